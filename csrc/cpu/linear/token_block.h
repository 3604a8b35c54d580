// A block of tokens times a weight: what linear layers and the MLP are made of.
#pragma once

#include "cpu/gemm/microkernel.h"
#include "cpu/gemm/pack.h"
#include "cpu/linear/params.h"
#include "cpu/simd/scratch.h"

namespace overtone::OVERTONE_ISA {

// The depth over which a product runs before its sum meets the partial ones, for exactness and so that a panel stays in
// the first-level cache. Without fused multiplication and addition every term is rounded twice.
#if OVERTONE_VECTOR_BYTES == 16
constexpr int64_t kLinearDepth = 64;
#else
constexpr int64_t kLinearDepth = 192;
#endif

// c = sum + bias.
template <class A>
struct AddBias {
  A* c;
  int64_t ldc;
  const A* bias;

  OVERTONE_INLINE void operator()(int64_t row, int v, Vector<A> sum) const {
    store_full(sum + load_full(bias + v * kLanes<A>), c + row * ldc + v * kLanes<A>);
  }
};

// A weight [depth, columns] in panels.
template <class A>
struct WeightPanels {
  const A* data;
  int64_t depth;
  int vectors;

  // Vectors [first, last) of the columns, rows [row, row + depth).
  struct Part {
    int first;
    int last;
    int64_t row;
    int64_t depth;
  };

  WeightPanels(const void* panels, int64_t depth, int64_t columns)
      : data(static_cast<const A*>(panels)), depth(depth), vectors(vectors_of<A>(columns)) {}

  // c = bias + A · part, or c += A · part without a bias; c and bias count from the part's first vector.
  void multiply(const Part& part, int64_t rows, const A* a, int64_t lda, const A* bias, A* c, int64_t ldc) const {
    for (int panel = part.first; panel < part.last;) {
      const int width = next_tile_width(vectors - panel);
      const int64_t ldb = width * kLanes<A>;
      const int vector = panel - part.first;
      const A* b = data + panel * kLanes<A> * depth + part.row * ldb;
      for (int64_t k = 0; k < part.depth; k += kLinearDepth) {
        const int64_t summands = std::min(kLinearDepth, part.depth - k);
        if (k == 0 && bias != nullptr) {
          gemm_panel_of<A, Operand::row_major>(width, rows, vector, summands, a, lda, b, ldb, AddBias<A>{c, ldc, bias});
        } else {
          gemm_panel_of<A, Operand::row_major>(width, rows, vector, summands, a + k, lda, b + k * ldb, ldb,
                                               AddTo<A>{c, ldc});
        }
      }
      panel += width;
    }
  }

  Part all() const { return {0, vectors, 0, depth}; }
  int64_t ld() const { return vectors * kLanes<A>; }
};

// Rows of a result: summed where they go, or in scratch where they do not end with a whole vector.
template <class A>
struct ResultRows {
  A* sums;
  A* out;
  int64_t width;

  ResultRows(void* result, int64_t row, int64_t width, A* scratch)
      : sums(scratch), out(static_cast<A*>(result) + row * width), width(width) {
    if (width % kLanes<A> == 0) {
      sums = out;
    }
  }

  void finish(int64_t rows) const {
    if (sums != out) {
      unpack_rows(sums, padded_to(width, kLanes<A>), rows, width, A{1}, buffer_rows<A>(out, 0, width));
    }
  }
};

// A bias filled up with zeros; zeros if there is none.
template <class A>
const A* padded_bias(const void* bias, int64_t size, A* out) {
  pack_rows(buffer_rows<A>(bias, 0, size), 1, bias == nullptr ? 0 : size, A{1}, out, Scratch<A>::padded(size));
  return out;
}

}  // namespace overtone::OVERTONE_ISA
