"""What a launch moves and multiplies, as a formula; tests count the same in Triton's interpreter.

Bytes are those that cross HBM if a launch finds its second reading of anything in L2: every tensor once. FLOPs are the
products the kernel executes, padding of its tiles included. Not modeled: causal launches, which skip tiles; gain, bias
and sample_scale, a few numbers; a dq_kernel that makes δ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from overtone.triton_kernels.attention import launch as attention
from overtone.triton_kernels.frequency import launch as frequency
from overtone.triton_kernels.runtime import Launch, assume_architecture, record_launches


class Cost(NamedTuple):
    """Of one launch, or of one operation of eager PyTorch: bytes that cross HBM, products, bytes its programs load."""

    name: str
    read: int
    written: int
    flops: int
    loaded: int = 0

    @property
    def bytes(self) -> int:
        return self.read + self.written


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


Values = dict[str, Any]  # a launch's arguments and constants by name, and "programs"


def _attention_flops(v: Values) -> int:
    blocks = 1 if v["SINGLE_PASS"] else _ceil(v["n_keys"], v["BN"])
    return v["programs"] * blocks * 4 * v["BM"] * v["BN"] * v["BD"]


def _fused_flops(v: Values) -> int:
    projection = 2 * v["BM"] * v["BD"] * v["E_TILE"] * v["NUM_E_TILES"]
    return v["n_heads"] * (_attention_flops(v) + v["programs"] * projection)


def _once(v: Values) -> int:
    return 1


def _per_program(v: Values) -> int:
    return v["programs"]


def _per_head(v: Values) -> int:
    return v["n_heads"]


def _per_tokens_of_heads(v: Values) -> int:
    return v["programs"] // v["n_heads"]


def _per_query_block(v: Values) -> int:
    return _ceil(v["n_queries"], v["BM"])


def _per_key_block(v: Values) -> int:
    return _ceil(v["n_keys"], v["BN"])


def _per_column(v: Values) -> int:
    return _ceil(v["n_channels"], v["BE" if "BE" in v else "E_TILE"])


def _per_row_of_columns(v: Values) -> int:
    return v["programs"] // _per_column(v)


def _per_row_of_features(v: Values) -> int:
    return _ceil(v["n_features"], v["BM"])


class _Kernel(NamedTuple):
    """How often a kernel's programs together load each of its arguments, which they write, and their FLOPs."""

    reads: Mapping[str, Callable[[Values], int]]
    writes: tuple[str, ...]
    flops: Callable[[Values], int] = lambda v: 0


_LOGITS = {"p_q": _once, "p_k": _per_query_block, "p_v": _per_query_block, "p_mask": _once}
_FORWARD = _LOGITS | {"p_addend": _once}
KERNELS = {
    "attention": _Kernel(_FORWARD, ("p_out", "p_stats"), _attention_flops),
    "fused": _Kernel(
        _FORWARD | {"p_weight": _per_program, "p_r": _once}, ("p_y", "p_moments", "p_out", "p_stats"), _fused_flops
    ),
    "projection": _Kernel(
        {"p_out": _per_column, "p_weight": _per_row_of_columns, "p_r": _once}, ("p_y", "p_moments"),
        lambda v: v["programs"] * _ceil(v["n_features"], v["BK"]) * 2 * v["BM"] * v["BK"] * v["E_TILE"],
    ),
    "dout": _Kernel(
        {"p_g": _per_head, "p_weight": _per_tokens_of_heads, "p_out": _once}, ("p_dout", "p_delta"),
        lambda v: v["programs"] * _ceil(v["n_channels"], v["BK"]) * 2 * v["BM"] * v["BK"] * v["BD"],
    ),
    "dweight": _Kernel(
        {"p_out": _per_column, "p_g": _per_row_of_features}, ("p_dweight",),
        lambda v: 2 * v["BM"] * v["BE"] * v["BK"] * _split_blocks(v),
    ),
    "dkv": _Kernel(
        {
            "p_q": _per_key_block, "p_k": _once, "p_v": _once, "p_mask": _once,
            "p_dout": _per_key_block, "p_stats": _per_key_block, "p_delta": _per_key_block,
        },
        ("p_dk", "p_dv"),
        lambda v: v["programs"] * _ceil(v["n_queries"], v["BM"]) * 8 * v["BM"] * v["BN"] * v["BD"],
    ),
    "dq": _Kernel(
        _LOGITS | {"p_dout": _once, "p_stats": _once, "p_delta": _once}, ("p_dq", "p_ds"),
        lambda v: v["programs"] * _ceil(v["n_keys"], v["BN"]) * 6 * v["BM"] * v["BN"] * v["BD"],
    ),
    "reduce_rows": _Kernel({"p_rows": _once}, ("p_sums",)),
    "norms": _Kernel({"p_moments": _once}, ("p_low", "p_high")),
    "finish_norms": _Kernel({"p_low2": _once, "p_high2": _once}, ("p_low", "p_high")),
    "norms_backward": _Kernel(
        dict.fromkeys(("p_x", "p_addend", "p_grad_low", "p_grad_high", "p_low", "p_high"), _once), ("p_grad_x",)
    ),
}  # fmt: skip


def _split_blocks(v: Values) -> int:
    """Steps of ∂W's loop, over all programs: the last split may be shorter."""
    splits = _ceil(v["n_tokens"], v["n_split_tokens"])
    steps = sum(
        _ceil(min(v["n_split_tokens"], v["n_tokens"] - i * v["n_split_tokens"]), v["BK"]) for i in range(splits)
    )
    return v["programs"] // splits * steps if splits else 0


def _touched(x: Tensor | None) -> int:
    """Bytes of a tensor's memory; what is broadcast by a stride of zero is there once."""
    if x is None:
        return 0
    return x.element_size() * torch.Size(n for n, s in zip(x.shape, x.stride(), strict=True) if s or n == 0).numel()


def cost(launch: Launch) -> Cost:
    """By the kernel's formula."""
    name = launch.kernel.fn.__name__.removesuffix("_kernel")
    values = dict(zip(launch.kernel.arg_names, launch.args, strict=False)) | launch.meta
    values["programs"] = torch.Size(launch.grid).numel()
    assert not values.get("MAKE_DELTA"), "δ made by dq_kernel is not modeled"
    assert not values.get("IS_CAUSAL"), "causal launches are not modeled"
    kernel = KERNELS[name]
    read, written = (sum(_touched(values[arg]) for arg in args) for args in (kernel.reads, kernel.writes))
    loaded = sum(times(values) * values[arg].nbytes for arg, times in kernel.reads.items() if values[arg] is not None)
    return Cost(name, read, written, kernel.flops(values), loaded)


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
    """Vendor's figures: bytes per second of HBM, dense FLOPs per second of float16 and bfloat16, of TF32 and of float32
    products, processors (SM, CU, WGP) and their clock. wide_rows: rows of a tile that matrix instructions want."""

    architecture: str
    bandwidth: float
    peak: float
    peak_tf32: float
    peak_float32: float
    processors: int
    clock: float
    wide_rows: int = 16

    @property
    def l2_bandwidth(self) -> float:
        return 64 * self.processors * self.clock  # bytes that a processor takes in a clock


GPUS = {
    "A100": Gpu("sm_80", 2.04e12, 312e12, 156e12, 19.5e12, 108, 1.41e9),
    "L40S": Gpu("sm_89", 0.86e12, 362e12, 183e12, 91.6e12, 142, 2.52e9),
    "H100": Gpu("sm_90", 3.35e12, 989e12, 495e12, 67e12, 132, 1.83e9, wide_rows=64),
    "B200": Gpu("sm_100", 8.0e12, 2250e12, 1125e12, 80e12, 148, 1.85e9, wide_rows=64),
    "RTX 5090": Gpu("sm_120", 1.79e12, 210e12, 105e12, 105e12, 170, 2.41e9),
    "MI300X": Gpu("gfx942", 5.3e12, 1307e12, 0.0, 163e12, 304, 2.1e9),
    "RX 7900 XTX": Gpu("gfx1100", 0.96e12, 123e12, 0.0, 61e12, 48, 2.5e9),
}


def ours(shape: Shape, dtype: torch.dtype, architecture: str, training: bool) -> list[Cost]:
    """The launches of y with its norms, and in training of all gradients, as they are made on this architecture."""
    b, n, c, h = shape[1:]
    qkv = torch.empty(b, n, 3, h, c // h, dtype=dtype, device="meta")
    residual = torch.empty(b, n, c, dtype=dtype, device="meta")
    weight = torch.empty(c, c, device="meta")
    rest = None, None, None, False, 1.0
    heads = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    with assume_architecture(architecture), record_launches() as launches:
        y, low, high, attn_out, stats = attention.forward(
            *heads, weight, None, residual, None, *rest, True, False, training
        )
        if training:
            grad = frequency.norms_backward(low, high, y, low, high, None, residual)
            attention.backward_qkvpacked(grad, qkv, weight, *rest, attn_out, stats, 0b1111)
    rounded = Cost("weight to dtype", weight.nbytes, weight.numel() * dtype.itemsize, 0)
    return [cost(launch) for launch in launches] + ([rounded] * (1 + training) if dtype != weight.dtype else [])


def eager(shape: Shape, dtype: torch.dtype, training: bool, norms_dtype: torch.dtype = torch.float32) -> list[Cost]:
    """SDPA, scale, matmul, add and norms, as PyTorch runs them one by one; SDPA itself is one operation.

    Counted is what benchmarks/attention.py times beside us: every operation that PyTorch dispatches there, with each of
    its tensors once (a test runs it and compares). It takes the norms of y.float(), as the reference and autocast do:
    rounded to bfloat16, the mean hides an HFC below 1/256 of it. With `norms_dtype` they are taken in that dtype.
    In bfloat16 throughout, eager's forward pass would move 15 tensors of tokens. Our single launch moves 5 and, in
    blocks of 32 tokens, half of one as their statistics: 0.37 of that, and at least a third whatever its statistics.
    """
    b, n, c, h = shape[1:]
    u = b * n * c * dtype.itemsize  # a tensor of tokens
    wide, mean, each = (size * norms_dtype.itemsize for size in (b * n * c, b * c, b))
    weight, vector, wide_vector = c * c * dtype.itemsize, c * dtype.itemsize, 4 * c
    rows = 4 * b * h * n  # SDPA's log-sum-exp
    scores, projection = 2 * b * n * n * c, 2 * b * n * c * c
    casts, casts_vector = norms_dtype != dtype, dtype != torch.float32
    forward = [
        Cost("sdpa", 3 * u, u + rows, 2 * scores),
        *([Cost("eigenvalues to dtype", wide_vector, vector, 0)] * casts_vector),
        Cost("scale", u + vector, u, 0),
        Cost("matmul", u + weight, u, projection),
        Cost("add", 2 * u, u, 0),
        *([Cost("to the norms' dtype", u, wide, 0)] * casts),
        Cost("mean", wide, mean, 0),
        Cost("norm of the mean", mean, each, 0),
        Cost("times √N", each, each, 0),
        Cost("subtract mean", wide + mean, wide, 0),
        Cost("norm", wide, each, 0),
    ]
    backward = [
        *_norm_backward(wide, each, b),
        Cost("subtract backward: minus", wide, wide, 0),
        Cost("subtract backward: sum", wide, mean, 0),
        Cost("times √N backward", each, each, 0),
        *_norm_backward(mean, each, b),
        Cost("add gradients of the mean", 2 * mean, mean, 0),
        Cost("mean backward", mean, wide, 0),
        Cost("add gradients of y", 2 * wide, wide, 0),
        *([Cost("from the norms' dtype", wide, u, 0)] * casts),
        Cost("add to grad_y", 2 * u, u, 0),
        Cost("matmul backward: basis", 2 * u, weight, projection),
        Cost("matmul backward: heads", u + weight, u, projection),
        Cost("scale backward: product", 2 * u, u, 0),
        Cost("scale backward: heads", u + vector, u, 0),
        Cost("scale backward: sum", u, vector, 0),
        *([Cost("eigenvalues to dtype backward", vector, wide_vector, 0)] * casts_vector),
        Cost("sdpa backward", 5 * u + rows, 3 * u, 5 * scores),
    ]
    return forward + backward if training else forward


def _norm_backward(wide: int, each: int, samples: int) -> list[Cost]:
    """grad · x / ‖x‖, and zero where ‖x‖ is."""
    return [
        Cost("norm backward: divide", wide + each, wide, 0),
        Cost("norm backward: is zero", each, samples, 0),
        Cost("norm backward: fill", wide + samples, wide, 0),
        Cost("norm backward: times gradient", wide + each, wide, 0),
    ]


def roofline(costs: list[Cost], gpu: Gpu) -> float:
    """Seconds, if every launch reached the GPU's bandwidth or its peak, whichever binds."""
    return sum(max(cost.bytes / gpu.bandwidth, cost.flops / gpu.peak) for cost in costs)


# So many resident warps keep a processor's matrix units busy: two on each of its four parts.
BUSY_WARPS = 8
# Bytes of shared memory that a processor's warps load in a clock.
SHARED_BYTES = 128
# The sides of what a kernel multiplies, which its warps share.
_SIDES = {
    "attention": ("BM", "BN"), "fused": ("BM", "BN"), "projection": ("BM", "E_TILE"), "dout": ("BM", "BD"),
    "dweight": ("BM", "BE"), "dkv": ("BN", "BM"), "dq": ("BM", "BN"),
}  # fmt: skip


def time(launch: Launch, gpu: Gpu, resident_warps: int) -> float:
    """Seconds of a launch, of which a processor holds so many warps; the configurations of the table are chosen by it.

    Products run at the peak, at half of it where a tile has too few rows for the widest instruction, and at a share of
    it where fewer than BUSY_WARPS are resident; their operands come from shared memory, each as often as warps share
    its rows or columns. Loads come from L2, from HBM the first time, and run beside the products if a loop has several
    stages or a processor several programs, of which there are many.
    """
    spent = cost(launch)
    meta = launch.meta
    dtype = launch.args[0].dtype
    peak = gpu.peak
    if dtype == torch.float32:
        peak = {"tf32": gpu.peak_tf32, "ieee": gpu.peak_float32}[meta["PRECISION"]]
    rows, columns = (meta[side] for side in _SIDES[spent.name])
    if rows < gpu.wide_rows:
        peak /= 2
    products = spent.flops / (peak * min(1, resident_warps / BUSY_WARPS))
    groups = max(1, meta["num_warps"] * 16 // gpu.wide_rows)  # of warps that multiply together
    by_rows = min(groups, max(1, rows // gpu.wide_rows))
    operands = spent.flops / 2 * dtype.itemsize * (by_rows / rows + groups // by_rows / columns)
    from_shared = operands / (SHARED_BYTES * gpu.processors * gpu.clock)
    loads = max(spent.loaded / gpu.l2_bandwidth, spent.bytes / gpu.bandwidth)
    busy = max(products, from_shared)
    overlap = meta["num_stages"] > 1 or resident_warps > meta["num_warps"]
    return max(busy, loads) if overlap else busy + loads
