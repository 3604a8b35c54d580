"""The price of weights composed of their spectrum, all layers of a ViT at once: Q Λ Qᵀ (symmetric), V Λ V⁻¹ (general).

Baselines are the reference and, for the symmetric one, torch.linalg.qr by hand. torch.linalg.inv is not among them:
MKL's LU has hung on two threads.
"""

from __future__ import annotations

import torch
from torch import Tensor

import overtone as ot
from overtone.benchmarks.harness.case import MODES, Case, Function, Workload
from overtone.ops.linalg.inverse import compose_general, compose_symmetric

FORWARD, BACKWARD, FORWARD_BACKWARD = MODES
LAYERS, SIZES = 12, (192, 384, 768)
TARGET = 1.7  # × torch.linalg, symmetric, 12x768, forward+backward

# In units of n³ per layer: forward and backward. Symmetric: QR 8/3, half a product; a product, half of one, a third,
# half of one. General: QR 8/3 and a solve for the inverse, a product; three products.
FLOPS = {"compose_symmetric": (11 / 3, 14 / 3), "compose_general": (17 / 3, 6)}


def _symmetric_by_linalg(theta: Tensor, eigenvalues: Tensor) -> Tensor:
    q = torch.linalg.qr(theta).Q
    return (q * eigenvalues[..., None, :]) @ q.mT


OURS: dict[str, Function] = {"compose_symmetric": compose_symmetric, "compose_general": compose_general}
BASELINES: dict[str, dict[str, Function]] = {
    "compose_symmetric": {"torch.linalg": _symmetric_by_linalg, "reference": ot.reference.spectrum.compose_symmetric},
    "compose_general": {"reference": ot.reference.spectrum.compose_general},
}


def _inputs(n: int, mode: str) -> tuple[Tensor, ...]:
    """Matrices of moderate condition: the inverse of a bad one would be judged, not ours."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.eye(n) + 0.5 * n**-0.5 * torch.randn(LAYERS, n, n, generator=generator)
    eigenvalues = torch.randn(LAYERS, n, generator=generator)
    return matrix.requires_grad_(mode != FORWARD), eigenvalues.requires_grad_(mode != FORWARD)


def _case(op: str, n: int, mode: str) -> Case:
    forward, backward = FLOPS[op]
    is_wanted = op == "compose_symmetric" and n == max(SIZES) and mode == FORWARD_BACKWARD
    return Case(
        op=op,
        shape=f"{LAYERS}x{n}",
        dtype=torch.float32,
        mode=mode,
        targets={"torch.linalg": TARGET} if is_wanted else {},
        workload=Workload(
            setup=lambda: _inputs(n, mode),
            ours=OURS[op],
            baselines=BASELINES[op],
            flops=int(((mode != BACKWARD) * forward + (mode != FORWARD) * backward) * LAYERS * n**3),
            bytes=4 * LAYERS * n * n * torch.float32.itemsize,
            bound_by="matmul",
        ),
    )


def cases() -> list[Case]:
    return [_case(op, n, mode) for op in OURS for n in SIZES for mode in MODES]
