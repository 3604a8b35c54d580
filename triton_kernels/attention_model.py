"""What a launch moves and multiplies, as a formula; tests count the same in Triton's interpreter.

Bytes are those that cross HBM if a launch finds its second reading of anything in L2: every tensor once. FLOPs are the
products the kernel executes, padding of its tiles included. Causal launches are not modelled: they skip blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from overtone.triton_kernels import attention
from overtone.triton_kernels.launch import Launch, assume_architecture, record_launches


class Cost(NamedTuple):
    """Of one launch, or of one operation of eager PyTorch."""

    name: str
    read: int
    written: int
    flops: int

    @property
    def bytes(self) -> int:
        return self.read + self.written


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _attention_flops(v: dict[str, Any], programs: int) -> int:
    blocks = 1 if v["WHOLE"] else _ceil(v["n_keys"], v["BN"])
    return programs * blocks * 4 * v["BM"] * v["BN"] * v["BD"]


def _fused_flops(v: dict[str, Any], programs: int) -> int:
    projection = 2 * v["BM"] * v["BD"] * v["BE"] * v["PIECES"]
    return v["n_heads"] * (_attention_flops(v, programs) + programs * projection)


class _Kernel(NamedTuple):
    """Which arguments a kernel reads and writes, and its FLOPs by its arguments and the number of programs."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    flops: Callable[[dict[str, Any], int], int] = lambda v, programs: 0


_QKV = ("p_q", "p_k", "p_v", "p_mask")
_WEIGHTS = ("p_eigenvalues", "p_basis")
_Y = ("p_y", "p_wide", "p_statistics")
_BACK = ("p_grad_heads", "p_rows", "p_delta")
KERNELS = {
    "attention": _Kernel(_QKV, ("p_heads", "p_rows"), _attention_flops),
    "fused": _Kernel((*_QKV, *_WEIGHTS, "p_r"), (*_Y, "p_heads", "p_rows"), _fused_flops),
    "projection": _Kernel(
        ("p_heads", *_WEIGHTS, "p_r"), _Y,
        lambda v, programs: programs * _ceil(v["n_features"], v["BK"]) * 2 * v["BM"] * v["BK"] * v["BE"],
    ),
    "heads_gradient": _Kernel(
        ("p_g", *_WEIGHTS, "p_heads"), ("p_grad_heads", "p_delta", "p_grad_eigenvalues"),
        lambda v, programs: programs * _ceil(v["n_channels"], v["BK"]) * 2 * v["BM"] * v["BK"] * v["BD"],
    ),
    "basis_gradient": _Kernel(
        ("p_heads", "p_eigenvalues", "p_g"), ("p_grad_basis",),
        lambda v, programs: 2 * v["BM"] * v["BE"] * v["BK"] * _split_blocks(v, programs),
    ),
    "key_value_gradient": _Kernel(
        (*_QKV, *_BACK), ("p_grad_k", "p_grad_v"),
        lambda v, programs: programs * _ceil(v["n_queries"], v["BM"]) * 8 * v["BM"] * v["BN"] * v["BD"],
    ),
    "query_gradient": _Kernel(
        (*_QKV, *_BACK), ("p_grad_q", "p_grad_logits"),
        lambda v, programs: programs * _ceil(v["n_keys"], v["BN"]) * 6 * v["BM"] * v["BN"] * v["BD"],
    ),
    "column_sums": _Kernel(("p_rows",), ("p_sums",)),
    "norms": _Kernel(("p_statistics",), ("p_low", "p_high")),
    "roots": _Kernel(("p_low2", "p_high2"), ("p_low", "p_high")),
    "norms_backward": _Kernel(
        ("p_x", "p_added", "p_grad_low", "p_grad_high", "p_low", "p_high"), ("p_grad_x",)
    ),
}  # fmt: skip


def _split_blocks(v: dict[str, Any], programs: int) -> int:
    """Steps of the basis gradient's loop, over all programs: the last split may be shorter."""
    splits = _ceil(v["n_tokens"], v["n_split_tokens"])
    steps = sum(
        _ceil(min(v["n_split_tokens"], v["n_tokens"] - i * v["n_split_tokens"]), v["BK"]) for i in range(splits)
    )
    return programs // splits * steps if splits else 0


def _touched(x: Tensor | None) -> int:
    """Bytes of a tensor's memory; what is broadcast by a stride of zero is there once."""
    if x is None:
        return 0
    return x.element_size() * torch.Size(n for n, s in zip(x.shape, x.stride(), strict=True) if s or n == 0).numel()


def cost(launch: Launch) -> Cost:
    """By the kernel's formula."""
    name = launch.kernel.fn.__name__.removesuffix("_kernel")
    values = dict(zip(launch.kernel.arg_names, launch.args, strict=False)) | launch.meta
    assert not values.get("IS_CAUSAL"), "causal launches are not modelled"
    kernel = KERNELS[name]
    read, written = (sum(_touched(values[arg]) for arg in args) for args in (kernel.reads, kernel.writes))
    programs = torch.Size(launch.grid).numel()
    return Cost(name, read, written, kernel.flops(values, programs))


class Shape(NamedTuple):
    """Images, tokens of an image, channels, and heads that share them."""

    label: str
    batch: int
    tokens: int
    channels: int
    heads: int


SHAPES = (
    Shape("Ti-cifar", 256, 65, 192, 3),
    Shape("Ti-224", 128, 197, 192, 3),
    Shape("S-224", 128, 197, 384, 6),
    Shape("B-224", 128, 197, 768, 12),
)


class Gpu(NamedTuple):
    """Vendor's figures: bytes per second of HBM, dense half-precision FLOPs per second."""

    architecture: str
    bandwidth: float
    peak: float


GPUS = {
    "A100": Gpu("sm_80", 2.04e12, 312e12),
    "H100": Gpu("sm_90", 3.35e12, 989e12),
    "B200": Gpu("sm_100", 8.0e12, 2250e12),
    "MI300X": Gpu("gfx942", 5.3e12, 1307e12),
}


def ours(shape: Shape, dtype: torch.dtype, architecture: str, training: bool) -> list[Cost]:
    """The launches of y with its norms, and in training of all gradients, as they are made on this architecture."""
    b, n, c, h = shape[1:]
    qkv = torch.empty(b, n, 3, h, c // h, dtype=dtype, device="meta").permute(2, 0, 3, 1, 4).unbind(0)
    residual = torch.empty(b, n, c, dtype=dtype, device="meta")
    weights = torch.empty(c, device="meta"), torch.empty(c, c, dtype=dtype, device="meta")
    call = *qkv, *weights
    rest = None, False, 1.0
    with assume_architecture(architecture), record_launches() as launches:
        y, low, high, _, heads, rows = attention.forward(*call, residual, *rest, True, False, training)
        if training:
            attention.backward(residual, low, high, y, low, high, *call, *rest, heads, rows, 31)
    return [cost(launch) for launch in launches]


def eager(shape: Shape, dtype: torch.dtype, training: bool) -> list[Cost]:
    """SDPA, scale, matmul, add and norms in float32, as PyTorch runs them one by one; SDPA itself is fused."""
    b, n, c, h = shape[1:]
    u = b * n * c * dtype.itemsize  # a tensor of tokens
    wide = b * n * c * 4
    weight = c * c * dtype.itemsize
    rows = 4 * b * h * n  # SDPA's log-sum-exp
    scores, projection = 2 * b * n * n * c, 2 * b * n * c * c
    forward = [
        Cost("sdpa", 3 * u, u + rows, 2 * scores),
        Cost("scale", u, u, 0),
        Cost("matmul", u + weight, u, projection),
        Cost("add", 2 * u, u, 0),
        Cost("to float32", u, wide, 0),
        Cost("mean", wide, 0, 0),
        Cost("subtract mean", wide, wide, 0),
        Cost("norm", wide, 0, 0),
    ]
    backward = [
        Cost("norm backward", wide, wide, 0),
        Cost("mean backward: sum", wide, 0, 0),
        Cost("mean backward: add", wide, wide, 0),
        Cost("to half", wide, u, 0),
        Cost("add to grad_y", 2 * u, u, 0),
        Cost("matmul backward: heads", u + weight, u, projection),
        Cost("matmul backward: basis", 2 * u, weight, projection),
        Cost("scale backward: heads", u, u, 0),
        Cost("scale backward: product", 2 * u, u, 0),
        Cost("scale backward: sum", u, 0, 0),
        Cost("sdpa backward: delta", 2 * u, rows, 0),
        Cost("sdpa backward", 4 * u + 2 * rows, 3 * u, 5 * scores),
    ]
    return forward + backward if training else forward


def roofline(costs: list[Cost], gpu: Gpu) -> float:
    """Seconds, if every launch reached the GPU's bandwidth or its peak, whichever binds."""
    return sum(max(cost.bytes / gpu.bandwidth, cost.flops / gpu.peak) for cost in costs)
