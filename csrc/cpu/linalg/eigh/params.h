// What the kernels of every ISA level solve: symmetric matrices of one size, a matrix per SIMD lane.
//
// A work item is as many matrices as a kernel has in flight. A matrix never meets another one's numbers, so its result
// is the same bit for bit wherever it stands in the batch and however the items are spread over threads.
#pragma once

#include <cstdint>

#include "cpu/dtype.h"
#include "cpu/isa/dispatch.h"
#include "cpu/matrix_batch.h"

namespace overtone {

struct EighParams {
  Dtype type;  // float32 or float64
  int64_t n = 0;
  bool upper = false;  // which triangle is read
  MatrixBatch a;
  void* values = nullptr;   // [count][n], ascending
  void* vectors = nullptr;  // [count][n][n], an eigenvector per row; null if they are not wanted
  int32_t* info = nullptr;  // [count]: 0 solved; 1 not finite or not converged, and the results are NaN
};

// grad_A = V (diag(grad_λ) + K) Vᵀ, K_ij = skew(Vᵀ grad_V)_ij / (λ_j − λ_i), symmetric. A matrix that was not solved
// has gradient zero.
//
// Where λ_i and λ_j are equal to rounding K_ij is a limit 0/0, which exists if the loss does not depend on the choice
// of basis in the eigenspace. It can be told from the gradients if the loss takes A through one function
// V f(Λ) Vᵀ: then grad_λ_k = c (Vᵀ grad_V)_kk with one c for the whole eigenspace, and K_ij = c (Vᵀ grad_V)_ij.
// In particular it is zero if (Vᵀ grad_V)_ij is. Otherwise the pair is reported.
struct EighBackward {
  Dtype type;
  int64_t n = 0;
  const void* values = nullptr;          // [count][n]
  MatrixBatch vectors;                   // an eigenvector per row
  const int32_t* info = nullptr;         // [count]
  const void* grad_values = nullptr;     // [count][n]; null is zero
  MatrixBatch grad_vectors;              // as V: an eigenvector per column; no data is zero
  void* grad_a = nullptr;                // [count][n][n]
  int32_t* undetermined_pair = nullptr;  // [count][2]: i, j of a pair that is not determined, or −1, −1
};

struct EighKernels {
  const char* isa;
  int64_t (*matrices_per_item)(const EighParams&);
  void (*solve)(const EighParams&, int64_t begin, int64_t end);
  int64_t (*matrices_per_backward_item)(const EighBackward&);
  void (*backward)(const EighBackward&, int64_t begin, int64_t end);
  // diag(grad_λ) + K of one matrix from m = Vᵀ grad_V, both contiguous; m is null if the loss has no eigenvectors.
  void (*divide_by_gaps)(const EighBackward&, int64_t index, const void* m, void* k);
};

OVERTONE_KERNELS(EighKernels, eigh_kernels);

}  // namespace overtone
