// Products of matrices larger than a core's cache: B is packed one panel of columns at a time, A is read as it lies.
#pragma once

#include "cpu/gemm/microkernel.h"
#include "cpu/gemm/pack.h"
#include "cpu/matrix_batch.h"
#include "cpu/simd/transpose.h"

namespace overtone::OVERTONE_ISA {

// A matrix of a batch whose elements are of type A.
template <class A>
StridedMatrix matrix_rows(const MatrixBatch& batch, int64_t index) {
  const A* first = static_cast<const A*>(batch.data) + batch.offsets[index];
  return {kDtype<A>, const_cast<A*>(first), batch.row_stride, batch.column_stride};
}

inline StridedMatrix transposed(const StridedMatrix& a) { return a.transposed(); }

// Rows of a running sum. Longer sums are sums of such sums: they lose fewer digits, and that much of B stays in the
// first-level cache for all rows of A.
constexpr int64_t kSumRows = 64;

template <class A>
struct SubtractFrom {
  A* c;
  int64_t ldc;

  OVERTONE_INLINE void operator()(int64_t row, int v, Vector<A> sum) const {
    A* p = c + row * ldc + v * kLanes<A>;
    store_full(load_full(p) - sum, p);
  }
};

// C = A · B, summed in parts of kSumRows.
template <class A>
void multiply_in_parts(int64_t rows, int vectors, int64_t depth, const A* a, int64_t lda, const A* b, int64_t ldb, A* c,
                       int64_t ldc) {
  gemm<A, Operand::row_major>(rows, vectors, std::min(depth, kSumRows), a, lda, b, ldb, StoreTo<A>{c, ldc});
  for (int64_t k = kSumRows; k < depth; k += kSumRows) {
    gemm<A, Operand::row_major>(rows, vectors, std::min(depth - k, kSumRows), a + k, lda, b + k * ldb, ldb,
                                AddTo<A>{c, ldc});
  }
}

// Columns that multiply() handles at a time.
template <class A>
constexpr int64_t kPanelColumns = (kWidestTile == 4 ? 3 : 2) * kLanes<A>;

// Which part of a product with triangular matrices is computed: rows from `row` to `row_end`, sums from `depth` on.
struct Extent {
  int64_t row;
  int64_t row_end;
  int64_t depth;
};

// Elements of scratch that multiply() needs: a panel of B, and sums of a panel of C.
template <class A>
constexpr int64_t multiply_scratch(int64_t rows, int64_t depth) {
  return (rows + depth) * kPanelColumns<A>;
}

// C = A · B, one panel of columns after the other. pack(column, columns, depth, out, ld) packs B's rows from `depth`
// on; extent(column, columns) says what of C's panel is wanted; epilogue(row, column, sum) takes its vectors. Sums are
// those of multiply_in_parts().
template <class A, class PackPanel, class Bound, class Epilogue>
void multiply(int64_t columns, int64_t depth, const A* a, int64_t lda, A* scratch, const PackPanel& pack,
              const Bound& extent, const Epilogue& epilogue) {
  for (int64_t column = 0; column < columns; column += kPanelColumns<A>) {
    const int64_t width = std::min(kPanelColumns<A>, columns - column);
    const int64_t ld = padded_to(width, kLanes<A>);
    const int vectors = static_cast<int>(ld / kLanes<A>);
    const Extent part = extent(column, width);
    const int64_t rows = part.row_end - part.row;
    const int64_t summands = depth - part.depth;
    const A* left = a + part.row * lda + part.depth;
    A* panel = scratch;
    A* sums = scratch + depth * kPanelColumns<A>;
    pack(column, width, part.depth, panel, ld);
    const int64_t before = summands > kSumRows ? (summands - 1) / kSumRows * kSumRows : 0;
    if (before > 0) {
      multiply_in_parts<A>(rows, vectors, before, left, lda, panel, ld, sums, ld);
    }
    gemm<A, Operand::row_major>(rows, vectors, summands - before, left + before, lda, panel + before * ld, ld,
                                [&](int64_t row, int v, Vector<A> sum) {
                                  const A* partial = sums + row * ld + v * kLanes<A>;
                                  epilogue(part.row + row, column + v * kLanes<A>,
                                           before > 0 ? sum + load_full(partial) : sum);
                                });
  }
}

// C[:, j] for a whole C: every row, every summand.
inline auto whole(int64_t rows) {
  return [rows](int64_t, int64_t) { return Extent{0, rows, 0}; };
}

// Square by square: out[column][row] = source[row][column], `rows` × `columns` elements of the source;
// change(row, column, vector) is applied to the source's vectors on the way.
template <class A, class Change>
void store_transposed(const A* source, int64_t ld, int64_t rows, int64_t columns, A* out, int64_t out_ld,
                      const Change& change) {
  constexpr int kSize = kLanes<A>;
  for (int64_t i = 0; i < rows; i += kSize) {
    const int square_rows = static_cast<int>(std::min<int64_t>(kSize, rows - i));
    for (int64_t j = 0; j < columns; j += kSize) {
      Vector<A> square[kSize];
      OVERTONE_UNROLL
      for (int row = 0; row < kSize; ++row) {
        square[row] = row < square_rows ? change(i + row, j, load_full(source + (i + row) * ld + j)) : Vector<A>{};
      }
      transpose_square<A>(square);
      OVERTONE_UNROLL
      for (int column = 0; column < kSize; ++column) {
        if (column < columns - j) {
          store(square[column], out + (j + column) * out_ld + i, square_rows);
        }
      }
    }
  }
}

// Makes a square matrix symmetric: its lower triangle, mirrored, becomes the upper one.
template <class A>
void mirror_lower(A* c, int64_t ld, int64_t size) {
  constexpr int kSize = kLanes<A>;
  for (int64_t i = 0; i < size; i += kSize) {
    const int64_t rows = std::min<int64_t>(kSize, size - i);
    if (i > 0) {  // whole squares left of the diagonal one
      store_transposed(c + i * ld, ld, rows, i, c + i, ld, [](int64_t, int64_t, Vector<A> v) { return v; });
    }
    for (int64_t row = i; row < i + rows; ++row) {
      for (int64_t column = i; column < row; ++column) {
        c[column * ld + row] = c[row * ld + column];
      }
    }
  }
}

}  // namespace overtone::OVERTONE_ISA
