"""Device functions on a tile [BT, BC] of BT tokens and BC channels.

Names: p_x pointer, b_x value, m_x mask, o_x offsets, i_x index, n_x count;
t tokens, c channels, s samples, k splits.

The moments of some tokens are (n, mean, mean_lo, m2), vectors over channels: their count, their mean as the unevaluated
sum mean + mean_lo, and the sum of squared distances from it. mean_lo holds the digits that rounding takes off the mean,
and the difference of nearly equal numbers is exact, so (x − mean) − mean_lo keeps its digits however far from zero
tokens lie.
"""

import triton
import triton.language as tl


@triton.jit
def sample_offset(i_s, p_offsets, n_inner, stride_outer, stride_inner):
    """Where sample i_s begins: from a table of offsets, or from two strides."""
    if p_offsets is not None:
        o_s = tl.load(p_offsets + i_s)
    else:
        o_s = (i_s // n_inner).to(tl.int64) * stride_outer + (i_s % n_inner).to(tl.int64) * stride_inner
    return o_s


@triton.jit
def program_channels(n_channels, BC: tl.constexpr):
    """Sample, block and channels of this program. Programs of one sample are neighbours: they share its cache lines."""
    n_blocks = tl.cdiv(n_channels, BC)
    i_s = tl.program_id(0) // n_blocks
    i_c = tl.program_id(0) % n_blocks
    o_c = i_c.to(tl.int64) * BC + tl.arange(0, BC)
    return i_s, i_c, o_c, o_c < n_channels


@triton.jit
def valid_tokens(p_mask, stride_t, o_t, n_tokens):
    """Which of the tokens o_t exist and take part."""
    m_t = o_t < n_tokens
    if p_mask is not None:
        m_t = tl.load(p_mask + o_t * stride_t, mask=m_t, other=False)
    return m_t


@triton.jit
def widen(b_x):
    """To the accumulate dtype."""
    if b_x.dtype == tl.float64:
        b_wide = b_x
    else:
        b_wide = b_x.to(tl.float32)
    return b_wide


@triton.jit
def load_tile(p_x, stride_t, stride_c, o_t, o_c, m_t, m_c):
    """Tokens o_t, channels o_c; zero where a mask is False, and not read there."""
    p_tile = p_x + o_t[:, None] * stride_t + o_c[None, :] * stride_c
    return widen(tl.load(p_tile, mask=m_t[:, None] & m_c[None, :], other=0.0))


@triton.jit
def load_first(p_x, stride_t, stride_c, o_t, o_c, m_t, m_c):
    """The first valid token of the tile; zero if it has none."""
    n_valid = tl.sum(m_t.to(tl.int32), 0)
    o_first = tl.min(tl.where(m_t, o_t, tl.max(o_t, 0)), 0)
    return widen(tl.load(p_x + o_first * stride_t + o_c * stride_c, mask=m_c & (n_valid > 0), other=0.0))


@triton.jit
def two_sum(b_a, b_b):
    """a + b, and what rounding takes off it (Knuth's two-sum)."""
    b_sum = b_a + b_b
    b_added = b_sum - b_a
    return b_sum, (b_a - (b_sum - b_added)) + (b_b - b_added)


@triton.jit
def tile_moments(b_x, b_first, m_t):
    """Moments of a tile's valid tokens, of which b_first is one."""
    b_n = tl.sum(m_t.to(tl.int32), 0).to(b_x.dtype) + tl.zeros_like(b_first)
    b_difference = tl.where(m_t[:, None], b_x - b_first[None, :], 0.0)
    b_shift = tl.sum(b_difference, 0) / tl.maximum(b_n, 1.0)
    b_centered = tl.where(m_t[:, None], b_difference - b_shift[None, :], 0.0)
    b_left = tl.sum(b_centered, 0) / tl.maximum(b_n, 1.0)  # the rounding error of b_shift
    b_mean, b_mean_lo = two_sum(b_first, b_shift)
    return b_n, b_mean, b_mean_lo + b_left, tl.sum(b_centered * b_centered, 0) - b_n * b_left * b_left


@triton.jit
def merge_moments(b_n, b_mean, b_mean_lo, b_m2, b_n2, b_mean2, b_mean_lo2, b_m22):
    """Moments of both sets of tokens together, by Chan's formula."""
    b_mean = tl.where(b_n > 0, b_mean, b_mean2)
    b_mean_lo = tl.where(b_n > 0, b_mean_lo, b_mean_lo2)
    b_delta = tl.where(b_n2 > 0, (b_mean2 - b_mean) + (b_mean_lo2 - b_mean_lo), 0.0)
    b_share = b_n2 / tl.maximum(b_n + b_n2, 1.0)
    b_mean, b_lost = two_sum(b_mean, b_delta * b_share)
    return b_n + b_n2, b_mean, b_mean_lo + b_lost, b_m2 + b_m22 + b_delta * b_delta * (b_n * b_share)


@triton.jit
def store_moments(p_moments, n_channels, i_row, o_c, m_c, b_n, b_mean, b_mean_lo, b_m2):
    """As row i_row of [rows, 4, C]."""
    p_row = p_moments + i_row.to(tl.int64) * 4 * n_channels + o_c
    tl.store(p_row, b_n, mask=m_c)
    tl.store(p_row + n_channels, b_mean, mask=m_c)
    tl.store(p_row + 2 * n_channels, b_mean_lo, mask=m_c)
    tl.store(p_row + 3 * n_channels, b_m2, mask=m_c)


@triton.jit
def merge_rows(p_moments, n_channels, i_row, n_rows, o_c, m_c):
    """Moments of rows [i_row, i_row + n_rows) together, merged in order."""
    p_row = p_moments + i_row.to(tl.int64) * 4 * n_channels + o_c
    b_n = tl.zeros(o_c.shape, dtype=p_moments.dtype.element_ty)
    b_mean = b_n
    b_mean_lo = b_n
    b_m2 = b_n
    for _ in range(n_rows):
        b_n2 = tl.load(p_row, mask=m_c, other=0.0)
        b_mean2 = tl.load(p_row + n_channels, mask=m_c, other=0.0)
        b_mean_lo2 = tl.load(p_row + 2 * n_channels, mask=m_c, other=0.0)
        b_m22 = tl.load(p_row + 3 * n_channels, mask=m_c, other=0.0)
        b_n, b_mean, b_mean_lo, b_m2 = merge_moments(b_n, b_mean, b_mean_lo, b_m2, b_n2, b_mean2, b_mean_lo2, b_m22)
        p_row += 4 * n_channels
    return b_n, b_mean, b_mean_lo, b_m2
