"""The price of spectral_attention: q, k, v to y and its norms, at ViT shapes.

Baselines are the reference and what a user would write with torch's own fused attention: SDPA, scale, matmul, add and
norms.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import overtone as ot
from overtone import hardware
from overtone.benchmarks.harness.case import MODES, Case, Function, InFloat32, Workload, with_compiled
from overtone.benchmarks.shapes import B_224, EXTRA_SHAPES, N4096, S_224, TI_224, TI_CIFAR, AttentionShape

FORWARD, BACKWARD, FORWARD_BACKWARD = MODES


# How many times faster than the best plain PyTorch is wanted in float32, (forward, forward+backward). In bfloat16 as
# fast as PyTorch in bfloat16 is wanted, and with AMX so many times faster than PyTorch in float32.
TARGETS = {TI_CIFAR: (1.7, 1.8), TI_224: (1.65, 1.75), S_224: (1.55, 1.6), B_224: (1.35, 1.4), N4096: (1.0, 1.0)}
# Over our own float32: forward, forward+backward.
OVER_FLOAT32 = {
    "avx512_bf16": {TI_CIFAR: (1.3, 1.3), TI_224: (1.5, 1.5), S_224: (1.6, 1.6), B_224: (1.7, 1.6)},
    "amx": {TI_CIFAR: (2.8, 2.2), TI_224: (3.2, 2.5), S_224: (3.4, 2.8), B_224: (3.6, 3.0)},
}
AMX_TARGETS = {TI_CIFAR: (4.8, 3.5), TI_224: (5.3, 4.0), S_224: (5.3, 4.0), B_224: (5.6, 4.5)}

# Products of attention's size and of the projection's: scores and values; backward: scores again, and two for each of
# the two. The projection, and twice it.
PRODUCTS = {FORWARD: (2, 1), BACKWARD: (5, 2), FORWARD_BACKWARD: (7, 3)}


def _by_sdpa(query: Tensor, key: Tensor, value: Tensor, eigenvalues: Tensor, basis: Tensor, residual: Tensor):
    heads = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
    y = residual + (heads * eigenvalues.to(heads.dtype)) @ basis
    wide = y.float()
    mean = wide.mean(-2, keepdim=True)
    low = math.sqrt(y.shape[-2]) * torch.linalg.vector_norm(mean, dim=(-2, -1))
    return y, low, torch.linalg.vector_norm(wide - mean, dim=(-2, -1))


def _with_norms(function, query, key, value, eigenvalues, basis, residual):
    y, norms = function(query, key, value, eigenvalues, basis, residual=residual, return_norms=True)
    return y, norms.low, norms.high


def _inputs(shape: AttentionShape, dtype: torch.dtype, mode: str) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)

    def random(*size: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(size, generator=generator)

    qkv = random(shape.batch, shape.tokens, 3, shape.num_heads, shape.head_dim).to(dtype)
    basis = random(shape.channels, shape.channels, scale=shape.channels**-0.5).to(dtype)
    residual = random(shape.batch, shape.tokens, shape.channels).to(dtype)
    inputs = (*qkv.permute(2, 0, 3, 1, 4).unbind(0), random(shape.channels), basis, residual)
    return tuple(x.detach().requires_grad_(mode != FORWARD) for x in inputs)


def _multiplies_halves(dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16 and (hardware.isa() or "").startswith(("avx512_bf16", "amx"))


def _tolerance_from(dtype: torch.dtype) -> dict[str, Function]:
    """Where softmax and heads are rounded to halves on their way into matrix instructions, as in SDPA's products.

    The reference, and our other kernels, keep them in float32.
    """
    on_cpu = {"cpu": _by_sdpa} if _multiplies_halves(dtype) else {}
    return on_cpu if dtype == torch.float32 else {"triton": _by_sdpa, **on_cpu}


def _case(shape: AttentionShape, dtype: torch.dtype, mode: str) -> Case:
    baselines = with_compiled({"reference": partial(_with_norms, ot.reference.spectral_attention), "sdpa": _by_sdpa})
    if shape is N4096:  # the reference's matrices of logits would take gigabytes in float64
        baselines = {"reference": baselines["reference"], "sdpa": _by_sdpa}
    products = 2 * shape.batch * shape.tokens * shape.channels
    attention, projection = products * shape.tokens, products * shape.channels
    tensors = 5 * shape.batch * shape.tokens * shape.channels  # q, k, v, residual, y
    targets = {}
    if mode != BACKWARD and (shape in TARGETS or dtype != torch.float32):
        targets = dict.fromkeys(baselines, TARGETS[shape][mode != FORWARD] if dtype == torch.float32 else 1.0)
    if dtype != torch.float32:
        by_sdpa = with_compiled({"sdpa": _by_sdpa})
        float32 = {f"{name} float32": InFloat32(function) for name, function in by_sdpa.items()}
        baselines |= float32 | {"ours float32": InFloat32(partial(_with_norms, ot.spectral_attention))}
        level = hardware.isa() or ""
        if mode != BACKWARD and shape in AMX_TARGETS and level == "amx":
            targets |= dict.fromkeys(float32, AMX_TARGETS[shape][mode != FORWARD])
        if mode != BACKWARD and shape in AMX_TARGETS and level in OVER_FLOAT32:
            targets["ours float32"] = OVER_FLOAT32[level][shape][mode != FORWARD]
    return Case(
        op="spectral_attention",
        shape=shape.label,
        dtype=dtype,
        mode=mode,
        targets=targets,
        tolerance_from=_tolerance_from(dtype),
        workload=Workload(
            setup=lambda: _inputs(shape, dtype, mode),
            ours=partial(_with_norms, ot.spectral_attention),
            baselines=baselines,
            flops=PRODUCTS[mode][0] * attention + PRODUCTS[mode][1] * projection,
            bytes=PRODUCTS[mode][1] * tensors * dtype.itemsize,
            bound_by="matmul",
        ),
    )


def cases() -> list[Case]:
    return [
        _case(shape, dtype, mode)
        for dtype in (torch.float32, torch.bfloat16)
        for shape in (*TARGETS, *EXTRA_SHAPES)
        for mode in MODES
        if dtype == torch.float32 or (shape in TARGETS and shape is not N4096)
    ]
