"""transformers' `attn_implementation="overtone"`: our op in models that keep their own projections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from overtone import _validate as validate
from overtone.libraries import imported
from overtone.ops.attention import spectral_attention
from overtone.types import FrequencyNorms

__all__ = ["register_hf_attention"]

NAME = "overtone"
# What some models ask of attention beside a mask and a scale.
_UNKNOWN = ("softcap", "s_aux", "position_bias", "cache")


def register_hf_attention(on_norms: Callable[[nn.Module, FrequencyNorms], None] | None = None) -> None:
    """Lets Hugging Face's transformers load models with `attn_implementation="overtone"`.

    Their attention then runs on the fused op; the models keep all of their weights. Heads may share keys and values.
    Dropout of attention weights, soft caps, sinks and learned position biases are refused.

    Args:
        on_norms: called with every attention module and the FrequencyNorms [B] of its heads side by side, before the
            output projection; differentiable. Registering again replaces it.
    """
    transformers = imported("transformers")
    masks = imported("transformers.masking_utils")

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """The signature is transformers'."""
        _require_known(module, dropout, options)
        y, norms = _attend(module, (query, key, value), attention_mask, scaling, is_causal)
        if on_norms is not None:
            on_norms(module, norms)
        return y.unflatten(-1, (query.shape[1], -1)), None

    transformers.AttentionInterface.register(NAME, attend)
    transformers.AttentionMaskInterface.register(NAME, masks.sdpa_mask)


def _require_known(module: nn.Module, dropout: float, options: dict[str, Any]) -> None:
    where = f"attn_implementation={NAME!r}: {type(module).__name__}"
    if dropout != 0:
        raise ValueError(
            f"{where}: dropout: got {dropout}, wanted 0: set the configuration's dropout of attention to 0"
        )
    for name in _UNKNOWN:
        if options.get(name) is not None:
            got = validate.describe(options[name])
            raise ValueError(f"{where}: {name}: got {got}, wanted None: load with attn_implementation='eager'")


def _attend(
    module: Any,
    heads: tuple[Tensor, Tensor, Tensor],
    attention_mask: Tensor | None,
    scaling: float | None,
    is_causal: bool | None,
) -> tuple[Tensor, FrequencyNorms]:
    """The heads side by side, [B, N, H·D], and their norms: our op with the identity for a projection."""
    query, *shared = heads
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in shared)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is not None:
        attention_mask = attention_mask[..., : key.shape[2]]
        if attention_mask.dtype != torch.bool:
            attention_mask = attention_mask.to(query.dtype)
    width = query.shape[1] * query.shape[3]
    identity = torch.eye(width, dtype=query.dtype, device=query.device)
    # transformers' rule: a mask says it all, and a single query sees everything.
    result: Any = spectral_attention(
        query, key, value, torch.ones_like(identity[0]), identity, attn_mask=attention_mask, scale=scaling,
        is_causal=bool(causal) and attention_mask is None and query.shape[2] > 1, return_norms=True,
    )  # fmt: skip
    return result
