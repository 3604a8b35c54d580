"""The price of LayerNorm from float32 to bfloat16, at the sizes of ViTs; the baseline is PyTorch's, and the cast."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from overtone.benchmarks.harness.case import MODES, Case, Workload, with_compiled
from overtone.benchmarks.shapes import VITS
from overtone.ops.layer_norm import rounded_layer_norm


def _inputs(tokens: int, channels: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((tokens, channels), (channels,), (channels,))
    return tuple(torch.randn(shape, generator=generator).requires_grad_() for shape in shapes)


def _plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    y = F.layer_norm(x, x.shape[-1:], weight, bias)
    return y if x.dtype == torch.float64 else y.bfloat16()


def _case(label: str, tokens: int, channels: int, mode: str) -> Case:
    return Case(
        op="rounded_layer_norm",
        shape=label,
        dtype=torch.float32,
        mode=mode,
        workload=Workload(
            setup=lambda: _inputs(tokens, channels),
            ours=rounded_layer_norm,
            baselines=with_compiled({"plain": _plain}),
            flops=0,
            bytes=tokens * channels * {MODES[0]: 6, MODES[1]: 10, MODES[2]: 16}[mode],
        ),
    )


def cases() -> list[Case]:
    return [_case(vit.label, vit.batch * vit.tokens, vit.channels, mode) for vit in VITS for mode in MODES]
