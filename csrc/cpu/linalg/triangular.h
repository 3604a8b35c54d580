// Triangular systems with many right-hand sides, one strip of columns at a time.
#pragma once

#include "cpu/gemm/blocked.h"

namespace overtone::OVERTONE_ISA {

constexpr int64_t kTriangleBlock = 32;

enum class Triangle { upper, unit_lower };

// x ← T⁻¹ x for the strip x[rows][width], rows `ld` apart; T is read where it is known not to be zero (or one).
// A block of rows first takes what the solved rows contribute, in products, and is then solved row by row.
template <class A, Triangle kTriangle>
void solve_triangular(const A* t, int64_t ldt, int64_t rows, A* x, int64_t ld, int64_t width) {
  const int vectors = static_cast<int>(padded_to(width, kLanes<A>) / kLanes<A>);
  const int64_t blocks = (rows + kTriangleBlock - 1) / kTriangleBlock;
  for (int64_t index = 0; index < blocks; ++index) {
    const int64_t block = kTriangle == Triangle::upper ? blocks - 1 - index : index;
    const int64_t begin = block * kTriangleBlock;
    const int64_t end = std::min(rows, begin + kTriangleBlock);
    const int64_t solved_begin = kTriangle == Triangle::upper ? end : 0;
    const int64_t solved = kTriangle == Triangle::upper ? rows - end : begin;
    for (int64_t k = 0; k < solved; k += kSumRows) {
      gemm<A, Operand::row_major>(end - begin, vectors, std::min(kSumRows, solved - k),
                                  t + begin * ldt + solved_begin + k, ldt, x + (solved_begin + k) * ld, ld,
                                  SubtractFrom<A>{x + begin * ld, ld});
    }
    for (int64_t step = 0; step < end - begin; ++step) {
      const int64_t row = kTriangle == Triangle::upper ? end - 1 - step : begin + step;
      const int64_t first = kTriangle == Triangle::upper ? row + 1 : begin;
      const int64_t last = kTriangle == Triangle::upper ? end : row;
      for (int v = 0; v < vectors; ++v) {
        Vector<A> value = load_full(x + row * ld + v * kLanes<A>);
        for (int64_t k = first; k < last; ++k) {
          value -= t[row * ldt + k] * load_full(x + k * ld + v * kLanes<A>);
        }
        store_full(kTriangle == Triangle::upper ? value / t[row * ldt + row] : value, x + row * ld + v * kLanes<A>);
      }
    }
  }
}

}  // namespace overtone::OVERTONE_ISA
