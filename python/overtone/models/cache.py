"""What a causal model remembers of the tokens it has seen, so that each is computed once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from overtone.nn.attention import QKV
from overtone.types import Spectrum

__all__ = ["BlockCache", "TokenCache"]


class BlockCache:
    """One block's keys and values, and what its filter needs of earlier tokens.

    Args:
        capacity: tokens there is room for.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.length = capacity, 0
        self._stored: tuple[Tensor, Tensor] | None = None  # keys and values, [B, H, capacity, D]
        self._filter_state: Any = None

    def attention_options(self, tokens: int) -> dict[str, Any]:
        """How attention is called for so many new tokens: row i sees the earlier ones and new ones up to itself."""
        options: dict[str, Any] = {"extend": self.extend, "is_causal": self.length == 0}
        if self.length > 0 and tokens > 1:
            total = self.length + tokens
            assert self._stored is not None
            every = self._stored[0].new_ones(tokens, total, dtype=torch.bool)
            options["attn_mask"] = every.tril(self.length)
        return options

    def extend(self, qkv: QKV) -> QKV:
        """New tokens' queries, with the keys and values of all tokens."""
        start, end = self.length, self.length + qkv.key.shape[2]
        if self._stored is None:
            batch, heads, _, width = qkv.key.shape
            shape = (batch, heads, self.capacity, width)
            self._stored = qkv.key.new_empty(shape), qkv.value.new_empty(shape)
        for stored, new in zip(self._stored, (qkv.key, qkv.value), strict=True):
            stored[:, :, start:end] = new
        self.length = end
        if start == 0:
            return qkv
        key, value = (stored[:, :, :end] for stored in self._stored)
        return QKV(qkv.query, key, value)

    def filtered(self, module: Any, x: Tensor) -> Tensor:
        """The block's filter on new tokens, which follow those it has been given before."""
        y, self._filter_state = module.step(x, self._filter_state)
        return y

    @property
    def samples(self) -> int | None:
        """How many sequences there are; None before the first tokens."""
        return None if self._stored is None else len(self._stored[0])


class TokenCache:
    """What a GPT remembers of a sequence's tokens: its `forward` takes it, with the tokens that come next.

    Args:
        spectra: of every block, evaluated once: the weights must stay as they are.
        capacity: tokens there is room for.
    """

    def __init__(self, spectra: list[Spectrum | None], capacity: int) -> None:
        self.spectra, self.capacity = spectra, capacity
        self.blocks = [BlockCache(capacity) for _ in spectra]

    @property
    def length(self) -> int:
        """Tokens seen so far."""
        return self.blocks[0].length

    @property
    def samples(self) -> int | None:
        """How many sequences there are; None before the first tokens."""
        return self.blocks[0].samples
