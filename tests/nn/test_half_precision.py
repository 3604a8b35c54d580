"""Spectral models of bfloat16 and float16: made so or made so later, trained, converted, restored; and how exact."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from support import accuracy, optional
from torch.func import functional_call

import overtone as ot
from overtone._validate import accumulate_dtype
from overtone.models import METHODS, VisionTransformer, ViTConfig

HALVES = (torch.bfloat16, torch.float16)
KINDS = ("symmetric", "general")
REGIMES = ("free", "sharpen", "smooth")
LAYERS = [("free", "symmetric", False), *itertools.product(("sharpen", "smooth"), KINDS, (False, True))]
SMALL = {"image_size": 8, "patch_size": 4, "num_classes": 5, "dim": 16, "num_heads": 2, "depth": 2}


def vit(dtype=None, **options):
    torch.manual_seed(0)
    return VisionTransformer(ViTConfig(**SMALL, **options), dtype=dtype)


def train(model, x):
    """Two steps; gradients have their parameters' dtype, and are finite."""
    dtypes = [p.dtype for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)  # the usual 1e-8 is zero in float16
    for _ in range(2):
        model(x).square().mean().backward()
        assert all(p.grad.dtype == p.dtype and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    assert [p.dtype for p in model.parameters()] == dtypes


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("regime", "kind", "bounded"), LAYERS)
@pytest.mark.parametrize("method", METHODS)
def test_models_train(dtype, kind, regime, bounded, method):
    x = torch.randn(2, 3, 8, 8).to(dtype)
    options = {"kind": kind, "regime": regime, "bounded": bounded, "method": method}
    for model in (vit(dtype=dtype, **options), vit(**options).to(dtype)):
        train(model, x)
        assert model(x).dtype == dtype and model(x).isfinite().all()
        assert all(each.holds for each in ot.spectrum.guarantees(model)) or not bounded


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bounded", [False, True])
def test_a_spectrum_starts_as_the_rounded_one_of_float32(dtype, kind, bounded):
    starts = []
    for given in (dtype, torch.float32):
        torch.manual_seed(0)
        starts.append(ot.spectrum.make_spectrum(kind, 24, "sharpen", bounded=bounded, dtype=given).to(dtype))
    assert all(map(torch.equal, *(start.parameters() for start in starts)))
    eigenvalues = -torch.linspace(0.05, 1, 24, dtype=dtype)
    starts[0].set_spectrum(torch.eye(24), eigenvalues)
    torch.testing.assert_close(
        starts[0]().eigenvalues, eigenvalues.float(), rtol=4 * torch.finfo(dtype).eps, atol=0
    )  # a rounded ψ squared


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("init", ["nearest", "random"])
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("kind", KINDS)
def test_converted_models_train_and_are_restored(dtype, regime, init, kind):
    torch.manual_seed(0)
    sizes = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 5}
    model, x = optional.timm().create_model("vit_tiny_patch16_224", **sizes), torch.randn(16, 3, 8, 8).to(dtype)
    torch.nn.init.normal_(model.blocks[0].attn.qkv.bias)
    wide = copy.deepcopy(model.to(dtype)).double()
    handle = ot.reparameterize(model, regime, kind, init=init)
    if init == "nearest" and regime != "free":  # one rounding away from what is nearest to the same weights in float64
        ot.reparameterize(wide, regime, kind)
        for ours, theirs in zip(handle.attentions, (block.attn.core for block in wide.blocks), strict=True):
            torch.testing.assert_close(ours.bias.double(), theirs.bias, rtol=torch.finfo(dtype).eps, atol=1e-6)
    train(model, x)
    truth, converted = copy.deepcopy(model).double()(x.double()), model(x)
    handle.restore(weights="trained")
    assert {p.dtype for p in model.parameters()} == {dtype}
    error = accuracy.max_error(converted, truth)
    accuracy.assert_error_within(model(x), truth, error, factor=accuracy.FORWARD_FACTOR, what="restored")
    train(model, x)


def attention_of(regime, kind, bounded, dtype):
    """SpectralAttention as a function of tokens and parameters, and the same written out in PyTorch."""
    module = ot.nn.SpectralAttention(12, 3, regime, kind, bounded=bounded, dtype=dtype)
    names = [name for name, _ in module.named_parameters()]

    def ours(x, *parameters):
        return functional_call(module, dict(zip(names, parameters, strict=True)), (x,))

    def plain(x, *parameters):
        return written_out(x, dict(zip(names, parameters, strict=True)), regime, kind, bounded)

    return module, ours, plain


def written_out(x, named, regime, kind, bounded):
    """In the tokens' precision; the factorisation, which PyTorch does not have for halves, in float32."""
    if regime == "free":
        query, key, value = F.linear(x, named["qkv.weight"], named["qkv.bias"]).chunk(3, -1)
        eigenvalues, basis_out, bias = 1, named["proj.weight"].mT, named["proj.bias"]
    else:
        basis, raw = (named[f"spectrum.{name}"] for name in ("basis", "raw_eigenvalues"))
        basis, raw = basis.to(accumulate_dtype(basis.dtype)), raw.to(accumulate_dtype(raw.dtype))
        functions = ot.reference.spectrum
        spectrum = (
            functions.symmetric(basis, raw, regime, bounded)
            if kind == "symmetric"
            else functions.general(basis, raw, regime)
        )
        basis_in, eigenvalues, basis_out = (part.to(x.dtype) for part in spectrum)
        query, key = F.linear(x, named["qk.weight"], named["qk.bias"]).chunk(2, -1)
        value, bias = x @ basis_in, 0
    heads = (part.unflatten(-1, (3, 4)).transpose(1, 2) for part in (query, key, value))
    tokens = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
    return (tokens * eigenvalues) @ basis_out + bias


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("regime", "kind", "bounded"), LAYERS)
def test_as_exact_as_the_formula_written_out(dtype, regime, kind, bounded):
    draws = []
    for seed in range(4):
        torch.manual_seed(seed)
        module, ours, plain = attention_of(regime, kind, bounded, dtype)
        leaves = (torch.randn(3, 9, 12, dtype=dtype), *module.parameters())
        draws.append(tuple(leaf.detach().requires_grad_() for leaf in leaves))
    accuracy.check_against_truth(ours, plain, draws[0], more_draws=draws[1:])
