"""spectral_attention: from the op's arguments to its kernels and back (the contract is ops/attention.py).

Nothing here waits for the device (autotuning does, but not during a capture), so calls can be captured in a CUDA graph.
Empty inputs need no case of their own: an empty grid is not launched, and a kernel whose loop is empty writes zeros.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from overtone.backends import BackendError, triton_interprets
from overtone.triton_kernels import autotune
from overtone.triton_kernels.attention import config as configs
from overtone.triton_kernels.attention.backward import (
    basis_gradient_kernel,
    column_sums_kernel,
    heads_gradient_kernel,
    key_value_gradient_kernel,
    query_gradient_kernel,
)
from overtone.triton_kernels.attention.forward import attention_kernel, fused_kernel, projection_kernel
from overtone.triton_kernels.frequency import launch as frequency
from overtone.triton_kernels.runtime import architecture, launch

LOG2E = 1 / math.log(2)


class _Call:
    """Sizes, blocks and common arguments of one call."""

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, eigenvalues: Tensor, basis: Tensor, attn_mask: Tensor | None,
        is_causal: bool,
    ) -> None:  # fmt: skip
        self.batch, self.heads, self.queries, self.width = query.shape
        self.keys, self.channels = key.shape[2], basis.shape[1]
        self.features = self.heads * self.width
        self.new_empty = query.new_empty
        self.device, self.dtype = query.device, query.dtype
        _check_sizes(keys=self.keys, features=self.features, channels=self.channels)
        name, precision = architecture(query.device), _dot_precision(query)
        if not configs.is_shipped(name, query.dtype, self.width):
            raise BackendError(
                f"spectral_attention: no Triton kernels for {query.dtype} heads {self.width} wide on {name}: its"
                " registers do not hold them. Use float16 or bfloat16, heads up to 64 wide, or backend='reference'"
            )
        self.table = configs.table(name, query.dtype, precision, self.width, attn_mask is not None)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = attn_mask.view(torch.uint8)  # AMD's compiler branches around every load of a bool
        qkv = [_strided(x, 4) for x in (query, key, value)]
        self.inputs = *itertools.chain(*qkv), *_strided(attn_mask, 4)
        self.weights = eigenvalues.contiguous(), *_strided(basis, 2)
        self.sizes = self.heads, self.queries, self.keys
        self.precision = {"PRECISION": precision}
        self.head = {"D": self.width, "BD": self.table.BD, **self.precision}
        unit = _unit(*(stride for _, *strides, _ in qkv for stride in strides))
        self.logits = {"IS_CAUSAL": is_causal, "UNIT": unit, **self.head}
        is_empty = 0 in (self.batch, self.width, *self.sizes, self.channels)
        self.tuning_case = self._tuning_case(attn_mask) if autotune.is_on() and not is_empty else None

    def _tuning_case(self, attn_mask: Tensor | None) -> tuple[str, ...]:
        """What a kernel's fastest blocks depend on, but for the batch: a sample's result must not change with that."""
        return (
            architecture(self.device), str(self.dtype).removeprefix("torch."), self.precision["PRECISION"],
            f"D={self.width}", f"E={self.channels}", f"N<={_bucket(self.queries)}", f"M<={_bucket(self.keys)}",
            "plain" if attn_mask is None else "masked", "causal" if self.logits["IS_CAUSAL"] else "full",
        )  # fmt: skip

    def run(self, kernel: str, blocks: configs.Blocks, launcher: Callable[[configs.Blocks], Any]) -> Any:
        """Launch with these blocks of the table or, with autotuning, with the fastest."""
        if self.tuning_case is not None:
            blocks = autotune.choose(kernel, blocks, self.tuning_case, self.device, launcher)
        return launcher(blocks)

    def empty(self, *shape: int) -> Tensor:
        """Uninitialised, in the statistics' dtype."""
        return self.new_empty(shape, dtype=torch.float32)

    def column_sums(self, rows: Tensor, sums: Tensor, blocks: configs.Blocks) -> None:
        grid = (triton.cdiv(sums.numel(), blocks.tile["BC"]),)
        launch(column_sums_kernel, grid, rows, sums, rows.shape[0], sums.numel(), **blocks.meta)


def _bucket(length: int) -> int:
    """The next power of two: lengths up to it share their blocks."""
    return max(64, 1 << (length - 1).bit_length())


# Offsets inside a tile are int32. Its sides are at most 256, so strides below this one cannot overflow them.
FAR = 2**22


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if size >= FAR:
            raise ValueError(f"spectral_attention: the Triton kernels take fewer than {FAR} {name}, got {size}")


def _strided(x: Tensor | None, dimensions: int) -> tuple:
    """A tensor and its strides as kernel arguments. One whose neighbours are 2²² elements apart is copied."""
    if x is None:
        return (None, *(0,) * dimensions)
    if max(x.stride()[-2:]) >= FAR:
        x = x.contiguous()
    return x, *x.stride()


def _unit(*strides: int) -> int:
    """Which the kernels may take for granted to divide these strides: what 16 bytes hold, so that a load takes as many.

    Triton itself looks for 16. That misses heads 72 or 88 wide, which it would load element by element.
    """
    return 8 if all(stride % 8 == 0 for stride in strides) and any(stride % 16 for stride in strides) else 1


def _dot_precision(query: Tensor) -> str:
    """How float32 is multiplied: exactly, unless torch allows TF32 and the GPU has it; the interpreter has not."""
    allowed = torch.get_float32_matmul_precision() != "highest" and not triton_interprets()
    has_it = query.dtype == torch.float32 and configs.has_tf32(architecture(query.device))
    return "tf32" if allowed and has_it else "ieee"


def forward(
    query: Tensor, key: Tensor, value: Tensor, eigenvalues: Tensor, basis: Tensor, residual: Tensor | None,
    attn_mask: Tensor | None, is_causal: bool, scale: float, need_norms: bool, need_wide: bool, need_backward: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The op spectral_attention: y, low, high, wide_y, heads, softmax_rows; what is not wanted comes back empty.

    The norms are made of statistics that are taken where y is made, before it is rounded: y is not read again.
    """
    call = _Call(query, key, value, eigenvalues, basis, attn_mask, is_causal)
    fused = call.table.fused(call.channels, call.keys)
    y = query.new_empty(call.batch, call.queries, call.channels)
    wide_y = call.empty(*y.shape) if need_wide and y.dtype != torch.float32 else None
    stores_heads = need_backward or fused is None
    heads = query.new_empty(call.batch, call.queries, call.features) if stores_heads else None
    rows = call.empty(call.batch, call.heads, call.queries, 2) if need_backward else None

    def make_heads(blocks: configs.Blocks) -> None:
        launch(
            attention_kernel, (call.batch * call.heads * triton.cdiv(call.queries, blocks.tile["BM"]),),
            *call.inputs, heads, rows, scale * LOG2E, *call.sizes,
            **call.logits, **blocks.meta,
        )  # fmt: skip

    def make_y(blocks: configs.Blocks) -> Tensor | None:
        """In one launch, or from the heads; returns the statistics of its blocks of tokens."""
        tokens = call.batch * triton.cdiv(call.queries, blocks.tile["BM"])
        statistics = call.empty(tokens, 4, call.channels) if need_norms else None
        end = *_strided(residual, 3), y, wide_y, statistics
        if fused is not None:
            launch(
                fused_kernel, (tokens,),
                *call.inputs, *call.weights, *end, heads, rows, scale * LOG2E, *call.sizes, call.channels,
                **call.logits, **blocks.meta,
            )  # fmt: skip
        else:
            launch(
                projection_kernel, (tokens * triton.cdiv(call.channels, blocks.tile["BE"]),),
                heads, *call.weights, *end, call.queries, call.features, call.channels,
                **call.precision, **blocks.meta,
            )  # fmt: skip
        return statistics

    if fused is None:
        call.run("attention", call.table.attention(call.keys), make_heads)
        statistics = call.run("projection", call.table.blocks["projection"], make_y)
    else:
        statistics = call.run("fused", fused, make_y)
    if statistics is None:
        low, high = call.empty(0), call.empty(0)
    else:
        low, high = frequency.norms_of_statistics(statistics, call.batch)
    wide_y = call.empty(0) if wide_y is None else wide_y
    if not need_backward:
        heads, rows = query.new_empty(0), call.empty(0)
    return y, low, high, wide_y, heads, rows


def backward(
    grad_y: Tensor | None, grad_low: Tensor | None, grad_high: Tensor | None, y: Tensor, low: Tensor, high: Tensor,
    query: Tensor, key: Tensor, value: Tensor, eigenvalues: Tensor, basis: Tensor, attn_mask: Tensor | None,
    is_causal: bool, scale: float, heads: Tensor, softmax_rows: Tensor, needs: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The op spectral_attention_backward: the gradients and total_grad; what is not wanted comes back empty.

    grad_y is contiguous, in any dtype. The norms' gradient is added to it in one reading of y.
    """
    total = y.new_empty(0)
    if grad_low is not None:
        grad_y = total = frequency.norms_backward(grad_low, grad_high, y, low, high, None, added=grad_y)
    call = _Call(query, key, value, eigenvalues, basis, attn_mask, is_causal)
    logits = *query.shape[:3], call.keys
    shapes = (query.shape, key.shape, value.shape, eigenvalues.shape, basis.shape, logits)
    dtypes = (query.dtype,) * 3 + (torch.float32,) * 3
    wanted = [bool(needs >> bit & 1) for bit in range(len(shapes))]
    results = tuple(
        query.new_empty(shape if want else (0,), dtype=dtype)
        for shape, dtype, want in zip(shapes, dtypes, wanted, strict=True)
    )
    grad_q, grad_k, grad_v, grad_eigenvalues, grad_basis, grad_logits = (
        result if want else None for result, want in zip(results, wanted, strict=True)
    )
    need_heads = any(wanted[bit] for bit in (0, 1, 2, 5))
    if need_heads or grad_eigenvalues is not None:
        grad_heads, delta = _heads_gradient(call, grad_y, heads, grad_eigenvalues, need_heads)
    if grad_basis is not None:
        _basis_gradient(call, grad_y, heads, grad_basis)
    apart = "key_value_apart" in call.table.blocks

    def key_value_gradient(blocks: configs.Blocks) -> None:
        for wanted_now in ((grad_k, None), (None, grad_v)) if apart else ((grad_k, grad_v),):
            if wanted_now == (None, None):
                continue
            launch(
                key_value_gradient_kernel, (call.batch * call.heads * triton.cdiv(call.keys, blocks.tile["BN"]),),
                *call.inputs, grad_heads, softmax_rows, delta, *wanted_now, scale, scale * LOG2E, *call.sizes,
                **call.logits, **blocks.meta,
            )  # fmt: skip

    def query_gradient(blocks: configs.Blocks) -> None:
        launch(
            query_gradient_kernel, (call.batch * call.heads * triton.cdiv(call.queries, blocks.tile["BM"]),),
            *call.inputs, grad_heads, softmax_rows, delta, grad_q, grad_logits, scale, scale * LOG2E, *call.sizes,
            **call.logits, **blocks.meta,
        )  # fmt: skip

    if grad_k is not None or grad_v is not None:
        kernel = "key_value_apart" if apart else "key_value_gradient"
        call.run(kernel, call.table.blocks[kernel], key_value_gradient)
    if grad_q is not None or grad_logits is not None:
        call.run("query_gradient", call.table.blocks["query_gradient"], query_gradient)
    return *results, total


def packed_backward(
    grad_y: Tensor | None, grad_low: Tensor | None, grad_high: Tensor | None, y: Tensor, low: Tensor, high: Tensor,
    qkv: Tensor, *rest,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The op spectral_attention_packed_backward; here the three gradients are copied together."""
    heads = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    *grads, grad_eigenvalues, grad_basis, grad_logits, total = backward(
        grad_y, grad_low, grad_high, y, low, high, *heads, *rest
    )
    is_wanted = bool(rest[-1] & 7)
    grad_qkv = torch.stack([g.transpose(1, 2) for g in grads], 2) if is_wanted else qkv.new_empty(0)
    return grad_qkv, grad_eigenvalues, grad_basis, grad_logits, total


def _heads_gradient(
    call: _Call, grad_y: Tensor, heads: Tensor, grad_eigenvalues: Tensor | None, need_heads: bool
) -> tuple[Tensor | None, Tensor | None]:
    """∂O and δ, where they are needed; ∂λ into grad_eigenvalues, where that is given."""
    grad_heads = heads.new_empty(heads.shape) if need_heads else None
    delta = call.empty(call.batch, call.heads, call.queries) if need_heads else None

    def run(blocks: configs.Blocks) -> None:
        rows = call.batch * triton.cdiv(call.queries, blocks.tile["BM"])
        parts = None if grad_eigenvalues is None else call.empty(rows, call.features)
        launch(
            heads_gradient_kernel, (rows * call.heads,),
            grad_y, *call.weights, heads, grad_heads, delta, parts, call.heads, call.queries, call.channels,
            **call.head, **blocks.meta,
        )  # fmt: skip
        if grad_eigenvalues is not None:
            call.column_sums(parts, grad_eigenvalues, configs.MANY_ROWS)

    call.run("heads_gradient", call.table.blocks["heads_gradient"], run)
    return grad_heads, delta


def _basis_gradient(call: _Call, grad_y: Tensor, heads: Tensor, grad_basis: Tensor) -> None:
    """∂U, over splits of all tokens that are then added up."""
    tokens = call.batch * call.queries

    def run(blocks: configs.Blocks) -> None:
        tiles = triton.cdiv(call.features, blocks.tile["BM"]) * triton.cdiv(call.channels, blocks.tile["BE"])
        split_tokens = configs.tokens_per_split(tokens, tiles, blocks.tile["BK"])
        splits = triton.cdiv(tokens, split_tokens)
        parts = grad_basis if splits == 1 else call.empty(splits, *grad_basis.shape)
        launch(
            basis_gradient_kernel, (splits * tiles,),
            heads, call.weights[0], grad_y, parts, tokens, call.features, call.channels, split_tokens,
            **call.precision, **blocks.meta,
        )  # fmt: skip
        if splits != 1:
            call.column_sums(parts, grad_basis, configs.FEW_ROWS)

    call.run("basis_gradient", call.table.blocks["basis_gradient"], run)
