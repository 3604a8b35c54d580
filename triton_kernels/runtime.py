"""From tensors to kernel arguments, and the one place where kernels are launched."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor


class LaunchConfig(NamedTuple):
    """A kernel's tile by its constants' names, the warps that hold it, and how many loads its loop has under way."""

    tile: dict[str, int]
    num_warps: int
    num_stages: int | None = None  # Triton's own choice

    @property
    def meta(self) -> dict[str, int]:
        """As a launch takes it."""
        stages = {} if self.num_stages is None else {"num_stages": self.num_stages}
        return self.tile | {"num_warps": self.num_warps} | stages


class Launch(NamedTuple):
    """What a launcher asked for: enough to compile the kernel without running it."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple
    meta: dict[str, Any]


_recorded: list[Launch] | None = None


@contextmanager
def record_launches() -> Iterator[list[Launch]]:
    """Inside, kernels are recorded instead of launched, so that launchers can be called with tensors on "meta"."""
    global _recorded
    before, _recorded = _recorded, []
    try:
        yield _recorded
    finally:
        _recorded = before


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """Run `kernel` on the device of its first argument, a tensor. An empty grid is nothing to do."""
    if _recorded is not None:
        _recorded.append(Launch(kernel, grid, args, meta))
        return
    if 0 in grid:
        return
    with torch.cuda.device_of(args[0]) if args[0].is_cuda else nullcontext():
        kernel[grid](*args, **meta)


def interprets() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors, in this process."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which sums over elements of this dtype are kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32


_assumed_architecture: str | None = None


@contextmanager
def assume_architecture(name: str) -> Iterator[None]:
    """Inside, launchers choose the configurations of this architecture, whatever the device."""
    global _assumed_architecture
    before, _assumed_architecture = _assumed_architecture, name
    try:
        yield
    finally:
        _assumed_architecture = before


def architecture(device: torch.device) -> str:
    """sm_90, gfx942, …; sm_80 where there is no GPU (the interpreter)."""
    if _assumed_architecture is not None:
        return _assumed_architecture
    return _device_architecture(device) if device.type == "cuda" else "sm_80"


@cache
def _device_architecture(device: torch.device) -> str:
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


def strided(x: Tensor, trailing: int) -> tuple:
    """`x` as kernel arguments that need no copy, whatever its strides.

    The leading dimensions count samples; the last `trailing` ones are indexed by the kernel. Returns pointer, offsets,
    inner, outer stride, inner stride (see frequency.device.sample_offset) and the trailing strides.
    """
    leading = x.dim() - trailing
    groups = _collapse(x.shape[:leading], x.stride()[:leading])
    if len(groups) > 2:
        sample = _offsets(groups, x.device), 1, 0, 0
    elif len(groups) == 2:
        (_, outer_stride), (inner, inner_stride) = groups
        sample = None, inner, outer_stride, inner_stride
    else:
        sample = None, 1, groups[0][1] if groups else 0, 0
    return x, *sample, *x.stride()[leading:]


def absent(trailing: int) -> tuple:
    """The arguments of `strided` for a tensor that is not given."""
    return None, None, 1, 0, 0, *(0 for _ in range(trailing))


def _collapse(sizes: tuple[int, ...], strides: tuple[int, ...]) -> list[tuple[int, int]]:
    """(size, stride) of the dimensions that remain when neighbours that one stride can walk are joined."""
    groups: list[tuple[int, int]] = []
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        if groups and groups[-1][1] == size * stride:
            groups[-1] = groups[-1][0] * size, stride
        else:
            groups.append((size, stride))
    return groups


def _offsets(groups: list[tuple[int, int]], device: torch.device) -> Tensor:
    offsets = torch.zeros((), dtype=torch.int64, device=device)
    for size, stride in groups:
        offsets = offsets[..., None] + torch.arange(size, device=device) * stride
    return offsets.flatten()
