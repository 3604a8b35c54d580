"""The kernels of attention's forward pass (the launchers and the choice between them are in launch.py).

Where all channels of y fit in a program's registers, one launch does everything: fused_kernel takes a tile of queries
through all heads and adds up their projections. Otherwise attention_kernel, the one known from Triton's tutorial,
writes the heads once, and projection_kernel's loop over features is the sum over heads.
Both end in epilogue: bias, sample scale, residual, y, and the moments of the tile's tokens, which become the norms.
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
from overtone.triton_kernels.frequency.device import store_moments, tile_moments


# fmt: off
@triton.jit
def attend(
    b_q, p_k, k_st, k_sd, p_v, v_st, v_sd, p_mask, mask_sq, mask_sk, i_m, n_queries, n_keys, logit_scale,
    D: tl.constexpr, IS_CAUSAL: tl.constexpr, SINGLE_PASS: tl.constexpr, PRECISION: tl.constexpr,
    STRIDE_ALIGN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):
    """softmax(scale · q kᵀ + bias) v of one head for the queries [i_m, i_m + BM), [BM, BD].

    Maximum and 1 / sum of every softmax are returned too.
    With SINGLE_PASS, BN keys are all there are and a row of logits is there at once; otherwise the softmax is online.
    A row in which every key is masked has the maximum 0 and 1 / sum = 0, so it is zero here and in backward.
    """
    o_m, o_n = tl.arange(0, BM)[:, None], tl.arange(0, BN)[None, :]
    if SINGLE_PASS:
        b_k = load_head(p_k, k_st, k_sd, 0, n_keys, D, BN, BD, STRIDE_ALIGN)  # [BN, BD]
        b_v = load_head(p_v, v_st, v_sd, 0, n_keys, D, BN, BD, STRIDE_ALIGN)  # [BN, BD]
        b_s = dot(b_q, tl.trans(b_k), None, PRECISION) * logit_scale  # [BM, BN]
        b_s = mask_logits(b_s, p_mask, mask_sq, mask_sk, i_m, o_m, n_queries, 0, o_n, n_keys, IS_CAUSAL)
        b_max = tl.max(b_s, 1)
        b_max = tl.where(b_max == float("-inf"), 0.0, b_max)
        b_p = tl.exp2(b_s - b_max[:, None])
        b_sum = tl.sum(b_p, 1)
        b_o = dot(b_p.to(b_v.dtype), b_v, None, PRECISION)  # [BM, BD]
    else:
        b_max = tl.full([BM], float("-inf"), dtype=tl.float32)
        b_sum = tl.zeros([BM], dtype=tl.float32)
        b_o = tl.zeros([BM, BD], dtype=tl.float32)
        i_end = n_keys
        if IS_CAUSAL:
            i_end = tl.minimum(n_keys, i_m + BM)
        for i_n in range(0, i_end, BN):
            b_k = load_head(p_k, k_st, k_sd, i_n, n_keys, D, BN, BD, STRIDE_ALIGN)  # [BN, BD]
            b_s = dot(b_q, tl.trans(b_k), None, PRECISION) * logit_scale  # [BM, BN]
            b_s = mask_logits(b_s, p_mask, mask_sq, mask_sk, i_m, o_m, n_queries, i_n, o_n, n_keys, IS_CAUSAL)
            b_next = tl.maximum(b_max, tl.max(b_s, 1))
            b_base = tl.where(b_next == float("-inf"), 0.0, b_next)  # no key yet: −inf − 0, not −inf − −inf
            b_p = tl.exp2(b_s - b_base[:, None])
            b_rescale = tl.exp2(b_max - b_base)
            b_sum = b_sum * b_rescale + tl.sum(b_p, 1)
            b_v = load_head(p_v, v_st, v_sd, i_n, n_keys, D, BN, BD, STRIDE_ALIGN)  # [BN, BD]
            b_o = dot(b_p.to(b_v.dtype), b_v, b_o * b_rescale[:, None], PRECISION)
            b_max = b_next
        b_max = tl.where(b_max == float("-inf"), 0.0, b_max)
    b_inverse = tl.where(b_sum == 0, 0.0, 1.0 / tl.where(b_sum == 0, 1.0, b_sum))
    return b_o * b_inverse[:, None], b_max, b_inverse


@triton.jit
def store_softmax_stats(p_stats, b_max, b_inverse, i_m, n_queries, BM: tl.constexpr):
    """As the head's [queries, 2]."""
    o_m = i_m + tl.arange(0, BM)
    p_row = p_stats + 2 * o_m
    tl.store(p_row, b_max, mask=o_m < n_queries)
    tl.store(p_row + 1, b_inverse, mask=o_m < n_queries)


@triton.jit
def mix_head(
    b_o, p_gain, i_h, p_addend, addend_st, addend_sd, i_m, n_queries,
    D: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
):
    """gain · b_o + addend, of what is given. p_addend: at the head."""
    if p_gain is not None:
        b_o *= tl.load(p_gain + i_h)
    if p_addend is not None:
        b_o += load_head(p_addend, addend_st, addend_sd, i_m, n_queries, D, BM, BD).to(tl.float32)
    return b_o


@triton.jit
def epilogue(
    b_y, i_b, i_t, i_e, i_row, p_bias, p_sample_scale, p_r, r_sb, r_st, r_se, p_y, p_moments, n_tokens, n_channels,
    BT: tl.constexpr, E_TILE: tl.constexpr,
):
    """residual + sample_scale · (b_y + bias), stored as the tile at (i_t, i_e) of image i_b of y.

    With p_moments the moments of the tile's tokens, before they are rounded, go to row i_row of [rows, 4, channels].
    """
    m_tile = tile_mask(i_t, i_e, n_tokens, n_channels, BT, E_TILE)
    o_t, o_e = tl.arange(0, BT), i_e + tl.arange(0, E_TILE)
    if p_bias is not None:
        b_y += tl.load(p_bias + o_e, mask=o_e < n_channels, other=0.0)[None, :]
    if p_sample_scale is not None:
        b_y *= tl.load(p_sample_scale + i_b)
    if p_r is not None:
        b_y += load_matrix(p_r + mul64(i_b, r_sb), r_st, r_se, i_t, i_e, n_tokens, n_channels, BT, E_TILE)
    p_image = p_y + mul64(i_b, mul64(n_tokens, n_channels))
    tl.store(tile_ptrs(p_image, n_channels, 1, i_t, i_e, BT, E_TILE), b_y, mask=m_tile)
    if p_moments is not None:
        b_first = tl.sum(tl.where((o_t == 0)[:, None], b_y, 0.0), 0)  # the tile's first token
        b_n, b_mean, b_mean_lo, b_m2 = tile_moments(b_y, b_first, i_t + o_t < n_tokens)
        store_moments(p_moments, n_channels, i_row, o_e, o_e < n_channels, b_n, b_mean, b_mean_lo, b_m2)


@triton.jit
def attention_kernel(
    p_q, q_sb, q_sh, q_st, q_sd, p_k, k_sb, k_sh, k_st, k_sd, p_v, v_sb, v_sh, v_st, v_sd,
    p_mask, mask_sb, mask_sh, mask_sq, mask_sk, p_gain, p_addend, addend_sb, addend_sh, addend_st, addend_sd,
    p_out, p_stats, logit_scale, n_heads, n_queries, n_keys,
    D: tl.constexpr, IS_CAUSAL: tl.constexpr, SINGLE_PASS: tl.constexpr, PRECISION: tl.constexpr,
    STRIDE_ALIGN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):
    """A tile of queries of one head -> attn_out [B, N, H·D] and, with p_stats, softmax_stats [B, H, N, 2]."""
    i_b, i_h, i_m = program_tile(n_queries, n_heads, BM)
    if p_mask is not None:
        p_mask = head_ptr(p_mask, i_b, i_h, mask_sb, mask_sh)
    p_q = head_ptr(p_q, i_b, i_h, q_sb, q_sh, STRIDE_ALIGN)
    b_q = load_head(p_q, q_st, q_sd, i_m, n_queries, D, BM, BD, STRIDE_ALIGN)  # [BM, BD]
    b_o, b_max, b_inverse = attend(
        b_q, head_ptr(p_k, i_b, i_h, k_sb, k_sh, STRIDE_ALIGN), k_st, k_sd,
        head_ptr(p_v, i_b, i_h, v_sb, v_sh, STRIDE_ALIGN), v_st, v_sd, p_mask, mask_sq, mask_sk,
        i_m, n_queries, n_keys, logit_scale, D, IS_CAUSAL, SINGLE_PASS, PRECISION, STRIDE_ALIGN, BM, BN, BD,
    )
    if p_addend is not None:
        p_addend = head_ptr(p_addend, i_b, i_h, addend_sb, addend_sh)
    b_o = mix_head(b_o, p_gain, i_h, p_addend, addend_st, addend_sd, i_m, n_queries, D, BM, BD)
    p_head = head_ptr(p_out, i_b, i_h, mul64(n_queries, n_heads * D), D)
    store_head(p_head, n_heads * D, b_o, i_m, n_queries, D, BM, BD)
    if p_stats is not None:
        p_stats = head_ptr(p_stats, i_b, i_h, 2 * n_heads * n_queries, 2 * n_queries)
        store_softmax_stats(p_stats, b_max, b_inverse, i_m, n_queries, BM)


@triton.jit
def projection_kernel(
    p_out, p_weight, p_bias, p_sample_scale, p_r, r_sb, r_st, r_se, p_y, p_moments,
    n_tokens, n_features, n_channels,
    PRECISION: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, E_TILE: tl.constexpr,
):
    """A tile of y = residual + sample_scale · (attn_out · weight + bias). Programs of the same tokens are neighbors."""
    n_columns, n_blocks = tl.cdiv(n_channels, E_TILE), tl.cdiv(n_tokens, BM)
    i_e, i_row = tl.program_id(0) % n_columns * E_TILE, tl.program_id(0) // n_columns
    i_b, i_m = i_row // n_blocks, i_row % n_blocks * BM
    p_out += mul64(i_b, mul64(n_tokens, n_features))
    b_y = tl.zeros([BM, E_TILE], dtype=tl.float32)
    for i_k in range(0, n_features, BK):
        b_o = load_matrix(p_out, n_features, 1, i_m, i_k, n_tokens, n_features, BM, BK)  # [BM, BK]
        b_w = load_matrix(p_weight, n_channels, 1, i_k, i_e, n_features, n_channels, BK, E_TILE)  # [BK, E_TILE]
        b_y = dot(b_o, b_w, b_y, PRECISION)
    epilogue(
        b_y, i_b, i_m, i_e, i_row, p_bias, p_sample_scale, p_r, r_sb, r_st, r_se, p_y, p_moments, n_tokens, n_channels,
        BM, E_TILE,
    )


@triton.jit
def fused_kernel(
    p_q, q_sb, q_sh, q_st, q_sd, p_k, k_sb, k_sh, k_st, k_sd, p_v, v_sb, v_sh, v_st, v_sd,
    p_mask, mask_sb, mask_sh, mask_sq, mask_sk, p_gain, p_addend, addend_sb, addend_sh, addend_st, addend_sd,
    p_weight, p_bias, p_sample_scale, p_r, r_sb, r_st, r_se,
    p_y, p_moments, p_out, p_stats, logit_scale, n_heads, n_queries, n_keys, n_channels,
    D: tl.constexpr, IS_CAUSAL: tl.constexpr, SINGLE_PASS: tl.constexpr, PRECISION: tl.constexpr,
    STRIDE_ALIGN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    E_TILE: tl.constexpr, NUM_E_TILES: tl.constexpr,
):
    """A tile of queries through all heads to y, which is held in NUM_E_TILES accumulators [BM, E_TILE].

    With p_out, attn_out and softmax_stats are kept for backward.
    """
    i_b, _, i_m = program_tile(n_queries, 1, BM)
    b_y = ()
    for _ in tl.static_range(NUM_E_TILES):
        b_y = b_y + (tl.zeros([BM, E_TILE], dtype=tl.float32),)
    for i_h in range(n_heads):
        p_mask_h = p_mask
        if p_mask is not None:
            p_mask_h = head_ptr(p_mask, i_b, i_h, mask_sb, mask_sh)
        p_q_h = head_ptr(p_q, i_b, i_h, q_sb, q_sh, STRIDE_ALIGN)
        b_q = load_head(p_q_h, q_st, q_sd, i_m, n_queries, D, BM, BD, STRIDE_ALIGN)  # [BM, BD]
        b_o, b_max, b_inverse = attend(
            b_q, head_ptr(p_k, i_b, i_h, k_sb, k_sh, STRIDE_ALIGN), k_st, k_sd,
            head_ptr(p_v, i_b, i_h, v_sb, v_sh, STRIDE_ALIGN), v_st, v_sd, p_mask_h, mask_sq, mask_sk,
            i_m, n_queries, n_keys, logit_scale, D, IS_CAUSAL, SINGLE_PASS, PRECISION, STRIDE_ALIGN, BM, BN, BD,
        )
        p_addend_h = p_addend
        if p_addend is not None:
            p_addend_h = head_ptr(p_addend, i_b, i_h, addend_sb, addend_sh)
        b_o = mix_head(b_o, p_gain, i_h, p_addend_h, addend_st, addend_sd, i_m, n_queries, D, BM, BD)
        b_o = b_o.to(b_q.dtype)
        if p_out is not None:
            p_head = head_ptr(p_out, i_b, i_h, mul64(n_queries, n_heads * D), D)
            store_head(p_head, n_heads * D, b_o, i_m, n_queries, D, BM, BD)
            p_stats_h = head_ptr(p_stats, i_b, i_h, 2 * n_heads * n_queries, 2 * n_queries)
            store_softmax_stats(p_stats_h, b_max, b_inverse, i_m, n_queries, BM)
        p_weight_h = p_weight + mul64(i_h * D, n_channels)
        b_sums = ()
        for i_e in tl.static_range(NUM_E_TILES):
            b_w = load_matrix(p_weight_h, n_channels, 1, 0, i_e * E_TILE, D, n_channels, BD, E_TILE)
            b_sums = b_sums + (dot(b_o, b_w, b_y[i_e], PRECISION),)
        b_y = b_sums
    for i_e in tl.static_range(NUM_E_TILES):
        epilogue(
            b_y[i_e], i_b, i_m, i_e * E_TILE, tl.program_id(0), p_bias, p_sample_scale, p_r, r_sb, r_st, r_se,
            p_y, p_moments, n_queries, n_channels, BM, E_TILE,
        )
# fmt: on
