// Symmetric eigenproblems by torch's LAPACK, a matrix at a time over the threads: large matrices, or few of them.
#pragma once

#include "cpu/linalg/eigh/params.h"
#include "cpu/tensor.h"

namespace overtone {

// `like` is any tensor of the matrices' type. Matrices that LAPACK gives up on are solved by `kernels`.
void solve_by_lapack(const EighParams& call, const EighKernels& kernels, const Tensor& like);
void backward_by_blas(const EighBackward& call, const EighKernels& kernels, const Tensor& like);

}  // namespace overtone
