"""The price of linear layers and MLPs at the sizes of ViTs: tokens × (inputs, hidden channels or outputs).

Baselines are nn.Linear's and GELU's functions, eager and compiled. In bfloat16 x is that and the weights are float32,
as under autocast; "float32" is ours on float32 copies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from overtone import reference
from overtone.benchmarks.harness.case import MODES, Case, Function, InFloat32, Workload, with_compiled
from overtone.benchmarks.shapes import TI_224, VITS
from overtone.ops import linear as ops

# Tokens of a batch: those of the attention shapes, half as many for ViT-Ti at 224 pixels.
SIZES = tuple((vit.label, vit.tokens * (16 if vit is TI_224 else vit.batch), vit.channels) for vit in VITS)

# How often every product is made: backward is one for the inputs and one for the weight.
PRODUCTS = dict(zip(MODES, (1, 2, 3), strict=True))


def _inputs(tokens: int, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, shapes[0][1], generator=generator).to(dtype)
    weights = [torch.randn(shape, generator=generator) * shape[-1] ** -0.5 for shape in shapes]
    return tuple(tensor.requires_grad_() for tensor in (x, *weights))


def _autocast(function: Function) -> Function:
    """In float64, where it is the truth, autocast has no say."""

    def call(*inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return function(*inputs)

    return call


def _case(op: str, label: str, tokens: int, shapes: tuple[tuple[int, ...], ...], mode: str, dtype: torch.dtype) -> Case:
    plain: Function = getattr(reference, op)
    ours: Function = getattr(ops, op)
    products = sum(2 * tokens * shape[0] * shape[1] for shape in shapes if len(shape) == 2)
    is_half = dtype == torch.bfloat16
    baselines = with_compiled({"plain": _autocast(plain) if is_half else plain})
    return Case(
        op=op,
        shape=label,
        dtype=dtype,
        mode=mode,
        workload=Workload(
            setup=lambda: _inputs(tokens, shapes, dtype),
            ours=ours,
            baselines={**baselines, "float32": InFloat32(ours)} if is_half else baselines,
            flops=products * PRODUCTS[mode],
            bytes=0,
            bound_by="matmul",
        ),
        targets={"float32": 1.7} if is_half and mode == MODES[2] else {},
    )


def cases() -> list[Case]:
    return [
        _case(op, label, tokens, shapes, mode, dtype)
        for dtype in (torch.float32, torch.bfloat16)
        for label, tokens, dim in SIZES
        for op, shapes in (
            ("linear", ((3 * dim, dim), (3 * dim,))),
            ("mlp", ((4 * dim, dim), (4 * dim,), (dim, 4 * dim), (dim,))),
        )
        for mode in MODES
    ]
