"""The kernels of the frequency ops with the mean over all tokens (the launchers are in frequency.py).

Up to configs.SINGLE_PASS tokens one program holds all tokens of some channels in registers and reads them once. More
tokens are split over programs: moments_kernel writes the moments of every split, and whoever needs them merges them.
"""

import triton
import triton.language as tl

from overtone.triton_kernels.frequency.device import (
    load_first,
    load_tile,
    merge_moments,
    merge_rows,
    program_channels,
    sample_offset,
    store_moments,
    tile_moments,
    valid_tokens,
)


# fmt: off
@triton.jit
def moments_kernel(
    p_x, x_offsets, x_inner, x_so, x_si, x_st, x_sc,
    p_mask, mask_offsets, mask_inner, mask_so, mask_si, mask_st,
    p_moments, n_tokens, n_channels, n_splits, n_split_tokens,
    BT: tl.constexpr, BC: tl.constexpr,
):
    """Moments of one split of a sample's tokens."""
    i_s, _, o_c, m_c = program_channels(n_channels, BC)
    i_k = tl.program_id(1)
    p_x += sample_offset(i_s, x_offsets, x_inner, x_so, x_si)
    if p_mask is not None:
        p_mask += sample_offset(i_s, mask_offsets, mask_inner, mask_so, mask_si)
    b_n = tl.zeros([BC], dtype=p_moments.dtype.element_ty)
    b_mean = b_n
    b_mean_lo = b_n
    b_m2 = b_n
    i_end = tl.minimum((i_k + 1) * n_split_tokens, n_tokens)
    for i_t in range(i_k * n_split_tokens, i_end, BT):
        o_t = (i_t + tl.arange(0, BT)).to(tl.int64)
        m_t = valid_tokens(p_mask, mask_st, o_t, i_end)
        b_x = load_tile(p_x, x_st, x_sc, o_t, o_c, m_t, m_c)  # [BT, BC]
        b_n2, b_mean2, b_mean_lo2, b_m22 = tile_moments(b_x, load_first(p_x, x_st, x_sc, o_t, o_c, m_t, m_c), m_t)
        b_n, b_mean, b_mean_lo, b_m2 = merge_moments(b_n, b_mean, b_mean_lo, b_m2, b_n2, b_mean2, b_mean_lo2, b_m22)
    store_moments(p_moments, n_channels, i_s * n_splits + i_k, o_c, m_c, b_n, b_mean, b_mean_lo, b_m2)


@triton.jit
def norms_kernel(
    p_x, x_offsets, x_inner, x_so, x_si, x_st, x_sc,
    p_mask, mask_offsets, mask_inner, mask_so, mask_si, mask_st,
    p_moments, p_low, p_high, n_tokens, n_channels, n_splits,
    BT: tl.constexpr, BC: tl.constexpr,
):
    """One block's share of ‖LFC‖² and ‖HFC‖². Without p_moments a tile holds all tokens."""
    i_s, _, o_c, m_c = program_channels(n_channels, BC)
    if p_moments is None:
        p_x += sample_offset(i_s, x_offsets, x_inner, x_so, x_si)
        if p_mask is not None:
            p_mask += sample_offset(i_s, mask_offsets, mask_inner, mask_so, mask_si)
        o_t = tl.arange(0, BT).to(tl.int64)
        m_t = valid_tokens(p_mask, mask_st, o_t, n_tokens)
        b_x = load_tile(p_x, x_st, x_sc, o_t, o_c, m_t, m_c)  # [BT, BC]
        b_n, b_mean, b_mean_lo, b_m2 = tile_moments(b_x, load_first(p_x, x_st, x_sc, o_t, o_c, m_t, m_c), m_t)
    else:
        b_n, b_mean, b_mean_lo, b_m2 = merge_rows(p_moments, n_channels, i_s * n_splits, n_splits, o_c, m_c)
    b_mean += b_mean_lo
    tl.store(p_low + tl.program_id(0), tl.sum(b_n * b_mean * b_mean, 0))
    tl.store(p_high + tl.program_id(0), tl.sum(b_m2, 0))


@triton.jit
def finish_norms_kernel(
    p_low2, p_high2, p_low, p_high, rounding, n_samples, n_blocks, BT: tl.constexpr, BC: tl.constexpr
):
    """The norms of BT samples from their blocks' shares, [samples, blocks]; ‖HFC‖ is zero up to rounding · ‖LFC‖."""
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
    b_low_norm = tl.sqrt(tl.sum(b_low, 1))
    b_high_norm = tl.sqrt(tl.sum(b_high, 1))
    is_rounding = (b_high_norm <= rounding * b_low_norm) & (b_low_norm < float("inf"))
    tl.store(p_low + o_s, b_low_norm, mask=m_s)
    tl.store(p_high + o_s, tl.where(is_rounding, 0.0, b_high_norm), mask=m_s)


@triton.jit
def store_filtered(p_y, p_addend, n_channels, b_x, b_mean, b_mean_lo, b_low, b_high, o_t, o_c, m_t, m_c, n_tokens):
    """low ⊙ mean + high ⊙ (x − mean) to [N, C], the mean being b_mean + b_mean_lo; zero where a token takes no part.

    With p_addend, [N, C], that is added.
    """
    b_y = tl.where(m_t[:, None], b_low * (b_mean + b_mean_lo) + b_high * ((b_x - b_mean) - b_mean_lo), 0.0)
    o_tile = o_t[:, None] * n_channels + o_c[None, :]
    m_tile = (o_t < n_tokens)[:, None] & m_c[None, :]
    if p_addend is not None:
        b_y += tl.load(p_addend + o_tile, mask=m_tile, other=0.0)
    tl.store(p_y + o_tile, b_y, mask=m_tile)


@triton.jit
def filter_by_mean(
    p_x, x_st, x_sc, p_mask, mask_st, p_moments, p_y, p_addend, b_low, b_high,
    i_s, o_c, m_c, n_tokens, n_channels, n_splits, n_split_tokens,
    BT: tl.constexpr,
):
    """The filter of one sample's tokens, or of one split of them. p_x, p_mask: at the sample."""
    p_y += i_s.to(tl.int64) * n_tokens * n_channels
    if p_addend is not None:
        p_addend += i_s.to(tl.int64) * n_tokens * n_channels
    if p_moments is None:
        o_t = tl.arange(0, BT).to(tl.int64)
        m_t = valid_tokens(p_mask, mask_st, o_t, n_tokens)
        b_x = load_tile(p_x, x_st, x_sc, o_t, o_c, m_t, m_c)  # [BT, BC]
        _, b_mean, b_mean_lo, _ = tile_moments(b_x, load_first(p_x, x_st, x_sc, o_t, o_c, m_t, m_c), m_t)
        store_filtered(p_y, p_addend, n_channels, b_x, b_mean, b_mean_lo, b_low, b_high, o_t, o_c, m_t, m_c, n_tokens)
    else:
        _, b_mean, b_mean_lo, _ = merge_rows(p_moments, n_channels, i_s * n_splits, n_splits, o_c, m_c)
        i_k = tl.program_id(1)
        for i_t in range(i_k * n_split_tokens, tl.minimum((i_k + 1) * n_split_tokens, n_tokens), BT):
            o_t = (i_t + tl.arange(0, BT)).to(tl.int64)
            m_t = valid_tokens(p_mask, mask_st, o_t, n_tokens)
            b_x = load_tile(p_x, x_st, x_sc, o_t, o_c, m_t, m_c)  # [BT, BC]
            store_filtered(
                p_y, p_addend, n_channels, b_x, b_mean, b_mean_lo, b_low, b_high, o_t, o_c, m_t, m_c, n_tokens
            )


@triton.jit
def scale(p_grad, p_norm, i_s):
    """grad / norm of sample i_s, and zero where the norm is zero."""
    b_norm = tl.load(p_norm + i_s)
    return tl.where(b_norm == 0, 0.0, tl.load(p_grad + i_s) / tl.where(b_norm == 0, 1.0, b_norm))


@triton.jit
def norms_backward_kernel(
    p_x, x_offsets, x_inner, x_so, x_si, x_st, x_sc,
    p_mask, mask_offsets, mask_inner, mask_so, mask_si, mask_st,
    p_moments, p_grad_low, p_grad_high, p_low, p_high, p_addend, p_grad_x,
    n_tokens, n_channels, n_splits, n_split_tokens,
    BT: tl.constexpr, BC: tl.constexpr,
):
    """The filter of x with the gains grad / norm of its sample; with p_addend, added to that."""
    i_s, _, o_c, m_c = program_channels(n_channels, BC)
    p_x += sample_offset(i_s, x_offsets, x_inner, x_so, x_si)
    if p_mask is not None:
        p_mask += sample_offset(i_s, mask_offsets, mask_inner, mask_so, mask_si)
    filter_by_mean(
        p_x, x_st, x_sc, p_mask, mask_st, p_moments, p_grad_x, p_addend,
        scale(p_grad_low, p_low, i_s), scale(p_grad_high, p_high, i_s),
        i_s, o_c, m_c, n_tokens, n_channels, n_splits, n_split_tokens, BT,
    )


@triton.jit
def filter_kernel(
    p_x, x_offsets, x_inner, x_so, x_si, x_st, x_sc,
    p_mask, mask_offsets, mask_inner, mask_so, mask_si, mask_st,
    p_low, low_sc, p_high, high_sc, p_moments, p_y, n_tokens, n_channels, n_splits, n_split_tokens,
    BT: tl.constexpr, BC: tl.constexpr,
):
    """low ⊙ LFC[x] + high ⊙ HFC[x]. It is its own adjoint: of grad_y it gives grad_x."""
    i_s, _, o_c, m_c = program_channels(n_channels, BC)
    p_x += sample_offset(i_s, x_offsets, x_inner, x_so, x_si)
    if p_mask is not None:
        p_mask += sample_offset(i_s, mask_offsets, mask_inner, mask_so, mask_si)
    b_low = tl.load(p_low + o_c * low_sc, mask=m_c, other=0.0)
    b_high = tl.load(p_high + o_c * high_sc, mask=m_c, other=0.0)
    filter_by_mean(
        p_x, x_st, x_sc, p_mask, mask_st, p_moments, p_y, None, b_low, b_high,
        i_s, o_c, m_c, n_tokens, n_channels, n_splits, n_split_tokens, BT,
    )


@triton.jit
def store_gain_gradients(p_grad_low, p_grad_high, n_channels, i_row, o_c, m_c, b_low, b_high):
    """As row i_row of two [rows, C], which reduce_gains_kernel adds up."""
    o_row = i_row.to(tl.int64) * n_channels + o_c
    tl.store(p_grad_low + o_row, b_low, mask=m_c)
    tl.store(p_grad_high + o_row, b_high, mask=m_c)


@triton.jit
def backward_tile(
    p_grad_x, n_channels, b_g, g_mean, g_mean_lo, b_x, x_mean, x_mean_lo, b_low, b_high, o_t, o_c, m_t, m_c, n_tokens
):
    """Σ LFC[x] ⊙ g and Σ HFC[x] ⊙ g over a tile's tokens; with p_grad_x their filtered gradients are stored.

    Both means are constant over tokens, so the sums are mean(x) · Σ g and the covariance of x and g.
    """
    if p_grad_x is not None:
        store_filtered(p_grad_x, None, n_channels, b_g, g_mean, g_mean_lo, b_low, b_high, o_t, o_c, m_t, m_c, n_tokens)
    b_product = ((b_g - g_mean) - g_mean_lo) * ((b_x - x_mean) - x_mean_lo)
    return (x_mean + x_mean_lo) * tl.sum(b_g, 0), tl.sum(tl.where(m_t[:, None], b_product, 0.0), 0)


@triton.jit
def filter_backward_kernel(
    p_g, g_offsets, g_inner, g_so, g_si, g_st, g_sc,
    p_x, x_offsets, x_inner, x_so, x_si, x_st, x_sc,
    p_mask, mask_offsets, mask_inner, mask_so, mask_si, mask_st,
    p_low, low_sc, p_high, high_sc, p_g_moments, p_x_moments, p_grad_x, p_grad_low, p_grad_high,
    n_tokens, n_channels, n_splits, n_split_tokens,
    BT: tl.constexpr, BC: tl.constexpr,
):
    """The gains' gradients, and with p_grad_x the tokens' too, from one reading of g and x."""
    i_s, _, o_c, m_c = program_channels(n_channels, BC)
    i_k = tl.program_id(1)
    p_g += sample_offset(i_s, g_offsets, g_inner, g_so, g_si)
    p_x += sample_offset(i_s, x_offsets, x_inner, x_so, x_si)
    if p_mask is not None:
        p_mask += sample_offset(i_s, mask_offsets, mask_inner, mask_so, mask_si)
    if p_grad_x is not None:
        p_grad_x += i_s.to(tl.int64) * n_tokens * n_channels
    b_low = tl.load(p_low + o_c * low_sc, mask=m_c, other=0.0)
    b_high = tl.load(p_high + o_c * high_sc, mask=m_c, other=0.0)
    if p_g_moments is None:
        o_t = tl.arange(0, BT).to(tl.int64)
        m_t = valid_tokens(p_mask, mask_st, o_t, n_tokens)
        b_g = load_tile(p_g, g_st, g_sc, o_t, o_c, m_t, m_c)  # [BT, BC]
        b_x = load_tile(p_x, x_st, x_sc, o_t, o_c, m_t, m_c)  # [BT, BC]
        _, g_mean, g_mean_lo, _ = tile_moments(b_g, load_first(p_g, g_st, g_sc, o_t, o_c, m_t, m_c), m_t)
        _, x_mean, x_mean_lo, _ = tile_moments(b_x, load_first(p_x, x_st, x_sc, o_t, o_c, m_t, m_c), m_t)
        b_grad_low, b_grad_high = backward_tile(
            p_grad_x, n_channels, b_g, g_mean, g_mean_lo, b_x, x_mean, x_mean_lo, b_low, b_high,
            o_t, o_c, m_t, m_c, n_tokens,
        )
    else:
        i_row = i_s * n_splits
        _, g_mean, g_mean_lo, _ = merge_rows(p_g_moments, n_channels, i_row, n_splits, o_c, m_c)
        _, x_mean, x_mean_lo, _ = merge_rows(p_x_moments, n_channels, i_row, n_splits, o_c, m_c)
        b_grad_low = tl.zeros_like(b_low)
        b_grad_high = tl.zeros_like(b_low)
        for i_t in range(i_k * n_split_tokens, tl.minimum((i_k + 1) * n_split_tokens, n_tokens), BT):
            o_t = (i_t + tl.arange(0, BT)).to(tl.int64)
            m_t = valid_tokens(p_mask, mask_st, o_t, n_tokens)
            b_g = load_tile(p_g, g_st, g_sc, o_t, o_c, m_t, m_c)  # [BT, BC]
            b_x = load_tile(p_x, x_st, x_sc, o_t, o_c, m_t, m_c)  # [BT, BC]
            b_tile_low, b_tile_high = backward_tile(
                p_grad_x, n_channels, b_g, g_mean, g_mean_lo, b_x, x_mean, x_mean_lo, b_low, b_high,
                o_t, o_c, m_t, m_c, n_tokens,
            )
            b_grad_low += b_tile_low
            b_grad_high += b_tile_high
    store_gain_gradients(p_grad_low, p_grad_high, n_channels, i_s * n_splits + i_k, o_c, m_c, b_grad_low, b_grad_high)


@triton.jit
def reduce_gains_kernel(p_low_rows, p_high_rows, p_low, p_high, n_rows, n_channels, BT: tl.constexpr, BC: tl.constexpr):
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
# fmt: on
