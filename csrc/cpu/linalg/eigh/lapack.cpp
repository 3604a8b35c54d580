#include "cpu/linalg/eigh/lapack.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "cpu/linalg/blas.h"
#include "cpu/linalg/lapack.h"

namespace overtone {
namespace {

// Of the triangle that is read.
template <class A>
MatrixSize<A> size_of(const A* a, int64_t n, bool upper) {
  MatrixSize<A> size;
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = upper ? i : 0; j < (upper ? n : i + 1); ++j) {
      size.add(a[i * n + j]);
    }
  }
  return size;
}

// False where LAPACK has no result that is finite.
template <class A>
bool solve_one(const EighParams& one, const Tensor& matrix) {
  const int64_t n = one.n;
  A* const elements = static_cast<A*>(matrix.data_ptr());
  const MatrixSize<A> size = size_of(elements, n, one.upper);
  if (!size.is_finite()) {
    return false;
  }
  const int exponent = size.exponent();
  scale_down(elements, n * n, exponent);
  const auto found =
      call_lapack<2>("aten::_linalg_eigh", matrix, std::string(one.upper ? "U" : "L"), one.vectors != nullptr);
  if (!found.has_value()) {
    return false;
  }
  A* const values = static_cast<A*>(one.values);
  const A* found_values = static_cast<const A*>((*found)[0].data_ptr());
  MatrixSize<A> of_values;
  for (int64_t i = 0; i < n; ++i) {
    values[i] = std::ldexp(found_values[i], exponent);
    of_values.add(values[i]);
  }
  if (one.vectors != nullptr) {
    const Tensor& vectors = (*found)[1];
    const int64_t offset = 0;
    const MatrixBatch by_row{vectors.data_ptr(), vectors.stride(1), vectors.stride(0), &offset, 1};
    copy_matrix(by_row, 0, n, n, static_cast<A*>(one.vectors));
  }
  *one.info = 0;
  return of_values.is_finite();
}

// The call of one matrix of the batch.
template <class A>
EighParams only(const EighParams& call, int64_t index) {
  EighParams one = call;
  one.a.offsets += index;
  one.a.count = 1;
  one.values = static_cast<A*>(call.values) + index * call.n;
  one.vectors = call.vectors == nullptr ? nullptr : static_cast<A*>(call.vectors) + index * call.n * call.n;
  one.info += index;
  return one;
}

template <class A>
void solve_range(const EighParams& call, const EighKernels& kernels, const Tensor& like, int64_t begin, int64_t end) {
  const Tensor matrix = allocated(like, {call.n, call.n});
  for (int64_t index = begin; index < end; ++index) {
    const EighParams one = only<A>(call, index);
    copy_matrix(call.a, index, call.n, call.n, static_cast<A*>(matrix.data_ptr()));
    if (!solve_one<A>(one, matrix)) {
      kernels.solve(one, 0, 1);
    }
  }
}

template <class A>
void backward_range(const EighBackward& call, const EighKernels& kernels, const Tensor& like, int64_t begin,
                    int64_t end) {
  const int64_t n = call.n;
  const Tensor rows = allocated(like, {n, n});  // Vᵀ
  const Tensor k = allocated(like, {n, n});
  const Tensor grad_vectors = allocated(like, {n, n});
  for (int64_t index = begin; index < end; ++index) {
    A* grad_a = static_cast<A*>(call.grad_a) + index * n * n;
    std::fill_n(call.undetermined_pair + 2 * index, 2, -1);
    if (call.info[index] != 0) {
      std::fill_n(grad_a, n * n, A(0));
      continue;
    }
    copy_matrix(call.vectors, index, n, n, static_cast<A*>(rows.data_ptr()));
    if (call.grad_vectors.data != nullptr) {
      copy_matrix(call.grad_vectors, index, n, n, static_cast<A*>(grad_vectors.data_ptr()));
      const Tensor m = blas_product(rows, grad_vectors);
      kernels.divide_by_gaps(call, index, m.data_ptr(), k.data_ptr());
    } else {
      kernels.divide_by_gaps(call, index, nullptr, k.data_ptr());
    }
    const Tensor product = blas_product(torch::stable::transpose(rows, 0, 1), blas_product(k, rows));
    std::copy_n(static_cast<const A*>(product.data_ptr()), n * n, grad_a);
  }
}

}  // namespace

void solve_by_lapack(const EighParams& call, const EighKernels& kernels, const Tensor& like) {
  parallel_ranges(call.a.count, kLargeItems, [&](int64_t begin, int64_t end) {
    const OneBlasThread one;
    call.type == Dtype::float64 ? solve_range<double>(call, kernels, like, begin, end)
                                : solve_range<float>(call, kernels, like, begin, end);
  });
}

void backward_by_blas(const EighBackward& call, const EighKernels& kernels, const Tensor& like) {
  parallel_ranges(call.vectors.count, kLargeItems, [&](int64_t begin, int64_t end) {
    const OneBlasThread one;
    call.type == Dtype::float64 ? backward_range<double>(call, kernels, like, begin, end)
                                : backward_range<float>(call, kernels, like, begin, end);
  });
}

}  // namespace overtone
