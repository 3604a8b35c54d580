"""Attention fused with a spectral projection.

    O_h = gain_h · softmax(s·Q_h K_hᵀ + mask) V_h + addend_h
    Y   = R + f · (concat_h(O_h) · diag(λ) · U + bias)

A key is attended to unless a bool mask is False there, a float mask is −inf there, or it lies in the future of a causal
row. A row with every key masked has softmax zero and sends no gradient back through it. Masked keys and values must
still be finite.

Everything is computed in float32 (float64 for float64 queries); y is rounded once, at the end, and its norms are those
of y before that rounding.
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
    gain: Tensor | None = None,
    addend: Tensor | None = None,
    bias: Tensor | None = None,
    sample_scale: Tensor | None = None,
    return_norms: bool = False,
) -> Tensor | tuple[Tensor, FrequencyNorms]:
    """residual + sample_scale · (concat_h(O_h) · diag(eigenvalues) · basis + bias), O_h = gain_h A_h V_h + addend_h.

    [B, H, N, D] and [B, H, M, D] twice -> [B, N, E], in the wider of query's and residual's dtypes.

    head_gain is AttnScale's ω: A_h becomes (1 + ω_h)·A_h − ω_h·Π, where Π averages over the keys a row may attend to.
    The rows of A still sum to one, a causal row sees no later key, and a fully masked row stays zero.
    """
    return folded_attention(
        query, key, value, _widen(eigenvalues)[:, None] * _widen(basis), bias=bias, residual=residual,
        sample_scale=sample_scale, attn_mask=attn_mask, is_causal=is_causal, scale=scale, head_gain=head_gain,
        gain=gain, addend=addend, return_norms=return_norms,
    )  # fmt: skip


def folded_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    sample_scale: Tensor | None = None,
    gain: Tensor | None = None,
    addend: Tensor | None = None,
    return_norms: bool = False,
    **logits,
) -> Tensor | tuple[Tensor, FrequencyNorms]:
    """spectral_attention with weight = diag(eigenvalues) · basis; `logits` are the options of attention_weights."""
    heads = attention_weights(query, key, **logits) @ _widen(value)  # [B, H, N, D]
    if gain is not None:
        heads = _widen(gain)[:, None, None] * heads
    if addend is not None:
        heads = heads + _widen(addend)
    y = heads.transpose(1, 2).flatten(2) @ _widen(weight)  # [B, N, E]
    if bias is not None:
        y = y + _widen(bias)
    if sample_scale is not None:
        y = _widen(sample_scale)[:, None, None] * y
    dtype = query.dtype
    if residual is not None:
        y = _widen(residual) + y
        dtype = torch.promote_types(dtype, residual.dtype)
    rounded = y.to(dtype)
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
