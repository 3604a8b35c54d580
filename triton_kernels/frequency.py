"""The frequency ops: norms, their gradient, the filter, its gradients (the contract is ops/frequency.py).

Up to configs.WHOLE tokens one program holds all tokens of some channels in registers and reads them once. More tokens
are split over programs: statistics_kernel writes the statistics of every split, and whoever needs them merges them.
The causal filter carries its running sums from tile to tile instead. No atomics: every sum has one fixed order.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from overtone.ops.checks import statistics_dtype
from overtone.triton_kernels import configs
from overtone.triton_kernels.blocks import (
    add_exactly,
    load_first,
    load_tile,
    locate,
    merge_rows,
    merge_statistics,
    sample_offset,
    store_statistics,
    tile_statistics,
    valid_tokens,
)
from overtone.triton_kernels.configs import Config
from overtone.triton_kernels.launch import absent, launch, strided


# fmt: off
@triton.jit
def statistics_kernel(
    p_x, x_offsets, x_inner, x_so, x_si, x_st, x_sc,
    p_mask, mask_offsets, mask_inner, mask_so, mask_si, mask_st,
    p_statistics, n_tokens, n_channels, n_splits, n_split_tokens,
    BT: tl.constexpr, BC: tl.constexpr,
):
    """Statistics of one split of a sample's tokens."""
    i_s, _, o_c, m_c = locate(n_channels, BC)
    i_k = tl.program_id(1)
    p_x += sample_offset(i_s, x_offsets, x_inner, x_so, x_si)
    if p_mask is not None:
        p_mask += sample_offset(i_s, mask_offsets, mask_inner, mask_so, mask_si)
    b_n = tl.zeros([BC], dtype=p_statistics.dtype.element_ty)
    b_mean = b_n
    b_rest = b_n
    b_m2 = b_n
    i_end = tl.minimum((i_k + 1) * n_split_tokens, n_tokens)
    for i_t in range(i_k * n_split_tokens, i_end, BT):
        o_t = (i_t + tl.arange(0, BT)).to(tl.int64)
        m_t = valid_tokens(p_mask, mask_st, o_t, i_end)
        b_x = load_tile(p_x, x_st, x_sc, o_t, o_c, m_t, m_c)  # [BT, BC]
        b_n2, b_mean2, b_rest2, b_m22 = tile_statistics(b_x, load_first(p_x, x_st, x_sc, o_t, o_c, m_t, m_c), m_t)
        b_n, b_mean, b_rest, b_m2 = merge_statistics(b_n, b_mean, b_rest, b_m2, b_n2, b_mean2, b_rest2, b_m22)
    store_statistics(p_statistics, n_channels, i_s * n_splits + i_k, o_c, m_c, b_n, b_mean, b_rest, b_m2)


@triton.jit
def norms_kernel(
    p_x, x_offsets, x_inner, x_so, x_si, x_st, x_sc,
    p_mask, mask_offsets, mask_inner, mask_so, mask_si, mask_st,
    p_statistics, p_low, p_high, n_tokens, n_channels, n_splits,
    BT: tl.constexpr, BC: tl.constexpr,
):
    """One block's share of ‖LFC‖² and ‖HFC‖². Without p_statistics a tile holds all tokens."""
    i_s, _, o_c, m_c = locate(n_channels, BC)
    if p_statistics is None:
        p_x += sample_offset(i_s, x_offsets, x_inner, x_so, x_si)
        if p_mask is not None:
            p_mask += sample_offset(i_s, mask_offsets, mask_inner, mask_so, mask_si)
        o_t = tl.arange(0, BT).to(tl.int64)
        m_t = valid_tokens(p_mask, mask_st, o_t, n_tokens)
        b_x = load_tile(p_x, x_st, x_sc, o_t, o_c, m_t, m_c)  # [BT, BC]
        b_n, b_mean, b_rest, b_m2 = tile_statistics(b_x, load_first(p_x, x_st, x_sc, o_t, o_c, m_t, m_c), m_t)
    else:
        b_n, b_mean, b_rest, b_m2 = merge_rows(p_statistics, n_channels, i_s * n_splits, n_splits, o_c, m_c)
    b_mean += b_rest
    tl.store(p_low + tl.program_id(0), tl.sum(b_n * b_mean * b_mean, 0))
    tl.store(p_high + tl.program_id(0), tl.sum(b_m2, 0))


@triton.jit
def roots_kernel(p_low2, p_high2, p_low, p_high, n_samples, n_blocks, BT: tl.constexpr, BC: tl.constexpr):
    """The norms of BT samples from their blocks' shares, [samples, blocks]."""
    o_s = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    m_s = o_s < n_samples
    b_low = tl.zeros([BT, BC], dtype=p_low.dtype.element_ty)
    b_high = b_low
    for i_c in range(0, n_blocks, BC):
        o_c = i_c + tl.arange(0, BC)
        o_tile = o_s[:, None] * n_blocks + o_c[None, :]
        m_tile = m_s[:, None] & (o_c < n_blocks)[None, :]
        b_low += tl.load(p_low2 + o_tile, mask=m_tile, other=0.0)
        b_high += tl.load(p_high2 + o_tile, mask=m_tile, other=0.0)
    tl.store(p_low + o_s, tl.sqrt(tl.sum(b_low, 1)), mask=m_s)
    tl.store(p_high + o_s, tl.sqrt(tl.sum(b_high, 1)), mask=m_s)


@triton.jit
def store_filtered(p_y, p_added, n_channels, b_x, b_mean, b_rest, b_low, b_high, o_t, o_c, m_t, m_c, n_tokens):
    """low ⊙ mean + high ⊙ (x − mean) to [N, C], the mean being b_mean + b_rest; zero where a token takes no part.

    With p_added, [N, C], that is added.
    """
    b_y = tl.where(m_t[:, None], b_low * (b_mean + b_rest) + b_high * ((b_x - b_mean) - b_rest), 0.0)
    o_tile = o_t[:, None] * n_channels + o_c[None, :]
    m_tile = (o_t < n_tokens)[:, None] & m_c[None, :]
    if p_added is not None:
        b_y += tl.load(p_added + o_tile, mask=m_tile, other=0.0)
    tl.store(p_y + o_tile, b_y, mask=m_tile)


@triton.jit
def filter_by_mean(
    p_x, x_st, x_sc, p_mask, mask_st, p_statistics, p_y, p_added, b_low, b_high,
    i_s, o_c, m_c, n_tokens, n_channels, n_splits, n_split_tokens,
    BT: tl.constexpr,
):
    """The filter of one sample's tokens, or of one split of them. p_x, p_mask: at the sample."""
    p_y += i_s.to(tl.int64) * n_tokens * n_channels
    if p_added is not None:
        p_added += i_s.to(tl.int64) * n_tokens * n_channels
    if p_statistics is None:
        o_t = tl.arange(0, BT).to(tl.int64)
        m_t = valid_tokens(p_mask, mask_st, o_t, n_tokens)
        b_x = load_tile(p_x, x_st, x_sc, o_t, o_c, m_t, m_c)  # [BT, BC]
        _, b_mean, b_rest, _ = tile_statistics(b_x, load_first(p_x, x_st, x_sc, o_t, o_c, m_t, m_c), m_t)
        store_filtered(p_y, p_added, n_channels, b_x, b_mean, b_rest, b_low, b_high, o_t, o_c, m_t, m_c, n_tokens)
    else:
        _, b_mean, b_rest, _ = merge_rows(p_statistics, n_channels, i_s * n_splits, n_splits, o_c, m_c)
        i_k = tl.program_id(1)
        for i_t in range(i_k * n_split_tokens, tl.minimum((i_k + 1) * n_split_tokens, n_tokens), BT):
            o_t = (i_t + tl.arange(0, BT)).to(tl.int64)
            m_t = valid_tokens(p_mask, mask_st, o_t, n_tokens)
            b_x = load_tile(p_x, x_st, x_sc, o_t, o_c, m_t, m_c)  # [BT, BC]
            store_filtered(p_y, p_added, n_channels, b_x, b_mean, b_rest, b_low, b_high, o_t, o_c, m_t, m_c, n_tokens)


@triton.jit
def scale(p_grad, p_norm, i_s):
    """grad / norm of sample i_s, and zero where the norm is zero."""
    b_norm = tl.load(p_norm + i_s)
    return tl.where(b_norm == 0, 0.0, tl.load(p_grad + i_s) / tl.where(b_norm == 0, 1.0, b_norm))


@triton.jit
def norms_backward_kernel(
    p_x, x_offsets, x_inner, x_so, x_si, x_st, x_sc,
    p_mask, mask_offsets, mask_inner, mask_so, mask_si, mask_st,
    p_statistics, p_grad_low, p_grad_high, p_low, p_high, p_added, p_grad_x,
    n_tokens, n_channels, n_splits, n_split_tokens,
    BT: tl.constexpr, BC: tl.constexpr,
):
    """The filter of x with the gains grad / norm of its sample; with p_added, added to that."""
    i_s, _, o_c, m_c = locate(n_channels, BC)
    p_x += sample_offset(i_s, x_offsets, x_inner, x_so, x_si)
    if p_mask is not None:
        p_mask += sample_offset(i_s, mask_offsets, mask_inner, mask_so, mask_si)
    filter_by_mean(
        p_x, x_st, x_sc, p_mask, mask_st, p_statistics, p_grad_x, p_added,
        scale(p_grad_low, p_low, i_s), scale(p_grad_high, p_high, i_s),
        i_s, o_c, m_c, n_tokens, n_channels, n_splits, n_split_tokens, BT,
    )


@triton.jit
def filter_kernel(
    p_x, x_offsets, x_inner, x_so, x_si, x_st, x_sc,
    p_mask, mask_offsets, mask_inner, mask_so, mask_si, mask_st,
    p_low, low_sc, p_high, high_sc, p_statistics, p_y, n_tokens, n_channels, n_splits, n_split_tokens,
    BT: tl.constexpr, BC: tl.constexpr,
):
    """low ⊙ LFC[x] + high ⊙ HFC[x]. It is its own adjoint: of grad_y it gives grad_x."""
    i_s, _, o_c, m_c = locate(n_channels, BC)
    p_x += sample_offset(i_s, x_offsets, x_inner, x_so, x_si)
    if p_mask is not None:
        p_mask += sample_offset(i_s, mask_offsets, mask_inner, mask_so, mask_si)
    b_low = tl.load(p_low + o_c * low_sc, mask=m_c, other=0.0)
    b_high = tl.load(p_high + o_c * high_sc, mask=m_c, other=0.0)
    filter_by_mean(
        p_x, x_st, x_sc, p_mask, mask_st, p_statistics, p_y, None, b_low, b_high,
        i_s, o_c, m_c, n_tokens, n_channels, n_splits, n_split_tokens, BT,
    )


@triton.jit
def store_gain_gradients(p_grad_low, p_grad_high, n_channels, i_row, o_c, m_c, b_low, b_high):
    """As row i_row of two [rows, C], which row_sums_kernel adds up."""
    o_row = i_row.to(tl.int64) * n_channels + o_c
    tl.store(p_grad_low + o_row, b_low, mask=m_c)
    tl.store(p_grad_high + o_row, b_high, mask=m_c)


@triton.jit
def backward_tile(
    p_grad_x, n_channels, b_g, g_mean, g_rest, b_x, x_mean, x_rest, b_low, b_high, o_t, o_c, m_t, m_c, n_tokens
):
    """Σ LFC[x] ⊙ g and Σ HFC[x] ⊙ g over a tile's tokens; with p_grad_x their filtered gradients are stored.

    Both means are constant over tokens, so the sums are mean(x) · Σ g and the covariance of x and g.
    """
    if p_grad_x is not None:
        store_filtered(p_grad_x, None, n_channels, b_g, g_mean, g_rest, b_low, b_high, o_t, o_c, m_t, m_c, n_tokens)
    b_product = ((b_g - g_mean) - g_rest) * ((b_x - x_mean) - x_rest)
    return (x_mean + x_rest) * tl.sum(b_g, 0), tl.sum(tl.where(m_t[:, None], b_product, 0.0), 0)


@triton.jit
def filter_backward_kernel(
    p_g, g_offsets, g_inner, g_so, g_si, g_st, g_sc,
    p_x, x_offsets, x_inner, x_so, x_si, x_st, x_sc,
    p_mask, mask_offsets, mask_inner, mask_so, mask_si, mask_st,
    p_low, low_sc, p_high, high_sc, p_g_statistics, p_x_statistics, p_grad_x, p_grad_low, p_grad_high,
    n_tokens, n_channels, n_splits, n_split_tokens,
    BT: tl.constexpr, BC: tl.constexpr,
):
    """The gains' gradients, and with p_grad_x the tokens' too, from one reading of g and x."""
    i_s, _, o_c, m_c = locate(n_channels, BC)
    i_k = tl.program_id(1)
    p_g += sample_offset(i_s, g_offsets, g_inner, g_so, g_si)
    p_x += sample_offset(i_s, x_offsets, x_inner, x_so, x_si)
    if p_mask is not None:
        p_mask += sample_offset(i_s, mask_offsets, mask_inner, mask_so, mask_si)
    if p_grad_x is not None:
        p_grad_x += i_s.to(tl.int64) * n_tokens * n_channels
    b_low = tl.load(p_low + o_c * low_sc, mask=m_c, other=0.0)
    b_high = tl.load(p_high + o_c * high_sc, mask=m_c, other=0.0)
    if p_g_statistics is None:
        o_t = tl.arange(0, BT).to(tl.int64)
        m_t = valid_tokens(p_mask, mask_st, o_t, n_tokens)
        b_g = load_tile(p_g, g_st, g_sc, o_t, o_c, m_t, m_c)  # [BT, BC]
        b_x = load_tile(p_x, x_st, x_sc, o_t, o_c, m_t, m_c)  # [BT, BC]
        _, g_mean, g_rest, _ = tile_statistics(b_g, load_first(p_g, g_st, g_sc, o_t, o_c, m_t, m_c), m_t)
        _, x_mean, x_rest, _ = tile_statistics(b_x, load_first(p_x, x_st, x_sc, o_t, o_c, m_t, m_c), m_t)
        b_grad_low, b_grad_high = backward_tile(
            p_grad_x, n_channels, b_g, g_mean, g_rest, b_x, x_mean, x_rest, b_low, b_high,
            o_t, o_c, m_t, m_c, n_tokens,
        )
    else:
        i_row = i_s * n_splits
        _, g_mean, g_rest, _ = merge_rows(p_g_statistics, n_channels, i_row, n_splits, o_c, m_c)
        _, x_mean, x_rest, _ = merge_rows(p_x_statistics, n_channels, i_row, n_splits, o_c, m_c)
        b_grad_low = tl.zeros_like(b_low)
        b_grad_high = tl.zeros_like(b_low)
        for i_t in range(i_k * n_split_tokens, tl.minimum((i_k + 1) * n_split_tokens, n_tokens), BT):
            o_t = (i_t + tl.arange(0, BT)).to(tl.int64)
            m_t = valid_tokens(p_mask, mask_st, o_t, n_tokens)
            b_g = load_tile(p_g, g_st, g_sc, o_t, o_c, m_t, m_c)  # [BT, BC]
            b_x = load_tile(p_x, x_st, x_sc, o_t, o_c, m_t, m_c)  # [BT, BC]
            b_tile_low, b_tile_high = backward_tile(
                p_grad_x, n_channels, b_g, g_mean, g_rest, b_x, x_mean, x_rest, b_low, b_high,
                o_t, o_c, m_t, m_c, n_tokens,
            )
            b_grad_low += b_tile_low
            b_grad_high += b_tile_high
    store_gain_gradients(p_grad_low, p_grad_high, n_channels, i_s * n_splits + i_k, o_c, m_c, b_grad_low, b_grad_high)


@triton.jit
def row_sums_kernel(p_low_rows, p_high_rows, p_low, p_high, n_rows, n_channels, BT: tl.constexpr, BC: tl.constexpr):
    """Sums over the rows of two [rows, C]."""
    o_c = tl.program_id(0).to(tl.int64) * BC + tl.arange(0, BC)
    m_c = o_c < n_channels
    b_low = tl.zeros([BT, BC], dtype=p_low.dtype.element_ty)
    b_high = b_low
    for i_r in range(0, n_rows, BT):
        o_r = (i_r + tl.arange(0, BT)).to(tl.int64)
        o_tile = o_r[:, None] * n_channels + o_c[None, :]
        m_tile = (o_r < n_rows)[:, None] & m_c[None, :]
        b_low += tl.load(p_low_rows + o_tile, mask=m_tile, other=0.0)
        b_high += tl.load(p_high_rows + o_tile, mask=m_tile, other=0.0)
    tl.store(p_low + o_c, tl.sum(b_low, 0), mask=m_c)
    tl.store(p_high + o_c, tl.sum(b_high, 0), mask=m_c)


@triton.jit
def running_mean(p_x, x_st, x_sc, b_x, b_mean, b_rest, n_seen, o_t, o_c, m_t, m_c):
    """The running mean over a tile, given the n_seen earlier tokens' mean + rest, and that of both for the next tile.

    At every token it is b_mean + b_run: as the earlier tokens' differences from their mean add up to nothing, only the
    tile's own are summed. Before the first valid token, that token is the mean to differ from.
    """
    b_mean = tl.where(n_seen > 0, b_mean, load_first(p_x, x_st, x_sc, o_t, o_c, m_t & (n_seen == 0), m_c))
    b_difference = tl.where(m_t[:, None], (b_x - b_mean) - b_rest, 0.0)
    b_count = tl.maximum(n_seen + tl.cumsum(m_t.to(tl.int32), 0), 1).to(b_x.dtype)
    b_run = b_rest + tl.cumsum(b_difference, 0) / b_count[:, None]  # [BT, BC]
    n_seen += tl.sum(m_t.to(tl.int32), 0)
    b_next, b_lost = add_exactly(b_mean, tl.sum(b_difference, 0) / tl.maximum(n_seen, 1).to(b_x.dtype))
    return b_mean, b_run, b_next, b_rest + b_lost, n_seen


@triton.jit
def causal_filter_kernel(
    p_x, x_offsets, x_inner, x_so, x_si, x_st, x_sc,
    p_mask, mask_offsets, mask_inner, mask_so, mask_si, mask_st,
    p_low, low_sc, p_high, high_sc, p_y, n_tokens, n_channels,
    BT: tl.constexpr, BC: tl.constexpr,
):
    """The filter with the running mean."""
    i_s, _, o_c, m_c = locate(n_channels, BC)
    p_x += sample_offset(i_s, x_offsets, x_inner, x_so, x_si)
    if p_mask is not None:
        p_mask += sample_offset(i_s, mask_offsets, mask_inner, mask_so, mask_si)
    p_y += i_s.to(tl.int64) * n_tokens * n_channels
    b_low = tl.load(p_low + o_c * low_sc, mask=m_c, other=0.0)
    b_high = tl.load(p_high + o_c * high_sc, mask=m_c, other=0.0)
    b_next = tl.zeros_like(b_low)
    b_rest = tl.zeros_like(b_low)
    n_seen = 0
    for i_t in range(0, n_tokens, BT):
        o_t = (i_t + tl.arange(0, BT)).to(tl.int64)
        m_t = valid_tokens(p_mask, mask_st, o_t, n_tokens)
        b_x = load_tile(p_x, x_st, x_sc, o_t, o_c, m_t, m_c)  # [BT, BC]
        b_mean, b_run, b_next, b_rest, n_seen = running_mean(
            p_x, x_st, x_sc, b_x, b_next, b_rest, n_seen, o_t, o_c, m_t, m_c
        )
        store_filtered(p_y, None, n_channels, b_x, b_mean, b_run, b_low, b_high, o_t, o_c, m_t, m_c, n_tokens)


@triton.jit
def causal_gains_kernel(
    p_g, g_offsets, g_inner, g_so, g_si, g_st, g_sc,
    p_x, x_offsets, x_inner, x_so, x_si, x_st, x_sc,
    p_mask, mask_offsets, mask_inner, mask_so, mask_si, mask_st,
    p_grad_low, p_grad_high, n_tokens, n_channels,
    BT: tl.constexpr, BC: tl.constexpr,
):
    """Σ LFC[x] ⊙ g and Σ HFC[x] ⊙ g over a sample's tokens, with the running mean."""
    i_s, _, o_c, m_c = locate(n_channels, BC)
    p_g += sample_offset(i_s, g_offsets, g_inner, g_so, g_si)
    p_x += sample_offset(i_s, x_offsets, x_inner, x_so, x_si)
    if p_mask is not None:
        p_mask += sample_offset(i_s, mask_offsets, mask_inner, mask_so, mask_si)
    b_low = tl.zeros([BC], dtype=p_grad_low.dtype.element_ty)
    b_high = b_low
    b_next = b_low
    b_rest = b_low
    n_seen = 0
    for i_t in range(0, n_tokens, BT):
        o_t = (i_t + tl.arange(0, BT)).to(tl.int64)
        m_t = valid_tokens(p_mask, mask_st, o_t, n_tokens)
        b_g = load_tile(p_g, g_st, g_sc, o_t, o_c, m_t, m_c)  # [BT, BC], zero where a token does not take part
        b_x = load_tile(p_x, x_st, x_sc, o_t, o_c, m_t, m_c)  # [BT, BC]
        b_mean, b_run, b_next, b_rest, n_seen = running_mean(
            p_x, x_st, x_sc, b_x, b_next, b_rest, n_seen, o_t, o_c, m_t, m_c
        )
        b_low += tl.sum((b_mean + b_run) * b_g, 0)
        b_high += tl.sum(((b_x - b_mean) - b_run) * b_g, 0)
    store_gain_gradients(p_grad_low, p_grad_high, n_channels, i_s, o_c, m_c, b_low, b_high)


@triton.jit
def count_valid(p_mask, mask_st, n_tokens, BT: tl.constexpr):
    """How many of a sample's tokens take part."""
    n_valid = n_tokens
    if p_mask is not None:
        b_valid = tl.zeros([BT], dtype=tl.int32)
        for i_t in range(0, n_tokens, BT):
            o_t = (i_t + tl.arange(0, BT)).to(tl.int64)
            b_valid += valid_tokens(p_mask, mask_st, o_t, n_tokens).to(tl.int32)
        n_valid = tl.sum(b_valid, 0)
    return n_valid


@triton.jit
def causal_adjoint_kernel(
    p_g, g_offsets, g_inner, g_so, g_si, g_st, g_sc,
    p_mask, mask_offsets, mask_inner, mask_so, mask_si, mask_st,
    p_low, low_sc, p_high, high_sc, p_grad_x, n_tokens, n_channels,
    BT: tl.constexpr, BC: tl.constexpr,
):
    """grad_x_j = high ⊙ g_j + (low − high) ⊙ Σ_{i ≥ j} g_i / count_i, from the last token to the first."""
    i_s, _, o_c, m_c = locate(n_channels, BC)
    p_g += sample_offset(i_s, g_offsets, g_inner, g_so, g_si)
    if p_mask is not None:
        p_mask += sample_offset(i_s, mask_offsets, mask_inner, mask_so, mask_si)
    p_grad_x += i_s.to(tl.int64) * n_tokens * n_channels
    b_low = tl.load(p_low + o_c * low_sc, mask=m_c, other=0.0)
    b_high = tl.load(p_high + o_c * high_sc, mask=m_c, other=0.0)
    b_sum = tl.zeros_like(b_low)
    n_before = count_valid(p_mask, mask_st, n_tokens, BT)  # valid tokens before the tiles that are done
    n_tiles = tl.cdiv(n_tokens, BT)
    for i in range(n_tiles):
        o_t = ((n_tiles - 1 - i) * BT + tl.arange(0, BT)).to(tl.int64)
        m_t = valid_tokens(p_mask, mask_st, o_t, n_tokens)
        b_valid = m_t.to(tl.int32)
        n_before -= tl.sum(b_valid, 0)
        b_count = tl.maximum(n_before + tl.cumsum(b_valid, 0), 1).to(b_low.dtype)
        b_g = load_tile(p_g, g_st, g_sc, o_t, o_c, m_t, m_c)  # [BT, BC]
        b_share = b_g / b_count[:, None]
        b_later = b_sum[None, :] + tl.cumsum(b_share, 0, reverse=True)
        b_grad = b_high * b_g + (b_low - b_high) * b_later
        p_tile = p_grad_x + o_t[:, None] * n_channels + o_c[None, :]
        tl.store(p_tile, tl.where(m_t[:, None], b_grad, 0.0), mask=(o_t < n_tokens)[:, None] & m_c[None, :])
        b_sum += tl.sum(b_share, 0)
# fmt: on


class _Call:
    """Sizes, blocks and common arguments of one call on tokens x, whose kernel holds so many tiles at once."""

    def __init__(self, x: Tensor, mask: Tensor | None, tiles: int = 1) -> None:
        self.tokens, self.channels = x.shape[-2:]
        self.samples = x.shape[:-2].numel()
        self.is_empty = x.numel() == 0
        self.dtype = statistics_dtype(x.dtype)
        self.mask = absent(1) if mask is None else strided(mask, 1)
        whole = configs.whole(self.tokens, x.dtype, tiles)
        self.is_whole = whole is not None
        self.config = whole or configs.for_dtype(configs.SPLIT, x.dtype)
        self.causal_config = configs.for_dtype(configs.CAUSAL, x.dtype)
        self.split_tokens = self.config.BT if self.is_whole else configs.tokens_per_split(self.tokens)
        self.splits = triton.cdiv(self.tokens, self.split_tokens)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.tokens, self.channels, self.splits, self.split_tokens

    def blocks(self, config: Config) -> int:
        """Programs that share the channels of one sample."""
        return triton.cdiv(self.channels, config.BC)

    def launch(self, kernel: Any, *args: Any) -> None:
        grid = self.samples * self.blocks(self.config), self.splits
        launch(kernel, grid, *args, **self.config.meta)

    def launch_causal(self, kernel: Any, *args: Any) -> None:
        grid = (self.samples * self.blocks(self.causal_config),)
        launch(kernel, grid, *args, **self.causal_config.meta)

    def statistics(self, x: Tensor) -> Tensor | None:
        """Statistics of every split of x's tokens; None where one tile holds all tokens."""
        if self.is_whole:
            return None
        rows = x.new_empty(self.samples * self.splits, 4, self.channels, dtype=self.dtype)
        self.launch(statistics_kernel, *strided(x, 2), *self.mask, rows, *self.sizes)
        return rows


def _gains(low: Tensor, high: Tensor) -> tuple:
    return low, low.stride(0), high, high.stride(0)


def norms(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """frequency_norms."""
    call = _Call(x, mask)
    low, high = (x.new_empty(x.shape[:-2], dtype=call.dtype) for _ in range(2))
    if call.is_empty:
        return low.zero_(), high.zero_()
    blocks = call.blocks(call.config)
    low2, high2 = (x.new_empty(call.samples, blocks, dtype=call.dtype) for _ in range(2))
    launch(
        norms_kernel, (call.samples * blocks,),
        *strided(x, 2), *call.mask, call.statistics(x), low2, high2, call.tokens, call.channels, call.splits,
        **call.config.meta,
    )  # fmt: skip
    _roots(low2, high2, low, high)
    return low, high


def norms_of_statistics(statistics: Tensor, samples: int) -> tuple[Tensor, Tensor]:
    """The norms of samples whose tokens' statistics [samples · blocks, 4, C] another kernel left, block by block."""
    rows, _, channels = statistics.shape
    low, high = (statistics.new_empty(samples) for _ in range(2))
    if statistics.numel() == 0:
        return low.zero_(), high.zero_()
    config = configs.SPLIT
    blocks = triton.cdiv(channels, config.BC)
    low2, high2 = (statistics.new_empty(samples, blocks) for _ in range(2))
    launch(
        norms_kernel, (samples * blocks,),
        *strided(statistics, 2), *absent(1), statistics, low2, high2, 0, channels, rows // samples,
        **config.meta,
    )  # fmt: skip
    _roots(low2, high2, low, high)
    return low, high


def _roots(low2: Tensor, high2: Tensor, low: Tensor, high: Tensor) -> None:
    samples, blocks = low2.shape
    launch(
        roots_kernel, (triton.cdiv(samples, configs.ROOTS.BT),),
        low2, high2, low, high, samples, blocks,
        **configs.ROOTS.meta,
    )  # fmt: skip


def norms_backward(
    grad_low: Tensor,
    grad_high: Tensor,
    x: Tensor,
    low: Tensor,
    high: Tensor,
    mask: Tensor | None,
    added: Tensor | None = None,
) -> Tensor:
    """frequency_norms_backward; `added`, contiguous, is another gradient of x to be added to it."""
    call = _Call(x, mask)
    grad_x = x.new_empty(x.shape)
    if call.is_empty:
        return grad_x
    per_sample = (statistic.contiguous() for statistic in (grad_low, grad_high, low, high))
    call.launch(
        norms_backward_kernel, *strided(x, 2), *call.mask, call.statistics(x), *per_sample, added, grad_x, *call.sizes
    )
    return grad_x


def filter(x: Tensor, low: Tensor, high: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    """frequency_filter."""
    call = _Call(x, mask)
    y = x.new_empty(x.shape)
    if call.is_empty:
        return y
    tensors = *strided(x, 2), *call.mask, *_gains(low, high)
    if is_causal:
        call.launch_causal(causal_filter_kernel, *tensors, y, call.tokens, call.channels)
    else:
        call.launch(filter_kernel, *tensors, call.statistics(x), y, *call.sizes)
    return y


def filter_backward(
    grad_y: Tensor, x: Tensor | None, low: Tensor, high: Tensor, mask: Tensor | None, is_causal: bool, need_x: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """frequency_filter_backward."""
    grad_x = grad_y.new_empty(grad_y.shape if need_x else (0,))
    dtype = statistics_dtype(grad_y.dtype)
    grad_low, grad_high = (grad_y.new_empty((0,) if x is None else low.shape, dtype=dtype) for _ in range(2))
    if grad_y.numel() == 0:
        return grad_x, grad_low.zero_(), grad_high.zero_()
    call = _Call(grad_y, mask, tiles=1 if x is None else 2)
    if x is None:
        if need_x:
            _filter_adjoint(call, grad_y, low, high, is_causal, grad_x)
        return grad_x, grad_low, grad_high
    splits = 1 if is_causal else call.splits
    low_rows, high_rows = (grad_y.new_empty(call.samples * splits, call.channels, dtype=dtype) for _ in range(2))
    if is_causal:
        if need_x:
            _filter_adjoint(call, grad_y, low, high, is_causal, grad_x)
        call.launch_causal(
            causal_gains_kernel,
            *strided(grad_y, 2), *strided(x, 2), *call.mask, low_rows, high_rows, call.tokens, call.channels,
        )  # fmt: skip
    else:
        call.launch(
            filter_backward_kernel,
            *strided(grad_y, 2), *strided(x, 2), *call.mask, *_gains(low, high), call.statistics(grad_y),
            call.statistics(x), grad_x if need_x else None, low_rows, high_rows, *call.sizes,
        )  # fmt: skip
    config = configs.for_dtype(configs.ROW_SUMS, dtype)
    launch(
        row_sums_kernel, (call.blocks(config),),
        low_rows, high_rows, grad_low, grad_high, low_rows.shape[0], call.channels,
        **config.meta,
    )  # fmt: skip
    return grad_x, grad_low, grad_high


def _filter_adjoint(call: _Call, grad_y: Tensor, low: Tensor, high: Tensor, is_causal: bool, grad_x: Tensor) -> None:
    tensors = *strided(grad_y, 2), *call.mask, *_gains(low, high)
    if is_causal:
        call.launch_causal(causal_adjoint_kernel, *tensors, grad_x, call.tokens, call.channels)
    else:
        call.launch(filter_kernel, *tensors, call.statistics(grad_y), grad_x, *call.sizes)
