// eigh_ex, eig_ex and qr_ex on CUDA tensors: from the dispatcher to the kernels, on the current stream. The host does
// not wait. Shapes and types were validated by python/overtone/ops; what is checked here again is what memory safety
// needs.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <vector>

#include "cuda/linalg/kernels.h"

namespace overtone::cuda {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using torch::stable::accelerator::DeviceGuard;

// All sizes but the last few.
std::vector<int64_t> sizes_of(const Tensor& tensor, int64_t without = 0) {
  const auto sizes = tensor.sizes();
  return {sizes.begin(), sizes.end() - without};
}

bool check_matrices(const Tensor& a, bool square, const char* op) {
  STD_TORCH_CHECK(a.is_cuda() && a.dim() >= 2 && (!square || a.size(-1) == a.size(-2)), op,
                  ": A must be a CUDA tensor of matrices");
  STD_TORCH_CHECK(a.scalar_type() == ScalarType::Float || a.scalar_type() == ScalarType::Double, op,
                  ": A must be float32 or float64");
  return a.scalar_type() == ScalarType::Double;
}

void check_size(int64_t n, bool is_float64, const char* op) {
  const int most = largest(op, is_float64);
  STD_TORCH_CHECK(n <= most, op, ": got matrices of ", n, " rows or columns, the kernels on this device take ", most);
}

void* current_stream(const Tensor& a) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(a.get_device_index(), &stream));
  return stream;
}

// [count, rows, columns], a view where the strides allow it.
Tensor as_batch(const Tensor& a) {
  int64_t count = 1;
  for (int64_t dim = 0; dim + 2 < a.dim(); ++dim) {
    count *= a.size(dim);
  }
  return torch::stable::reshape(a, {count, a.size(-2), a.size(-1)});
}

template <class T>
Matrices<T> matrices(const Tensor& batch) {
  return {static_cast<const T*>(batch.data_ptr()), batch.size(0), batch.stride(0), batch.stride(1), batch.stride(2)};
}

template <class T>
T* pointer(const Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

std::tuple<Tensor, Tensor, Tensor> eigh_ex(Tensor a, bool upper, bool vectors) {
  const bool is_float64 = check_matrices(a, true, "eigh");
  const DeviceGuard guard(a.get_device_index());
  const int64_t n = a.size(-1);
  check_size(n, is_float64, "eigh");
  const std::vector<int64_t> shape = sizes_of(a);
  Tensor values = torch::stable::new_empty(a, sizes_of(a, 1));
  Tensor rows = torch::stable::new_empty(a, vectors ? shape : std::vector<int64_t>{0, 0});
  Tensor info = torch::stable::new_zeros(a, sizes_of(a, 2), ScalarType::Int);
  if (a.numel() > 0) {
    const Tensor batch = as_batch(a);
    const auto run = [&]<class T>(T) {
      solve(EighParams<T>{matrices<T>(batch), static_cast<int>(n), upper, pointer<T>(values),
                          vectors ? pointer<T>(rows) : nullptr, pointer<int32_t>(info)},
            current_stream(a));
    };
    is_float64 ? run(double{}) : run(float{});
  }
  return {values, torch::stable::transpose(rows, -2, -1), info};
}

// Eigenvalues only: what is asked for beyond them goes to torch.linalg before it comes here.
std::tuple<Tensor, Tensor, Tensor, Tensor> eig_ex(Tensor a, bool row_stochastic, bool right, bool left) {
  const bool is_float64 = check_matrices(a, true, "eig");
  STD_TORCH_CHECK(!right && !left, "eig: the CUDA kernels have eigenvalues only");
  const DeviceGuard guard(a.get_device_index());
  const int64_t n = a.size(-1);
  check_size(n, is_float64, "eig");
  const std::vector<int64_t> shape = sizes_of(a), none{0, 0};
  const ScalarType complex_type = is_float64 ? ScalarType::ComplexDouble : ScalarType::ComplexFloat;
  Tensor values = torch::stable::new_empty(a, sizes_of(a, 1), complex_type);
  Tensor info = torch::stable::new_zeros(a, sizes_of(a, 2), ScalarType::Int);
  if (a.numel() > 0) {
    const Tensor batch = as_batch(a);
    const Tensor workspace = torch::stable::new_empty(a, {batch.size(0) * eig_workspace(n, is_float64)});
    const auto run = [&]<class T>(T) {
      solve(EigParams<T>{matrices<T>(batch), static_cast<int>(n), row_stochastic, pointer<T>(values),
                         pointer<T>(workspace), pointer<int32_t>(info)},
            current_stream(a));
    };
    is_float64 ? run(double{}) : run(float{});
  }
  return {values, torch::stable::new_empty(a, none, complex_type), torch::stable::new_empty(a, none, complex_type),
          info};
}

std::tuple<Tensor, Tensor, Tensor> qr_ex(Tensor a, bool complete, bool need_q) {
  const bool is_float64 = check_matrices(a, false, "qr");
  const DeviceGuard guard(a.get_device_index());
  const int64_t rows = a.size(-2), columns = a.size(-1), inner = complete ? rows : std::min(rows, columns);
  check_size(std::max(rows, columns), is_float64, "qr");
  std::vector<int64_t> shape = sizes_of(a);
  Tensor info = torch::stable::new_zeros(a, sizes_of(a, 2), ScalarType::Int);
  shape[shape.size() - 2] = inner;
  Tensor r = torch::stable::new_empty(a, shape);
  shape[shape.size() - 2] = rows;
  shape.back() = inner;
  Tensor q = torch::stable::new_empty(a, need_q ? shape : std::vector<int64_t>{0});
  const Tensor batch = as_batch(a);
  if (batch.size(0) > 0) {
    const auto run = [&]<class T>(T) {
      solve(QrCall<T>{matrices<T>(batch), static_cast<int>(rows), static_cast<int>(columns),
                      static_cast<int>(need_q ? inner : 0), static_cast<int>(inner), pointer<T>(q), pointer<T>(r),
                      pointer<int32_t>(info)},
            current_stream(a));
    };
    is_float64 ? run(double{}) : run(float{});
  }
  return {q, r, info};
}

}  // namespace
}  // namespace overtone::cuda

STABLE_TORCH_LIBRARY_IMPL(overtone, CUDA, m) {
  m.impl("eigh_ex", TORCH_BOX(&overtone::cuda::eigh_ex));
  m.impl("eig_ex", TORCH_BOX(&overtone::cuda::eig_ex));
  m.impl("qr_ex", TORCH_BOX(&overtone::cuda::qr_ex));
}
