// What Python asks of the kernels without launching one; no CUDA header, so that module.cpp can include it.
#pragma once

#include <string>

namespace overtone::cuda {

// The most rows or columns of matrices that the kernels of `op`, one of eigh, eig and qr, take on `device` (-1: the
// current one). Shared memory limits it. `dtype`: float32 or float64.
int cuda_limit(const std::string& op, const std::string& dtype, int device);

}  // namespace overtone::cuda
