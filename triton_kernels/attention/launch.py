"""spectral_attention: from the op's arguments to its kernels and back (the schema is in ops/attention.py).

Nothing here waits for the device (autotuning does, but not during a capture), so calls can be captured in a CUDA graph.
Empty inputs need no case of their own: an empty grid is not launched, and a kernel whose loop is empty writes zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
import triton
from torch import Tensor

from overtone.triton_kernels import autotune
from overtone.triton_kernels.attention import config as configs
from overtone.triton_kernels.attention.backward import (
    dkv_kernel,
    dout_kernel,
    dq_kernel,
    dweight_kernel,
    reduce_rows_kernel,
)
from overtone.triton_kernels.attention.forward import attention_kernel, fused_kernel, projection_kernel
from overtone.triton_kernels.frequency import launch as frequency
from overtone.triton_kernels.runtime import LaunchConfig, architecture, interprets, launch

LOG2E = 1 / math.log(2)
# Offsets inside a tile are int32. Its sides are at most 256, so strides below this one cannot overflow them.
MAX_TILE_STRIDE = 2**22

_Result = TypeVar("_Result")


class Sizes(NamedTuple):
    batch: int
    num_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    out_dim: int

    @property
    def inner_dim(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def tokens(self) -> int:
        """Queries of all images."""
        return self.batch * self.q_len


class Problem(NamedTuple):
    """What a call computes."""

    query: Tensor
    key: Tensor
    value: Tensor
    weight: Tensor
    attn_mask: Tensor | None
    gain: Tensor | None
    addend: Tensor | None
    is_causal: bool
    scale: float

    @property
    def sizes(self) -> Sizes:
        return Sizes(*self.query.shape[:3], self.key.shape[2], self.query.shape[3], self.weight.shape[1])

    @property
    def operands(self) -> tuple:
        """Query, key, value and mask as kernels take them."""
        mask = self.attn_mask
        if mask is not None and mask.dtype == torch.bool:
            mask = mask.view(torch.uint8)  # AMD's compiler branches around every load of a bool
        return *_strided(self.query, 4), *_strided(self.key, 4), *_strided(self.value, 4), *_strided(mask, 4)

    @property
    def rounded_weight(self) -> Tensor:
        """As kernels take it: contiguous, in the dtype that they multiply."""
        # `to` leaves the strides of a tensor that has the dtype already, whatever memory_format says.
        return self.weight.to(self.query.dtype).contiguous()


class Plan(NamedTuple):
    """How a problem is launched: configurations, dot precision, stride alignment, and what tuning depends on."""

    table: configs.ConfigTable
    precision: str
    stride_align: int
    tuning_key: tuple[str, ...] | None
    device: torch.device

    def run(self, kernel: str, default: LaunchConfig, launcher: Callable[[LaunchConfig], _Result]) -> _Result:
        """Launch with this configuration of the table or, with autotuning, with the fastest."""
        if self.tuning_key is not None:
            default = autotune.choose(kernel, default, self.tuning_key, self.device, launcher)
        return launcher(default)


class Epilogue(NamedTuple):
    """What becomes of the projection, and what is wanted."""

    bias: Tensor | None
    residual: Tensor | None
    sample_scale: Tensor | None
    return_norms: bool
    return_unrounded: bool
    save_for_backward: bool


class Gradients(NamedTuple):
    """Of the arguments, in the op's order; None where not wanted."""

    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    weight: Tensor | None
    attn_mask: Tensor | None
    gain: Tensor | None
    addend: Tensor | None


class Saved(NamedTuple):
    """What forward has left for backward."""

    attn_out: Tensor
    softmax_stats: Tensor


def forward(
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None,
    sample_scale: Tensor | None, attn_mask: Tensor | None, gain: Tensor | None, addend: Tensor | None,
    is_causal: bool, scale: float, return_norms: bool, return_unrounded: bool, save_for_backward: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The op spectral_attention, with its arguments: y, low, high, attn_out, softmax_stats.

    The norms are made of moments that are taken where y is made, before it is rounded: y is not read again.
    """
    problem = Problem(query, key, value, weight, attn_mask, gain, addend, is_causal, scale)
    end = Epilogue(bias, residual, sample_scale, return_norms, return_unrounded, save_for_backward)
    plan, sizes = _plan(problem), problem.sizes
    y = query.new_empty(
        sizes.batch, sizes.q_len, sizes.out_dim, dtype=torch.float32 if return_unrounded else query.dtype
    )
    fused = plan.table.fused(sizes.out_dim, sizes.kv_len)
    saves = save_for_backward or fused is None
    attn_out = query.new_empty(sizes.batch, sizes.q_len, sizes.inner_dim) if saves else None
    stats = _float32(query, *query.shape[:3], 2) if save_for_backward else None
    if fused is not None:
        moments = _fused(problem, plan, end, fused, (y, attn_out, stats))
    else:
        _attention(problem, plan, attn_out, stats)
        moments = _projection(problem, plan, end, attn_out, y)
    if moments is None:
        low, high = _float32(query, 0), _float32(query, 0)
    else:
        low, high = frequency.norms_from_moments(moments, sizes.batch)
    if attn_out is None or stats is None:
        attn_out, stats = query.new_empty(0), _float32(query, 0)
    return y, low, high, attn_out, stats


def backward(
    grad_y: Tensor, query: Tensor, key: Tensor, value: Tensor, weight: Tensor, attn_mask: Tensor | None,
    gain: Tensor | None, addend: Tensor | None, is_causal: bool, scale: float, attn_out: Tensor, softmax_stats: Tensor,
    output_mask: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The op spectral_attention_backward, with its arguments; what is not wanted comes back empty.

    grad_y may have any dtype.
    """
    problem = Problem(query, key, value, weight, attn_mask, gain, addend, is_causal, scale)
    results = tuple(x.new_empty(x.shape if output_mask >> bit & 1 else (0,)) for bit, x in enumerate(problem[:3]))
    return *results, *_backward(problem, grad_y, Saved(attn_out, softmax_stats), results, output_mask)


def backward_qkvpacked(
    grad_y: Tensor, qkv: Tensor, weight: Tensor, attn_mask: Tensor | None, gain: Tensor | None, addend: Tensor | None,
    is_causal: bool, scale: float, attn_out: Tensor, softmax_stats: Tensor, output_mask: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The op spectral_attention_qkvpacked_backward: the kernels write into one gradient of qkv [B, N, 3, H, D]."""
    problem = Problem(*_unpack(qkv), weight, attn_mask, gain, addend, is_causal, scale)
    wanted = bool(output_mask & 7)
    grad_qkv = qkv.new_empty(qkv.shape if wanted else (0,))
    parts = _unpack(grad_qkv) if wanted else (grad_qkv,) * 3
    return grad_qkv, *_backward(problem, grad_y, Saved(attn_out, softmax_stats), parts, output_mask)


def _unpack(qkv: Tensor) -> tuple[Tensor, ...]:
    """Query, key and value [B, H, N, D]: views."""
    return qkv.permute(2, 0, 3, 1, 4).unbind(0)


def _plan(problem: Problem) -> Plan:
    query, sizes = problem.query, problem.sizes
    for name in ("kv_len", "inner_dim", "out_dim"):
        if getattr(sizes, name) >= MAX_TILE_STRIDE:
            raise ValueError(
                f"spectral_attention: the Triton kernels take {name} < {MAX_TILE_STRIDE}, got {getattr(sizes, name)}"
            )
    name, precision = architecture(query.device), _dot_precision(query)
    reason = configs.unsupported_reason(name, query.dtype, sizes.head_dim)
    if reason is not None:
        raise NotImplementedError(f"spectral_attention: the Triton backend {reason}")
    table = configs.table(name, query.dtype, precision, sizes.head_dim, problem.attn_mask is not None)
    strides = (stride for x in problem[:3] for stride in x.stride()[:3])
    tunes = autotune.is_on() and 0 not in sizes
    return Plan(
        table, precision, _stride_alignment(*strides), _tuning_key(problem, name, precision) if tunes else None,
        query.device,
    )  # fmt: skip


def _tuning_key(problem: Problem, architecture_name: str, precision: str) -> tuple[str, ...]:
    """What a kernel's fastest tile depends on, but for the batch: a sample's result must not change with that."""
    sizes = problem.sizes
    mixing = "mixed" if problem.gain is not None or problem.addend is not None else ""
    return tuple(
        filter(None, (
            architecture_name, str(problem.query.dtype).removeprefix("torch."), precision,
            f"D={sizes.head_dim}", f"E={sizes.out_dim}", f"N<={_bucket(sizes.q_len)}", f"M<={_bucket(sizes.kv_len)}",
            "plain" if problem.attn_mask is None else "masked", "causal" if problem.is_causal else "full", mixing,
        ))
    )  # fmt: skip


def _bucket(length: int) -> int:
    """The next power of two: lengths up to it share their configuration."""
    return max(64, 1 << (length - 1).bit_length())


def _strided(x: Tensor | None, dimensions: int) -> tuple:
    """A tensor and its strides as kernel arguments. It is copied if neighbors are MAX_TILE_STRIDE apart."""
    if x is None:
        return (None, *(0,) * dimensions)
    if max(x.stride()[-2:]) >= MAX_TILE_STRIDE:
        x = x.contiguous()
    return x, *x.stride()


def _stride_alignment(*strides: int) -> int:
    """What the kernels may take for granted to divide these strides: what 16 bytes hold, so that a load takes as many.

    Triton itself looks for 16. That misses heads 72 or 88 wide, which it would load element by element.
    """
    return 8 if all(stride % 8 == 0 for stride in strides) and any(stride % 16 for stride in strides) else 1


def _dot_precision(query: Tensor) -> str:
    """How float32 is multiplied: exactly, unless torch allows TF32 and the GPU has it; the interpreter has not.

    torch's old switches set this attribute of the new ones too. The old getters raise once a new switch was used.
    """
    allowed = torch.backends.cuda.matmul.fp32_precision == "tf32" and not interprets()
    has_it = query.dtype == torch.float32 and configs.has_tf32(architecture(query.device))
    return "tf32" if allowed and has_it else "ieee"


def _float32(like: Tensor, *shape: int) -> Tensor:
    """Uninitialized."""
    return like.new_empty(shape, dtype=torch.float32)


def _logits_meta(problem: Problem, plan: Plan) -> dict:
    """The constants of kernels that make logits."""
    return {
        "D": problem.sizes.head_dim, "BD": plan.table.BD, "IS_CAUSAL": problem.is_causal,
        "PRECISION": plan.precision, "STRIDE_ALIGN": plan.stride_align,
    }  # fmt: skip


def _epilogue_args(end: Epilogue) -> tuple:
    return end.bias, end.sample_scale, *_strided(end.residual, 3)


def _fused(problem: Problem, plan: Plan, end: Epilogue, config: LaunchConfig, outputs: tuple) -> Tensor | None:
    """y, attn_out and softmax_stats in one launch; returns the moments of its tiles of tokens."""
    y, attn_out, stats = outputs
    sizes = problem.sizes
    weight = problem.rounded_weight

    def run(config: LaunchConfig) -> Tensor | None:
        tiles = sizes.batch * triton.cdiv(sizes.q_len, config.tile["BM"])
        moments = _float32(y, tiles, 4, sizes.out_dim) if end.return_norms else None
        launch(
            fused_kernel, (tiles,),
            *problem.operands, problem.gain, *_strided(problem.addend, 4), weight, *_epilogue_args(end), y, moments,
            attn_out, stats, problem.scale * LOG2E, sizes.num_heads, sizes.q_len, sizes.kv_len, sizes.out_dim,
            **_logits_meta(problem, plan), **config.meta,
        )  # fmt: skip
        return moments

    return plan.run("fused", config, run)


def _attention(problem: Problem, plan: Plan, attn_out: Tensor | None, stats: Tensor | None) -> None:
    sizes = problem.sizes

    def run(config: LaunchConfig) -> None:
        launch(
            attention_kernel, (sizes.batch * sizes.num_heads * triton.cdiv(sizes.q_len, config.tile["BM"]),),
            *problem.operands, problem.gain, *_strided(problem.addend, 4), attn_out, stats, problem.scale * LOG2E,
            sizes.num_heads, sizes.q_len, sizes.kv_len,
            **_logits_meta(problem, plan), **config.meta,
        )  # fmt: skip

    plan.run("attention", plan.table.attention(sizes.kv_len), run)


def _projection(problem: Problem, plan: Plan, end: Epilogue, attn_out: Tensor | None, y: Tensor) -> Tensor | None:
    """y from the heads; returns the moments of its tiles of tokens."""
    sizes = problem.sizes
    weight = problem.rounded_weight

    def run(config: LaunchConfig) -> Tensor | None:
        tiles = sizes.batch * triton.cdiv(sizes.q_len, config.tile["BM"])
        moments = _float32(y, tiles, 4, sizes.out_dim) if end.return_norms else None
        launch(
            projection_kernel, (tiles * triton.cdiv(sizes.out_dim, config.tile["E_TILE"]),),
            attn_out, weight, *_epilogue_args(end), y, moments, sizes.q_len, sizes.inner_dim, sizes.out_dim,
            PRECISION=plan.precision, **config.meta,
        )  # fmt: skip
        return moments

    return plan.run("projection", plan.table.by_kernel["projection"], run)


def _backward(
    problem: Problem, grad_y: Tensor, saved: Saved, parts: tuple[Tensor, ...], output_mask: int
) -> tuple[Tensor, ...]:
    """Writes the gradients of query, key and value into `parts`; returns the others."""
    plan, sizes, query = _plan(problem), problem.sizes, problem.query
    wanted = [bool(output_mask >> bit & 1) for bit in range(len(Gradients._fields))]
    shapes = (sizes.inner_dim, sizes.out_dim), (*query.shape[:3], sizes.kv_len), (sizes.num_heads,)
    others = [_float32(query, *(shape if want else (0,))) for shape, want in zip(shapes, wanted[3:6], strict=True)]
    results = *parts, *others, _float32(query, 0)
    grads = Gradients(*(x if want else None for x, want in zip(results, wanted, strict=True)))
    grad_y = grad_y.contiguous()
    if grads.weight is not None:
        _dweight(problem, plan, saved, grad_y, grads.weight)
    needs_probabilities = any(wanted[bit] for bit in (0, 1, 2, 4, 5))
    if not (needs_probabilities or wanted[6]):
        return results[3:]
    is_mixed = problem.gain is not None or problem.addend is not None
    delta = _float32(query, *query.shape[:3]) if needs_probabilities else None
    dout = _dout(problem, plan, saved, grad_y, None if is_mixed else delta)
    if delta is not None:
        if grads.query is not None or grads.attn_mask is not None or is_mixed:
            _dq(problem, plan, saved, (dout, delta), grads)
        if grads.key is not None or grads.value is not None:
            _dkv(problem, plan, saved, (dout, delta), grads)
        if grads.gain is not None:
            torch.sum(delta, (0, 2), out=grads.gain)
    grad_addend = dout.view(sizes.batch, sizes.q_len, sizes.num_heads, sizes.head_dim).transpose(1, 2)
    return *others, grad_addend if wanted[6] else results[6]


def _dout(problem: Problem, plan: Plan, saved: Saved, grad_y: Tensor, delta: Tensor | None) -> Tensor:
    """∂O [B, N, H·D]; with `delta`, which it fills, rowsum(∂O ⊙ O)."""
    sizes = problem.sizes
    dout = problem.query.new_empty(sizes.batch, sizes.q_len, sizes.inner_dim)
    weight = problem.rounded_weight

    def run(config: LaunchConfig) -> None:
        launch(
            dout_kernel, (triton.cdiv(sizes.tokens, config.tile["BM"]) * sizes.num_heads,),
            grad_y, weight, saved.attn_out, dout, delta, sizes.num_heads, sizes.q_len, sizes.tokens, sizes.out_dim,
            D=sizes.head_dim, BD=plan.table.BD, PRECISION=plan.precision, **config.meta,
        )  # fmt: skip

    plan.run("dout", plan.table.by_kernel["dout"], run)
    return dout


def _dweight(problem: Problem, plan: Plan, saved: Saved, grad_y: Tensor, dweight: Tensor) -> None:
    """∂W, over splits of all images' tokens that are then added up."""
    sizes = problem.sizes

    def run(config: LaunchConfig) -> None:
        tiles = triton.cdiv(sizes.inner_dim, config.tile["BM"]) * triton.cdiv(sizes.out_dim, config.tile["BE"])
        split_tokens = configs.tokens_per_split(sizes.tokens, tiles, config.tile["BK"])
        splits = triton.cdiv(sizes.tokens, split_tokens)
        parts = dweight if splits == 1 else _float32(dweight, splits, *dweight.shape)
        launch(
            dweight_kernel, (splits * tiles,),
            saved.attn_out, grad_y, parts, sizes.tokens, sizes.inner_dim, sizes.out_dim, split_tokens,
            PRECISION=plan.precision, **config.meta,
        )  # fmt: skip
        if splits != 1:
            reduce = configs.WIDE_REDUCE
            grid = (triton.cdiv(dweight.numel(), reduce.tile["BC"]),)
            launch(reduce_rows_kernel, grid, parts, dweight, splits, dweight.numel(), **reduce.meta)

    plan.run("dweight", plan.table.by_kernel["dweight"], run)


def _heads_grad(x: Tensor | None) -> tuple:
    """A gradient [B, H, N, D], whose columns are neighbors, as kernels take it."""
    return (None, 0, 0, 0) if x is None else (x, *x.stride()[:3])


def _dq(problem: Problem, plan: Plan, saved: Saved, dout_delta: tuple[Tensor, Tensor], grads: Gradients) -> None:
    """∂Q, the mask's gradient, and δ where dout_kernel could not make it."""
    sizes = problem.sizes
    is_mixed = problem.gain is not None or problem.addend is not None

    def run(config: LaunchConfig) -> None:
        dout, delta = dout_delta
        launch(
            dq_kernel, (sizes.batch * sizes.num_heads * triton.cdiv(sizes.q_len, config.tile["BM"]),),
            *problem.operands, problem.gain, dout, saved.softmax_stats, delta, *_heads_grad(grads.query),
            grads.attn_mask, problem.scale, problem.scale * LOG2E, sizes.num_heads, sizes.q_len, sizes.kv_len,
            MAKE_DELTA=is_mixed, **_logits_meta(problem, plan), **config.meta,
        )  # fmt: skip

    plan.run("dq", plan.table.by_kernel["dq"], run)


def _dkv(problem: Problem, plan: Plan, saved: Saved, dout_delta: tuple[Tensor, Tensor], grads: Gradients) -> None:
    """∂K and ∂V, together or one after the other."""
    sizes = problem.sizes
    kernel = "dkv_split" if "dkv_split" in plan.table.by_kernel else "dkv"
    both = grads.key, grads.value

    def run(config: LaunchConfig) -> None:
        for dk, dv in ((both[0], None), (None, both[1])) if kernel == "dkv_split" else (both,):
            if dk is None and dv is None:
                continue
            launch(
                dkv_kernel, (sizes.batch * sizes.num_heads * triton.cdiv(sizes.kv_len, config.tile["BN"]),),
                *problem.operands, problem.gain, *dout_delta[:1], saved.softmax_stats, dout_delta[1],
                *_heads_grad(dk), *_heads_grad(dv), problem.scale, problem.scale * LOG2E,
                sizes.num_heads, sizes.q_len, sizes.kv_len,
                **_logits_meta(problem, plan), **config.meta,
            )  # fmt: skip

    plan.run(kernel, plan.table.by_kernel[kernel], run)
