// The kernels, compiled; no torch header, so that they can be compiled and measured without a CUDA build of torch.
#include "cuda/linalg/kernels.h"

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "cuda/linalg/launch.h"
#include "cuda/linalg/limit.h"

namespace overtone::cuda {
namespace {

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("overtone: ") + what + ": " + cudaGetErrorString(error));
  }
}

int current_device() {
  int device = 0;
  check(cudaGetDevice(&device), "no current device");
  return device;
}

size_t shared_limit(int device = current_device()) {
  int bytes = 0;
  check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "no shared memory limit");
  return static_cast<size_t>(bytes);
}

struct Launcher {
  cudaStream_t stream;

  template <class Call>
  void operator()(void (*kernel)(Call), const Grid& grid, const Call& call) const {
    constexpr size_t kWithoutAsking = 48 * 1024;
    if (grid.shared_bytes > kWithoutAsking) {
      check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(grid.shared_bytes)),
            "the device does not give a block so much shared memory");
    }
    kernel<<<grid.blocks, grid.threads, grid.shared_bytes, stream>>>(call);
    check(cudaGetLastError(), "a kernel could not be launched");
  }
};

}  // namespace

int largest(const std::string& op, bool is_float64) {
  return is_float64 ? largest<double>(op, shared_limit()) : largest<float>(op, shared_limit());
}

int cuda_limit(const std::string& op, const std::string& dtype, int device) {
  if ((op != "eigh" && op != "eig" && op != "qr") || (dtype != "float32" && dtype != "float64")) {
    throw std::invalid_argument("overtone: cuda_limit: got " + op + " of " + dtype +
                                ", wanted eigh, eig or qr of float32 or float64");
  }
  const size_t limit = device < 0 ? shared_limit() : shared_limit(device);
  return dtype == "float64" ? largest<double>(op, limit) : largest<float>(op, limit);
}

int64_t eig_workspace(int n, bool is_float64) {
  const size_t limit = shared_limit();
  const Path path = is_float64 ? eig_path<double>(n, limit) : eig_path<float>(n, limit);
  return path == Path::block_global ? static_cast<int64_t>(n) * n : 0;
}

template <class T>
void solve(const EighParams<T>& call, void* stream) {
  launch_eigh(call, eigh_path<T>(call.n, shared_limit()), Launcher{static_cast<cudaStream_t>(stream)});
}

template <class T>
void solve(const EigParams<T>& call, void* stream) {
  launch_eig(call, eig_path<T>(call.n, shared_limit()), Launcher{static_cast<cudaStream_t>(stream)});
}

template <class T>
void solve(const QrCall<T>& call, void* stream) {
  launch_qr(call, Launcher{static_cast<cudaStream_t>(stream)});
}

template void solve(const EighParams<float>&, void*);
template void solve(const EighParams<double>&, void*);
template void solve(const EigParams<float>&, void*);
template void solve(const EigParams<double>&, void*);
template void solve(const QrCall<float>&, void*);
template void solve(const QrCall<double>&, void*);

}  // namespace overtone::cuda
