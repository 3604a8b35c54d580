// What module.cpp asks of the CUDA kernels; no CUDA header, so that a C++ compiler takes it.
#pragma once

#include <string>

namespace overtone::cuda {

// The most rows or columns of matrices that the kernels of `op`, one of eigh, eigvals and qr, take on a device: its
// shared memory limits it.
int largest(const std::string& op, bool is_float64, int device);

}  // namespace overtone::cuda
