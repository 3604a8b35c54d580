"""The price of eigh and eigvalsh on batches of random symmetric matrices.

Baselines are torch.linalg as a user calls it, and the fairest one: split over threads, one BLAS thread each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import overtone as ot
from overtone.benchmarks.harness.baselines import SplitOverThreads
from overtone.benchmarks.harness.case import MODES, Case, Results
from overtone.benchmarks.harness.check import Check, Evidence, against_truth, widened

FORWARD, BACKWARD, FORWARD_BACKWARD = MODES
TORCH, SPLIT, OUR_EIGH = "torch.linalg", "torch over threads", "our eigh"
# LAPACK's own test programs accept ratios of 20 to 50.
RATIO = 10


class Shape(NamedTuple):
    batch: int
    n: int

    @property
    def label(self) -> str:
        return f"{self.batch}x{self.n}"


# How many times faster than torch.linalg is wanted in float32; float64 has half the lanes.
TARGETS = {
    Shape(16384, 4): 40.0,
    Shape(8192, 8): 34.0,
    Shape(4096, 16): 24.0,
    Shape(1024, 32): 15.0,
    Shape(256, 64): 5.0,
}
FLOAT64_SHARE = 0.45
LARGE = (Shape(64, 128), Shape(32, 197), Shape(1, 64), Shape(1, 384))


def _matrices(shape: Shape, dtype: torch.dtype, mode: str) -> tuple[Tensor]:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(shape.batch, shape.n, shape.n, generator=generator, dtype=torch.float64).to(dtype)
    return ((a + a.mT).requires_grad_(mode != FORWARD),)


def by_ratios(results: Results, evidence: Evidence) -> Check:
    """LAPACK's residual and orthogonality ratios of every member: eigenvectors have no signs to compare."""
    values, vectors = map(widened, results)
    a, (n, eps) = widened(evidence.inputs[0]), (vectors.shape[-1], torch.finfo(results[1].dtype).eps)
    size = torch.linalg.matrix_norm(a, 1)
    residual = (torch.linalg.matrix_norm(a @ vectors - vectors * values[..., None, :], 1) / size).max().item()
    loss = torch.linalg.matrix_norm(vectors.mT @ vectors - torch.eye(n, dtype=a.dtype), 1).max().item()
    error, tolerance = max(residual, loss), RATIO * n * eps
    passed = error <= tolerance and bool((values.diff(dim=-1) >= 0).all())
    return Check(
        passed, error, tolerance, "" if passed else f"ratios {residual / (n * eps):.2g}, {loss / (n * eps):.2g}"
    )


def _values_by_ratio(results: Results, evidence: Evidence) -> Check:
    """Eigenvalues to the same standard: relative to the norm."""
    truth = evidence.truth[0]
    error = ((widened(results[0]) - truth).abs().amax(-1) / truth.abs().amax(-1)).max().item()
    tolerance = RATIO * truth.shape[-1] * torch.finfo(results[0].dtype).eps
    return Check(error <= tolerance, error, tolerance, "" if error <= tolerance else "eigenvalues differ")


def _eigh(shape: Shape, dtype: torch.dtype) -> Case:
    target = TARGETS.get(shape)
    share = 1.0 if dtype == torch.float32 else FLOAT64_SHARE
    return Case(
        op="eigh",
        shape=shape.label,
        dtype=dtype,
        mode=FORWARD,
        setup=lambda: _matrices(shape, dtype, FORWARD),
        ours=ot.linalg.eigh,
        baselines={TORCH: torch.linalg.eigh, SPLIT: SplitOverThreads(torch.linalg.eigh)},
        flops=9 * shape.batch * shape.n**3,  # reduction 4/3, Q 4/3, about 6 for the rotations of QL
        bytes=2 * shape.batch * shape.n * (shape.n + 1) * dtype.itemsize,
        limit="matmul",
        targets={} if target is None else {TORCH: share * target},
        check=by_ratios,
    )


def _eigvalsh(shape: Shape, dtype: torch.dtype) -> Case:
    return Case(
        op="eigvalsh",
        shape=shape.label,
        dtype=dtype,
        mode=FORWARD,
        setup=lambda: _matrices(shape, dtype, FORWARD),
        ours=ot.linalg.eigvalsh,
        baselines={
            TORCH: torch.linalg.eigvalsh,
            SPLIT: SplitOverThreads(torch.linalg.eigvalsh),
            OUR_EIGH: lambda a: ot.linalg.eigh(a).eigenvalues,
        },
        flops=4 * shape.batch * shape.n**3 // 3,
        bytes=shape.batch * shape.n * (shape.n + 1) * dtype.itemsize,
        limit="matmul",
        targets={OUR_EIGH: 1.0},
        check=_values_by_ratio,
    )


def _squares(solver: Callable) -> Callable:
    """Eigenvalues, and squares of the eigenvectors' entries: what signs do not change."""

    def squares(a: Tensor) -> tuple[Tensor, Tensor]:
        values, vectors = solver(a)
        return values, vectors.square()

    return squares


def _training(shape: Shape, dtype: torch.dtype, mode: str) -> Case:
    return Case(
        op="eigh",
        shape=shape.label,
        dtype=dtype,
        mode=mode,
        setup=lambda: _matrices(shape, dtype, mode),
        ours=_squares(ot.linalg.eigh),
        baselines={TORCH: _squares(torch.linalg.eigh)},
        flops=(15 if mode == FORWARD_BACKWARD else 6) * shape.batch * shape.n**3,  # backward: three products
        bytes=5 * shape.batch * shape.n * (shape.n + 1) * dtype.itemsize,
        limit="matmul",
        check=against_truth,
    )


def cases() -> list[Case]:
    dtypes = (torch.float32, torch.float64)
    return [
        *(_eigh(shape, dtype) for dtype in dtypes for shape in (*TARGETS, *LARGE)),
        *(_eigvalsh(shape, dtype) for dtype in dtypes for shape in TARGETS),
        *(_training(shape, torch.float64, mode) for shape in TARGETS for mode in (BACKWARD, FORWARD_BACKWARD)),
    ]
