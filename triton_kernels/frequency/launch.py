"""The frequency ops: norms, their gradient, the filter, its gradients (the contract is ops/frequency.py).

No atomics: every sum has one fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from overtone.triton_kernels.frequency import config as configs
from overtone.triton_kernels.frequency.causal import causal_adjoint_kernel, causal_filter_kernel, causal_gains_kernel
from overtone.triton_kernels.frequency.mean import (
    filter_backward_kernel,
    filter_kernel,
    finish_norms_kernel,
    moments_kernel,
    norms_backward_kernel,
    norms_kernel,
    reduce_gains_kernel,
)
from overtone.triton_kernels.runtime import LaunchConfig, absent, accumulate_dtype, launch, strided

# Times ε: the share of ‖LFC‖ up to which ‖HFC‖ is rounding, as in reference.frequency.rounding_share.
ROUNDING = 2.5


class _Plan:
    """Sizes, configurations and common arguments of one call on tokens x, whose kernel holds so many tiles at once."""

    def __init__(self, x: Tensor, mask: Tensor | None, tiles: int = 1) -> None:
        self.tokens, self.channels = x.shape[-2:]
        self.samples = x.shape[:-2].numel()
        self.is_empty = x.numel() == 0
        self.dtype = accumulate_dtype(x.dtype)
        self.mask = absent(1) if mask is None else strided(mask, 1)
        single_pass = configs.single_pass(self.tokens, x.dtype, tiles)
        self.is_single_pass = single_pass is not None
        self.config = single_pass or configs.for_dtype(configs.SPLIT, x.dtype)
        self.causal_config = configs.for_dtype(configs.CAUSAL, x.dtype)
        self.split_tokens = self.config.tile["BT"] if self.is_single_pass else configs.tokens_per_split(self.tokens)
        self.splits = triton.cdiv(self.tokens, self.split_tokens)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.tokens, self.channels, self.splits, self.split_tokens

    def blocks(self, config: LaunchConfig) -> int:
        """Programs that share the channels of one sample."""
        return triton.cdiv(self.channels, config.tile["BC"])

    def launch(self, kernel: Any, *args: Any) -> None:
        grid = self.samples * self.blocks(self.config), self.splits
        launch(kernel, grid, *args, **self.config.meta)

    def launch_causal(self, kernel: Any, *args: Any) -> None:
        grid = (self.samples * self.blocks(self.causal_config),)
        launch(kernel, grid, *args, **self.causal_config.meta)

    def moments(self, x: Tensor) -> Tensor | None:
        """Moments of every split of x's tokens; None where one tile holds all tokens."""
        if self.is_single_pass:
            return None
        rows = x.new_empty(self.samples * self.splits, 4, self.channels, dtype=self.dtype)
        self.launch(moments_kernel, *strided(x, 2), *self.mask, rows, *self.sizes)
        return rows


def _gains(low: Tensor, high: Tensor) -> tuple:
    return low, low.stride(0), high, high.stride(0)


def norms(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """frequency_norms."""
    plan = _Plan(x, mask)
    low, high = (x.new_empty(x.shape[:-2], dtype=plan.dtype) for _ in range(2))
    if plan.is_empty:
        return low.zero_(), high.zero_()
    blocks = plan.blocks(plan.config)
    low2, high2 = (x.new_empty(plan.samples, blocks, dtype=plan.dtype) for _ in range(2))
    launch(
        norms_kernel, (plan.samples * blocks,),
        *strided(x, 2), *plan.mask, plan.moments(x), low2, high2, plan.tokens, plan.channels, plan.splits,
        **plan.config.meta,
    )  # fmt: skip
    _finish_norms(low2, high2, low, high)
    return low, high


def norms_from_moments(moments: Tensor, samples: int) -> tuple[Tensor, Tensor]:
    """The norms of samples whose tokens' moments [samples · blocks, 4, C] another kernel left, block by block."""
    rows, _, channels = moments.shape
    low, high = (moments.new_empty(samples) for _ in range(2))
    if moments.numel() == 0:
        return low.zero_(), high.zero_()
    config = configs.SPLIT
    blocks = triton.cdiv(channels, config.tile["BC"])
    low2, high2 = (moments.new_empty(samples, blocks) for _ in range(2))
    launch(
        norms_kernel, (samples * blocks,),
        *strided(moments, 2), *absent(1), moments, low2, high2, 0, channels, rows // samples,
        **config.meta,
    )  # fmt: skip
    _finish_norms(low2, high2, low, high)
    return low, high


def _finish_norms(low2: Tensor, high2: Tensor, low: Tensor, high: Tensor) -> None:
    samples, blocks = low2.shape
    launch(
        finish_norms_kernel, (triton.cdiv(samples, configs.FINISH_NORMS.tile["BT"]),),
        low2, high2, low, high, ROUNDING * torch.finfo(low.dtype).eps, samples, blocks,
        **configs.FINISH_NORMS.meta,
    )  # fmt: skip


def norms_backward(
    grad_low: Tensor,
    grad_high: Tensor,
    x: Tensor,
    low: Tensor,
    high: Tensor,
    mask: Tensor | None,
    addend: Tensor | None = None,
) -> Tensor:
    """frequency_norms_backward; `addend`, contiguous, is another gradient of x to be added to it."""
    plan = _Plan(x, mask)
    grad_x = x.new_empty(x.shape)
    if plan.is_empty:
        return grad_x
    per_sample = (norm.contiguous() for norm in (grad_low, grad_high, low, high))
    plan.launch(
        norms_backward_kernel, *strided(x, 2), *plan.mask, plan.moments(x), *per_sample, addend, grad_x, *plan.sizes
    )
    return grad_x


def filter(x: Tensor, low: Tensor, high: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    """frequency_filter."""
    plan = _Plan(x, mask)
    y = x.new_empty(x.shape)
    if plan.is_empty:
        return y
    tensors = *strided(x, 2), *plan.mask, *_gains(low, high)
    if is_causal:
        plan.launch_causal(causal_filter_kernel, *tensors, y, plan.tokens, plan.channels)
    else:
        plan.launch(filter_kernel, *tensors, plan.moments(x), y, *plan.sizes)
    return y


def filter_backward(
    grad_y: Tensor, x: Tensor | None, low: Tensor, high: Tensor, mask: Tensor | None, is_causal: bool, need_x: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """frequency_filter_backward."""
    grad_x = grad_y.new_empty(grad_y.shape if need_x else (0,))
    dtype = accumulate_dtype(grad_y.dtype)
    grad_low, grad_high = (grad_y.new_empty((0,) if x is None else low.shape, dtype=dtype) for _ in range(2))
    if grad_y.numel() == 0:
        return grad_x, grad_low.zero_(), grad_high.zero_()
    plan = _Plan(grad_y, mask, tiles=1 if x is None else 2)
    if x is None:
        if need_x:
            _filter_adjoint(plan, grad_y, low, high, is_causal, grad_x)
        return grad_x, grad_low, grad_high
    splits = 1 if is_causal else plan.splits
    low_rows, high_rows = (grad_y.new_empty(plan.samples * splits, plan.channels, dtype=dtype) for _ in range(2))
    if is_causal:
        if need_x:
            _filter_adjoint(plan, grad_y, low, high, is_causal, grad_x)
        plan.launch_causal(
            causal_gains_kernel,
            *strided(grad_y, 2), *strided(x, 2), *plan.mask, low_rows, high_rows, plan.tokens, plan.channels,
        )  # fmt: skip
    else:
        plan.launch(
            filter_backward_kernel,
            *strided(grad_y, 2), *strided(x, 2), *plan.mask, *_gains(low, high), plan.moments(grad_y),
            plan.moments(x), grad_x if need_x else None, low_rows, high_rows, *plan.sizes,
        )  # fmt: skip
    config = configs.for_dtype(configs.REDUCE_GAINS, dtype)
    launch(
        reduce_gains_kernel, (plan.blocks(config),),
        low_rows, high_rows, grad_low, grad_high, low_rows.shape[0], plan.channels,
        **config.meta,
    )  # fmt: skip
    return grad_x, grad_low, grad_high


def _filter_adjoint(plan: _Plan, grad_y: Tensor, low: Tensor, high: Tensor, is_causal: bool, grad_x: Tensor) -> None:
    tensors = *strided(grad_y, 2), *plan.mask, *_gains(low, high)
    if is_causal:
        plan.launch_causal(causal_adjoint_kernel, *tensors, grad_x, plan.tokens, plan.channels)
    else:
        plan.launch(filter_kernel, *tensors, plan.moments(grad_y), grad_x, *plan.sizes)
