"""The price of the metrics that have a cost of their own; token_similarity, token_diversity and escalation_rate are
frequency_norms and a division.

Baselines are the reference and what a user would write: a sum of unit tokens, torch.linalg.svdvals. The ranks are
computed by the reference on every backend, so beside it they are equal by construction.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import overtone as ot
from overtone.benchmarks.harness.case import MODES, Case, Workload, with_compiled
from overtone.benchmarks.shapes import TOKENS, TokenShape

FORWARD, BACKWARD, FORWARD_BACKWARD = MODES
RANK_SHAPES = (TokenShape(16, 65, 192), TokenShape(8, 197, 192), TokenShape(8, 197, 768))


def _cosine_by_sum(x: Tensor) -> Tensor:
    n = x.shape[-2]
    return (F.normalize(x, dim=-1).sum(-2).square().sum(-1) - n) / (n * (n - 1))


def _effective_rank_by_svd(x: Tensor) -> Tensor:
    sigma = torch.linalg.svdvals(x)
    share = sigma / sigma.sum(-1, keepdim=True)
    return torch.special.entr(share).sum(-1).exp()


def _stable_rank_by_svd(x: Tensor) -> Tensor:
    squares = torch.linalg.svdvals(x).square()
    return squares.sum(-1) / squares[..., 0]


def _tokens(shape: TokenShape, mode: str = FORWARD) -> tuple[Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator) + torch.randn(shape.channels, generator=generator)
    return (x.requires_grad_(mode != FORWARD),)


def _cosine(shape: TokenShape, mode: str) -> Case:
    forward, backward = mode != BACKWARD, mode != FORWARD
    return Case(
        op="cosine_similarity",
        shape=shape.label,
        dtype=torch.float32,
        mode=mode,
        workload=Workload(
            setup=lambda: _tokens(shape, mode),
            ours=ot.cosine_similarity,
            baselines=with_compiled({"reference": ot.reference.cosine_similarity, "by sum": _cosine_by_sum}),
            # square, sum, divide, sum. Backward: scale, project, add
            flops=(4 * forward + 4 * backward) * shape.elements,
            # read x. Backward: read x, write its gradient
            bytes=(forward + 2 * backward) * shape.elements * 4,
            bound_by="map" if backward else "read",
        ),
    )


def _rank(op: str, shape: TokenShape) -> Case:
    by_svd = {"effective_rank": _effective_rank_by_svd, "stable_rank": _stable_rank_by_svd}[op]
    small, large = sorted(shape[1:])
    return Case(
        op=op,
        shape=shape.label,
        dtype=torch.float32,
        mode=FORWARD,
        workload=Workload(
            setup=lambda: _tokens(shape),
            ours=getattr(ot, op),
            baselines={"reference": getattr(ot.reference, op), "svdvals": by_svd},
            flops=shape.batch * (2 * small**2 * large + 4 * small**3 // 3),  # Gram matrix, its eigenvalues
            bytes=shape.elements * 4,
            bound_by="matmul",
        ),
    )


def cases() -> list[Case]:
    return [
        *(_cosine(shape, mode) for shape in TOKENS for mode in MODES),
        *(_rank(op, shape) for op in ("effective_rank", "stable_rank") for shape in RANK_SHAPES),
    ]
