// torch's own BLAS and LAPACK from inside a parallel loop, a matrix at a time.
#pragma once

#include <array>

#include "cpu/tensor.h"

extern "C" int MKL_Set_Num_Threads_Local(int count) __attribute__((weak));

namespace overtone {

// While it lives this thread's MKL, if torch has one, uses no other thread: with several its results would depend on
// how many there are, even inside a parallel region.
class OneBlasThread {
 public:
  OneBlasThread() {
    torch::stable::get_num_threads();  // torch sets the number itself when a thread first asks; not after us, then
    if (MKL_Set_Num_Threads_Local != nullptr) {
      before_ = MKL_Set_Num_Threads_Local(1);
    }
  }
  ~OneBlasThread() {
    if (MKL_Set_Num_Threads_Local != nullptr) {
      MKL_Set_Num_Threads_Local(before_);
    }
  }
  OneBlasThread(const OneBlasThread&) = delete;
  OneBlasThread& operator=(const OneBlasThread&) = delete;

 private:
  int before_ = 0;
};

inline Tensor blas_product(const Tensor& left, const Tensor& right) {
  std::array<StableIValue, 2> stack{torch::stable::detail::from(left), torch::stable::detail::from(right)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::mm", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// A matrix of a batch to contiguous memory of its own: BLAS then sees the same alignment wherever it stands.
template <class A>
void copy_matrix(const MatrixBatch& batch, int64_t index, int64_t rows, int64_t columns, A* out) {
  const A* source = static_cast<const A*>(batch.data) + batch.offsets[index];
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      out[i * columns + j] = source[i * batch.row_stride + j * batch.column_stride];
    }
  }
}

}  // namespace overtone
