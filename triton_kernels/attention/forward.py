"""The kernels of attention's forward pass (the launchers and the choice between them are in attention.py).

Where all channels of y fit in a program's registers, one launch does everything: fused_kernel takes a block of queries
through all heads and adds up their projections. Otherwise attention_kernel, the one known from Triton's tutorial,
writes the heads once, and projection_kernel's loop over features is the sum over heads.
Both end in finish_tile: the residual, y, and the statistics of the tile's tokens, of which the norms are made.
"""

import triton
import triton.language as tl

from overtone.triton_kernels.attention.device import (
    at_head,
    at_tile,
    in_matrix,
    load_columns,
    load_head,
    load_matrix,
    locate_block,
    mask_logits,
    mul64,
    multiply,
    store_head,
)
from overtone.triton_kernels.frequency.device import store_statistics, tile_statistics


# fmt: off
@triton.jit
def attend(
    b_q, p_k, k_st, k_sd, p_v, v_st, v_sd, p_mask, mask_sq, mask_sk, i_m, n_queries, n_keys, logit_scale,
    D: tl.constexpr, IS_CAUSAL: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr, UNIT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):
    """softmax(scale · q kᵀ + bias) v of one head for the queries [i_m, i_m + BM), [BM, BD].

    Maximum and 1 / sum of every softmax are returned too.
    With WHOLE, BN keys are all there are and a row of logits is there at once; otherwise the softmax is online.
    A row in which no key takes part has the maximum 0 and 1 / sum = 0, so it is zero here and in backward.
    """
    o_m, o_n = tl.arange(0, BM)[:, None], tl.arange(0, BN)[None, :]
    if WHOLE:
        b_k = load_head(p_k, k_st, k_sd, 0, n_keys, D, BN, BD, UNIT)  # [BN, BD]
        b_v = load_head(p_v, v_st, v_sd, 0, n_keys, D, BN, BD, UNIT)  # [BN, BD]
        b_s = multiply(b_q, tl.trans(b_k), None, PRECISION) * logit_scale  # [BM, BN]
        b_s = mask_logits(b_s, p_mask, mask_sq, mask_sk, i_m, o_m, n_queries, 0, o_n, n_keys, IS_CAUSAL)
        b_max = tl.max(b_s, 1)
        b_max = tl.where(b_max == float("-inf"), 0.0, b_max)
        b_p = tl.exp2(b_s - b_max[:, None])
        b_sum = tl.sum(b_p, 1)
        b_o = multiply(b_p.to(b_v.dtype), b_v, None, PRECISION)  # [BM, BD]
    else:
        b_max = tl.full([BM], float("-inf"), dtype=tl.float32)
        b_sum = tl.zeros([BM], dtype=tl.float32)
        b_o = tl.zeros([BM, BD], dtype=tl.float32)
        i_end = n_keys
        if IS_CAUSAL:
            i_end = tl.minimum(n_keys, i_m + BM)
        for i_n in range(0, i_end, BN):
            b_k = load_head(p_k, k_st, k_sd, i_n, n_keys, D, BN, BD, UNIT)  # [BN, BD]
            b_s = multiply(b_q, tl.trans(b_k), None, PRECISION) * logit_scale  # [BM, BN]
            b_s = mask_logits(b_s, p_mask, mask_sq, mask_sk, i_m, o_m, n_queries, i_n, o_n, n_keys, IS_CAUSAL)
            b_next = tl.maximum(b_max, tl.max(b_s, 1))
            b_base = tl.where(b_next == float("-inf"), 0.0, b_next)  # no key yet: −inf − 0, not −inf − −inf
            b_p = tl.exp2(b_s - b_base[:, None])
            b_rescale = tl.exp2(b_max - b_base)
            b_sum = b_sum * b_rescale + tl.sum(b_p, 1)
            b_v = load_head(p_v, v_st, v_sd, i_n, n_keys, D, BN, BD, UNIT)  # [BN, BD]
            b_o = multiply(b_p.to(b_v.dtype), b_v, b_o * b_rescale[:, None], PRECISION)
            b_max = b_next
        b_max = tl.where(b_max == float("-inf"), 0.0, b_max)
    b_inverse = tl.where(b_sum == 0, 0.0, 1.0 / tl.where(b_sum == 0, 1.0, b_sum))
    return b_o * b_inverse[:, None], b_max, b_inverse


@triton.jit
def store_softmax_rows(p_rows, b_max, b_inverse, i_m, n_queries, BM: tl.constexpr):
    """As the head's [queries, 2]."""
    o_m = i_m + tl.arange(0, BM)
    p_row = p_rows + 2 * o_m
    tl.store(p_row, b_max, mask=o_m < n_queries)
    tl.store(p_row + 1, b_inverse, mask=o_m < n_queries)


@triton.jit
def finish_tile(
    b_y, i_b, i_t, i_e, i_row, p_r, r_sb, r_st, r_se, p_y, p_wide, p_statistics, n_tokens, n_channels,
    BT: tl.constexpr, BE: tl.constexpr,
):
    """Add the residual and store the tile at (i_t, i_e) of image i_b of y; with p_wide before it is rounded too.

    With p_statistics the statistics of the tile's tokens go to row i_row of [rows, 4, channels].
    """
    o_image = mul64(i_b, mul64(n_tokens, n_channels))
    m_tile = in_matrix(i_t, i_e, n_tokens, n_channels, BT, BE)
    if p_r is not None:
        b_y += load_matrix(p_r + mul64(i_b, r_sb), r_st, r_se, i_t, i_e, n_tokens, n_channels, BT, BE)
    tl.store(at_tile(p_y + o_image, n_channels, 1, i_t, i_e, BT, BE), b_y, mask=m_tile)
    if p_wide is not None:
        tl.store(at_tile(p_wide + o_image, n_channels, 1, i_t, i_e, BT, BE), b_y, mask=m_tile)
    if p_statistics is not None:
        o_t, o_e = tl.arange(0, BT), i_e + tl.arange(0, BE)
        b_first = tl.sum(tl.where((o_t == 0)[:, None], b_y, 0.0), 0)  # the tile's first token
        b_n, b_mean, b_rest, b_m2 = tile_statistics(b_y, b_first, i_t + o_t < n_tokens)
        store_statistics(p_statistics, n_channels, i_row, o_e, o_e < n_channels, b_n, b_mean, b_rest, b_m2)


@triton.jit
def attention_kernel(
    p_q, q_sb, q_sh, q_st, q_sd, p_k, k_sb, k_sh, k_st, k_sd, p_v, v_sb, v_sh, v_st, v_sd,
    p_mask, mask_sb, mask_sh, mask_sq, mask_sk, p_heads, p_rows, logit_scale, n_heads, n_queries, n_keys,
    D: tl.constexpr, IS_CAUSAL: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr, UNIT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):
    """A block of queries of one head -> heads [B, N, H·D] and, with p_rows, softmax_rows [B, H, N, 2]."""
    i_b, i_h, i_m = locate_block(n_queries, n_heads, BM)
    if p_mask is not None:
        p_mask = at_head(p_mask, i_b, i_h, mask_sb, mask_sh)
    b_q = load_head(at_head(p_q, i_b, i_h, q_sb, q_sh, UNIT), q_st, q_sd, i_m, n_queries, D, BM, BD, UNIT)  # [BM, BD]
    b_o, b_max, b_inverse = attend(
        b_q, at_head(p_k, i_b, i_h, k_sb, k_sh, UNIT), k_st, k_sd,
        at_head(p_v, i_b, i_h, v_sb, v_sh, UNIT), v_st, v_sd, p_mask, mask_sq, mask_sk,
        i_m, n_queries, n_keys, logit_scale, D, IS_CAUSAL, WHOLE, PRECISION, UNIT, BM, BN, BD,
    )
    p_head = at_head(p_heads, i_b, i_h, mul64(n_queries, n_heads * D), D)
    store_head(p_head, n_heads * D, b_o, i_m, n_queries, D, BM, BD)
    if p_rows is not None:
        p_rows = at_head(p_rows, i_b, i_h, 2 * n_heads * n_queries, 2 * n_queries)
        store_softmax_rows(p_rows, b_max, b_inverse, i_m, n_queries, BM)


@triton.jit
def projection_kernel(
    p_heads, p_eigenvalues, p_basis, basis_sk, basis_se, p_r, r_sb, r_st, r_se, p_y, p_wide, p_statistics,
    n_tokens, n_features, n_channels,
    PRECISION: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BE: tl.constexpr,
):
    """A tile of y = residual + heads · diag(eigenvalues) · basis. Programs of the same tokens are neighbours."""
    n_columns, n_blocks = tl.cdiv(n_channels, BE), tl.cdiv(n_tokens, BM)
    i_e, i_row = tl.program_id(0) % n_columns * BE, tl.program_id(0) // n_columns
    i_b, i_m = i_row // n_blocks, i_row % n_blocks * BM
    p_heads += mul64(i_b, mul64(n_tokens, n_features))
    b_y = tl.zeros([BM, BE], dtype=tl.float32)
    for i_k in range(0, n_features, BK):
        b_heads = load_matrix(p_heads, n_features, 1, i_m, i_k, n_tokens, n_features, BM, BK)  # [BM, BK]
        b_basis = load_matrix(p_basis, basis_sk, basis_se, i_k, i_e, n_features, n_channels, BK, BE)  # [BK, BE]
        o_k = i_k + tl.arange(0, BK)
        b_eigenvalues = tl.load(p_eigenvalues + o_k, mask=o_k < n_features, other=0.0)
        b_scaled = (b_heads * b_eigenvalues[None, :]).to(b_basis.dtype)
        b_y = multiply(b_scaled, b_basis, b_y, PRECISION)
    finish_tile(
        b_y, i_b, i_m, i_e, i_row, p_r, r_sb, r_st, r_se, p_y, p_wide, p_statistics, n_tokens, n_channels, BM, BE
    )


@triton.jit
def fused_kernel(
    p_q, q_sb, q_sh, q_st, q_sd, p_k, k_sb, k_sh, k_st, k_sd, p_v, v_sb, v_sh, v_st, v_sd,
    p_mask, mask_sb, mask_sh, mask_sq, mask_sk, p_eigenvalues, p_basis, basis_sk, basis_se, p_r, r_sb, r_st, r_se,
    p_y, p_wide, p_statistics, p_heads, p_rows, logit_scale, n_heads, n_queries, n_keys, n_channels,
    D: tl.constexpr, IS_CAUSAL: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr, UNIT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, PIECES: tl.constexpr,
):
    """A block of queries through all heads to y, which is held in PIECES accumulators [BM, BE].

    With p_heads, heads and softmax_rows are kept for backward.
    """
    i_b, _, i_m = locate_block(n_queries, 1, BM)
    b_y = ()
    for _ in tl.static_range(PIECES):
        b_y = b_y + (tl.zeros([BM, BE], dtype=tl.float32),)
    for i_h in range(n_heads):
        p_mask_h = p_mask
        if p_mask is not None:
            p_mask_h = at_head(p_mask, i_b, i_h, mask_sb, mask_sh)
        p_q_h = at_head(p_q, i_b, i_h, q_sb, q_sh, UNIT)
        b_q = load_head(p_q_h, q_st, q_sd, i_m, n_queries, D, BM, BD, UNIT)  # [BM, BD]
        b_o, b_max, b_inverse = attend(
            b_q, at_head(p_k, i_b, i_h, k_sb, k_sh, UNIT), k_st, k_sd,
            at_head(p_v, i_b, i_h, v_sb, v_sh, UNIT), v_st, v_sd, p_mask_h, mask_sq, mask_sk,
            i_m, n_queries, n_keys, logit_scale, D, IS_CAUSAL, WHOLE, PRECISION, UNIT, BM, BN, BD,
        )
        if p_heads is not None:
            p_head = at_head(p_heads, i_b, i_h, mul64(n_queries, n_heads * D), D)
            store_head(p_head, n_heads * D, b_o, i_m, n_queries, D, BM, BD)
            p_rows_h = at_head(p_rows, i_b, i_h, 2 * n_heads * n_queries, 2 * n_queries)
            store_softmax_rows(p_rows_h, b_max, b_inverse, i_m, n_queries, BM)
        b_eigenvalues = load_columns(p_eigenvalues + i_h * D, D, BD)
        b_scaled = (b_o * b_eigenvalues[None, :]).to(b_q.dtype)
        p_basis_h = p_basis + mul64(i_h * D, basis_sk)
        b_sums = ()
        for i_e in tl.static_range(PIECES):
            b_basis = load_matrix(p_basis_h, basis_sk, basis_se, 0, i_e * BE, D, n_channels, BD, BE)  # [BD, BE]
            b_sums = b_sums + (multiply(b_scaled, b_basis, b_y[i_e], PRECISION),)
        b_y = b_sums
    for i_e in tl.static_range(PIECES):
        finish_tile(
            b_y[i_e], i_b, i_m, i_e * BE, tl.program_id(0), p_r, r_sb, r_st, r_se, p_y, p_wide, p_statistics,
            n_queries, n_channels, BM, BE,
        )
# fmt: on
