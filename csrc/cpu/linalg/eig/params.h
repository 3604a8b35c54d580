// What the nonsymmetric eigen-solver computes, as plain structs shared by the dispatcher and every ISA level.
#pragma once

#include <cstdint>

#include "cpu/matrix_batch.h"
#include "cpu/work_queue.h"

namespace overtone {

// Per matrix: solved; not finite or not converged; promised to be row-stochastic and is not.
enum EigInfo : int32_t { kSolved = 0, kUnsolved = 1, kNotStochastic = 2 };

// A V = V diag(λ) of n × n matrices. Complex results are (real, imaginary) pairs; those of a matrix with an info are
// NaN.
struct Eig {
  MatrixBatch matrices;
  int64_t n = 0;
  bool is_float64 = false;
  bool row_stochastic = false;  // deflate the eigenpair (1, ones) and put it first; eigenvalues only
  void* eigenvalues = nullptr;  // [count, n]
  void* right = nullptr;        // [count, n, n]: eigenvectors of length one as columns; null: not wanted
  void* left = nullptr;         // [count, n, n]: columns w with wᴴ A = λ wᴴ, scaled so that wᴴ v = 1; only with right
  int32_t* info = nullptr;      // [count]
  int64_t threads = 1;          // that take groups in turn; changes nothing but which memory is asked for early
};

struct EigKernels {
  const char* level;
  int64_t (*lanes)(bool is_float64);  // matrices of a group
  void (*eig)(const Eig& call, WorkQueue& groups);
};

namespace baseline {
extern const EigKernels eig_kernels;
}
namespace avx2 {
extern const EigKernels eig_kernels;
}
namespace avx512 {
extern const EigKernels eig_kernels;
}

}  // namespace overtone
