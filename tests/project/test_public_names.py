"""The public names: each imports and can be called as promised. The list is fixed: a change here breaks users."""

from __future__ import annotations

import inspect
import operator
import subprocess
import sys

import pytest

import overtone as ot

# Parameters as they are given: name, name=default; after * by keyword only; … for more that may follow.
FUNCTIONS = {
    "spectral_attention": "query, key, value, eigenvalues, basis, *, residual=None, attn_mask=None, is_causal=False, "
    "scale=None, head_gain=None, return_norms=False, backend=None",
    "frequency_norms": "x, *, mask=None, backend=None",
    "frequency_filter": "x, low, high, *, mask=None, is_causal=False, backend=None",
    "de_escalate": "x, tau=1.0, *, mask=None, is_causal=False, backend=None",
    "token_similarity": "x",
    "token_diversity": "x",
    "escalation_rate": "x, y",
    "cosine_similarity": "x",
    "effective_rank": "x",
    "stable_rank": "x",
    **dict.fromkeys((f"linalg.{name}" for name in ("eigh", "eigvalsh", "eig", "eigvals", "qr")), "…"),
    **dict.fromkeys((f"linalg.{name}_ex" for name in ("eigh", "eigvalsh", "eig", "eigvals", "qr")), "…"),
    "spectrum.SymmetricSpectrum": "dim, regime='sharpen', *, bounded",
    "spectrum.GeneralSpectrum": "dim, regime='sharpen', *",
    "spectrum.fold": "model",
    "nn.SpectralAttention": "dim, num_heads, regime='sharpen', kind='symmetric'",
    "nn.DeEscalation": "tau",
    "nn.SignedLayerNorm": "dim, sign",
    **dict.fromkeys(
        ("models.vit_tiny", "models.vit_small", "models.vit_base"), "image_size, patch_size, num_classes, regime='free'"
    ),
    "models.gpt": "…",
    "models.load": "folder",
    "models.save": "model, folder",
    "reparameterize": "model, *, regime, kind, layers",
    "analysis.analyze": "model, inputs",
    "analysis.dominance": "attention, weight",
    "backends": "",
    "use_backend": "name",
}
REFERENCE = [
    name for name in FUNCTIONS if "." not in name and name not in ("reparameterize", "backends", "use_backend")
]
COMMANDS = ("info", "kernels", "bench", "train", "predict", "analyze", "study")


def public(name: str):
    return operator.attrgetter(name)(ot)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_can_be_called_as_promised(name):
    parameters = inspect.signature(public(name)).parameters
    accepts_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    by_position = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    keyword_only, place = False, 0
    for promised in filter(None, FUNCTIONS[name].replace("…", "").split(", ")):
        if promised == "*":
            keyword_only = True
            continue
        parameter, _, default = promised.partition("=")
        if parameter not in parameters:
            assert accepts_any, f"{name}: no parameter {parameter}"
            continue
        assert not default or repr(parameters[parameter].default) == default, f"{name}: {parameter}"
        if not keyword_only:
            assert by_position[place] == parameter, f"{name}: {parameter} is not argument {place + 1}"
            place += 1
    assert public(name).__doc__, f"{name} has no docstring"


@pytest.mark.parametrize("name", REFERENCE)
def test_the_reference_has_it_too(name):
    """With the same parameters, all but the choice of a backend."""
    ours, theirs = (inspect.signature(operator.attrgetter(name)(package)).parameters for package in (ot, ot.reference))
    assert [p for p in ours if p != "backend"] == list(theirs)


def test_norms_have_low_high_and_their_ratio():
    import torch

    norms = ot.frequency_norms(torch.randn(2, 5, 3))
    assert type(norms)._fields == ("low", "high") and torch.equal(norms.ratio, norms.high / norms.low)


def test_a_handle_restores():
    assert callable(ot.integrations.Handle.restore)


def test_the_commands():
    result = subprocess.run([sys.executable, "-m", "overtone", "--help"], capture_output=True, text=True, check=True)
    assert all(f"    {command} " in result.stdout for command in COMMANDS)


def test_importing_touches_no_device_and_no_heavy_library():
    script = (
        "import sys, torch, overtone; assert not torch.cuda.is_initialized(); "
        "print([m for m in ('timm', 'transformers', 'matplotlib', 'sklearn', 'PIL', 'triton') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
