// What the nonsymmetric eigen-solver computes, as plain structs shared by the dispatcher and every ISA level.
#pragma once

#include <cstdint>

#include "cpu/isa/dispatch.h"
#include "cpu/matrix_batch.h"
#include "cpu/parallel.h"
#include "info.h"

namespace overtone {

// A V = V diag(λ) of n × n matrices. Complex results are (real, imaginary) pairs; those of a matrix with an info are
// NaN.
struct EigParams {
  MatrixBatch matrices;
  int64_t n = 0;
  bool is_float64 = false;
  bool row_stochastic = false;  // deflate the eigenpair (1, ones) and put it first; eigenvalues only
  void* eigenvalues = nullptr;  // [count, n]
  void* right = nullptr;        // [count, n, n]: eigenvectors of length one as columns; null: not wanted
  void* left = nullptr;         // [count, n, n]: columns w with wᴴ A = λ wᴴ, scaled so that wᴴ v = 1; only with right
  int32_t* info = nullptr;      // [count], of Info
  int64_t threads = 1;          // that take groups in turn; changes nothing but which memory is asked for early
};

struct EigKernels {
  const char* isa;
  int64_t (*lanes)(bool is_float64);  // matrices of a group
  void (*eig)(const EigParams& call, WorkQueue& groups);
};

OVERTONE_KERNELS(EigKernels, eig_kernels);

}  // namespace overtone
