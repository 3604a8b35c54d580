"""Attention as plain PyTorch computes it in 16 bits, and launches of both directions of the Triton kernels."""

from __future__ import annotations

import overtone as ot
from overtone.reference.attention import attention_weights


def step_by_step(
    query, key, value, eigenvalues, basis, *, residual=None, attn_mask=None, is_causal=False, scale=None,
    head_gain=None, return_norms=False,
):  # fmt: skip
    """The reference as eager PyTorch runs it in half precision: every step is rounded."""
    dtype = query.dtype
    weights = attention_weights(
        query, key, attn_mask=attn_mask, is_causal=is_causal, scale=scale, head_gain=head_gain
    ).to(dtype)
    y = ((weights @ value).transpose(1, 2).flatten(2) * eigenvalues).to(dtype) @ basis
    if residual is not None:
        y = residual + y
    return (y, ot.reference.frequency_norms(y)) if return_norms else y


def run_both_ways(attention, args, mask=None, is_causal=False, needs=63, norms=True):
    """Forward and backward; the arguments in the order of the op."""
    *call, residual, _, _ = (a if a is None else a.detach() for a in args)
    rest = mask, is_causal, 0.125
    y, low, high, _, heads, rows = attention.forward(*call, residual, *rest, norms, False, True)
    grads = (low, high) if norms else (None, None)
    return attention.backward(y, *grads, y, low, high, *call, *rest, heads, rows, needs)
