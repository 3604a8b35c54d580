// What ops.cu calls; solvers.cu is the one file that compiles the kernels. For the current device.
#pragma once

#include <string>

#include "cuda/linalg/params.h"

namespace overtone::cuda {

// The most rows or columns of matrices that the kernels of `op`, one of eigh, eig and qr, take: shared memory limits
// it.
int largest(const std::string& op, bool is_float64);

// Numbers of global memory that a matrix takes.
int64_t eig_workspace(int n, bool is_float64);

// Launch on `stream`, a cudaStream_t. They throw std::runtime_error if the launch fails.
template <class T>
void solve(const EighParams<T>& call, void* stream);
template <class T>
void solve(const EigParams<T>& call, void* stream);
template <class T>
void solve(const QrCall<T>& call, void* stream);

}  // namespace overtone::cuda
