"""The kernels of the causal filter: the mean runs along with the tokens, carried from tile to tile.

The launchers are in frequency.py.
"""

import triton
import triton.language as tl

from overtone.triton_kernels.frequency.device import (
    load_first,
    load_tile,
    program_channels,
    sample_offset,
    two_sum,
    valid_tokens,
)
from overtone.triton_kernels.frequency.mean import store_filtered, store_gain_gradients


# fmt: off
@triton.jit
def running_mean(p_x, x_st, x_sc, b_x, b_mean, b_mean_lo, n_seen, o_t, o_c, m_t, m_c):
    """The running mean over a tile, given the n_seen earlier tokens' mean + mean_lo, and both for the next tile.

    At every token it is b_mean + b_run: as the earlier tokens' differences from their mean add up to nothing, only the
    tile's own are summed. Before the first valid token, that token is the mean to differ from.
    """
    b_mean = tl.where(n_seen > 0, b_mean, load_first(p_x, x_st, x_sc, o_t, o_c, m_t & (n_seen == 0), m_c))
    b_difference = tl.where(m_t[:, None], (b_x - b_mean) - b_mean_lo, 0.0)
    b_count = tl.maximum(n_seen + tl.cumsum(m_t.to(tl.int32), 0), 1).to(b_x.dtype)
    b_run = b_mean_lo + tl.cumsum(b_difference, 0) / b_count[:, None]  # [BT, BC]
    n_seen += tl.sum(m_t.to(tl.int32), 0)
    b_next, b_lost = two_sum(b_mean, tl.sum(b_difference, 0) / tl.maximum(n_seen, 1).to(b_x.dtype))
    return b_mean, b_run, b_next, b_mean_lo + b_lost, n_seen


@triton.jit
def causal_filter_kernel(
    p_x, x_offsets, x_inner, x_so, x_si, x_st, x_sc,
    p_mask, mask_offsets, mask_inner, mask_so, mask_si, mask_st,
    p_low, low_sc, p_high, high_sc, p_y, n_tokens, n_channels,
    BT: tl.constexpr, BC: tl.constexpr,
):
    """The filter with the running mean."""
    i_s, _, o_c, m_c = program_channels(n_channels, BC)
    p_x += sample_offset(i_s, x_offsets, x_inner, x_so, x_si)
    if p_mask is not None:
        p_mask += sample_offset(i_s, mask_offsets, mask_inner, mask_so, mask_si)
    p_y += i_s.to(tl.int64) * n_tokens * n_channels
    b_low = tl.load(p_low + o_c * low_sc, mask=m_c, other=0.0)
    b_high = tl.load(p_high + o_c * high_sc, mask=m_c, other=0.0)
    b_next = tl.zeros_like(b_low)
    b_mean_lo = tl.zeros_like(b_low)
    n_seen = 0
    for i_t in range(0, n_tokens, BT):
        o_t = (i_t + tl.arange(0, BT)).to(tl.int64)
        m_t = valid_tokens(p_mask, mask_st, o_t, n_tokens)
        b_x = load_tile(p_x, x_st, x_sc, o_t, o_c, m_t, m_c)  # [BT, BC]
        b_mean, b_run, b_next, b_mean_lo, n_seen = running_mean(
            p_x, x_st, x_sc, b_x, b_next, b_mean_lo, n_seen, o_t, o_c, m_t, m_c
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
    i_s, _, o_c, m_c = program_channels(n_channels, BC)
    p_g += sample_offset(i_s, g_offsets, g_inner, g_so, g_si)
    p_x += sample_offset(i_s, x_offsets, x_inner, x_so, x_si)
    if p_mask is not None:
        p_mask += sample_offset(i_s, mask_offsets, mask_inner, mask_so, mask_si)
    b_low = tl.zeros([BC], dtype=p_grad_low.dtype.element_ty)
    b_high = b_low
    b_next = b_low
    b_mean_lo = b_low
    n_seen = 0
    for i_t in range(0, n_tokens, BT):
        o_t = (i_t + tl.arange(0, BT)).to(tl.int64)
        m_t = valid_tokens(p_mask, mask_st, o_t, n_tokens)
        b_g = load_tile(p_g, g_st, g_sc, o_t, o_c, m_t, m_c)  # [BT, BC], zero where a token does not take part
        b_x = load_tile(p_x, x_st, x_sc, o_t, o_c, m_t, m_c)  # [BT, BC]
        b_mean, b_run, b_next, b_mean_lo, n_seen = running_mean(
            p_x, x_st, x_sc, b_x, b_next, b_mean_lo, n_seen, o_t, o_c, m_t, m_c
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
    i_s, _, o_c, m_c = program_channels(n_channels, BC)
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
