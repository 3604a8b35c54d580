// A matrix per SIMD lane: kLanes<A> matrices of a batch side by side, so that a batch of small matrices is solved in
// lock-step, every operation of the algorithm being one operation on vectors.
#pragma once

#include "cpu/matrix_batch.h"
#include "cpu/simd/transpose.h"
#include "cpu/simd/vector.h"

namespace overtone::OVERTONE_ISA {

// The same matrix element of every lane is one vector. Small matrices have no gaps. Rows of larger ones are an odd
// number of vectors apart, or all elements of a column would share a few lines of the cache; and not about a multiple
// of 4096 bytes, or the processor would take loads from a row for loads of what was just stored to the next.
template <class A>
struct InterleavedMatrix {
  A* data = nullptr;
  int64_t row_stride = 0;  // in elements of A

  static constexpr int64_t padded_columns(int64_t columns) {
    constexpr int64_t kPage = 4096 / OVERTONE_VECTOR_BYTES;
    constexpr int64_t kApart = 9;
    if (columns <= 16) {
      return columns;
    }
    const int64_t odd = columns | 1;
    const int64_t rest = odd % kPage;
    return rest < kApart ? odd + kApart - rest : rest > kPage - kApart ? odd + kPage + kApart - rest : odd;
  }
  static constexpr int64_t size(int64_t rows, int64_t columns) { return rows * padded_columns(columns) * kLanes<A>; }

  InterleavedMatrix() = default;
  InterleavedMatrix(A* data, int64_t columns) : data(data), row_stride(padded_columns(columns) * kLanes<A>) {}

  OVERTONE_INLINE A* at(int64_t row, int64_t column) const { return data + row * row_stride + column * kLanes<A>; }
  OVERTONE_INLINE Vector<A> get(int64_t row, int64_t column) const { return load_full(at(row, column)); }
  OVERTONE_INLINE void set(int64_t row, int64_t column, Vector<A> v) const { store_full(v, at(row, column)); }
};

// Consecutive elements of every lane's memory to consecutive vectors. A square of kLanes at a time is transposed in
// registers; what is left is done again as part of a last whole square, or one by one.
template <class A>
OVERTONE_INLINE void interleave_run(const A* const (&lanes)[kLanes<A>], int64_t length, A* out) {
  constexpr int kSize = kLanes<A>;
  for (int64_t begin = 0; length >= kSize && begin < length; begin += kSize) {
    const int64_t first = std::min(begin, length - kSize);
    Vector<A> square[kSize];
    OVERTONE_UNROLL
    for (int lane = 0; lane < kSize; ++lane) {
      square[lane] = load_full(lanes[lane] + first);
    }
    transpose_square<A>(square);
    OVERTONE_UNROLL
    for (int i = 0; i < kSize; ++i) {
      store_full(square[i], out + (first + i) * kSize);
    }
  }
  if (length < kSize) {
    for (int64_t i = 0; i < length; ++i) {
      for (int lane = 0; lane < kSize; ++lane) {
        out[i * kSize + lane] = lanes[lane][i];
      }
    }
  }
}

// The way back: consecutive vectors to consecutive elements of the first `count` lanes' memory.
template <class A>
OVERTONE_INLINE void deinterleave_run(const A* vectors, int64_t length, int count, A* const (&lanes)[kLanes<A>]) {
  constexpr int kSize = kLanes<A>;
  for (int64_t begin = 0; length >= kSize && begin < length; begin += kSize) {
    const int64_t first = std::min(begin, length - kSize);
    Vector<A> square[kSize];
    OVERTONE_UNROLL
    for (int i = 0; i < kSize; ++i) {
      square[i] = load_full(vectors + (first + i) * kSize);
    }
    transpose_square<A>(square);
    OVERTONE_UNROLL
    for (int lane = 0; lane < kSize; ++lane) {
      if (lane < count) {
        store_full(square[lane], lanes[lane] + first);
      }
    }
  }
  if (length < kSize) {
    for (int lane = 0; lane < count; ++lane) {
      for (int64_t i = 0; i < length; ++i) {
        lanes[lane][i] = vectors[i * kSize + lane];
      }
    }
  }
}

// Matrices [first, first + kLanes) of the batch, rows × columns. Lanes beyond the batch repeat its last matrix: they
// behave like any other lane, and nobody reads them.
template <class A>
void load_lanes(const MatrixBatch& batch, int64_t first, int64_t rows, int64_t columns,
                const InterleavedMatrix<A>& out) {
  const A* base[kLanes<A>];
  for (int lane = 0; lane < kLanes<A>; ++lane) {
    base[lane] = static_cast<const A*>(batch.data) + batch.offsets[std::min(first + lane, batch.count - 1)];
  }
  const bool is_contiguous = batch.column_stride == 1 && batch.row_stride == columns;
  if (is_contiguous && out.row_stride == columns * kLanes<A>) {
    interleave_run<A>(base, rows * columns, out.data);
    return;
  }
  for (int64_t i = 0; i < rows; ++i) {
    const A* lanes[kLanes<A>];
    for (int lane = 0; lane < kLanes<A>; ++lane) {
      lanes[lane] = base[lane] + i * batch.row_stride;
    }
    if (batch.column_stride == 1) {
      interleave_run<A>(lanes, columns, out.at(i, 0));
    } else {
      for (int64_t j = 0; j < columns; ++j) {
        for (int lane = 0; lane < kLanes<A>; ++lane) {
          out.at(i, j)[lane] = lanes[lane][j * batch.column_stride];
        }
      }
    }
  }
}

// Rows × columns of the first `count` lanes to contiguous matrices one after another.
template <class A>
void store_lanes(const InterleavedMatrix<A>& source, int64_t rows, int64_t columns, int count, A* out) {
  if (source.row_stride == columns * kLanes<A>) {
    columns *= rows;
    rows = 1;
  }
  for (int64_t i = 0; i < rows; ++i) {
    A* lanes[kLanes<A>];
    for (int lane = 0; lane < kLanes<A>; ++lane) {
      lanes[lane] = out + (lane * rows + i) * columns;
    }
    deinterleave_run<A>(source.at(i, 0), columns, count, lanes);
  }
}

}  // namespace overtone::OVERTONE_ISA
