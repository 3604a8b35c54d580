"""The price of qr, at batches of small matrices and at all layers of a ViT.

Baselines are torch.linalg.qr as a user calls it, and the same split over threads. Both choose the signs of R's diagonal
otherwise, so the results are judged by LAPACK's ratios; gradients are those of the factors' squares.
"""

from __future__ import annotations

import torch
from torch import Tensor

import overtone as ot
from overtone.benchmarks.harness.baselines import SplitOverThreads
from overtone.benchmarks.harness.case import MODES, Case, Function
from overtone.benchmarks.harness.check import Check, Evidence

FORWARD, BACKWARD, FORWARD_BACKWARD = MODES
RATIO = 10.0

# (batch, size) -> how many times faster than torch.linalg.qr is wanted.
TARGETS = {(4096, 16): 15.0, (12, 192): 4.5, (12, 384): 3.8, (12, 768): 2.2}
FLOAT64_SHARE = 0.45  # of the float32 targets: half the lanes


def _by_linalg(a: Tensor) -> tuple[Tensor, Tensor]:
    return tuple(torch.linalg.qr(a))


def by_ratios(results: tuple[Tensor, ...], evidence: Evidence) -> Check:
    """‖A − QR‖/(n ‖A‖ ε) and ‖I − QᵀQ‖/(n ε) of the worst member."""
    a, (q, r) = evidence.inputs[0].double(), (result.double() for result in results)
    n, eps = a.shape[-1], torch.finfo(results[0].dtype).eps
    residual = torch.linalg.matrix_norm(a - q @ r) / torch.linalg.matrix_norm(a)
    loss = torch.linalg.matrix_norm(torch.eye(n, dtype=torch.float64) - q.mT @ q)
    worst = max(residual.max().item(), loss.max().item()) / (n * eps)
    passed = worst <= RATIO  # False for NaN
    return Check(passed, worst, RATIO, "" if passed else f"ratio {worst:.2g}, wanted at most {RATIO:.0f}")


def _matrices(batch: int, n: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(batch, n, n, generator=torch.Generator().manual_seed(0), dtype=dtype)


def _case(batch: int, n: int, dtype: torch.dtype) -> Case:
    return Case(
        op="qr",
        shape=f"{batch}x{n}",
        dtype=dtype,
        mode=FORWARD,
        setup=lambda: (_matrices(batch, n, dtype),),
        ours=lambda a: tuple(ot.linalg.qr(a)),
        baselines={"torch.linalg": _by_linalg, "torch.linalg, two threads": SplitOverThreads(_by_linalg)},
        flops=8 * batch * n**3 // 3,  # the factorisation, and the same again for Q
        bytes=3 * batch * n * n * dtype.itemsize,
        limit="matmul",
        targets={"torch.linalg": TARGETS[batch, n] * (1.0 if dtype == torch.float32 else FLOAT64_SHARE)},
        check=by_ratios,
    )


def _squares(function: Function) -> Function:
    """Squares of the factors' entries: what signs do not change."""
    return lambda a: tuple(factor.square() for factor in function(a))


def _training(batch: int, n: int, mode: str) -> Case:
    return Case(
        op="qr",
        shape=f"{batch}x{n}",
        dtype=torch.float32,
        mode=mode,
        setup=lambda: (_matrices(batch, n, torch.float32).requires_grad_(),),
        ours=_squares(ot.linalg.qr),
        baselines={"torch.linalg": _squares(_by_linalg)},
        flops=(8 if mode == FORWARD_BACKWARD else 5) * batch * n**3,  # backward: two products and a triangular solve
        bytes=6 * batch * n * n * torch.float32.itemsize,
        limit="matmul",
    )


def cases() -> list[Case]:
    return [
        *(_case(batch, n, dtype) for dtype in (torch.float32, torch.float64) for batch, n in TARGETS),
        *(_training(batch, n, mode) for batch, n in TARGETS for mode in (BACKWARD, FORWARD_BACKWARD)),
    ]
