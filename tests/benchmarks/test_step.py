"""The benchmark of a training step, on a model small enough for a test."""

from __future__ import annotations

import pytest
import torch

from overtone.benchmarks import step
from overtone.benchmarks.harness import runner, timing
from overtone.benchmarks.shapes import ImageShape
from overtone.ops.basis import BasisCache

pytestmark = pytest.mark.usefixtures("cpu_kernels")

SMALL = ImageShape("small", 2, 16, 8, 24, 3, depth=2)


@pytest.fixture(autouse=True)
def wanted_share(monkeypatch):
    monkeypatch.setitem(step.SHARES, SMALL, 0.5)


@pytest.mark.parametrize("options", [{}, {"return_norms": True}, {"autocast": True}], ids=str)
def test_both_models_take_the_same_step(options):
    case = step.step_case(step.Kind(SMALL, **options))
    prepared = runner.PreparedCase(case)
    for name, function in runner.implementations(case).items():
        check = prepared.check(name, prepared.call(function))
        assert check.passed, f"{name}: {check.message}"
    loss, *grads = prepared.expected.plain
    assert loss.dim() == 0 and len(grads) > 20


def test_autocast_rounds_products():
    """Or the case would time float32 under another name."""
    inputs = step._images_and_labels(SMALL)
    exact, rounded = (
        step.Step(step.Kind(SMALL, autocast=autocast), False, torch.float32)(*inputs)[0] for autocast in (False, True)
    )
    assert exact != rounded


def test_every_step_factorises(monkeypatch):
    """With a learning rate of zero the bases never change, and a cached factorisation would serve all steps."""
    stored = []
    keep = BasisCache.store
    monkeypatch.setattr(BasisCache, "store", staticmethod(lambda *args: (stored.append(args[1]), keep(*args))))
    taken, inputs = step.Step(step.Kind(SMALL), False, torch.float32), step._images_and_labels(SMALL)
    for _ in range(3):
        taken(*inputs)
    assert stored == ["orthonormal"] * 3


def test_the_factorisations_share_of_a_step():
    case = step._share_case(SMALL)
    result = runner.run_case(case, timing.QUICK, compiled=False, matmul_peak=1e11)
    assert result.passed, result.checks
    assert result.ratios["whole step"] > 1  # a step has a factorisation in it
    assert case.targets == {"whole step": 2.0}
