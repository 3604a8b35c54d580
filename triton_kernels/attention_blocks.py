"""Device functions that attention's forward and backward share, on tiles of BM queries, BN keys and BD head columns.

A head of width D lies in tiles of BD columns, the next power of two; what lies beyond D is masked, never copied.
Logits are in base 2: exp2(b_s) is exp(scale · q kᵀ + bias), as the launchers multiply `scale` by log2(e).
Offsets to an image or a head are int64. Offsets inside one are int32, which saves registers, unless it spans 2³¹
elements: then WIDE is True.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def locate_block(n_tokens, n_inner, BT: tl.constexpr):
    """(i_outer, i_inner, i_t) of this program, of which i_t, the block of tokens, runs fastest."""
    n_blocks = tl.cdiv(n_tokens, BT)
    i_s = tl.program_id(0) // n_blocks
    return i_s // n_inner, i_s % n_inner, tl.program_id(0) % n_blocks


@triton.jit
def at_head(p_x, i_b, i_h, x_sb, x_sh):
    """The pointer at head i_h of image i_b."""
    return p_x + i_b.to(tl.int64) * x_sb + i_h.to(tl.int64) * x_sh


@triton.jit
def tile_offsets(o_r, o_c, x_sr, x_sc, WIDE: tl.constexpr):
    """Rows o_r and columns o_c of a matrix with these strides."""
    if WIDE:
        o_r, o_c = o_r.to(tl.int64), o_c.to(tl.int64)
    return o_r[:, None] * x_sr + o_c[None, :] * x_sc


@triton.jit
def load_head(p_x, x_st, x_sd, o_t, n_tokens, D: tl.constexpr, BD: tl.constexpr, WIDE: tl.constexpr):
    """Tokens o_t of a head, [BT, BD]; zero where there are none, and beyond the head's width."""
    o_d = tl.arange(0, BD)
    m_tile = (o_t < n_tokens)[:, None]
    if D < BD:
        m_tile = m_tile & (o_d < D)[None, :]
    return tl.load(p_x + tile_offsets(o_t, o_d, x_st, x_sd, WIDE), mask=m_tile, other=0.0)


@triton.jit
def store_head(p_x, x_st, b_x, o_t, n_tokens, D: tl.constexpr, BD: tl.constexpr, WIDE: tl.constexpr):
    """Store [BT, BD] as tokens o_t of a head, whose columns are neighbours."""
    o_d = tl.arange(0, BD)
    m_tile = (o_t < n_tokens)[:, None]
    if D < BD:
        m_tile = m_tile & (o_d < D)[None, :]
    tl.store(p_x + tile_offsets(o_t, o_d, x_st, 1, WIDE), b_x, mask=m_tile)


@triton.jit
def load_columns(p_x, D: tl.constexpr, BD: tl.constexpr):
    """A vector over a head's columns, [BD]."""
    o_d = tl.arange(0, BD)
    if D < BD:
        b_x = tl.load(p_x + o_d, mask=o_d < D, other=0.0)
    else:
        b_x = tl.load(p_x + o_d)
    return b_x


@triton.jit
def load_matrix(p_x, x_sr, x_sc, o_r, o_c, n_rows, n_columns, WIDE: tl.constexpr):
    """Rows o_r and columns o_c of a matrix; zero outside."""
    m_tile = (o_r < n_rows)[:, None] & (o_c < n_columns)[None, :]
    return tl.load(p_x + tile_offsets(o_r, o_c, x_sr, x_sc, WIDE), mask=m_tile, other=0.0)


@triton.jit
def mask_logits(
    b_s, p_mask, mask_sq, mask_sk, o_q, o_k, n_queries, n_keys, IS_CAUSAL: tl.constexpr, WIDE: tl.constexpr
):
    """Logits with the bias added, −inf where a key takes no part.

    o_q and o_k are two-dimensional, so that b_s may be [queries, keys] or its transpose.
    """
    m_s = (o_q < n_queries) & (o_k < n_keys)
    if IS_CAUSAL:
        m_s = m_s & (o_k <= o_q)
    if p_mask is not None:
        if WIDE:
            o_q, o_k = o_q.to(tl.int64), o_k.to(tl.int64)
        p_tile = p_mask + (o_q * mask_sq + o_k * mask_sk)
        if p_mask.dtype.element_ty == tl.int1:
            m_s = tl.load(p_tile, mask=m_s, other=False)
        else:
            b_s += LOG2E * tl.load(p_tile, mask=m_s, other=0.0)
    return tl.where(m_s, b_s, float("-inf"))
