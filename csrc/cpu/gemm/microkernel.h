// Small matrix products on register tiles, for operands that fit a core's cache.
//
// gemm() computes C = A · B tile by tile and hands every finished vector of C to a functor, so that what follows a
// product (scaling, a sum) happens while the value is still in a register. Every element of C is summed in the order of
// k whichever tile it lies in, so results do not depend on how rows are cut into calls.
#pragma once

#include "cpu/simd/vector.h"

namespace overtone::OVERTONE_ISA {

// Tiles of rows × vectors that fill the registers but for one row of B and one element of A.
#if OVERTONE_VECTOR_BYTES == 64
constexpr int kWidestTile = 4;  // 32 registers: 6 × 4, 8 × 3
template <int kVectors>
inline constexpr int kTileRows = kVectors == 4 ? 6 : 8;
#else
constexpr int kWidestTile = 2;  // 16 registers: 6 × 2, 8 × 1
template <int kVectors>
inline constexpr int kTileRows = kVectors == 2 ? 6 : 8;
#endif

// How a row of `left` vectors is cut: into fours where they fit, else into threes as far as they do (7 = 4 + 3);
// narrower tiles only where nothing else fits. 6 × 4 and 8 × 3 both fill 32 registers; a row of 12 vectors in fours
// makes attention forward 1–2 % faster than in threes (Zen 4).
OVERTONE_INLINE int next_tile_width(int left) {
  if constexpr (kWidestTile == 2) {
    return left >= 2 ? 2 : 1;
  } else {
    return left % 4 == 0 ? 4 : left % 3 == 0 || left == 5 ? 3 : std::min(left, 4);
  }
}

// Vectors that hold `columns` elements.
template <class A>
OVERTONE_INLINE int vectors_of(int64_t columns) {
  return static_cast<int>((columns + kLanes<A> - 1) / kLanes<A>);
}

enum class Operand { rows, columns };  // A[i][k] at a[i·lda + k], or at a[k·lda + i]

template <class A, int kRows, int kVectors, Operand kOperand, class Finish>
OVERTONE_INLINE void tile(const A* a, int64_t lda, const A* b, int64_t ldb, int64_t depth, int64_t first_row,
                          int first_vector, Finish finish) {
  Vector<A> sums[kRows][kVectors] = {};
  for (int64_t k = 0; k < depth; ++k) {
    Vector<A> b_row[kVectors];
    OVERTONE_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      b_row[v] = load_full(b + k * ldb + v * kLanes<A>);
    }
    OVERTONE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const Vector<A> a_element = broadcast(kOperand == Operand::rows ? a[i * lda + k] : a[k * lda + i]);
      OVERTONE_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        sums[i][v] += a_element * b_row[v];
      }
    }
  }
  OVERTONE_UNROLL
  for (int i = 0; i < kRows; ++i) {
    OVERTONE_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      finish(first_row + i, first_vector + v, sums[i][v]);
    }
  }
}

// The rows that are left below the last whole tile: fewer than kRows, in one tile of their own.
template <class A, int kRows, int kVectors, Operand kOperand, class Finish>
OVERTONE_INLINE void last_tile(int64_t rows, const A* a, int64_t lda, const A* b, int64_t ldb, int64_t depth,
                               int64_t first_row, int first_vector, const Finish& finish) {
  if constexpr (kRows > 1) {
    if (rows == kRows - 1) {
      tile<A, kRows - 1, kVectors, kOperand>(a, lda, b, ldb, depth, first_row, first_vector, finish);
    } else {
      last_tile<A, kRows - 1, kVectors, kOperand>(rows, a, lda, b, ldb, depth, first_row, first_vector, finish);
    }
  }
}

// All rows of one tile's width.
template <class A, int kVectors, Operand kOperand, class Finish>
void tile_column(int64_t rows, int first_vector, int64_t depth, const A* a, int64_t lda, const A* b, int64_t ldb,
                 Finish finish) {
  constexpr int kRows = kTileRows<kVectors>;
  constexpr bool kByRows = kOperand == Operand::rows;
  int64_t i = 0;
  for (; i + kRows <= rows; i += kRows) {
    tile<A, kRows, kVectors, kOperand>(a + (kByRows ? i * lda : i), lda, b, ldb, depth, i, first_vector, finish);
  }
  last_tile<A, kRows, kVectors, kOperand>(rows - i, a + (kByRows ? i * lda : i), lda, b, ldb, depth, i, first_vector,
                                          finish);
}

template <class A, Operand kOperand, class Finish>
OVERTONE_INLINE void tile_column_of(int width, int64_t rows, int first_vector, int64_t depth, const A* a, int64_t lda,
                                    const A* b, int64_t ldb, const Finish& finish) {
  switch (width) {
    case 1:
      return tile_column<A, 1, kOperand>(rows, first_vector, depth, a, lda, b, ldb, finish);
    case 2:
      return tile_column<A, 2, kOperand>(rows, first_vector, depth, a, lda, b, ldb, finish);
#if OVERTONE_VECTOR_BYTES == 64
    case 3:
      return tile_column<A, 3, kOperand>(rows, first_vector, depth, a, lda, b, ldb, finish);
    case 4:
      return tile_column<A, 4, kOperand>(rows, first_vector, depth, a, lda, b, ldb, finish);
#endif
  }
}

// C[rows × vectors] = A[rows × depth] · B[depth × vectors]; finish(row, vector, value) takes every vector of C.
template <class A, Operand kOperand, class Finish>
void gemm(int64_t rows, int vectors, int64_t depth, const A* a, int64_t lda, const A* b, int64_t ldb,
          const Finish& finish) {
  for (int first = 0; first < vectors;) {
    const int width = next_tile_width(vectors - first);
    tile_column_of<A, kOperand>(width, rows, first, depth, a, lda, b + first * kLanes<A>, ldb, finish);
    first += width;
  }
}

// The same with B in panels: the columns of one tile's width together, row by row. Only the panels that hold the first
// `wanted` vectors are multiplied.
template <class A, class Finish>
void gemm_by_panels(int64_t rows, int vectors, int wanted, int64_t depth, const A* a, int64_t lda, const A* panels,
                    const Finish& finish) {
  for (int first = 0; first < wanted;) {
    const int width = next_tile_width(vectors - first);
    tile_column_of<A, Operand::rows>(width, rows, first, depth, a, lda, panels + first * kLanes<A> * depth,
                                     width * kLanes<A>, finish);
    first += width;
  }
}

// What happens to a finished vector of C. Named types, so that all products that do the same share their code.
template <class A>
struct StoreTo {
  A* c;
  int64_t ldc;

  OVERTONE_INLINE void operator()(int64_t row, int v, Vector<A> sum) const {
    store_full(sum, c + row * ldc + v * kLanes<A>);
  }
};

template <class A>
struct AddTo {
  A* c;
  int64_t ldc;

  OVERTONE_INLINE void operator()(int64_t row, int v, Vector<A> sum) const {
    A* p = c + row * ldc + v * kLanes<A>;
    store_full(load_full(p) + sum, p);
  }
};

// Where a panel's columns of C go: c = sum + earlier sums + plus.
template <class A>
struct PanelTarget {
  A* c;
  int64_t ldc;
  const A* plus;  // or null
  int64_t plus_ld;
  const A* earlier = nullptr;  // or null; gemm_large_panels() sets it

  OVERTONE_INLINE void operator()(int64_t row, int v, Vector<A> sum) const {
    if (earlier != nullptr) {
      sum += load_full(earlier + (row * kWidestTile + v) * kLanes<A>);
    }
    if (plus != nullptr) {
      sum += load_full(plus + row * plus_ld + v * kLanes<A>);
    }
    store_full(sum, c + row * ldc + v * kLanes<A>);
  }
};

// Of the scratch that gemm_large_panels() collects sums in: [rows][kPanelLd].
template <class A>
inline constexpr int64_t kPanelLd = kWidestTile * kLanes<A>;

// C = A · B with B in panels too large for the first-level cache. target_of(first_vector, width) says where a panel's
// columns of C go, which may be `sums` itself; panel_done(first_vector, width) follows when they are there.
template <class A, class TargetOf, class PanelDone>
void gemm_large_panels(int64_t rows, int vectors, int64_t depth, const A* a, int64_t lda, const A* panels, A* sums,
                       const TargetOf& target_of, const PanelDone& panel_done) {
  constexpr int64_t kDepthBlock = 192;  // of a panel: that much stays in the first-level cache for all rows
  for (int first = 0; first < vectors;) {
    const int width = next_tile_width(vectors - first);
    const A* panel = panels + first * kLanes<A> * depth;
    const int64_t ldb = width * kLanes<A>;
    int64_t k = 0;
    for (; k + kDepthBlock < depth; k += kDepthBlock) {
      if (k == 0) {
        tile_column_of<A, Operand::rows>(width, rows, 0, kDepthBlock, a, lda, panel, ldb,
                                         StoreTo<A>{sums, kPanelLd<A>});
      } else {
        tile_column_of<A, Operand::rows>(width, rows, 0, kDepthBlock, a + k, lda, panel + k * ldb, ldb,
                                         AddTo<A>{sums, kPanelLd<A>});
      }
    }
    PanelTarget<A> target = target_of(first, width);
    target.earlier = k == 0 ? nullptr : sums;
    tile_column_of<A, Operand::rows>(width, rows, 0, depth - k, a + k, lda, panel + k * ldb, ldb, target);
    panel_done(first, width);
    first += width;
  }
}

// Interleaves row i with row i + half, for every i.
template <class A, size_t... kLane>
OVERTONE_INLINE void interleave_rows(Vector<A> (&rows)[kLanes<A>], std::index_sequence<kLane...>) {
  constexpr int kSize = kLanes<A>;
  Vector<A> next[kSize];
  OVERTONE_UNROLL
  for (int i = 0; i < kSize / 2; ++i) {
    const Vector<A> x = rows[i];
    const Vector<A> y = rows[i + kSize / 2];
    next[2 * i] = __builtin_shufflevector(x, y, (kLane / 2 + kLane % 2 * kSize)...);
    next[2 * i + 1] = __builtin_shufflevector(x, y, (kSize / 2 + kLane / 2 + kLane % 2 * kSize)...);
  }
  OVERTONE_UNROLL
  for (int i = 0; i < kSize; ++i) {
    rows[i] = next[i];
  }
}

#if OVERTONE_VECTOR_BYTES == 64
// 16 × 16 floats with one-operand-pattern shuffles: the general ones need an index register each, and GCC spills.
OVERTONE_INLINE void transpose_floats(Vector<float> (&r)[16]) {
  Vector<float> t[16];
  OVERTONE_UNROLL
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
  OVERTONE_UNROLL
  for (int i = 0; i < 16; i += 4) {
    for (int j = 0; j < 2; ++j) {
      const __m512d x = _mm512_castps_pd(t[i + j]);
      const __m512d y = _mm512_castps_pd(t[i + j + 2]);
      r[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(x, y));
      r[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(x, y));
    }
  }
  // r[4i + j] now holds, in its quarter q, column 4q + j of rows 4i … 4i + 3: what is left is to move quarters.
  OVERTONE_UNROLL
  for (int j = 0; j < 4; ++j) {
    t[j] = _mm512_shuffle_f32x4(r[j], r[4 + j], 0x88);
    t[4 + j] = _mm512_shuffle_f32x4(r[j], r[4 + j], 0xdd);
    t[8 + j] = _mm512_shuffle_f32x4(r[8 + j], r[12 + j], 0x88);
    t[12 + j] = _mm512_shuffle_f32x4(r[8 + j], r[12 + j], 0xdd);
  }
  OVERTONE_UNROLL
  for (int j = 0; j < 4; ++j) {
    r[j] = _mm512_shuffle_f32x4(t[j], t[8 + j], 0x88);
    r[4 + j] = _mm512_shuffle_f32x4(t[4 + j], t[12 + j], 0x88);
    r[8 + j] = _mm512_shuffle_f32x4(t[j], t[8 + j], 0xdd);
    r[12 + j] = _mm512_shuffle_f32x4(t[4 + j], t[12 + j], 0xdd);
  }
}

// 8 × 8 doubles; the general form needs index registers and copies here too.
OVERTONE_INLINE void transpose_doubles(Vector<double> (&r)[8]) {
  Vector<double> t[8];
  OVERTONE_UNROLL
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm512_unpacklo_pd(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_pd(r[i], r[i + 1]);
  }
  // t[2i + j] now holds, in its quarter q, column 2q + j of rows 2i, 2i + 1: what is left is to move quarters.
  OVERTONE_UNROLL
  for (int i = 0; i < 8; i += 4) {
    OVERTONE_UNROLL
    for (int j = 0; j < 2; ++j) {
      r[i + j] = _mm512_shuffle_f64x2(t[i + j], t[i + 2 + j], 0x88);
      r[i + 2 + j] = _mm512_shuffle_f64x2(t[i + j], t[i + 2 + j], 0xdd);
    }
  }
  OVERTONE_UNROLL
  for (int j = 0; j < 4; ++j) {
    t[j] = _mm512_shuffle_f64x2(r[j], r[4 + j], 0x88);
    t[4 + j] = _mm512_shuffle_f64x2(r[j], r[4 + j], 0xdd);
  }
  OVERTONE_UNROLL
  for (int j = 0; j < 8; ++j) {
    r[j] = t[j];
  }
}
#endif

#if OVERTONE_VECTOR_BYTES == 32
// 8 × 8 floats; GCC makes slower instructions of the general form.
OVERTONE_INLINE void transpose_floats(Vector<float> (&r)[8]) {
  Vector<float> t[8];
  OVERTONE_UNROLL
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  OVERTONE_UNROLL
  for (int i = 0; i < 8; i += 4) {
    for (int j = 0; j < 2; ++j) {
      r[i + 2 * j] = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0x44);
      r[i + 2 * j + 1] = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0xee);
    }
  }
  // r[4i + j] now holds, in its half h, column 4h + j of rows 4i … 4i + 3: what is left is to move halves.
  OVERTONE_UNROLL
  for (int j = 0; j < 4; ++j) {
    const Vector<float> upper = r[j];
    r[j] = _mm256_permute2f128_ps(upper, r[4 + j], 0x20);
    r[4 + j] = _mm256_permute2f128_ps(upper, r[4 + j], 0x31);
  }
}
#endif

// Transposes a square in registers: log2(kLanes) rounds of interleaving. Written out, so that no array is in memory.
template <class A>
OVERTONE_INLINE void transpose_square(Vector<A> (&rows)[kLanes<A>]) {
#if OVERTONE_VECTOR_BYTES >= 32
  if constexpr (std::is_same_v<A, float>) {
    return transpose_floats(rows);
  }
#endif
#if OVERTONE_VECTOR_BYTES == 64
  if constexpr (std::is_same_v<A, double>) {
    return transpose_doubles(rows);
  }
#endif
  constexpr auto kLaneIndices = std::make_index_sequence<size_t{kLanes<A>}>();
  interleave_rows<A>(rows, kLaneIndices);
  if constexpr (kLanes<A> >= 4) {
    interleave_rows<A>(rows, kLaneIndices);
  }
  if constexpr (kLanes<A> >= 8) {
    interleave_rows<A>(rows, kLaneIndices);
  }
}

}  // namespace overtone::OVERTONE_ISA
