// Kᵀ, or Vᵀ, as the right operand of products whose columns are keys.
#pragma once

#include "cpu/gemm/pack.h"

namespace overtone::OVERTONE_ISA {

// In panels of whole vectors. A Vision Transformer's class token often leaves one key over (65 = 64 + 1,
// 257 = 256 + 1): it is kept as a row and multiplied by dot products, where a vector of its own would cost as much as
// kLanes keys.
template <class A>
class KeyPanels {
 public:
  // Elements of memory for `keys` keys.
  static int64_t size(int64_t keys, int64_t width) { return padded_to(keys, kLanes<A>) * width; }

  // All of a call's keys (`is_whole`), or a block of them: blocks have no lone key, so that their logits are summed in
  // one order, as row_dots() sums.
  KeyPanels(A* memory, int64_t keys, int64_t width, bool is_whole)
      : panels_(memory),
        keys_(keys),
        in_panels_(is_whole && keys > 1 && keys % kLanes<A> == 1 ? keys - 1 : keys),
        width_(width),
        tail_(memory + in_panels_ * width) {}

  void pack(const StridedMatrix& source, A scale) const {
    pack_column_panels(source, in_panels_, width_, scale, panels_);
    if (has_tail()) {
      StridedMatrix last = source;
      last.data = static_cast<char*>(source.data) + in_panels_ * source.row_stride * bytes_of(source.type);
      pack_rows(last, 1, width_, scale, tail_, padded_to(width_, kLanes<A>));
    }
  }

  // out = a · columns for the first `wanted` keys, zeros up to a whole vector. Rows of `a` end in zeros up to one too.
  void multiply(int64_t rows, int64_t wanted, const A* a, int64_t lda, A* out, int64_t ld) const {
    const int vectors = vectors_of<A>(in_panels_);
    gemm_by_panels<A>(rows, vectors, std::min(vectors, vectors_of<A>(wanted)), width_, a, lda, panels_,
                      StoreTo<A>{out, ld});
    if (has_tail() && wanted == keys_) {
      constexpr int kRows = 4;  // whose sums of lanes overlap
      A* column = out + in_panels_;
      int64_t row = 0;
      for (; row + kRows <= rows; row += kRows) {
        tail_column<kRows>(a + row * lda, lda, column + row * ld, ld);
      }
      for (; row < rows; ++row) {
        tail_column<1>(a + row * lda, lda, column + row * ld, ld);
      }
    }
  }

 private:
  bool has_tail() const { return in_panels_ < keys_; }

  template <int kRows>
  OVERTONE_INLINE void tail_column(const A* a, int64_t lda, A* out, int64_t ld) const {
    Vector<A> sums[kRows] = {};
    for (int64_t j = 0; j < width_; j += kLanes<A>) {
      const Vector<A> key = load_full(tail_ + j);
      OVERTONE_UNROLL
      for (int i = 0; i < kRows; ++i) {
        sums[i] += load_full(a + i * lda + j) * key;
      }
    }
    OVERTONE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      store_full(mask_tail<A>(broadcast(reduce_add<A>(sums[i])), 1, A{0}), out + i * ld);
    }
  }

  A* panels_;
  int64_t keys_;
  int64_t in_panels_;
  int64_t width_;
  A* tail_;  // the last key's row, where the panels end
};

}  // namespace overtone::OVERTONE_ISA
