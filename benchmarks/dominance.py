"""The price of dominance: a ViT-B/16's attention at random initialisation and a sharp one, with certificates.

Baselines do the same analysis with torch.linalg: the reference, which solves every matrix in float64, with eigenvectors
for its error bounds, and the least that gives a verdict at all, eigenvalues in float32 without any bound. They take
minutes for 32 images, so one image (12 layers × 12 heads) is timed on all sides: every image costs the same.
"""

from __future__ import annotations

from functools import cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import overtone as ot
from overtone.benchmarks.harness.case import Case, Results, Workload
from overtone.benchmarks.harness.check import Check, Expected
from overtone.reference.dominance import Dominance, Verdict, head_weights

DIM, HEADS, LAYERS, TOKENS, STD = 768, 12, 12, 197, 0.02


class Shape(NamedTuple):
    images: int
    sharpness: float  # what queries and keys are multiplied by

    @property
    def label(self) -> str:
        return f"{self.images}x{LAYERS}x{HEADS}x{TOKENS}"


# How many times faster than either baseline is wanted.
TARGETS = {Shape(1, 1.0): 8.0, Shape(1, 4.0): None}


@cache
def _inputs(shape: Shape) -> tuple[Tensor, Tensor]:
    """Attention [layers, images, heads, N, N] and the heads' weights [layers, 1, heads, k, k] of a pre-norm ViT-B/16.

    Random weights of timm's standard deviation, no MLP; tokens run through the layers. Sharper queries and keys are the
    hard case: attention is almost one-hot, its eigenvalues fill the disk, and margins are small.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape.images, TOKENS, DIM, generator=generator)
    attention, weights = [], []
    for _ in range(LAYERS):
        w_q, w_k, w_v, w_proj = STD * torch.randn(4, DIM, DIM, generator=generator)
        normed = F.layer_norm(x, (DIM,))
        query, key, value = (
            (normed @ w).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for w in (shape.sharpness * w_q, shape.sharpness * w_k, w_v)
        )
        attention.append(ot.reference.attention_weights(query, key))
        weights.append(head_weights(w_v, w_proj, HEADS)[None])
        x = x + (attention[-1] @ value).transpose(1, 2).flatten(2) @ w_proj
    return torch.stack(attention), torch.stack(weights)


def _ours(attention: Tensor, weight: Tensor) -> Results:
    return tuple(ot.analysis.dominance(attention, weight))


def _reference(attention: Tensor, weight: Tensor) -> Results:
    return tuple(ot.reference.analysis.dominance(attention, weight))


def _eigenvalues_only(attention: Tensor, weight: Tensor) -> Results:
    """The margin's sign from torch.linalg.eigvals, image by image; the error is not known."""
    h = torch.linalg.eigvals(weight)[..., :, None]
    margins = []
    for index in range(attention.shape[1]):
        values = torch.linalg.eigvals(attention[:, index : index + 1])
        perron = (values - 1).abs().argmin(-1, keepdim=True)
        others = (1 + h * values[..., None, :]).abs()
        is_perron = torch.zeros_like(values, dtype=torch.bool).scatter(-1, perron, True)[..., None, :]
        margins.append((1 + h).abs().amax((-2, -1)) - others.masked_fill(is_perron, 0).amax((-2, -1)))
    margin = torch.cat(margins, 1).double()
    verdict = torch.where(margin > 0, Verdict.PERRON, Verdict.OTHER).to(torch.int8)
    return verdict, margin, torch.zeros_like(margin)


def _check(results: Results, expected: Expected) -> Check:
    """Every decided verdict is the reference's, what it decides is decided, and margins agree within their bounds."""
    found, wanted = Dominance(*results), Dominance(*expected.plain)
    settled = ~wanted.undecided
    wrong = int((settled & (found.verdict != wanted.verdict)).sum())
    off = (found.margin - wanted.margin).abs() - found.error - wanted.error
    worst = float(off.max()) if found.error.any() else 0.0  # who states no bound is judged by the verdicts alone
    if wrong or worst > 0:
        return Check.failed(f"{wrong} verdicts are not the reference's; margins are off their bounds by {worst:.1g}")
    return Check(True, 0.0, 0.0)


def _case(shape: Shape, target: float | None) -> Case:
    matrices = shape.images * LAYERS * HEADS
    return Case(
        op="dominance",
        shape=shape.label,
        dtype=torch.float32,
        mode="forward",
        variant="random init" if shape.sharpness == 1 else "sharp",
        targets={} if target is None else {"reference": target, "torch eigvals": target},
        check=_check,
        workload=Workload(
            setup=partial(_inputs, shape),
            ours=_ours,
            baselines={"reference": _reference, "torch eigvals": _eigenvalues_only},
            flops=matrices
            * 2
            * TOKENS**3,  # one product of A with itself, the least that tells its eigenvalues' spread
            bytes=matrices * TOKENS**2 * 4,
            bound_by="matmul",
        ),
    )


def cases() -> list[Case]:
    return [_case(shape, target) for shape, target in TARGETS.items()]
