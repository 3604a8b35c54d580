"""The price of qr, at batches of small matrices and at all layers of a ViT.

Baselines are torch.linalg.qr as a user calls it, and the same split over threads. Both choose the signs of R's diagonal
otherwise, so the results are judged by LAPACK's ratios; gradients are those of the factors' squares.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.linalg import matrix_norm

import overtone as ot
from overtone.benchmarks.harness.baselines import SplitOverThreads
from overtone.benchmarks.harness.case import MODES, Case, Function, Workload
from overtone.benchmarks.harness.check import Check, Expected, widened
from overtone.benchmarks.linalg import judge_ratios
from overtone.benchmarks.shapes import QR, MatrixShape

FORWARD, BACKWARD, FORWARD_BACKWARD = MODES

# How many times faster than torch.linalg.qr is wanted.
TARGETS = dict(zip(QR, (15.0, 4.5, 3.8, 2.2), strict=True))
FLOAT64_SHARE = 0.45  # of the float32 targets: half the lanes


def _by_linalg(a: Tensor) -> tuple[Tensor, Tensor]:
    return tuple(torch.linalg.qr(a))


def check_lapack_ratios(results: tuple[Tensor, ...], expected: Expected) -> Check:
    """‖A − QR‖ / ‖A‖ and ‖I − QᵀQ‖: signs are chosen otherwise by each."""
    a, (q, r) = widened(expected.inputs[0]), map(widened, results)
    residual = matrix_norm(a - q @ r) / matrix_norm(a)
    loss = matrix_norm(torch.eye(a.shape[-1], dtype=torch.float64) - q.mT @ q)
    return judge_ratios(residual, loss, a.shape[-1], results[0].dtype)


def _matrices(shape: MatrixShape, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape.batch, shape.n, shape.n, generator=torch.Generator().manual_seed(0), dtype=dtype)


def _case(shape: MatrixShape, dtype: torch.dtype) -> Case:
    return Case(
        op="qr",
        shape=shape.label,
        dtype=dtype,
        mode=FORWARD,
        targets={"torch.linalg": TARGETS[shape] * (1.0 if dtype == torch.float32 else FLOAT64_SHARE)},
        check=check_lapack_ratios,
        workload=Workload(
            setup=lambda: (_matrices(shape, dtype),),
            ours=lambda a: tuple(ot.linalg.qr(a)),
            baselines={"torch.linalg": _by_linalg, "torch.linalg, two threads": SplitOverThreads(_by_linalg)},
            flops=8 * shape.batch * shape.n**3 // 3,  # the factorisation, and the same again for Q
            bytes=3 * shape.batch * shape.n**2 * dtype.itemsize,
            bound_by="matmul",
        ),
    )


def _squares(function: Function) -> Function:
    """Squares of the factors' entries: what signs do not change."""
    return lambda a: tuple(factor.square() for factor in function(a))


def _training(shape: MatrixShape, mode: str) -> Case:
    return Case(
        op="qr",
        shape=shape.label,
        dtype=torch.float32,
        mode=mode,
        workload=Workload(
            setup=lambda: (_matrices(shape, torch.float32).requires_grad_(),),
            ours=_squares(ot.linalg.qr),
            baselines={"torch.linalg": _squares(_by_linalg)},
            # backward: two products and a triangular solve
            flops=(8 if mode == FORWARD_BACKWARD else 5) * shape.batch * shape.n**3,
            bytes=6 * shape.batch * shape.n**2 * torch.float32.itemsize,
            bound_by="matmul",
        ),
    )


def cases() -> list[Case]:
    return [
        *(_case(shape, dtype) for dtype in (torch.float32, torch.float64) for shape in TARGETS),
        *(_training(shape, mode) for shape in TARGETS for mode in (BACKWARD, FORWARD_BACKWARD)),
    ]
