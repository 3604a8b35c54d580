// Small matrix products on register tiles, for operands that fit a core's cache.
//
// gemm() computes C = A · B tile by tile and hands every finished vector of C to a functor, so that what follows a
// product (scaling, a residual, a sum, rounding) happens while the value is still in a register.
#pragma once

#include "cpu/scratch.h"
#include "cpu/simd.h"

namespace overtone::OVERTONE_LEVEL {

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

// Buffers whose rows serve as tile rows are padded to a multiple of this (of 6, of 8 and of every vector length).
constexpr int64_t kRowPadding = 48;

// How a row of `left` vectors is cut. On 32 registers 8 × 3 is best: it reads the least of B per product. 6 × 4 serves
// where threes do not fit (4, 7 = 4 + 3, 8 = 4 + 4), and narrower tiles only where nothing else does.
OVERTONE_INLINE int next_tile_width(int left) {
  if constexpr (kWidestTile == 2) {
    return left >= 2 ? 2 : 1;
  } else {
    return left % 3 == 0 || left == 5 ? 3 : std::min(left, 4);
  }
}

enum class Operand { rows, columns };  // A[i][k] at a[i·lda + k], or at a[k·lda + i]
enum class Layout { row_major, panels };

// A `finish` that only adds, scales and stores whole vectors works on the registers; any other gets its vectors through
// memory, because inlined once per register it would be a page of code, and GCC would spill inside the loop.
enum class Finishing { in_registers, through_memory };

template <class A, int kVectors, Operand kOperand, Finishing kFinishing, class Finish>
OVERTONE_INLINE void tile(const A* a, int64_t lda, int64_t rows, const A* b, int64_t ldb, int64_t depth,
                          Finish finish) {
  constexpr int kRows = kTileRows<kVectors>;
  const A* row[kRows];
  for (int i = 0; i < kRows; ++i) {
    // Past the last row the tile repeats it: the result is dropped, and nothing out of bounds is read.
    row[i] = kOperand == Operand::rows ? a + std::min<int64_t>(i, rows - 1) * lda : a + i;
  }
  Vector<A> sums[kRows][kVectors] = {};
  for (int64_t k = 0; k < depth; ++k) {
    Vector<A> b_row[kVectors];
    OVERTONE_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      b_row[v] = load_full(b + k * ldb + v * kLanes<A>);
    }
    OVERTONE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const Vector<A> a_element = broadcast(kOperand == Operand::rows ? row[i][k] : row[i][k * lda]);
      OVERTONE_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        sums[i][v] += a_element * b_row[v];
      }
    }
  }
  if constexpr (kFinishing == Finishing::in_registers) {
    OVERTONE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      if (i < rows) {
        OVERTONE_UNROLL
        for (int v = 0; v < kVectors; ++v) {
          finish(i, v, sums[i][v]);
        }
      }
    }
  } else {
    Vector<A> results[kRows][kVectors];
    std::memcpy(results, sums, sizeof sums);
    for (int64_t i = 0; i < std::min<int64_t>(rows, kRows); ++i) {
      for (int v = 0; v < kVectors; ++v) {
        finish(static_cast<int>(i), v, results[i][v]);
      }
    }
  }
}

template <class A, int kVectors, Operand kOperand, Finishing kFinishing, class Finish>
void tile_column(int64_t rows, int first_vector, int64_t depth, const A* a, int64_t lda, const A* b, int64_t ldb,
                 const Finish& finish) {
  constexpr int kRows = kTileRows<kVectors>;
  for (int64_t i = 0; i < rows; i += kRows) {
    tile<A, kVectors, kOperand, kFinishing>(
        a + (kOperand == Operand::rows ? i * lda : i), lda, rows - i, b, ldb, depth,
        [&](int row, int v, Vector<A> sum) { finish(i + row, first_vector + v, sum); });
  }
}

// C[rows × vectors] = A[rows × depth] · B[depth × vectors]; finish(row, vector, value) takes every vector of C.
// Operand::columns reads A in whole tiles: its rows must be padded to kRowPadding.
template <class A, Operand kOperand, Layout kLayout, Finishing kFinishing, class Finish>
void gemm(int64_t rows, int vectors, int64_t depth, const A* a, int64_t lda, const A* b, int64_t ldb,
          const Finish& finish) {
  for (int first = 0; first < vectors;) {
    const int width = next_tile_width(vectors - first);
    const A* panel = b + first * kLanes<A> * (kLayout == Layout::panels ? depth : 1);
    const int64_t stride = kLayout == Layout::panels ? width * kLanes<A> : ldb;
    switch (width) {
      case 1:
        tile_column<A, 1, kOperand, kFinishing>(rows, first, depth, a, lda, panel, stride, finish);
        break;
      case 2:
        tile_column<A, 2, kOperand, kFinishing>(rows, first, depth, a, lda, panel, stride, finish);
        break;
#if OVERTONE_VECTOR_BYTES == 64
      case 3:
        tile_column<A, 3, kOperand, kFinishing>(rows, first, depth, a, lda, panel, stride, finish);
        break;
      case 4:
        tile_column<A, 4, kOperand, kFinishing>(rows, first, depth, a, lda, panel, stride, finish);
        break;
#endif
    }
    first += width;
  }
}

// Writes element (k, column) of a matrix that gemm() will read as panels: the columns of one tile width together.
template <class A>
struct PanelIndex {
  int64_t depth;
  int vectors;

  // Offset of vector `v` of row k.
  OVERTONE_INLINE int64_t operator()(int64_t k, int v) const {
    int first = 0;
    int width = next_tile_width(vectors);
    while (v >= first + width) {
      first += width;
      width = next_tile_width(vectors - first);
    }
    return first * kLanes<A> * depth + k * width * kLanes<A> + (v - first) * kLanes<A>;
  }
};

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

// Transposes a square in registers: log2(kLanes) rounds of interleaving. Written out, so that no array is in memory.
template <class A>
OVERTONE_INLINE void transpose_square(Vector<A> (&rows)[kLanes<A>]) {
  constexpr auto kLaneIndices = std::make_index_sequence<size_t{kLanes<A>}>();
  interleave_rows<A>(rows, kLaneIndices);
  if constexpr (kLanes<A> >= 4) {
    interleave_rows<A>(rows, kLaneIndices);
  }
  if constexpr (kLanes<A> >= 8) {
    interleave_rows<A>(rows, kLaneIndices);
  }
  if constexpr (kLanes<A> >= 16) {
    interleave_rows<A>(rows, kLaneIndices);
  }
}

}  // namespace overtone::OVERTONE_LEVEL
