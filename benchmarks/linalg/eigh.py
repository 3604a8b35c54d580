"""The price of eigh and eigvalsh on batches of random symmetric matrices.

Baselines are torch.linalg as a user calls it, and the fairest one: split over threads, one BLAS thread each.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.linalg import matrix_norm

import overtone as ot
from overtone.benchmarks.harness.baselines import SplitOverThreads
from overtone.benchmarks.harness.case import MODES, Case, Results, Workload
from overtone.benchmarks.harness.check import Check, Expected, widened
from overtone.benchmarks.linalg import MAX_RATIO, judge_ratios
from overtone.benchmarks.shapes import LARGE_SYMMETRIC, SYMMETRIC, MatrixShape

FORWARD, BACKWARD, FORWARD_BACKWARD = MODES
TORCH, SPLIT, OUR_EIGH = "torch.linalg", "torch over threads", "our eigh"


# How many times faster than torch.linalg is wanted in float32; float64 has half the lanes.
TARGETS = dict(zip(SYMMETRIC, (40.0, 34.0, 24.0, 15.0, 5.0), strict=True))
FLOAT64_SHARE = 0.45


def _matrices(shape: MatrixShape, dtype: torch.dtype, mode: str) -> tuple[Tensor]:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(shape.batch, shape.n, shape.n, generator=generator, dtype=torch.float64).to(dtype)
    return ((a + a.mT).requires_grad_(mode != FORWARD),)


def check_lapack_ratios(results: Results, expected: Expected) -> Check:
    """Eigenvectors have no signs to compare."""
    values, vectors = map(widened, results)
    a, identity = widened(expected.inputs[0]), torch.eye(vectors.shape[-1], dtype=torch.float64)
    residual = matrix_norm(a @ vectors - vectors * values[..., None, :], 1) / matrix_norm(a, 1)
    loss = matrix_norm(vectors.mT @ vectors - identity, 1)
    if not bool((values.diff(dim=-1) >= 0).all()):
        return Check.failed("the eigenvalues do not ascend")
    return judge_ratios(residual, loss, vectors.shape[-1], results[1].dtype)


def _values_by_ratio(results: Results, expected: Expected) -> Check:
    """Eigenvalues to the same standard: relative to the norm."""
    truth = expected.truth[0]
    error = ((widened(results[0]) - truth).abs().amax(-1) / truth.abs().amax(-1)).max().item()
    tolerance = MAX_RATIO * truth.shape[-1] * torch.finfo(results[0].dtype).eps
    return Check(error <= tolerance, error, tolerance, "" if error <= tolerance else "eigenvalues differ")


def _eigh(shape: MatrixShape, dtype: torch.dtype) -> Case:
    target = TARGETS.get(shape)
    share = 1.0 if dtype == torch.float32 else FLOAT64_SHARE
    return Case(
        op="eigh",
        shape=shape.label,
        dtype=dtype,
        mode=FORWARD,
        targets={} if target is None else {TORCH: share * target},
        check=check_lapack_ratios,
        workload=Workload(
            setup=lambda: _matrices(shape, dtype, FORWARD),
            ours=ot.linalg.eigh,
            baselines={TORCH: torch.linalg.eigh, SPLIT: SplitOverThreads(torch.linalg.eigh)},
            flops=9 * shape.batch * shape.n**3,  # reduction 4/3, Q 4/3, about 6 for the rotations of QL
            bytes=2 * shape.batch * shape.n * (shape.n + 1) * dtype.itemsize,
            bound_by="matmul",
        ),
    )


def _eigvalsh(shape: MatrixShape, dtype: torch.dtype) -> Case:
    return Case(
        op="eigvalsh",
        shape=shape.label,
        dtype=dtype,
        mode=FORWARD,
        targets={OUR_EIGH: 1.0},
        check=_values_by_ratio,
        workload=Workload(
            setup=lambda: _matrices(shape, dtype, FORWARD),
            ours=ot.linalg.eigvalsh,
            baselines={
                TORCH: torch.linalg.eigvalsh,
                SPLIT: SplitOverThreads(torch.linalg.eigvalsh),
                OUR_EIGH: lambda a: ot.linalg.eigh(a).eigenvalues,
            },
            flops=4 * shape.batch * shape.n**3 // 3,
            bytes=shape.batch * shape.n * (shape.n + 1) * dtype.itemsize,
            bound_by="matmul",
        ),
    )


def _square(solver: Callable) -> Callable:
    """The trace and V Λ² Vᵀ = A²: what signs do not change, and what products know exactly."""

    def square(a: Tensor) -> tuple[Tensor, Tensor]:
        values, vectors = solver(a)
        return values.sum(-1), (vectors * values.square()[..., None, :]) @ vectors.mT

    return square


def _square_by_product(a: Tensor) -> tuple[Tensor, Tensor]:
    a = (a + a.mT) / 2
    return a.diagonal(dim1=-2, dim2=-1).sum(-1), a @ a


def _training(shape: MatrixShape, dtype: torch.dtype, mode: str) -> Case:
    return Case(
        op="eigh",
        shape=shape.label,
        dtype=dtype,
        mode=mode,
        workload=Workload(
            setup=lambda: _matrices(shape, dtype, mode),
            ours=_square(ot.linalg.eigh),
            baselines={TORCH: _square(torch.linalg.eigh)},
            truth=_square_by_product,
            flops=(21 if mode == FORWARD_BACKWARD else 10)
            * shape.batch
            * shape.n**3,  # three products, V Λ² Vᵀ and its own
            bytes=5 * shape.batch * shape.n * (shape.n + 1) * dtype.itemsize,
            bound_by="matmul",
        ),
    )


def cases() -> list[Case]:
    dtypes = (torch.float32, torch.float64)
    return [
        *(_eigh(shape, dtype) for dtype in dtypes for shape in (*TARGETS, *LARGE_SYMMETRIC)),
        *(_eigvalsh(shape, dtype) for dtype in dtypes for shape in TARGETS),
        *(_training(shape, torch.float64, mode) for shape in TARGETS for mode in (BACKWARD, FORWARD_BACKWARD)),
    ]
