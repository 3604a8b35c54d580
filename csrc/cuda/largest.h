// How large the matrices may be that the kernels take; no CUDA header.
#pragma once

#include <string>

namespace overtone::cuda {

// The most rows or columns for `op`, one of eigh, eig and qr, on the current device: its shared memory is the limit.
int largest(const std::string& op, bool is_float64);

}  // namespace overtone::cuda
