"""The kernels of attention's backward pass (the launchers are in attention.py).

With G = ∂L/∂y (MATH.md §2), O the heads, and P the softmax, made again from its rows' maximum and 1 / sum:
    heads_gradient_kernel       ∂O = G Uᵀ diag(λ), δ = rowsum(∂O ⊙ O), and ∂λ = Σ_tokens O ⊙ G Uᵀ of a block of tokens
    basis_gradient_kernel       ∂U = diag(λ) Oᵀ G over a split of the tokens
    key_value_gradient_kernel   ∂V = Pᵀ ∂O and ∂K = scale · ∂Sᵀ Q, where ∂S = P ⊙ (∂O Vᵀ − δ)
    query_gradient_kernel       ∂Q = scale · ∂S K, and ∂S itself where the bias needs a gradient
column_sums_kernel adds up the blocks and splits. No atomics: every sum has one fixed order.
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


# fmt: off
@triton.jit
def heads_gradient_kernel(
    p_g, p_eigenvalues, p_basis, basis_sk, basis_se, p_heads, p_grad_heads, p_delta, p_grad_eigenvalues,
    n_heads, n_tokens, n_channels,
    D: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr,
):
    """∂O [B, N, H·D] and δ [B, H, N]; with p_grad_eigenvalues ∂λ of every block of tokens too, [blocks, H·D].

    Without p_grad_heads only ∂λ is wanted. Programs of the same tokens are neighbours.
    """
    i_h, i_row = tl.program_id(0) % n_heads, tl.program_id(0) // n_heads
    n_blocks = tl.cdiv(n_tokens, BM)
    i_b, i_m = i_row // n_blocks, i_row % n_blocks * BM
    p_g += mul64(i_b, mul64(n_tokens, n_channels))
    p_basis += mul64(i_h * D, basis_sk)
    b_back = tl.zeros([BM, BD], dtype=tl.float32)  # G Uᵀ
    for i_e in range(0, n_channels, BK):
        b_g = load_matrix(p_g, n_channels, 1, i_m, i_e, n_tokens, n_channels, BM, BK)  # [BM, BK]
        b_basis = load_matrix(p_basis, basis_sk, basis_se, 0, i_e, D, n_channels, BD, BK)  # [BD, BK]
        b_back = multiply(b_g.to(b_basis.dtype), tl.trans(b_basis), b_back, PRECISION)
    b_eigenvalues = load_columns(p_eigenvalues + i_h * D, D, BD)
    p_heads = at_head(p_heads, i_b, i_h, mul64(n_tokens, n_heads * D), D)
    b_o = load_head(p_heads, n_heads * D, 1, i_m, n_tokens, D, BM, BD).to(tl.float32)  # [BM, BD]
    if p_grad_heads is not None:
        p_grad_heads = at_head(p_grad_heads, i_b, i_h, mul64(n_tokens, n_heads * D), D)
        # δ from ∂O as it is stored: then the rows of ∂S add up to zero as they should.
        b_do = (b_back * b_eigenvalues[None, :]).to(p_grad_heads.dtype.element_ty)
        store_head(p_grad_heads, n_heads * D, b_do, i_m, n_tokens, D, BM, BD)
        p_delta = at_head(p_delta, i_b, i_h, n_heads * n_tokens, n_tokens)
        o_m = i_m + tl.arange(0, BM)
        tl.store(p_delta + o_m, tl.sum(b_do.to(tl.float32) * b_o, 1), mask=o_m < n_tokens)
    if p_grad_eigenvalues is not None:
        p_row = p_grad_eigenvalues + mul64(tl.program_id(0), D)
        o_d = tl.arange(0, BD)
        tl.store(p_row + o_d, tl.sum(b_o * b_back, 0), mask=o_d < D)


@triton.jit
def basis_gradient_kernel(
    p_heads, p_eigenvalues, p_g, p_grad_basis, n_tokens, n_features, n_channels, n_split_tokens,
    PRECISION: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr,
):
    """A tile of ∂U over one split of all images' tokens, to [splits, features, channels]."""
    n_columns = tl.cdiv(n_channels, BE)
    n_tiles = tl.cdiv(n_features, BM) * n_columns
    i_tile, i_split = tl.program_id(0) % n_tiles, tl.program_id(0) // n_tiles
    i_m, i_e = i_tile // n_columns * BM, i_tile % n_columns * BE
    i_first = i_split * n_split_tokens
    i_end = tl.minimum(n_tokens, i_first + n_split_tokens)
    b_sum = tl.zeros([BM, BE], dtype=tl.float32)
    for i_t in range(i_first, i_end, BK):
        b_heads = load_matrix(p_heads, n_features, 1, i_t, i_m, i_end, n_features, BK, BM)  # [BK, BM]
        b_g = load_matrix(p_g, n_channels, 1, i_t, i_e, i_end, n_channels, BK, BE).to(b_heads.dtype)  # [BK, BE]
        b_sum = multiply(tl.trans(b_heads), b_g, b_sum, PRECISION)
    o_m = i_m + tl.arange(0, BM)
    b_eigenvalues = tl.load(p_eigenvalues + o_m, mask=o_m < n_features, other=0.0)
    p_split = p_grad_basis + mul64(i_split, mul64(n_features, n_channels))
    m_tile = in_matrix(i_m, i_e, n_features, n_channels, BM, BE)
    tl.store(at_tile(p_split, n_channels, 1, i_m, i_e, BM, BE), b_sum * b_eigenvalues[:, None], mask=m_tile)


@triton.jit
def load_softmax_rows(p_rows, p_delta, i_m, n_queries, BM: tl.constexpr):
    """Maximum, 1 / sum and δ of the queries [i_m, i_m + BM) of a head."""
    o_m = i_m + tl.arange(0, BM)
    m_m = o_m < n_queries
    b_max = tl.load(p_rows + 2 * o_m, mask=m_m, other=0.0)
    b_inverse = tl.load(p_rows + 2 * o_m + 1, mask=m_m, other=0.0)
    return b_max, b_inverse, tl.load(p_delta + o_m, mask=m_m, other=0.0)


@triton.jit
def key_value_gradient_kernel(
    p_q, q_sb, q_sh, q_st, q_sd, p_k, k_sb, k_sh, k_st, k_sd, p_v, v_sb, v_sh, v_st, v_sd,
    p_mask, mask_sb, mask_sh, mask_sq, mask_sk, p_grad_heads, p_rows, p_delta, p_grad_k, p_grad_v,
    scale, logit_scale, n_heads, n_queries, n_keys,
    D: tl.constexpr, IS_CAUSAL: tl.constexpr, PRECISION: tl.constexpr, UNIT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):
    """∂K and ∂V of a block of keys, over all queries. Everything is transposed, so that no tile has to be."""
    i_b, i_h, i_n = locate_block(n_keys, n_heads, BN)
    o_m, o_n = tl.arange(0, BM)[None, :], tl.arange(0, BN)[:, None]
    if p_mask is not None:
        p_mask = at_head(p_mask, i_b, i_h, mask_sb, mask_sh)
    p_q = at_head(p_q, i_b, i_h, q_sb, q_sh, UNIT)
    p_do = at_head(p_grad_heads, i_b, i_h, mul64(n_queries, n_heads * D), D)
    p_rows = at_head(p_rows, i_b, i_h, 2 * n_heads * n_queries, 2 * n_queries)
    p_delta = at_head(p_delta, i_b, i_h, n_heads * n_queries, n_queries)
    b_k = load_head(at_head(p_k, i_b, i_h, k_sb, k_sh, UNIT), k_st, k_sd, i_n, n_keys, D, BN, BD, UNIT)  # [BN, BD]
    if p_grad_k is not None:
        b_v = load_head(at_head(p_v, i_b, i_h, v_sb, v_sh, UNIT), v_st, v_sd, i_n, n_keys, D, BN, BD, UNIT)  # [BN, BD]
    b_dk = tl.zeros([BN, BD], dtype=tl.float32)
    b_dv = tl.zeros([BN, BD], dtype=tl.float32)
    i_first = 0
    if IS_CAUSAL:
        i_first = i_n // BM * BM  # earlier queries see none of these keys
    for i_m in range(i_first, n_queries, BM):
        b_q = load_head(p_q, q_st, q_sd, i_m, n_queries, D, BM, BD, UNIT)  # [BM, BD]
        b_do = load_head(p_do, n_heads * D, 1, i_m, n_queries, D, BM, BD)  # [BM, BD]
        b_max, b_inverse, b_delta = load_softmax_rows(p_rows, p_delta, i_m, n_queries, BM)
        b_s = multiply(b_k, tl.trans(b_q), None, PRECISION) * logit_scale  # [BN, BM]
        b_s = mask_logits(b_s, p_mask, mask_sq, mask_sk, i_m, o_m, n_queries, i_n, o_n, n_keys, IS_CAUSAL)
        b_p = tl.exp2(b_s - b_max[None, :]) * b_inverse[None, :]
        if p_grad_v is not None:
            b_dv = multiply(b_p.to(b_do.dtype), b_do, b_dv, PRECISION)
        if p_grad_k is not None:
            b_dp = multiply(b_v, tl.trans(b_do), None, PRECISION)  # [BN, BM]
            b_ds = b_p * (b_dp - b_delta[None, :])
            b_dk = multiply(b_ds.to(b_q.dtype), b_q, b_dk, PRECISION)
    o_head = mul64(i_b * n_heads + i_h, mul64(n_keys, D))
    if p_grad_k is not None:
        store_head(p_grad_k + o_head, D, b_dk * scale, i_n, n_keys, D, BN, BD)
    if p_grad_v is not None:
        store_head(p_grad_v + o_head, D, b_dv, i_n, n_keys, D, BN, BD)


@triton.jit
def query_gradient_kernel(
    p_q, q_sb, q_sh, q_st, q_sd, p_k, k_sb, k_sh, k_st, k_sd, p_v, v_sb, v_sh, v_st, v_sd,
    p_mask, mask_sb, mask_sh, mask_sq, mask_sk, p_grad_heads, p_rows, p_delta, p_grad_q, p_grad_logits,
    scale, logit_scale, n_heads, n_queries, n_keys,
    D: tl.constexpr, IS_CAUSAL: tl.constexpr, PRECISION: tl.constexpr, UNIT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):
    """∂Q of a block of queries, over all keys; with p_grad_logits ∂S [B, H, N, M] too."""
    i_b, i_h, i_m = locate_block(n_queries, n_heads, BM)
    o_m, o_n = tl.arange(0, BM)[:, None], tl.arange(0, BN)[None, :]
    if p_mask is not None:
        p_mask = at_head(p_mask, i_b, i_h, mask_sb, mask_sh)
    p_k = at_head(p_k, i_b, i_h, k_sb, k_sh, UNIT)
    p_v = at_head(p_v, i_b, i_h, v_sb, v_sh, UNIT)
    p_do = at_head(p_grad_heads, i_b, i_h, mul64(n_queries, n_heads * D), D)
    p_rows = at_head(p_rows, i_b, i_h, 2 * n_heads * n_queries, 2 * n_queries)
    p_delta = at_head(p_delta, i_b, i_h, n_heads * n_queries, n_queries)
    b_q = load_head(at_head(p_q, i_b, i_h, q_sb, q_sh, UNIT), q_st, q_sd, i_m, n_queries, D, BM, BD, UNIT)  # [BM, BD]
    b_do = load_head(p_do, n_heads * D, 1, i_m, n_queries, D, BM, BD)  # [BM, BD]
    b_max, b_inverse, b_delta = load_softmax_rows(p_rows, p_delta, i_m, n_queries, BM)
    b_dq = tl.zeros([BM, BD], dtype=tl.float32)
    i_head = i_b * n_heads + i_h  # of all images
    i_end = n_keys
    if IS_CAUSAL:
        if p_grad_logits is None:  # later keys are not seen: their ∂S is zero, but must be written
            i_end = tl.minimum(n_keys, i_m + BM)
    for i_n in range(0, i_end, BN):
        b_k = load_head(p_k, k_st, k_sd, i_n, n_keys, D, BN, BD, UNIT)  # [BN, BD]
        b_v = load_head(p_v, v_st, v_sd, i_n, n_keys, D, BN, BD, UNIT)  # [BN, BD]
        b_s = multiply(b_q, tl.trans(b_k), None, PRECISION) * logit_scale  # [BM, BN]
        b_s = mask_logits(b_s, p_mask, mask_sq, mask_sk, i_m, o_m, n_queries, i_n, o_n, n_keys, IS_CAUSAL)
        b_p = tl.exp2(b_s - b_max[:, None]) * b_inverse[:, None]
        b_dp = multiply(b_do, tl.trans(b_v), None, PRECISION)  # [BM, BN]
        b_ds = b_p * (b_dp - b_delta[:, None])
        if p_grad_logits is not None:
            p_tile = at_tile(p_grad_logits + mul64(i_head, mul64(n_queries, n_keys)), n_keys, 1, i_m, i_n, BM, BN)
            tl.store(p_tile, b_ds, mask=in_matrix(i_m, i_n, n_queries, n_keys, BM, BN))
        if p_grad_q is not None:
            b_dq = multiply(b_ds.to(b_k.dtype), b_k, b_dq, PRECISION)
    if p_grad_q is not None:
        store_head(p_grad_q + mul64(i_head, mul64(n_queries, D)), D, b_dq * scale, i_m, n_queries, D, BM, BD)


@triton.jit
def column_sums_kernel(p_rows, p_sums, n_rows, n_columns, BT: tl.constexpr, BC: tl.constexpr):
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
