"""Attention fused with a spectral projection (MATH: Y = R + concat_h(softmax(s·Q_h K_hᵀ + bias) V_h) · diag(λ) · U).

A key takes part in a row unless a bool mask is False there, a float mask is −inf there, or it lies in the future of a
causal row. A row in which no key takes part is zero and sends no gradient back. Masked keys and values must still
be finite.

Everything is computed in float32 (float64 for float64 queries); y is rounded once, at the end, to the query's dtype,
and its norms are those of y before that rounding.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from overtone.reference.frequency import _widen, frequency_norms
from overtone.types import FrequencyNorms


def spectral_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    eigenvalues: Tensor,
    basis: Tensor,
    *,
    residual: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    head_gain: Tensor | None = None,
    return_norms: bool = False,
) -> Tensor | tuple[Tensor, FrequencyNorms]:
    """residual + concat_h(A_h V_h) · diag(eigenvalues) · basis: [B, H, N, D] and [B, H, M, D] twice -> [B, N, E].

    head_gain is AttnScale's ω: A_h becomes (1 + ω_h)·A_h − ω_h·Π, where Π averages over the keys that take part in the
    row. So the rows of A still sum to one, a causal row sees no later key, and a fully masked row stays zero.
    """
    weights = attention_weights(
        query, key, attn_mask=attn_mask, is_causal=is_causal, scale=scale, head_gain=head_gain
    )  # [B, H, N, M]
    heads = weights @ _widen(value)  # [B, H, N, D]
    tokens = heads.transpose(1, 2).flatten(2)  # [B, N, H·D]
    y = (tokens * _widen(eigenvalues)) @ _widen(basis)  # [B, N, E]
    if residual is not None:
        y = _widen(residual) + y
    rounded = y.to(query.dtype)
    return (rounded, frequency_norms(y)) if return_norms else rounded


def attention_weights(
    query: Tensor,
    key: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    head_gain: Tensor | None = None,
) -> Tensor:
    """A = softmax(scale·QKᵀ + bias), [B, H, N, M] in float32 or float64; scale is 1/√D unless given."""
    query, key = _widen(query), _widen(key)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    logits = scale * (query @ key.transpose(-2, -1))
    takes_part = _takes_part(logits, attn_mask, is_causal)
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        logits = logits + _widen(attn_mask)
    weights = _softmax(logits, takes_part)
    if head_gain is None:
        return weights
    gain = _widen(head_gain)[:, None, None]
    return (1 + gain) * weights - gain * _uniform(takes_part, weights.dtype)


def _takes_part(logits: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
    """Which key takes part in which row: bool, broadcastable to [B, H, N, M]."""
    takes_part = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device)
    if is_causal:
        takes_part = takes_part.tril()  # aligned at the top left, as in SDPA: row i sees keys 0..i
    if attn_mask is None:
        return takes_part
    return takes_part & (attn_mask if attn_mask.dtype == torch.bool else attn_mask != -math.inf)


def _softmax(logits: Tensor, takes_part: Tensor) -> Tensor:
    """Softmax over the keys that take part; zero where there are none."""
    empty = ~takes_part.any(-1, keepdim=True)
    logits = logits.masked_fill(~takes_part, -math.inf)
    # A row of nothing but −inf has no softmax: give it any logits, then blank it, and no nan arises on the way (which
    # torch's anomaly detection would report).
    return logits.masked_fill(empty, 0).softmax(-1).masked_fill(~takes_part, 0)


def _uniform(takes_part: Tensor, dtype: torch.dtype) -> Tensor:
    count = takes_part.sum(-1, keepdim=True).clamp(min=1)
    return takes_part.to(dtype) / count
