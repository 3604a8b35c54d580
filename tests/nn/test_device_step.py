"""A training step on a GPU never waits for it: traced on fake tensors, from the images to the optimizer."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from support.tracing import Trace, fake_gpu, without_numbers
from torch._subclasses.fake_tensor import DataDependentOutputException

import overtone as ot
from overtone.ops import basis
from overtone.spectrum import BasisCache, basis_status, evaluate, make_spectrum

# What reads a number on the host, and what loops over the matrices of a batch on GPUs.
WAITS = {"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::nonzero", "aten::item"}
LOOPS = {"aten::linalg_qr", "aten::geqrf", "aten::linalg_inv_ex", "aten::linalg_lu_factor_ex", "aten::_linalg_eigh"}
LAYERS = 3


def trace_of_a_step(monkeypatch, kind: str, autocast: bool) -> Trace:
    model = ot.models.vit_tiny(32, 4, 10, "sharpen", kind=kind, depth=LAYERS)
    with fake_gpu(monkeypatch):
        model = without_numbers(model)
        images, labels = torch.empty(8, 3, 32, 32), torch.empty(8, dtype=torch.int64)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        with Trace() as trace:
            with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
                logits = model(images)
                assert logits.dtype == (torch.bfloat16 if autocast else torch.float32)
                loss = F.cross_entropy(logits.float(), labels)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            assert basis_status(model).conditions.shape == (LAYERS,) and norm.shape == ()
    return trace


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bf16 autocast"])
@pytest.mark.parametrize("kind", ["symmetric", "general"])
def test_a_step_never_waits(monkeypatch, kind, autocast):
    calls = trace_of_a_step(monkeypatch, kind, autocast).calls
    assert not WAITS & calls.keys()
    assert not LOOPS & calls.keys()
    # All layers are factorised together: as many calls as one layer would take. A general V is first conditioned.
    factorisations = {"overtone::orthonormal_basis": 1} | ({"overtone::inverse_basis": 1} if kind == "general" else {})
    assert {name: count for name, count in calls.items() if "_basis" in name} == factorisations
    assert calls["aten::linalg_cholesky_ex"] == 4 * len(factorisations)
    assert calls["aten::linalg_solve_triangular"] <= 6 * len(factorisations)
    attention = "overtone::spectral_attention_qkvpacked"
    assert calls[attention] == calls[f"{attention}_backward"] == LAYERS


def test_the_trace_sees_a_wait(monkeypatch):
    """The same step with a look at a number, which fake tensors refuse, and with a QR per matrix."""
    with fake_gpu(monkeypatch), Trace() as trace:
        x = torch.empty(3, 4, 4)
        with pytest.raises(DataDependentOutputException):
            x.sum().item()
        torch.linalg.qr(x)
    assert trace.calls["aten::_local_scalar_dense"] == 1 and trace.calls["aten::linalg_qr"] == 1


class TestBadBases:
    """What a GPU's step would leave: on the CPU the batched products run here, and nothing raises before the look."""

    @pytest.fixture(params=["symmetric", "general"])
    def model(self, request, monkeypatch):
        monkeypatch.setattr(basis, "_looked_up", lambda matrix, cache: "")
        monkeypatch.setattr(basis, "select", lambda op, *args: "cuda")
        return torch.nn.ModuleDict({name: make_spectrum(request.param, 8, "sharpen") for name in ("a", "b", "c")})

    def step(self, model) -> torch.Tensor:
        return sum(part.basis_out.sum() for part in evaluate(list(model.values()), BasisCache()))

    def test_good_ones(self, model):
        assert self.step(model).isfinite()
        basis_status(model).check()
        assert all(math.isfinite(line.condition) for line in ot.spectrum.guarantees(model))

    @pytest.mark.parametrize("what", ["nan", "singular"])
    def test_bad_ones_are_named_at_the_next_look(self, model, what):
        with torch.no_grad():
            model["b"].basis[:, 2] = math.nan if what == "nan" else 0
        self.step(model)
        status = basis_status(model)
        fetched = status.conditions.clone()
        for look in (status.check, lambda: status.check(fetched)):
            with pytest.raises(torch.linalg.LinAlgError, match="^b: basis is singular or not finite"):
                look()
        (bad,) = [line for line in ot.spectrum.guarantees(model) if not math.isfinite(line.condition)]
        assert not bad.holds and "basis is singular or not finite" in str(bad)


def test_an_ill_conditioned_basis_is_named():
    spectrum = ot.spectrum.GeneralSpectrum(4, max_condition=10.0)
    spectrum.condition.fill_(100.0)
    with pytest.raises(torch.linalg.LinAlgError, match="spectrum: basis has a condition number of 1e\\+02, above"):
        basis_status(spectrum).check()


def test_a_training_step_remembers_and_nothing_else_does():
    spectrum = ot.spectrum.GeneralSpectrum(4)
    with torch.no_grad():
        spectrum.basis.mul_(torch.tensor([1.0, 1, 1, 7]))
        spectrum()
    assert spectrum.condition == 1
    spectrum()
    assert 5 < spectrum.condition < 50
    assert "condition" not in spectrum.state_dict()
