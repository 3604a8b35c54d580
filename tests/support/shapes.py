"""Ugly shapes and strides: the ones that users of neighbouring projects report."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

TOKENS = (1, 3, 50, 65, 113, 197, 257)
CHANNELS = (1, 7, 16, 63, 64, 65, 72, 80, 192)
LAYOUTS = ("contiguous", "packed", "transposed", "channels_strided", "expanded", "offset")


def with_layout(x: Tensor, layout: str) -> Tensor:
    """The values of x [..., N, C] in a storage with other strides."""
    n, c = x.shape[-2:]
    if layout == "contiguous":
        return x.contiguous()
    if layout == "packed":  # a slice of a packed qkv
        storage = x.new_full((*x.shape[:-1], 3 * c), float("nan"))
        view = storage[..., c : 2 * c]
    elif layout == "transposed":  # [..., C, N] as a convolution leaves it
        view = x.new_full((*x.shape[:-2], c, n), float("nan")).transpose(-2, -1)
    elif layout == "channels_strided":
        view = x.new_full((*x.shape[:-1], 2 * c), float("nan"))[..., ::2]
    elif layout == "offset":  # starts one element into its storage: unaligned
        view = x.new_full((x.numel() + 1,), float("nan"))[1:].view(x.shape)
    elif layout == "expanded":  # every sample the same memory
        return x[(0,) * (x.dim() - 2)].expand(x.shape) if x.numel() else x
    else:
        raise ValueError(f"unknown layout {layout!r}")
    view.copy_(x)
    return view


def on_gpu(x: Tensor) -> Tensor:
    """A copy there with the same strides, which .cuda() does not keep where memory has gaps; a leaf, as x was one."""
    storage = x.new_empty(0).set_(x.detach().untyped_storage())
    copy = storage.cuda().as_strided(x.shape, x.stride(), x.storage_offset())
    return copy.requires_grad_(x.requires_grad)


def token_tensors(max_batch: int = 3) -> st.SearchStrategy[tuple[tuple[int, ...], str]]:
    """(shape, layout) of a token tensor, with every size from empty to odd."""
    batch = st.lists(st.integers(0, max_batch), max_size=2)
    sizes = st.tuples(st.integers(0, 70), st.integers(0, 140))
    return st.tuples(st.builds(lambda b, nc: (*b, *nc), batch, sizes), st.sampled_from(LAYOUTS))


def random_mask(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """About a third of the tokens masked, and one sample masked wholly where there is more than one."""
    mask = torch.rand(shape, generator=generator) > 0.3
    if mask.dim() > 1 and mask.shape[0] > 1:
        mask[0] = False
    return mask
