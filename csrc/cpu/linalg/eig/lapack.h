// Nonsymmetric eigenproblems by torch's LAPACK, a matrix at a time over the threads: large matrices, or few of them.
#pragma once

#include "cpu/linalg/eig/params.h"
#include "cpu/tensor.h"

namespace overtone {

// Matrices that LAPACK gives up on, or would balance to their harm, are solved by `kernels`. Not for row-stochastic
// calls.
void solve_by_lapack(const EigParams& call, const EigKernels& kernels, const Tensor& like);

}  // namespace overtone
