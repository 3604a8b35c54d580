"""How cost grows: time and memory of the main ops and of a model against tokens, batch, width, depth and threads.

Every point is a case, checked and timed like any other. A slope is the exponent of the power that fits best, by least
squares in logarithms, over the points from which on the leading term is most of the work; beside it stands the exponent
of that term.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import overtone as ot
from overtone.benchmarks.harness.case import Case, Function, Workload
from overtone.benchmarks.harness.runner import OURS, Result, run_case
from overtone.benchmarks.harness.timing import Plan
from overtone.benchmarks.linalg.eigh import check_lapack_ratios as check_eigh
from overtone.benchmarks.linalg.qr import check_lapack_ratios as check_qr
from overtone.benchmarks.shapes import ImageShape
from overtone.benchmarks.step import Kind, step_case

PLAN = Plan(rounds=5, seconds=2.0, slice_seconds=0.02)
TIME, MEMORY = "time", "memory"


@dataclass(frozen=True)
class Sweep:
    """An op against one size of its problem.

    time, memory: by implementation, the exponent of the leading term; memory only where results or scratch grow.
    """

    op: str
    axis: str  # what grows: N, batch, d, n, depth, threads
    values: tuple[int, ...]
    case: Callable[[int], Case]
    time: Mapping[str, float]
    memory: Mapping[str, float]
    since: int = 0  # from here on the leading term is most of the work

    @property
    def title(self) -> str:
        return f"{self.op} against {self.axis}"


@dataclass(frozen=True)
class Slope:
    """The exponent of the fitted power and its standard error (nan for fewer than three points)."""

    value: float
    error: float
    points: int


def fit(x: Sequence[float], y: Sequence[float]) -> Slope | None:
    """log y = slope · log x + c by least squares; None for fewer than two points, or none that grows."""
    import numpy as np

    pairs = [(a, b) for a, b in zip(x, y, strict=True) if a > 0 and b > 0]
    if len({a for a, _ in pairs}) < 2:
        return None
    logarithms = np.log(np.array(pairs, dtype=float)).T
    if len(pairs) < 3:
        return Slope(float(np.polyfit(*logarithms, 1)[0]), math.nan, len(pairs))
    coefficients, covariance = np.polyfit(*logarithms, 1, cov=True)
    return Slope(float(coefficients[0]), math.sqrt(max(0.0, covariance[0, 0])), len(pairs))


@dataclass(frozen=True)
class Curve:
    """An implementation's points of one quantity, and their slope beside the theoretical one."""

    sweep: Sweep
    implementation: str
    quantity: str
    x: tuple[int, ...]
    y: tuple[float, ...]  # seconds or bytes
    theory: float | None

    @property
    def asymptotic(self) -> list[tuple[int, float]]:
        return [(x, y) for x, y in zip(self.x, self.y, strict=True) if x >= self.sweep.since]

    @property
    def slope(self) -> Slope | None:
        points = self.asymptotic
        return fit([x for x, _ in points], [y for _, y in points])


@dataclass(frozen=True)
class Measured:
    """A sweep's results, by value."""

    sweep: Sweep
    results: Mapping[int, Result]

    @property
    def failures(self) -> list[str]:
        found = [(result, check) for result in self.results.values() for check in result.checks.items()]
        return [f"{result.case.name}: {name}: {check.message}" for result, (name, check) in found if not check.passed]

    @property
    def noisy(self) -> int:
        return sum(not result.reliable for result in self.results.values())

    def curves(self) -> list[Curve]:
        names = dict.fromkeys(name for result in self.results.values() for name in result.checks)
        found = [self._curve(name, quantity) for quantity in (TIME, MEMORY) for name in names]
        return [curve for curve in found if curve.x]

    def _curve(self, name: str, quantity: str) -> Curve:
        theory = getattr(self.sweep, quantity)
        points = {value: _quantity(result, name, quantity) for value, result in self.results.items()}
        known = {value: amount for value, amount in points.items() if amount is not None}
        if quantity == MEMORY and name not in theory:
            known = {}
        return Curve(self.sweep, name, quantity, tuple(known), tuple(known.values()), theory.get(name))


def _quantity(result: Result, name: str, quantity: str) -> float | None:
    check = result.checks.get(name)
    if result.measurement is None or check is None or not check.passed:
        return None
    return result.measurement.timings[name].median if quantity == TIME else result.memory.get(name)


@contextmanager
def _threads(count: int | None):
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure(sweep: Sweep, plan: Plan = PLAN, progress: Callable[[str], None] = lambda name: None) -> Measured:
    """Run every point of a sweep."""
    results = {}
    for value in sweep.values:
        case = sweep.case(value)
        progress(f"{sweep.title}: {value}")
        with _threads(value if sweep.axis == "threads" else None):
            results[value] = run_case(case, plan, compiled=False)
    return Measured(sweep, results)


# The sweeps.


def _random(*size: int, scale: float = 1.0, grad: bool = False) -> Tensor:
    x = scale * torch.randn(size, generator=torch.Generator().manual_seed(sum(size)))
    return x.requires_grad_(grad)


def _point(
    op: str, label: str, setup: Callable[[], tuple[Any, ...]], ours: Function, reference: Function, **options: Any
) -> Case:
    workload = Workload(setup, ours, {"reference": reference}, flops=0, bytes=0, bound_by="matmul")
    return Case(op, label, torch.float32, **{"mode": "forward", "workload": workload, **options})


def _norms(batch: int, tokens: int, channels: int) -> Case:
    return _point(
        "frequency_norms", f"{batch}x{tokens}x{channels}", lambda: (_random(batch, tokens, channels),),
        ot.frequency_norms, ot.reference.frequency_norms,
    )  # fmt: skip


def _attention(batch: int, tokens: int, channels: int, mode: str = "forward") -> Case:
    heads, grad = channels // 64, mode != "forward"

    def setup() -> tuple[Tensor, ...]:
        qkv = _random(3, batch, heads, tokens, 64)
        leaves = (*qkv.unbind(0), _random(channels), _random(channels, channels, scale=channels**-0.5))
        return tuple(leaf.detach().requires_grad_(grad) for leaf in leaves)

    label = f"{batch}x{tokens}x{channels}"
    return _point("spectral_attention", label, setup, ot.spectral_attention, ot.reference.spectral_attention, mode=mode)


def _eigh(batch: int, n: int) -> Case:
    def setup() -> tuple[Tensor]:
        a = _random(batch, n, n)
        return (a + a.mT,)

    return _point("eigh", f"{batch}x{n}", setup, ot.linalg.eigh, torch.linalg.eigh, check=check_eigh)


def _qr(batch: int, n: int) -> Case:
    return _point(
        "qr", f"{batch}x{n}", lambda: (_random(batch, n, n),), lambda a: tuple(ot.linalg.qr(a)),
        lambda a: tuple(torch.linalg.qr(a)), check=check_qr,
    )  # fmt: skip


def _step(batch: int, size: int, depth: int) -> Case:
    """A training step of ViT-Ti⁻ with patches of 4 × 4 pixels."""
    return step_case(Kind(ImageShape(f"batch {batch} {size}px depth {depth}", batch, size, 4, depth=depth)))


def sweeps() -> list[Sweep]:
    linear, model = {OURS: 1.0, "reference": 1.0}, {OURS: 1.0, "plain": 1.0}
    cpus = torch.get_num_threads()
    counts = tuple(sorted({1, *(2**k for k in range(1, cpus.bit_length()) if 2**k <= cpus), cpus}))
    ideal = {OURS: -1.0, "reference": -1.0}
    tokens, batches = (64, 128, 256, 512, 1024, 2048), (1, 2, 4, 8, 16, 32)
    return [
        Sweep("frequency_norms", "N", tokens, lambda n: _norms(64, n, 192), linear, {"reference": 1.0}, since=128),
        # 4 N² d of attention and 2 N d² of the projection: five times as much from N = 512 on
        Sweep(
            "spectral_attention", "N", tokens, lambda n: _attention(1, n, 192), {OURS: 2.0, "reference": 2.0},
            {OURS: 1.0, "reference": 2.0}, since=512,
        ),
        Sweep(
            "spectral_attention forward+backward", "N", tokens[:-1],
            lambda n: _attention(1, n, 192, "forward+backward"), {OURS: 2.0, "reference": 2.0},
            {OURS: 1.0, "reference": 2.0}, since=256,
        ),
        Sweep("spectral_attention", "batch", batches, lambda b: _attention(b, 197, 192), linear, linear, since=4),
        # The same two are equal at d = 2 N; our memory is the basis, packed for the projection
        Sweep(
            "spectral_attention", "d", (64, 128, 256, 512, 1024), lambda d: _attention(4, 65, d),
            {OURS: 2.0, "reference": 2.0}, {OURS: 2.0, "reference": 1.0}, since=256,
        ),
        Sweep("eigh", "n", (16, 32, 64, 128, 256), lambda n: _eigh(64, n), {OURS: 3.0, "reference": 3.0},
              {OURS: 2.0, "reference": 2.0}, since=64),
        Sweep("qr", "n", (32, 64, 128, 256, 512), lambda n: _qr(12, n), {OURS: 3.0, "reference": 3.0},
              {OURS: 2.0, "reference": 2.0}, since=128),
        Sweep("training_step", "depth", (1, 2, 4, 8), lambda k: _step(8, 32, k), model, model, since=2),
        Sweep("spectral_attention", "threads", counts, lambda _: _attention(16, 197, 192), ideal, {}),
        Sweep("training_step", "threads", counts, lambda _: _step(8, 32, 2), {OURS: -1.0, "plain": -1.0}, {}),
    ]  # fmt: skip
