// What the kernels of every ISA level solve: symmetric matrices of one size, a matrix per SIMD lane.
//
// A work item is as many matrices as a kernel has in flight. A matrix never meets another one's numbers, so its result
// is the same bit for bit wherever it stands in the batch and however the items are spread over threads.
#pragma once

#include <cstdint>

#include "cpu/element_type.h"
#include "cpu/matrix_batch.h"

namespace overtone {

struct Eigh {
  ElementType type;  // float32 or float64
  int64_t n = 0;
  bool upper = false;  // which triangle is read
  MatrixBatch a;
  void* values = nullptr;   // [count][n], ascending
  void* vectors = nullptr;  // [count][n][n], an eigenvector per row; null if they are not wanted
  int32_t* info = nullptr;  // [count]: 0 solved; 1 not finite or not converged, and the results are NaN
};

struct EighKernels {
  const char* level;
  int64_t (*matrices_per_item)(const Eigh&);
  void (*solve)(const Eigh&, int64_t begin, int64_t end);
};

namespace baseline {
extern const EighKernels eigh_kernels;
}
namespace avx2 {
extern const EighKernels eigh_kernels;
}
namespace avx512 {
extern const EighKernels eigh_kernels;
}

}  // namespace overtone
