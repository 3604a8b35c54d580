"""Device functions that attention's forward and backward share, on tiles of BM queries, BN keys and BD head columns.

A head of width D lies in tiles of BD columns, the next power of two; what lies beyond D is masked, never copied.
Logits are in base 2: exp2(b_s) is exp(scale · q kᵀ + bias), as logit_scale is scale · log2(e).
The way to an image, a head or a tile is one int64 number. Inside a tile offsets are int32, which saves registers; the
launchers see to it that no tile spans 2³¹ elements.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def program_tile(n_tokens, n_inner, BT: tl.constexpr):
    """(i_outer, i_inner, i_t) of this program, of which i_t, the first token of its tile, runs fastest."""
    n_blocks = tl.cdiv(n_tokens, BT)
    i_s = tl.program_id(0) // n_blocks
    return i_s // n_inner, i_s % n_inner, tl.program_id(0) % n_blocks * BT


@triton.jit
def mul64(a, b):
    """a · b of two scalars in int64."""
    return tl.full([], a, tl.int64) * b  # not a.to(tl.int64): in the interpreter a loop's index is a plain number


@triton.jit
def as_multiple(stride, STRIDE_ALIGN: tl.constexpr):
    """A stride that STRIDE_ALIGN divides, in a form in which the compiler sees it: it sees only 16 by itself."""
    if STRIDE_ALIGN > 1:
        stride = stride // STRIDE_ALIGN * STRIDE_ALIGN
    return stride


@triton.jit
def head_ptr(p_x, i_b, i_h, x_sb, x_sh, STRIDE_ALIGN: tl.constexpr = 1):
    """The pointer at head i_h of image i_b."""
    return p_x + mul64(i_b, as_multiple(x_sb, STRIDE_ALIGN)) + mul64(i_h, as_multiple(x_sh, STRIDE_ALIGN))


@triton.jit
def tile_ptrs(p_x, x_sr, x_sc, i_r, i_c, BR: tl.constexpr, BC: tl.constexpr):
    """The pointers at rows [i_r, i_r + BR) and columns [i_c, i_c + BC) of a matrix with these strides."""
    o_r, o_c = tl.arange(0, BR), tl.arange(0, BC)
    return p_x + mul64(i_r, x_sr) + mul64(i_c, x_sc) + (o_r[:, None] * x_sr + o_c[None, :] * x_sc)


@triton.jit
def tile_mask(i_r, i_c, n_rows, n_columns, BR: tl.constexpr, BC: tl.constexpr):
    """Which elements of the tile at (i_r, i_c) the matrix has."""
    return (i_r + tl.arange(0, BR) < n_rows)[:, None] & (i_c + tl.arange(0, BC) < n_columns)[None, :]


@triton.jit
def load_matrix(p_x, x_sr, x_sc, i_r, i_c, n_rows, n_columns, BR: tl.constexpr, BC: tl.constexpr):
    """The tile at (i_r, i_c), [BR, BC]; zero outside the matrix."""
    m_tile = tile_mask(i_r, i_c, n_rows, n_columns, BR, BC)
    return tl.load(tile_ptrs(p_x, x_sr, x_sc, i_r, i_c, BR, BC), mask=m_tile, other=0.0)


@triton.jit
def head_mask(i_t, n_tokens, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    """Which elements of the tile at token i_t the head has."""
    m_tile = (i_t + tl.arange(0, BT) < n_tokens)[:, None]
    if D < BD:
        m_tile = m_tile & (tl.arange(0, BD) < D)[None, :]
    return m_tile


@triton.jit
def load_head(
    p_x, x_st, x_sd, i_t, n_tokens, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, STRIDE_ALIGN: tl.constexpr = 1
):
    """Tokens [i_t, i_t + BT) of a head, [BT, BD]; zero where there are none, and beyond the head's width."""
    m_tile = head_mask(i_t, n_tokens, D, BT, BD)
    p_tile = tile_ptrs(p_x, as_multiple(x_st, STRIDE_ALIGN), x_sd, i_t, 0, BT, BD)
    return tl.load(p_tile, mask=m_tile, other=0.0)


@triton.jit
def store_head(p_x, x_st, b_x, i_t, n_tokens, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    """Store [BT, BD] as tokens [i_t, i_t + BT) of a head, whose columns are neighbors."""
    tl.store(tile_ptrs(p_x, x_st, 1, i_t, 0, BT, BD), b_x, mask=head_mask(i_t, n_tokens, D, BT, BD))


@triton.jit
def round_to_tf32(b_x, PRECISION: tl.constexpr):
    """Rounded to TF32, if that is the precision: matrix instructions only cut off what they cannot hold."""
    if PRECISION == "tf32":
        b_x = tl.inline_asm_elementwise("cvt.rna.tf32.f32 $0, $1;", "=r,r", [b_x], tl.float32, is_pure=True, pack=1)
    return b_x


@triton.jit
def dot(b_a, b_b, b_sum, PRECISION: tl.constexpr):
    """b_a · b_b, added to b_sum unless that is None."""
    return tl.dot(round_to_tf32(b_a, PRECISION), round_to_tf32(b_b, PRECISION), b_sum, input_precision=PRECISION)


@triton.jit
def mask_logits(b_s, p_mask, mask_sq, mask_sk, i_q, o_q, n_queries, i_k, o_k, n_keys, IS_CAUSAL: tl.constexpr):
    """Logits of queries i_q + o_q and keys i_k + o_k with the bias added, −inf where a key is masked.

    o_q and o_k are two-dimensional, so that b_s may be [queries, keys] or its transpose.
    """
    m_s = (i_q + o_q < n_queries) & (i_k + o_k < n_keys)
    if IS_CAUSAL:
        m_s = m_s & (i_k + o_k <= i_q + o_q)
    if p_mask is not None:
        p_tile = p_mask + mul64(i_q, mask_sq) + mul64(i_k, mask_sk) + (o_q * mask_sq + o_k * mask_sk)
        if p_mask.dtype.element_ty == tl.uint8:
            m_s = tl.load(p_tile, mask=m_s, other=0) != 0
        else:
            b_s += LOG2E * tl.load(p_tile, mask=m_s, other=0.0)
    return tl.where(m_s, b_s, float("-inf"))
