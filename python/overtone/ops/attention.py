"""spectral_attention: public function → contract → backend. This version has the reference only."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from overtone import reference
from overtone.backends import select
from overtone.ops import checks
from overtone.types import FrequencyNorms

__all__ = ["spectral_attention"]


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
    backend: str | None = None,
) -> Tensor | tuple[Tensor, FrequencyNorms]:
    """Attention fused with a spectral projection: residual + concat_h(A_h V_h) · diag(eigenvalues) · basis.

    Half-precision inputs are multiplied and summed in float32, and y is rounded once, at the end.
    Under autocast query, key, value, basis and residual are cast to its dtype; eigenvalues and head_gain are not.

    Args:
        query: [B, H, N, D], any strides.
        key, value: [B, H, M, D] in query's dtype; finite, also where they are masked.
        eigenvalues: [H·D], one per row of basis, in query's dtype or float32.
        basis: [H·D, E] in query's dtype.
        residual: [B, N, E] in query's dtype; None adds nothing.
        attn_mask: broadcastable to [B, H, N, M]; bool (True = the key takes part) or float (added to the logits, −inf =
            takes no part). A row in which no key takes part is zero, before the residual.
        is_causal: row i sees keys 0..i only, together with attn_mask if there is one.
        scale: of the logits; None is 1/√D.
        head_gain: [H], AttnScale's ω, in query's dtype or float32: A_h becomes (1 + ω_h)·A_h − ω_h·Π, where Π averages
            over the keys that take part in the row.
        return_norms: return FrequencyNorms of y too, each [B], float32 (float64), taken before y is rounded.
        backend: "reference", or None to choose.

    Returns:
        y [B, N, E] in query's dtype, or (y, FrequencyNorms); differentiable in every floating-point argument.
    """
    query, key, value, basis, residual = (_autocast(x) for x in (query, key, value, basis, residual))
    query = checks.heads(_NAME, "query", query)
    batch, heads, length, width = query.shape
    key = checks.matching(_NAME, "key", key, (batch, heads, "M", width), query)
    value = checks.matching(_NAME, "value", value, tuple(key.shape), query)
    eigenvalues = checks.matching(_NAME, "eigenvalues", eigenvalues, (heads * width,), query, wide=True)
    basis = checks.matching(_NAME, "basis", basis, (heads * width, "E"), query)
    if residual is not None:
        residual = checks.matching(_NAME, "residual", residual, (batch, length, basis.shape[1]), query)
    attn_mask = checks.attention_mask(_NAME, attn_mask, query, key)
    is_causal = checks.flag(_NAME, "is_causal", is_causal)
    scale = checks.optional_number(_NAME, "scale", scale)
    if head_gain is not None:
        head_gain = checks.matching(_NAME, "head_gain", head_gain, (heads,), query, wide=True)
    return_norms = checks.flag(_NAME, "return_norms", return_norms)
    select(_NAME, backend, query)  # raises for every backend but the reference, the only one yet
    with _float32_products(query):
        return reference.spectral_attention(
            query, key, value, eigenvalues, basis, residual=residual, attn_mask=attn_mask, is_causal=is_causal,
            scale=scale, head_gain=head_gain, return_norms=return_norms,
        )  # fmt: skip


_NAME = "spectral_attention"


def _autocast(x: Any) -> Any:
    """A tensor in autocast's dtype where that is on; float64 stays, as in autocast itself."""
    if not isinstance(x, Tensor) or x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return x
    device = x.device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return x
    return x.to(torch.get_autocast_dtype(device))


def _float32_products(tensor: Tensor) -> AbstractContextManager:
    """Keeps autocast from narrowing what the reference widened."""
    device = tensor.device.type
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()
