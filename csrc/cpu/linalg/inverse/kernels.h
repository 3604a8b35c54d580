// The inverse's kernels, written once and compiled for every ISA level: LU with partial pivoting, blocked.
#pragma once

#include <algorithm>
#include <limits>

#include "cpu/linalg/inverse/params.h"
#include "cpu/linalg/triangular.h"
#include "info.h"

namespace overtone::OVERTONE_ISA {

template <class A>
class Inverse {
 public:
  explicit Inverse(int64_t size)
      : size_(size),
        ld_(padded_stride<A>(padded_to(size, kTriangleBlock))),
        scratch_(Scratch<A>::padded(size * ld_) + Scratch<A>::padded(size * kPanelColumns<A>)),
        lu_(scratch_.take(size * ld_)),
        strip_(scratch_.take(size * kPanelColumns<A>)),
        row_scratch_(size),
        row_of_(row_scratch_.take(size)) {}

  // a⁻¹ to contiguous `inverse`; false if the matrix is singular or not finite.
  bool run(const StridedMatrix& a, A* inverse) {
    pack_block(a, 0, 0, size_, size_, lu_, ld_);
    if (!factor()) {
      return false;
    }
    for (int64_t column = 0; column < size_; column += kPanelColumns<A>) {
      const int64_t width = std::min(kPanelColumns<A>, size_ - column);
      for (int64_t i = 0; i < size_; ++i) {  // rows of the identity, in the order of the pivots
        std::fill(strip_ + i * kPanelColumns<A>, strip_ + (i + 1) * kPanelColumns<A>, A{0});
        if (row_of_[i] >= column && row_of_[i] < column + width) {
          strip_[i * kPanelColumns<A> + row_of_[i] - column] = 1;
        }
      }
      solve_triangular<A, Triangle::unit_lower>(lu_, ld_, size_, strip_, kPanelColumns<A>, width);
      solve_triangular<A, Triangle::upper>(lu_, ld_, size_, strip_, kPanelColumns<A>, width);
      for (int64_t i = 0; i < size_; ++i) {
        std::copy(strip_ + i * kPanelColumns<A>, strip_ + i * kPanelColumns<A> + width, inverse + i * size_ + column);
      }
    }
    return true;
  }

 private:
  bool factor() {
    for (int64_t i = 0; i < size_; ++i) {
      row_of_[i] = i;
    }
    for (int64_t first = 0; first < size_; first += kTriangleBlock) {
      const int64_t end = std::min(size_, first + kTriangleBlock);
      for (int64_t column = first; column < end; ++column) {
        if (!eliminate(first, column)) {
          return false;
        }
      }
      update_rest(first, end);
    }
    return true;
  }

  // Brings the largest element below the diagonal up and clears the rest of the column, within the block of columns
  // that begins at `first`.
  bool eliminate(int64_t first, int64_t column) {
    int64_t pivot = column;
    for (int64_t i = column + 1; i < size_; ++i) {
      if (std::abs(lu_[i * ld_ + column]) > std::abs(lu_[pivot * ld_ + column])) {
        pivot = i;
      }
    }
    const A largest = lu_[pivot * ld_ + column];
    if (!(std::abs(largest) > 0 && std::abs(largest) <= std::numeric_limits<A>::max())) {
      return false;
    }
    if (pivot != column) {
      std::swap_ranges(lu_ + pivot * ld_, lu_ + pivot * ld_ + size_, lu_ + column * ld_);
      std::swap(row_of_[pivot], row_of_[column]);
    }
    A right[kTriangleBlock];  // the pivot's row, zero up to the diagonal
    std::copy(lu_ + column * ld_ + first, lu_ + column * ld_ + first + kTriangleBlock, right);
    std::fill(right, right + column - first + 1, A{0});
    for (int64_t i = column + 1; i < size_; ++i) {
      A* row = lu_ + i * ld_;
      const A multiplier = row[column] / largest;
      for (int64_t j = 0; j < kTriangleBlock; j += kLanes<A>) {
        store_full(load_full(row + first + j) - multiplier * load_full(right + j), row + first + j);
      }
      row[column] = multiplier;
    }
    return true;
  }

  void update_rest(int64_t first, int64_t end) {
    if (end == size_) {
      return;
    }
    A* right = lu_ + first * ld_ + end;
    solve_triangular<A, Triangle::unit_lower>(lu_ + first * ld_ + first, ld_, end - first, right, ld_, size_ - end);
    const int vectors = static_cast<int>(padded_to(size_ - end, kLanes<A>) / kLanes<A>);
    gemm<A, Operand::row_major>(size_ - end, vectors, end - first, lu_ + end * ld_ + first, ld_, right, ld_,
                                [&](int64_t row, int v, Vector<A> sum) {
                                  A* out = lu_ + (end + row) * ld_ + end + v * kLanes<A>;
                                  store_full(load_full(out) - sum, out);
                                });
  }

  int64_t size_, ld_;
  Scratch<A> scratch_;
  A* lu_;     // [size][ld]: L below the diagonal (its own is 1), U on and above it
  A* strip_;  // [size][kPanelColumns]
  Scratch<int64_t> row_scratch_;
  int64_t* row_of_;  // which row of the matrix stands where
};

template <class A>
void invert_items(const InverseParams& params, int64_t begin, int64_t end) {
  const int64_t elements = params.size * params.size;
  Inverse<A> inverse(params.size);
  for (int64_t index = begin; index < end; ++index) {
    A* out = static_cast<A*>(params.inverse) + index * elements;
    params.info[index] = inverse.run(matrix_rows<A>(params.a, index), out) ? kSolved : kUnsolved;
    if (params.info[index] != kSolved) {
      std::fill(out, out + elements, std::numeric_limits<A>::quiet_NaN());
    }
  }
}

inline void invert(const InverseParams& params, int64_t begin, int64_t end) {
  params.type == Dtype::float64 ? invert_items<double>(params, begin, end) : invert_items<float>(params, begin, end);
}

extern const InverseKernels inverse_kernels = {OVERTONE_ISA_NAME, &invert};

}  // namespace overtone::OVERTONE_ISA
