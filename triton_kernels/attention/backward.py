"""The kernels of attention's backward pass (the launchers are in launch.py).

With G = ∂L/∂y, sample_scale included (MATH.md §2), O the heads as they were projected, and P the softmax, made again
from its rows' maximum and 1 / sum:
    dout_kernel       ∂O = G Wᵀ, and δ = rowsum(∂O ⊙ O) where O is A V
    dweight_kernel    ∂W = Oᵀ G over a split of the tokens
    dq_kernel         ∂Q = scale · ∂S K, where ∂S = gain · P ⊙ (∂O Vᵀ − δ), and ∂S itself for the mask's gradient
    dkv_kernel        ∂V = gain · Pᵀ ∂O and ∂K = scale · ∂Sᵀ Q
Where O is gain · A V + addend, dq_kernel makes δ = rowsum(P ⊙ ∂O Vᵀ) = rowsum(∂O ⊙ A V), whose sum is ∂gain.
reduce_rows_kernel adds up the splits. No atomics: every sum has one fixed order.
"""

import triton
import triton.language as tl

from overtone.triton_kernels.attention.device import (
    dot,
    head_ptr,
    load_head,
    load_matrix,
    mask_logits,
    mul64,
    program_tile,
    store_head,
    tile_mask,
    tile_ptrs,
)


# fmt: off
@triton.jit
def dout_kernel(
    p_g, p_weight, p_out, p_dout, p_delta, n_heads, n_queries, n_tokens, n_channels,
    D: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr,
):
    """∂O [B, N, H·D] of a tile of all images' tokens and one head and, with p_delta, δ [B, H, N].

    Programs of the same tokens are neighbors.
    """
    i_h, i_m = tl.program_id(0) % n_heads, tl.program_id(0) // n_heads * BM
    p_weight += mul64(i_h * D, n_channels)
    b_do = tl.zeros([BM, BD], dtype=tl.float32)
    for i_e in range(0, n_channels, BK):
        b_g = load_matrix(p_g, n_channels, 1, i_m, i_e, n_tokens, n_channels, BM, BK)  # [BM, BK]
        b_w = load_matrix(p_weight, n_channels, 1, 0, i_e, D, n_channels, BD, BK)  # [BD, BK]
        b_do = dot(b_g.to(b_w.dtype), tl.trans(b_w), b_do, PRECISION)
    b_do = b_do.to(p_dout.dtype.element_ty)
    store_head(p_dout + i_h * D, n_heads * D, b_do, i_m, n_tokens, D, BM, BD)
    if p_delta is not None:
        # δ from ∂O as it is stored: then the rows of ∂S add up to zero as they should.
        b_o = load_head(p_out + i_h * D, n_heads * D, 1, i_m, n_tokens, D, BM, BD).to(tl.float32)  # [BM, BD]
        o_m = i_m + tl.arange(0, BM)
        o_row = (o_m // n_queries * n_heads + i_h).to(tl.int64) * n_queries + o_m % n_queries
        tl.store(p_delta + o_row, tl.sum(b_do.to(tl.float32) * b_o, 1), mask=o_m < n_tokens)


@triton.jit
def dweight_kernel(
    p_out, p_g, p_dweight, n_tokens, n_features, n_channels, n_split_tokens,
    PRECISION: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr,
):
    """A tile of ∂W over one split of all images' tokens, to [splits, features, channels]."""
    n_columns = tl.cdiv(n_channels, BE)
    n_tiles = tl.cdiv(n_features, BM) * n_columns
    i_tile, i_split = tl.program_id(0) % n_tiles, tl.program_id(0) // n_tiles
    i_m, i_e = i_tile // n_columns * BM, i_tile % n_columns * BE
    i_first = i_split * n_split_tokens
    i_end = tl.minimum(n_tokens, i_first + n_split_tokens)
    b_sum = tl.zeros([BM, BE], dtype=tl.float32)
    for i_t in range(i_first, i_end, BK):
        b_o = load_matrix(p_out, n_features, 1, i_t, i_m, i_end, n_features, BK, BM)  # [BK, BM]
        b_g = load_matrix(p_g, n_channels, 1, i_t, i_e, i_end, n_channels, BK, BE).to(b_o.dtype)  # [BK, BE]
        b_sum = dot(tl.trans(b_o), b_g, b_sum, PRECISION)
    p_split = p_dweight + mul64(i_split, mul64(n_features, n_channels))
    m_tile = tile_mask(i_m, i_e, n_features, n_channels, BM, BE)
    tl.store(tile_ptrs(p_split, n_channels, 1, i_m, i_e, BM, BE), b_sum, mask=m_tile)


@triton.jit
def load_softmax_stats(p_stats, i_m, n_queries, BM: tl.constexpr):
    """Maximum and 1 / sum of the queries [i_m, i_m + BM) of a head."""
    o_m = i_m + tl.arange(0, BM)
    m_m = o_m < n_queries
    return tl.load(p_stats + 2 * o_m, mask=m_m, other=0.0), tl.load(p_stats + 2 * o_m + 1, mask=m_m, other=0.0)


@triton.jit
def load_gain(p_gain, i_h):
    """Of head i_h; 1 where there is none."""
    gain = 1.0
    if p_gain is not None:
        gain = tl.load(p_gain + i_h)
    return gain


@triton.jit
def softmax_tile(
    b_q, b_k, b_max, b_inverse, p_mask, mask_sq, mask_sk, i_m, o_m, n_queries, i_n, o_n, n_keys, logit_scale,
    IS_CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):
    """The tile [BM, BN] of P, made again."""
    b_s = dot(b_q, tl.trans(b_k), None, PRECISION) * logit_scale
    b_s = mask_logits(b_s, p_mask, mask_sq, mask_sk, i_m, o_m, n_queries, i_n, o_n, n_keys, IS_CAUSAL)
    return tl.exp2(b_s - b_max[:, None]) * b_inverse[:, None]


@triton.jit
def dkv_kernel(
    p_q, q_sb, q_sh, q_st, q_sd, p_k, k_sb, k_sh, k_st, k_sd, p_v, v_sb, v_sh, v_st, v_sd,
    p_mask, mask_sb, mask_sh, mask_sq, mask_sk, p_gain, p_dout, p_stats, p_delta,
    p_dk, dk_sb, dk_sh, dk_st, p_dv, dv_sb, dv_sh, dv_st, scale, logit_scale, n_heads, n_queries, n_keys,
    D: tl.constexpr, IS_CAUSAL: tl.constexpr, PRECISION: tl.constexpr, STRIDE_ALIGN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):
    """∂K and ∂V of a tile of keys, over all queries. Everything is transposed, so that no tile has to be."""
    i_b, i_h, i_n = program_tile(n_keys, n_heads, BN)
    o_m, o_n = tl.arange(0, BM)[None, :], tl.arange(0, BN)[:, None]
    if p_mask is not None:
        p_mask = head_ptr(p_mask, i_b, i_h, mask_sb, mask_sh)
    p_q = head_ptr(p_q, i_b, i_h, q_sb, q_sh, STRIDE_ALIGN)
    p_do = head_ptr(p_dout, i_b, i_h, mul64(n_queries, n_heads * D), D)
    p_stats = head_ptr(p_stats, i_b, i_h, 2 * n_heads * n_queries, 2 * n_queries)
    p_delta = head_ptr(p_delta, i_b, i_h, n_heads * n_queries, n_queries)
    p_k = head_ptr(p_k, i_b, i_h, k_sb, k_sh, STRIDE_ALIGN)
    b_k = load_head(p_k, k_st, k_sd, i_n, n_keys, D, BN, BD, STRIDE_ALIGN)  # [BN, BD]
    if p_dk is not None:
        p_v = head_ptr(p_v, i_b, i_h, v_sb, v_sh, STRIDE_ALIGN)
        b_v = load_head(p_v, v_st, v_sd, i_n, n_keys, D, BN, BD, STRIDE_ALIGN)  # [BN, BD]
    b_dk = tl.zeros([BN, BD], dtype=tl.float32)
    b_dv = tl.zeros([BN, BD], dtype=tl.float32)
    i_first = 0
    if IS_CAUSAL:
        i_first = i_n // BM * BM  # earlier queries see none of these keys
    for i_m in range(i_first, n_queries, BM):
        b_q = load_head(p_q, q_st, q_sd, i_m, n_queries, D, BM, BD, STRIDE_ALIGN)  # [BM, BD]
        b_do = load_head(p_do, n_heads * D, 1, i_m, n_queries, D, BM, BD)  # [BM, BD]
        b_max, b_inverse = load_softmax_stats(p_stats, i_m, n_queries, BM)
        b_s = dot(b_k, tl.trans(b_q), None, PRECISION) * logit_scale  # [BN, BM]
        b_s = mask_logits(b_s, p_mask, mask_sq, mask_sk, i_m, o_m, n_queries, i_n, o_n, n_keys, IS_CAUSAL)
        b_p = tl.exp2(b_s - b_max[None, :]) * b_inverse[None, :]
        if p_dv is not None:
            b_dv = dot(b_p.to(b_do.dtype), b_do, b_dv, PRECISION)
        if p_dk is not None:
            b_delta = tl.load(p_delta + i_m + tl.arange(0, BM), mask=i_m + tl.arange(0, BM) < n_queries, other=0.0)
            b_dp = dot(b_v, tl.trans(b_do), None, PRECISION)  # [BN, BM]
            b_ds = b_p * (b_dp - b_delta[None, :])
            b_dk = dot(b_ds.to(b_q.dtype), b_q, b_dk, PRECISION)
    gain = load_gain(p_gain, i_h)
    if p_dk is not None:
        store_head(head_ptr(p_dk, i_b, i_h, dk_sb, dk_sh), dk_st, b_dk * (scale * gain), i_n, n_keys, D, BN, BD)
    if p_dv is not None:
        store_head(head_ptr(p_dv, i_b, i_h, dv_sb, dv_sh), dv_st, b_dv * gain, i_n, n_keys, D, BN, BD)


@triton.jit
def dq_kernel(
    p_q, q_sb, q_sh, q_st, q_sd, p_k, k_sb, k_sh, k_st, k_sd, p_v, v_sb, v_sh, v_st, v_sd,
    p_mask, mask_sb, mask_sh, mask_sq, mask_sk, p_gain, p_dout, p_stats, p_delta, p_dq, dq_sb, dq_sh, dq_st, p_ds,
    scale, logit_scale, n_heads, n_queries, n_keys,
    D: tl.constexpr, IS_CAUSAL: tl.constexpr, MAKE_DELTA: tl.constexpr, PRECISION: tl.constexpr,
    STRIDE_ALIGN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):
    """∂Q of a tile of queries, over all keys; with p_ds ∂S [B, H, N, M] too; with MAKE_DELTA δ first, by a loop."""
    i_b, i_h, i_m = program_tile(n_queries, n_heads, BM)
    o_m, o_n = tl.arange(0, BM)[:, None], tl.arange(0, BN)[None, :]
    o_row, m_row = i_m + tl.arange(0, BM), i_m + tl.arange(0, BM) < n_queries
    if p_mask is not None:
        p_mask = head_ptr(p_mask, i_b, i_h, mask_sb, mask_sh)
    p_k = head_ptr(p_k, i_b, i_h, k_sb, k_sh, STRIDE_ALIGN)
    p_v = head_ptr(p_v, i_b, i_h, v_sb, v_sh, STRIDE_ALIGN)
    p_q = head_ptr(p_q, i_b, i_h, q_sb, q_sh, STRIDE_ALIGN)
    p_do = head_ptr(p_dout, i_b, i_h, mul64(n_queries, n_heads * D), D)
    p_stats = head_ptr(p_stats, i_b, i_h, 2 * n_heads * n_queries, 2 * n_queries)
    p_delta = head_ptr(p_delta, i_b, i_h, n_heads * n_queries, n_queries)
    b_q = load_head(p_q, q_st, q_sd, i_m, n_queries, D, BM, BD, STRIDE_ALIGN)  # [BM, BD]
    b_do = load_head(p_do, n_heads * D, 1, i_m, n_queries, D, BM, BD)  # [BM, BD]
    b_max, b_inverse = load_softmax_stats(p_stats, i_m, n_queries, BM)
    i_seen = n_keys
    if IS_CAUSAL:
        i_seen = tl.minimum(n_keys, i_m + BM)  # later keys are not seen
    if MAKE_DELTA:
        b_delta = tl.zeros([BM], dtype=tl.float32)
        for i_n in range(0, i_seen, BN):
            b_k = load_head(p_k, k_st, k_sd, i_n, n_keys, D, BN, BD, STRIDE_ALIGN)  # [BN, BD]
            b_v = load_head(p_v, v_st, v_sd, i_n, n_keys, D, BN, BD, STRIDE_ALIGN)  # [BN, BD]
            b_p = softmax_tile(
                b_q, b_k, b_max, b_inverse, p_mask, mask_sq, mask_sk, i_m, o_m, n_queries, i_n, o_n, n_keys,
                logit_scale, IS_CAUSAL, PRECISION,
            )  # [BM, BN]
            b_delta += tl.sum(b_p * dot(b_do, tl.trans(b_v), None, PRECISION), 1)
        tl.store(p_delta + o_row, b_delta, mask=m_row)
    else:
        b_delta = tl.load(p_delta + o_row, mask=m_row, other=0.0)
    if p_dq is not None or p_ds is not None:
        gain = load_gain(p_gain, i_h)
        b_dq = tl.zeros([BM, BD], dtype=tl.float32)
        i_head = i_b * n_heads + i_h  # of all images
        i_end = i_seen
        if p_ds is not None:
            i_end = n_keys  # where a key is not seen ∂S is zero, but must be written
        for i_n in range(0, i_end, BN):
            b_k = load_head(p_k, k_st, k_sd, i_n, n_keys, D, BN, BD, STRIDE_ALIGN)  # [BN, BD]
            b_v = load_head(p_v, v_st, v_sd, i_n, n_keys, D, BN, BD, STRIDE_ALIGN)  # [BN, BD]
            b_p = softmax_tile(
                b_q, b_k, b_max, b_inverse, p_mask, mask_sq, mask_sk, i_m, o_m, n_queries, i_n, o_n, n_keys,
                logit_scale, IS_CAUSAL, PRECISION,
            )  # [BM, BN]
            b_ds = b_p * (dot(b_do, tl.trans(b_v), None, PRECISION) - b_delta[:, None])
            if p_ds is not None:
                p_tile = tile_ptrs(p_ds + mul64(i_head, mul64(n_queries, n_keys)), n_keys, 1, i_m, i_n, BM, BN)
                tl.store(p_tile, b_ds * gain, mask=tile_mask(i_m, i_n, n_queries, n_keys, BM, BN))
            if p_dq is not None:
                b_dq = dot(b_ds.to(b_k.dtype), b_k, b_dq, PRECISION)
        if p_dq is not None:
            p_dq = head_ptr(p_dq, i_b, i_h, dq_sb, dq_sh)
            store_head(p_dq, dq_st, b_dq * (scale * gain), i_m, n_queries, D, BM, BD)


@triton.jit
def reduce_rows_kernel(p_rows, p_sums, n_rows, n_columns, BT: tl.constexpr, BC: tl.constexpr):
    """The sums over the rows of [rows, columns], BT rows at a time."""
    o_c = tl.program_id(0).to(tl.int64) * BC + tl.arange(0, BC)
    m_c = o_c < n_columns
    b_sum = tl.zeros([BT, BC], dtype=tl.float32)
    for i_t in range(0, n_rows, BT):
        o_t = (i_t + tl.arange(0, BT)).to(tl.int64)
        m_tile = (o_t < n_rows)[:, None] & m_c[None, :]
        b_sum += tl.load(p_rows + o_t[:, None] * n_columns + o_c[None, :], mask=m_tile, other=0.0)
    tl.store(p_sums + o_c, tl.sum(b_sum, 0), mask=m_c)
# fmt: on
