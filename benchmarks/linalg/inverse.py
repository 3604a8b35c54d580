"""The inverses of all layers of a ViT at once, which a general spectrum V Λ V⁻¹ takes at every step.

torch.linalg.inv is not among the baselines: MKL's LU has hung on two threads.
"""

from __future__ import annotations

import torch
from torch import Tensor

import overtone as ot
from overtone.benchmarks.harness.case import MODES, Case, Workload
from overtone.ops.linalg.inverse import inverse

FORWARD, BACKWARD, _ = MODES
LAYERS, SIZES = 12, (192, 384, 768)


def _inputs(n: int, mode: str) -> tuple[Tensor, ...]:
    """Matrices of moderate condition: the inverse of a bad one would be judged, not ours."""
    matrix = torch.eye(n) + 0.5 * n**-0.5 * torch.randn(LAYERS, n, n, generator=torch.Generator().manual_seed(0))
    return (matrix.requires_grad_(mode != FORWARD),)


def _case(n: int, mode: str) -> Case:
    return Case(
        op="inverse",
        shape=f"{LAYERS}x{n}",
        dtype=torch.float32,
        mode=mode,
        workload=Workload(
            setup=lambda: _inputs(n, mode),
            ours=inverse,
            baselines={"reference": ot.reference.linalg.inverse},
            # LU and two substitutions; two products.
            flops=int(((mode != BACKWARD) * 2 + (mode != FORWARD) * 4) * LAYERS * n**3),
            bytes=3 * LAYERS * n * n * torch.float32.itemsize,
            bound_by="matmul",
        ),
    )


def cases() -> list[Case]:
    return [_case(n, mode) for n in SIZES for mode in MODES]
