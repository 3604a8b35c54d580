"""The frequency ops: norms, their gradient, the filter, its gradients (the contract is ops/frequency.py).

No atomics: every sum has one fixed order.
"""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor

from overtone._validate import statistics_dtype
from overtone.reference.frequency import rounding_share
from overtone.triton_kernels.frequency import config as configs
from overtone.triton_kernels.frequency.causal import causal_adjoint_kernel, causal_filter_kernel, causal_gains_kernel
from overtone.triton_kernels.frequency.config import Config
from overtone.triton_kernels.frequency.mean import (
    filter_backward_kernel,
    filter_kernel,
    norms_backward_kernel,
    norms_kernel,
    roots_kernel,
    row_sums_kernel,
    statistics_kernel,
)
from overtone.triton_kernels.runtime import absent, launch, strided


class _Call:
    """Sizes, blocks and common arguments of one call on tokens x, whose kernel holds so many tiles at once."""

    def __init__(self, x: Tensor, mask: Tensor | None, tiles: int = 1) -> None:
        self.tokens, self.channels = x.shape[-2:]
        self.samples = x.shape[:-2].numel()
        self.is_empty = x.numel() == 0
        self.dtype = statistics_dtype(x.dtype)
        self.mask = absent(1) if mask is None else strided(mask, 1)
        whole = configs.whole(self.tokens, x.dtype, tiles)
        self.is_whole = whole is not None
        self.config = whole or configs.for_dtype(configs.SPLIT, x.dtype)
        self.causal_config = configs.for_dtype(configs.CAUSAL, x.dtype)
        self.split_tokens = self.config.BT if self.is_whole else configs.tokens_per_split(self.tokens)
        self.splits = triton.cdiv(self.tokens, self.split_tokens)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.tokens, self.channels, self.splits, self.split_tokens

    def blocks(self, config: Config) -> int:
        """Programs that share the channels of one sample."""
        return triton.cdiv(self.channels, config.BC)

    def launch(self, kernel: Any, *args: Any) -> None:
        grid = self.samples * self.blocks(self.config), self.splits
        launch(kernel, grid, *args, **self.config.meta)

    def launch_causal(self, kernel: Any, *args: Any) -> None:
        grid = (self.samples * self.blocks(self.causal_config),)
        launch(kernel, grid, *args, **self.causal_config.meta)

    def statistics(self, x: Tensor) -> Tensor | None:
        """Statistics of every split of x's tokens; None where one tile holds all tokens."""
        if self.is_whole:
            return None
        rows = x.new_empty(self.samples * self.splits, 4, self.channels, dtype=self.dtype)
        self.launch(statistics_kernel, *strided(x, 2), *self.mask, rows, *self.sizes)
        return rows


def _gains(low: Tensor, high: Tensor) -> tuple:
    return low, low.stride(0), high, high.stride(0)


def norms(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """frequency_norms."""
    call = _Call(x, mask)
    low, high = (x.new_empty(x.shape[:-2], dtype=call.dtype) for _ in range(2))
    if call.is_empty:
        return low.zero_(), high.zero_()
    blocks = call.blocks(call.config)
    low2, high2 = (x.new_empty(call.samples, blocks, dtype=call.dtype) for _ in range(2))
    launch(
        norms_kernel, (call.samples * blocks,),
        *strided(x, 2), *call.mask, call.statistics(x), low2, high2, call.tokens, call.channels, call.splits,
        **call.config.meta,
    )  # fmt: skip
    _roots(low2, high2, low, high)
    return low, high


def norms_of_statistics(statistics: Tensor, samples: int) -> tuple[Tensor, Tensor]:
    """The norms of samples whose tokens' statistics [samples · blocks, 4, C] another kernel left, block by block."""
    rows, _, channels = statistics.shape
    low, high = (statistics.new_empty(samples) for _ in range(2))
    if statistics.numel() == 0:
        return low.zero_(), high.zero_()
    config = configs.SPLIT
    blocks = triton.cdiv(channels, config.BC)
    low2, high2 = (statistics.new_empty(samples, blocks) for _ in range(2))
    launch(
        norms_kernel, (samples * blocks,),
        *strided(statistics, 2), *absent(1), statistics, low2, high2, 0, channels, rows // samples,
        **config.meta,
    )  # fmt: skip
    _roots(low2, high2, low, high)
    return low, high


def _roots(low2: Tensor, high2: Tensor, low: Tensor, high: Tensor) -> None:
    samples, blocks = low2.shape
    launch(
        roots_kernel, (triton.cdiv(samples, configs.ROOTS.BT),),
        low2, high2, low, high, rounding_share(low.dtype), samples, blocks,
        **configs.ROOTS.meta,
    )  # fmt: skip


def norms_backward(
    grad_low: Tensor,
    grad_high: Tensor,
    x: Tensor,
    low: Tensor,
    high: Tensor,
    mask: Tensor | None,
    added: Tensor | None = None,
) -> Tensor:
    """frequency_norms_backward; `added`, contiguous, is another gradient of x to be added to it."""
    call = _Call(x, mask)
    grad_x = x.new_empty(x.shape)
    if call.is_empty:
        return grad_x
    per_sample = (statistic.contiguous() for statistic in (grad_low, grad_high, low, high))
    call.launch(
        norms_backward_kernel, *strided(x, 2), *call.mask, call.statistics(x), *per_sample, added, grad_x, *call.sizes
    )
    return grad_x


def filter(x: Tensor, low: Tensor, high: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    """frequency_filter."""
    call = _Call(x, mask)
    y = x.new_empty(x.shape)
    if call.is_empty:
        return y
    tensors = *strided(x, 2), *call.mask, *_gains(low, high)
    if is_causal:
        call.launch_causal(causal_filter_kernel, *tensors, y, call.tokens, call.channels)
    else:
        call.launch(filter_kernel, *tensors, call.statistics(x), y, *call.sizes)
    return y


def filter_backward(
    grad_y: Tensor, x: Tensor | None, low: Tensor, high: Tensor, mask: Tensor | None, is_causal: bool, need_x: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """frequency_filter_backward."""
    grad_x = grad_y.new_empty(grad_y.shape if need_x else (0,))
    dtype = statistics_dtype(grad_y.dtype)
    grad_low, grad_high = (grad_y.new_empty((0,) if x is None else low.shape, dtype=dtype) for _ in range(2))
    if grad_y.numel() == 0:
        return grad_x, grad_low.zero_(), grad_high.zero_()
    call = _Call(grad_y, mask, tiles=1 if x is None else 2)
    if x is None:
        if need_x:
            _filter_adjoint(call, grad_y, low, high, is_causal, grad_x)
        return grad_x, grad_low, grad_high
    splits = 1 if is_causal else call.splits
    low_rows, high_rows = (grad_y.new_empty(call.samples * splits, call.channels, dtype=dtype) for _ in range(2))
    if is_causal:
        if need_x:
            _filter_adjoint(call, grad_y, low, high, is_causal, grad_x)
        call.launch_causal(
            causal_gains_kernel,
            *strided(grad_y, 2), *strided(x, 2), *call.mask, low_rows, high_rows, call.tokens, call.channels,
        )  # fmt: skip
    else:
        call.launch(
            filter_backward_kernel,
            *strided(grad_y, 2), *strided(x, 2), *call.mask, *_gains(low, high), call.statistics(grad_y),
            call.statistics(x), grad_x if need_x else None, low_rows, high_rows, *call.sizes,
        )  # fmt: skip
    config = configs.for_dtype(configs.ROW_SUMS, dtype)
    launch(
        row_sums_kernel, (call.blocks(config),),
        low_rows, high_rows, grad_low, grad_high, low_rows.shape[0], call.channels,
        **config.meta,
    )  # fmt: skip
    return grad_x, grad_low, grad_high


def _filter_adjoint(call: _Call, grad_y: Tensor, low: Tensor, high: Tensor, is_causal: bool, grad_x: Tensor) -> None:
    tensors = *strided(grad_y, 2), *call.mask, *_gains(low, high)
    if is_causal:
        call.launch_causal(causal_adjoint_kernel, *tensors, grad_x, call.tokens, call.channels)
    else:
        call.launch(filter_kernel, *tensors, call.statistics(grad_y), grad_x, *call.sizes)
