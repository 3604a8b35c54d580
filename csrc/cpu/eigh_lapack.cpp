#include "cpu/eigh_lapack.h"

#include <algorithm>
#include <array>
#include <exception>
#include <limits>
#include <string>
#include <tuple>

#include "cpu/blas.h"

namespace overtone {
namespace {

// Throws if it does not converge.
std::tuple<Tensor, Tensor> lapack_eigh(const Tensor& a, bool upper, bool vectors) {
  std::array<StableIValue, 3> stack{torch::stable::detail::from(a),
                                    torch::stable::detail::from(std::string(upper ? "U" : "L")),
                                    torch::stable::detail::from(vectors)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::_linalg_eigh", "", stack.data(), TORCH_ABI_VERSION));
  return {torch::stable::detail::to<Tensor>(stack[0]), torch::stable::detail::to<Tensor>(stack[1])};
}

template <class A>
bool is_finite(const A* a, int64_t n, bool upper) {
  A not_finite = 0;
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = upper ? i : 0; j < (upper ? n : i + 1); ++j) {
      not_finite += a[i * n + j] * 0;
    }
  }
  return not_finite == 0;
}

template <class A>
bool solve_one(const Eigh& call, const Tensor& matrix, A* values, A* vectors) {
  const int64_t n = call.n;
  if (!is_finite(static_cast<const A*>(matrix.data_ptr()), n, call.upper)) {
    return false;
  }
  try {
    const auto [found_values, found_vectors] = lapack_eigh(matrix, call.upper, vectors != nullptr);
    std::copy_n(static_cast<const A*>(found_values.data_ptr()), n, values);
    if (vectors != nullptr) {
      const int64_t offset = 0;
      const MatrixBatch by_row{found_vectors.data_ptr(), found_vectors.stride(1), found_vectors.stride(0), &offset, 1};
      copy_matrix(by_row, 0, n, n, vectors);
    }
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

template <class A>
void solve_range(const Eigh& call, const Tensor& like, int64_t begin, int64_t end) {
  const int64_t n = call.n;
  const Tensor matrix = torch::stable::new_empty(like, {n, n});
  for (int64_t index = begin; index < end; ++index) {
    A* values = static_cast<A*>(call.values) + index * n;
    A* vectors = call.vectors == nullptr ? nullptr : static_cast<A*>(call.vectors) + index * n * n;
    copy_matrix(call.a, index, n, n, static_cast<A*>(matrix.data_ptr()));
    const bool is_solved = solve_one(call, matrix, values, vectors);
    call.info[index] = is_solved ? 0 : 1;
    if (!is_solved) {
      std::fill_n(values, n, std::numeric_limits<A>::quiet_NaN());
      std::fill_n(vectors, vectors == nullptr ? 0 : n * n, std::numeric_limits<A>::quiet_NaN());
    }
  }
}

template <class A>
void backward_range(const EighBackward& call, const EighKernels& kernels, const Tensor& like, int64_t begin,
                    int64_t end) {
  const int64_t n = call.n;
  const Tensor rows = torch::stable::new_empty(like, {n, n});  // Vᵀ
  const Tensor k = torch::stable::new_empty(like, {n, n});
  const Tensor grad_vectors = torch::stable::new_empty(like, {n, n});
  for (int64_t index = begin; index < end; ++index) {
    A* grad_a = static_cast<A*>(call.grad_a) + index * n * n;
    std::fill_n(call.pair + 2 * index, 2, -1);
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

void solve_by_lapack(const Eigh& call, const Tensor& like) {
  torch::stable::parallel_for(0, call.a.count, 1, [&](int64_t begin, int64_t end) {
    const OneBlasThread one;
    call.type == ElementType::float64 ? solve_range<double>(call, like, begin, end)
                                      : solve_range<float>(call, like, begin, end);
  });
}

void backward_by_blas(const EighBackward& call, const EighKernels& kernels, const Tensor& like) {
  torch::stable::parallel_for(0, call.vectors.count, 1, [&](int64_t begin, int64_t end) {
    const OneBlasThread one;
    call.type == ElementType::float64 ? backward_range<double>(call, kernels, like, begin, end)
                                      : backward_range<float>(call, kernels, like, begin, end);
  });
}

}  // namespace overtone
