"""The price of eigvals and eig: random matrices and softmax attention, in batches.

Baselines are torch.linalg as a user calls it, and torch.linalg with the batch split over threads.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import overtone as ot
from overtone.benchmarks.harness.baselines import SplitOverThreads
from overtone.benchmarks.harness.case import MODES, Case, Function, Results, Workload
from overtone.benchmarks.harness.check import ERROR_FACTOR, Check, Expected
from overtone.benchmarks.linalg import perturbed

FORWARD, BACKWARD, FORWARD_BACKWARD = MODES


class Shape(NamedTuple):
    batch: int
    n: int
    is_attention: bool = False

    @property
    def label(self) -> str:
        return f"{self.batch}x{self.n}" + (" softmax" if self.is_attention else "")


# How many times faster than torch.linalg.eigvals is wanted, in float32.
TARGETS = {
    Shape(4096, 16): 40.0,
    Shape(1024, 32): 30.0,
    Shape(64, 65, is_attention=True): 20.0,
    Shape(32, 197, is_attention=True): 9.5,
    Shape(32, 384): 3.0,
}
FLOAT64_SHARE = 0.45


def _matrices(shape: Shape, dtype: torch.dtype) -> tuple[Tensor]:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(shape.batch, shape.n, shape.n, generator=generator, dtype=torch.float64)
    return ((2 * a).softmax(-1).to(dtype) if shape.is_attention else a.to(dtype),)


def _distance(values: Tensor, truth: Tensor) -> float:
    """How far the worst eigenvalue is from the nearest true one, or the other way round, relative to the largest."""
    gaps = (values.to(truth.dtype)[..., :, None] - truth[..., None, :]).abs()
    worst = torch.maximum(gaps.amin(-1).amax(-1), gaps.amin(-2).amax(-1))
    return float((worst / truth.abs().amax(-1)).max())


def _check_values(results: Results, expected: Expected) -> Check:
    values, plain, truth = (each[0] for each in (results, expected.plain, expected.truth))
    if values.shape != plain.shape or values.dtype != plain.dtype:
        return Check.failed(f"got {values.dtype} of shape {list(values.shape)}, wanted that of torch.linalg")
    n = values.shape[-1]
    error = _distance(values, truth)
    if values.dtype == truth.dtype:  # the truth is torch's result: its error shows in the eigenvalues of the transpose
        plain = torch.linalg.eigvals(expected.inputs[0].mT)
    tolerance = ERROR_FACTOR * _distance(plain, truth) + n * torch.finfo(values.dtype).eps
    passed = error <= tolerance
    return Check(passed, error, tolerance, "" if passed else f"error {error:.2g}, tolerance {tolerance:.2g}")


def _case(op: str, shape: Shape, dtype: torch.dtype, target: float | None) -> Case:
    plain = getattr(torch.linalg, op)
    # Reduction to Hessenberg form (10/3 n³) and QR iterations (about 7 n³; 15 n³ and the vectors with them).
    flops = shape.batch * shape.n**3 * (10 if op == "eigvals" else 27)
    return Case(
        op=op,
        shape=shape.label,
        dtype=dtype,
        mode=FORWARD,
        targets={} if target is None else {"torch": target},
        check=_check_values,
        workload=Workload(
            setup=partial(_matrices, shape, dtype),
            ours=getattr(ot.linalg, op),
            baselines={"torch": plain, "torch split": SplitOverThreads(plain)},
            flops=flops,
            bytes=shape.batch * shape.n**2 * dtype.itemsize,
            bound_by="matmul",
        ),
    )


def _sums_of_squares(solver: Function) -> Function:
    """Σ Re(λ)² and Σ Im(λ)²: what the order of the eigenvalues does not change."""

    def sums(a: Tensor) -> tuple[Tensor, Tensor]:
        values = solver(a)
        return values.real.square().sum(-1), values.imag.square().sum(-1)

    return sums


def _training(shape: Shape, mode: str) -> Case:
    return Case(
        op="eigvals",
        shape=shape.label,
        dtype=torch.float64,
        mode=mode,
        workload=Workload(
            setup=lambda: (_matrices(shape, torch.float64)[0].requires_grad_(),),
            ours=_sums_of_squares(ot.linalg.eigvals),
            baselines={"torch": _sums_of_squares(torch.linalg.eigvals)},
            # with the vectors; backward: a product and a solve
            flops=shape.batch * shape.n**3 * (31 if mode == FORWARD_BACKWARD else 4),
            bytes=3 * shape.batch * shape.n**2 * 8,
            bound_by="matmul",
        ),
        tolerance_from=dict.fromkeys(("cpu", "cuda"), perturbed(_sums_of_squares(torch.linalg.eigvals))),
    )


def cases() -> list[Case]:
    values = [_case("eigvals", shape, torch.float32, target) for shape, target in TARGETS.items()]
    wide = [_case("eigvals", shape, torch.float64, FLOAT64_SHARE * target) for shape, target in TARGETS.items()]
    vectors = [_case("eig", shape, torch.float32, None) for shape in TARGETS if shape.n <= 197]
    small = [shape for shape in TARGETS if shape.n <= 65]
    training = [_training(shape, mode) for shape in small for mode in (BACKWARD, FORWARD_BACKWARD)]
    return [*values, *wide, *vectors, *training]
