"""Attention as plain PyTorch computes it in 16 bits, and launches of both directions of the Triton kernels."""

from __future__ import annotations

import torch

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


def plain_attention(
    query, key, value, eigenvalues, basis, *, residual=None, attn_mask=None, is_causal=False, bias=None, gain=None,
    addend=None, sample_scale=None, return_norms=False,
):  # fmt: skip
    """The whole formula as eager PyTorch runs it, every step rounded to the dtype that it runs in."""
    dtype = query.dtype
    weights = attention_weights(query, key, attn_mask=attn_mask, is_causal=is_causal, scale=None).to(dtype)
    heads = weights @ value
    if gain is not None:
        heads = (heads * gain[:, None, None]).to(dtype)
    if addend is not None:
        heads = (heads + addend).to(dtype)
    y = heads.transpose(1, 2).flatten(2) @ (eigenvalues[:, None] * basis).to(dtype)
    y = y if bias is None else y + bias
    y = y if sample_scale is None else y * sample_scale.to(y.dtype)[:, None, None]
    y = y if residual is None else residual + y
    y = y.to(dtype if residual is None else torch.promote_types(dtype, residual.dtype))
    return (y, ot.reference.frequency_norms(y)) if return_norms else y


def run_both_ways(attention, args, mask=None, is_causal=False, output_mask=0b1111, norms=True):
    """Forward and backward of the launchers; `args` as of the public function, up to the residual."""
    query, key, value, eigenvalues, basis, residual, *_ = (a if a is None else a.detach() for a in args)
    weight = eigenvalues.float()[:, None] * basis.float()
    rest = mask, None, None, is_causal, 0.125
    y, _, _, attn_out, stats = attention.forward(
        query, key, value, weight, None, residual, None, *rest, norms, False, True
    )
    return attention.backward(y, query, key, value, weight, *rest, attn_out, stats, output_mask)
