"""The price of linear layers and MLPs at the sizes of ViTs: tokens × (inputs, hidden channels or outputs).

Baselines are nn.Linear's and GELU's functions, eager and compiled.
"""

from __future__ import annotations

import torch
from torch import Tensor

from overtone import reference
from overtone.benchmarks.harness.case import MODES, Case, Function, Workload, with_compiled
from overtone.benchmarks.shapes import TI_224, VITS
from overtone.ops import linear as ops

# Tokens of a batch: those of the attention shapes, half as many for ViT-Ti at 224 pixels.
SIZES = tuple((vit.label, vit.tokens * (16 if vit is TI_224 else vit.batch), vit.channels) for vit in VITS)

# How often every product is made: backward is one for the inputs and one for the weight.
PRODUCTS = dict(zip(MODES, (1, 2, 3), strict=True))


def _inputs(tokens: int, shapes: tuple[tuple[int, ...], ...]) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(tokens, shapes[0][1], generator=generator)]
    tensors += [torch.randn(shape, generator=generator) * shape[-1] ** -0.5 for shape in shapes]
    return tuple(tensor.requires_grad_() for tensor in tensors)


def _case(op: str, label: str, tokens: int, shapes: tuple[tuple[int, ...], ...], mode: str) -> Case:
    plain: Function = getattr(reference, op)
    products = sum(2 * tokens * shape[0] * shape[1] for shape in shapes if len(shape) == 2)
    return Case(
        op=op,
        shape=label,
        dtype=torch.float32,
        mode=mode,
        workload=Workload(
            setup=lambda: _inputs(tokens, shapes),
            ours=getattr(ops, op),
            baselines=with_compiled({"plain": plain}),
            flops=products * PRODUCTS[mode],
            bytes=0,
            bound_by="matmul",
        ),
    )


def cases() -> list[Case]:
    return [
        _case(op, label, tokens, shapes, mode)
        for label, tokens, dim in SIZES
        for op, shapes in (
            ("linear", ((3 * dim, dim), (3 * dim,))),
            ("mlp", ((4 * dim, dim), (4 * dim,), (dim, 4 * dim), (dim,))),
        )
        for mode in MODES
    ]
