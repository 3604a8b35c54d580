// Small matrix products on register tiles, for operands that fit a core's cache.
//
// gemm() computes C = A · B tile by tile and hands every finished vector of C to a functor, so that what follows a
// product (scaling, a sum) happens while the value is still in a register. Every element of C is summed in the order of
// k whichever tile it lies in, so results do not depend on how rows are cut into calls.
//
// An operand is a pointer and a leading dimension, as in BLAS; hence the many parameters.
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

enum class Operand {
  row_major,  // A[i][k] at a[i·lda + k]
  col_major,  // at a[k·lda + i]
};

template <class A, int kRows, int kVectors, Operand kOperand, class Epilogue>
OVERTONE_INLINE void tile(const A* a, int64_t lda, const A* b, int64_t ldb, int64_t depth, int64_t first_row,
                          int first_vector, Epilogue epilogue) {
  Vector<A> sums[kRows][kVectors] = {};
  for (int64_t k = 0; k < depth; ++k) {
    Vector<A> b_row[kVectors];
    OVERTONE_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      b_row[v] = load_full(b + k * ldb + v * kLanes<A>);
    }
    OVERTONE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const Vector<A> a_element = broadcast(kOperand == Operand::row_major ? a[i * lda + k] : a[k * lda + i]);
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
      epilogue(first_row + i, first_vector + v, sums[i][v]);
    }
  }
}

// The rows that are left below the last whole tile: fewer than kRows, in one tile of their own.
template <class A, int kRows, int kVectors, Operand kOperand, class Epilogue>
OVERTONE_INLINE void edge_tile(int64_t rows, const A* a, int64_t lda, const A* b, int64_t ldb, int64_t depth,
                               int64_t first_row, int first_vector, const Epilogue& epilogue) {
  if constexpr (kRows > 1) {
    if (rows == kRows - 1) {
      tile<A, kRows - 1, kVectors, kOperand>(a, lda, b, ldb, depth, first_row, first_vector, epilogue);
    } else {
      edge_tile<A, kRows - 1, kVectors, kOperand>(rows, a, lda, b, ldb, depth, first_row, first_vector, epilogue);
    }
  }
}

// All rows of one tile's width.
template <class A, int kVectors, Operand kOperand, class Epilogue>
void gemm_panel(int64_t rows, int first_vector, int64_t depth, const A* a, int64_t lda, const A* b, int64_t ldb,
                Epilogue epilogue) {
  constexpr int kRows = kTileRows<kVectors>;
  constexpr bool kRowMajor = kOperand == Operand::row_major;
  int64_t i = 0;
  for (; i + kRows <= rows; i += kRows) {
    tile<A, kRows, kVectors, kOperand>(a + (kRowMajor ? i * lda : i), lda, b, ldb, depth, i, first_vector, epilogue);
  }
  edge_tile<A, kRows, kVectors, kOperand>(rows - i, a + (kRowMajor ? i * lda : i), lda, b, ldb, depth, i, first_vector,
                                          epilogue);
}

template <class A, Operand kOperand, class Epilogue>
OVERTONE_INLINE void gemm_panel_of(int width, int64_t rows, int first_vector, int64_t depth, const A* a, int64_t lda,
                                   const A* b, int64_t ldb, const Epilogue& epilogue) {
  switch (width) {
    case 1:
      return gemm_panel<A, 1, kOperand>(rows, first_vector, depth, a, lda, b, ldb, epilogue);
    case 2:
      return gemm_panel<A, 2, kOperand>(rows, first_vector, depth, a, lda, b, ldb, epilogue);
#if OVERTONE_VECTOR_BYTES == 64
    case 3:
      return gemm_panel<A, 3, kOperand>(rows, first_vector, depth, a, lda, b, ldb, epilogue);
    case 4:
      return gemm_panel<A, 4, kOperand>(rows, first_vector, depth, a, lda, b, ldb, epilogue);
#endif
  }
}

// C[rows × vectors] = A[rows × depth] · B[depth × vectors]; epilogue(row, vector, value) takes every vector of C.
template <class A, Operand kOperand, class Epilogue>
void gemm(int64_t rows, int vectors, int64_t depth, const A* a, int64_t lda, const A* b, int64_t ldb,
          const Epilogue& epilogue) {
  for (int first = 0; first < vectors;) {
    const int width = next_tile_width(vectors - first);
    gemm_panel_of<A, kOperand>(width, rows, first, depth, a, lda, b + first * kLanes<A>, ldb, epilogue);
    first += width;
  }
}

// The same with B in panels: the columns of one tile's width together, row by row. Only the panels that hold the first
// `wanted` vectors are multiplied.
template <class A, class Epilogue>
void gemm_by_panels(int64_t rows, int vectors, int wanted, int64_t depth, const A* a, int64_t lda, const A* panels,
                    const Epilogue& epilogue) {
  for (int first = 0; first < wanted;) {
    const int width = next_tile_width(vectors - first);
    gemm_panel_of<A, Operand::row_major>(width, rows, first, depth, a, lda, panels + first * kLanes<A> * depth,
                                         width * kLanes<A>, epilogue);
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

// Where a panel's columns of C go: c = sum + partial sums.
template <class A>
struct PanelTarget {
  A* c;
  int64_t ldc;
  const A* partial = nullptr;  // or null; gemm_large_panels() sets it

  OVERTONE_INLINE void operator()(int64_t row, int v, Vector<A> sum) const {
    if (partial != nullptr) {
      sum += load_full(partial + (row * kWidestTile + v) * kLanes<A>);
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
        gemm_panel_of<A, Operand::row_major>(width, rows, 0, kDepthBlock, a, lda, panel, ldb,
                                             StoreTo<A>{sums, kPanelLd<A>});
      } else {
        gemm_panel_of<A, Operand::row_major>(width, rows, 0, kDepthBlock, a + k, lda, panel + k * ldb, ldb,
                                             AddTo<A>{sums, kPanelLd<A>});
      }
    }
    auto target = target_of(first, width);  // an epilogue with `partial`
    target.partial = k == 0 ? nullptr : sums;
    gemm_panel_of<A, Operand::row_major>(width, rows, 0, depth - k, a + k, lda, panel + k * ldb, ldb, target);
    panel_done(first, width);
    first += width;
  }
}

}  // namespace overtone::OVERTONE_ISA
