"""The price of frequency_norms, frequency_filter and de_escalate.

Baselines are the reference and faster forms a user would write by hand. ‖HFC‖² = ‖x‖² − ‖LFC‖² is not among them: it
loses its digits where tokens are almost equal, so it is not the same function.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import overtone as ot
from overtone.benchmarks.harness.case import MODES, Case, Function, Workload, with_compiled
from overtone.benchmarks.shapes import EXTRA_TOKENS, TOKENS, TokenShape

FORWARD, BACKWARD, FORWARD_BACKWARD = MODES
TAU = 0.5


SETTINGS = (
    (TOKENS[0], torch.float32),
    (TOKENS[0], torch.bfloat16),
    *((shape, torch.float32) for shape in (*TOKENS[1:], *EXTRA_TOKENS)),
)


def _norms_by_mean(x: Tensor) -> tuple[Tensor, Tensor]:
    wide = x.float()
    mean = wide.mean(-2, keepdim=True)
    low = math.sqrt(x.shape[-2]) * torch.linalg.vector_norm(mean, dim=(-2, -1))
    return low, torch.linalg.vector_norm(wide - mean, dim=(-2, -1))


def _norms_by_variance(x: Tensor) -> tuple[Tensor, Tensor]:
    variance, mean = torch.var_mean(x.float(), -2, correction=0)
    tokens = x.shape[-2]
    return math.sqrt(tokens) * torch.linalg.vector_norm(mean, dim=-1), (tokens * variance.sum(-1)).sqrt()


def _filter_by_mean(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    mean = x.mean(-2, keepdim=True, dtype=torch.float32)
    return torch.addcmul((low - high) * mean, x, high).to(x.dtype)


def _causal_by_cumsum(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    counts = torch.arange(1, x.shape[-2] + 1, dtype=torch.float32, device=x.device)[:, None]
    mean = x.cumsum(-2, dtype=torch.float32) / counts
    return torch.addcmul((low - high) * mean, x, high).to(x.dtype)


def _causal_by_matmul(tokens: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The running mean as a product with a matrix made beforehand: more arithmetic, but torch's cumsum is slow."""
    average = torch.ones(tokens, tokens).tril() / torch.arange(1, tokens + 1)[:, None]

    def causal_by_matmul(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
        return torch.addcmul((low - high) * (average.to(x.device) @ x.float()), x, high).to(x.dtype)

    return causal_by_matmul


def _de_escalate_by_mean(x: Tensor) -> Tensor:
    return torch.sub(x, x.mean(-2, keepdim=True, dtype=torch.float32), alpha=TAU).to(x.dtype)


def _tokens(shape: TokenShape, dtype: torch.dtype, mode: str) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(shape.channels, generator=generator)  # so that neither component is negligible
    x = torch.randn(shape, generator=generator) + common
    return x.to(dtype).requires_grad_(mode != FORWARD)


def _gains(shape: TokenShape, trained: bool) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    low, high = 1 + 0.1 * torch.randn(2, shape.channels, generator=generator)
    return low.requires_grad_(trained), high.requires_grad_(trained)


# FLOPs and bytes: per element, counting multiplications and additions; passes over a tensor of x's size.


def _norms(shape: TokenShape, dtype: torch.dtype, mode: str) -> Case:
    forward, backward = mode != BACKWARD, mode != FORWARD
    return Case(
        op="frequency_norms",
        shape=shape.label,
        dtype=dtype,
        mode=mode,
        targets={} if backward else {"reference": 3.0, "compiled reference": 1.5},
        workload=Workload(
            setup=lambda: (_tokens(shape, dtype, mode),),
            ours=ot.frequency_norms,
            baselines=with_compiled(
                {
                    "reference": ot.reference.frequency_norms,
                    "by mean": _norms_by_mean,
                    "by variance": _norms_by_variance,
                }
            ),
            # sum; subtract, square, sum. Backward: subtract mean, scale, add the low part
            flops=(4 * forward + 3 * backward) * shape.elements,
            # read x. Backward: read x, write its gradient
            bytes=(forward + 2 * backward) * shape.elements * dtype.itemsize,
            bound_by="map" if backward else "read",
        ),
    )


def _filter(shape: TokenShape, dtype: torch.dtype, mode: str, *, trained: bool = False, causal: bool = False) -> Case:
    forward, backward = mode != BACKWARD, mode != FORWARD
    by_hand: dict[str, Function] = {"by mean": _filter_by_mean}
    if causal:
        by_hand = {"by cumsum": _causal_by_cumsum, "by matmul": _causal_by_matmul(shape.tokens)}
    return Case(
        op="frequency_filter",
        variant=" ".join(["causal"] * causal + ["trained gains"] * trained),
        shape=shape.label,
        dtype=dtype,
        mode=mode,
        targets={"reference": 2.0} if mode == FORWARD_BACKWARD and not causal else {},
        workload=Workload(
            setup=lambda: (_tokens(shape, dtype, mode), *_gains(shape, trained)),
            ours=partial(ot.frequency_filter, is_causal=causal),
            baselines=with_compiled({"reference": partial(ot.reference.frequency_filter, is_causal=causal), **by_hand}),
            # sum; scale, add. Backward: the same, and a product and a sum for each trained gain
            flops=(3 * forward + 3 * backward + 4 * trained) * shape.elements,
            # read x, write y. Backward: read y's gradient, write x's; trained gains read x again
            bytes=(2 * forward + 2 * backward + trained) * shape.elements * dtype.itemsize,
        ),
    )


def _de_escalate(shape: TokenShape, dtype: torch.dtype, mode: str) -> Case:
    forward, backward = mode != BACKWARD, mode != FORWARD
    return Case(
        op="de_escalate",
        shape=shape.label,
        dtype=dtype,
        mode=mode,
        workload=Workload(
            setup=lambda: (_tokens(shape, dtype, mode),),
            ours=partial(ot.de_escalate, tau=TAU),
            baselines=with_compiled(
                {"reference": partial(ot.reference.de_escalate, tau=TAU), "by mean": _de_escalate_by_mean}
            ),
            flops=2 * (forward + backward) * shape.elements,
            bytes=2 * (forward + backward) * shape.elements * dtype.itemsize,
        ),
    )


def cases() -> list[Case]:
    """Grouped by op."""
    return [
        *(_norms(*setting, mode) for setting in SETTINGS for mode in MODES),
        *(_filter(*setting, mode) for setting in SETTINGS for mode in MODES),
        *(_filter(*setting, FORWARD_BACKWARD, trained=True) for setting in SETTINGS),
        *(_filter(*setting, mode, causal=True) for setting in SETTINGS for mode in MODES),
        *(_de_escalate(*setting, mode) for setting in SETTINGS for mode in MODES),
    ]
