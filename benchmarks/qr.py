"""The price of qr, and of the weight Q Λ Qᵀ composed with it, at batches of small matrices and at all layers of a ViT.

Baselines are torch.linalg.qr as a user calls it, and the same split over threads. Both choose the signs of R's diagonal
otherwise, so the results are judged by LAPACK's ratios; the composed weight does not depend on the signs.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

import overtone as ot
from overtone.benchmarks.case import Case
from overtone.benchmarks.check import Check, Evidence
from overtone.benchmarks.threads import split_over_threads
from overtone.ops.spectrum import compose_symmetric

FORWARD, FORWARD_BACKWARD = "forward", "forward+backward"
RATIO = 10.0

# (batch, size) -> how many times faster than torch.linalg.qr is wanted.
TARGETS = {(4096, 16): 15.0, (12, 192): 4.5, (12, 384): 3.8, (12, 768): 2.2}
FLOAT64_SHARE = 0.45  # of the float32 targets: half the lanes
COMPOSE_TARGET = 1.7


def _by_linalg(a: Tensor) -> tuple[Tensor, Tensor]:
    return tuple(torch.linalg.qr(a))


def _weight_by_linalg(theta: Tensor, eigenvalues: Tensor) -> Tensor:
    q = torch.linalg.qr(theta).Q
    return (q * eigenvalues[..., None, :]) @ q.mT


def _ratios(results: tuple[Tensor, ...], evidence: Evidence) -> Check:
    """‖A − QR‖/(n ‖A‖ ε) and ‖I − QᵀQ‖/(n ε) of the worst member."""
    a, (q, r) = evidence.inputs[0].double(), (result.double() for result in results)
    n, eps = a.shape[-1], torch.finfo(results[0].dtype).eps
    residual = torch.linalg.matrix_norm(a - q @ r) / torch.linalg.matrix_norm(a)
    loss = torch.linalg.matrix_norm(torch.eye(n, dtype=torch.float64) - q.mT @ q)
    worst = max(residual.max().item(), loss.max().item()) / (n * eps)
    passed = worst <= RATIO  # False for NaN
    return Check(passed, worst, RATIO, "" if passed else f"ratio {worst:.2g}, wanted at most {RATIO:.0f}")


def _case(batch: int, n: int, dtype: torch.dtype) -> Case:
    generator = torch.Generator().manual_seed(0)
    return Case(
        op="qr",
        shape=f"{batch}x{n}",
        dtype=dtype,
        mode=FORWARD,
        setup=lambda: (torch.randn(batch, n, n, generator=generator.manual_seed(0), dtype=dtype),),
        ours=lambda a: tuple(ot.linalg.qr(a, backend="cpu")),
        baselines={"torch.linalg": _by_linalg, "torch.linalg, two threads": split_over_threads(_by_linalg)},
        flops=8 * batch * n**3 // 3,  # the factorisation, and the same again for Q
        bytes=3 * batch * n * n * dtype.itemsize,
        limit="matmul",
        targets={"torch.linalg": TARGETS[batch, n] * (1.0 if dtype == torch.float32 else FLOAT64_SHARE)},
        check=_ratios,
    )


def _compose_case(batch: int, n: int) -> Case:
    def setup() -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(0)
        theta = torch.randn(batch, n, n, generator=generator)
        return theta.requires_grad_(), torch.randn(batch, n, generator=generator).requires_grad_()

    return Case(
        op="compose_symmetric",
        shape=f"{batch}x{n}",
        dtype=torch.float32,
        mode=FORWARD_BACKWARD,
        setup=setup,
        ours=partial(compose_symmetric, backend="cpu"),
        baselines={"torch.linalg": _weight_by_linalg},
        flops=8 * batch * n**3,  # QR 8/3, half a product; backward: a product, half of one, a third, half of one
        bytes=4 * batch * n * n * torch.float32.itemsize,
        limit="matmul",
        targets={"torch.linalg": COMPOSE_TARGET},
    )


def cases() -> list[Case]:
    return [
        *(_case(batch, n, dtype) for dtype in (torch.float32, torch.float64) for batch, n in TARGETS),
        _compose_case(12, 768),
    ]
