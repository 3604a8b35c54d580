#include "cpu/eig_lapack.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <complex>
#include <exception>

#include "cpu/blas.h"

namespace overtone {
namespace {

// Throws what the op throws, for instance because LAPACK did not converge.
template <size_t results, class... Arguments>
std::array<Tensor, results> call_torch(const char* op, const Arguments&... arguments) {
  std::array<StableIValue, std::max(results, sizeof...(arguments))> stack{torch::stable::detail::from(arguments)...};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(op, "", stack.data(), TORCH_ABI_VERSION));
  std::array<Tensor, results> found;
  for (size_t i = 0; i < results; ++i) {
    found[i] = torch::stable::detail::to<Tensor>(stack[i]);
  }
  return found;
}

// [n, n] with any strides to rows, transposed and conjugated or as it is.
template <class C>
void copy_rows(const Tensor& from, bool adjoint, int64_t n, C* to) {
  const C* data = static_cast<const C*>(from.data_ptr());
  const int64_t row = from.stride(adjoint ? 1 : 0), column = from.stride(adjoint ? 0 : 1);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      const C x = data[i * row + j * column];
      to[i * n + j] = adjoint ? std::conj(x) : x;
    }
  }
}

// MKL's nonsymmetric solver dies of NaN.
template <class A>
bool is_finite(const Tensor& matrix) {
  const A* data = static_cast<const A*>(matrix.data_ptr());
  return std::all_of(data, data + matrix.numel(), [](A x) { return std::isfinite(x); });
}

template <class A>
bool solve_one(const Tensor& matrix, const Eig& one) {
  using C = std::complex<A>;
  if (!is_finite<A>(matrix)) {
    return false;
  }
  try {
    Tensor values;
    if (one.right == nullptr) {
      values = call_torch<1>("aten::linalg_eigvals", matrix)[0];
    } else {
      const auto [found, right] = call_torch<2>("aten::linalg_eig", matrix);
      values = found;
      copy_rows(right, false, one.n, static_cast<C*>(one.right));
      if (one.left != nullptr) {
        const auto inverse = call_torch<2>("aten::linalg_inv_ex", right, false)[0];
        copy_rows(inverse, true, one.n, static_cast<C*>(one.left));
      }
    }
    std::copy_n(static_cast<const C*>(values.data_ptr()), one.n, static_cast<C*>(one.eigenvalues));
    *one.info = kSolved;
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

// The call of one matrix of the batch.
template <class A>
Eig only(const Eig& call, int64_t index) {
  const auto shifted = [](void* data, int64_t numbers) -> void* {
    return data == nullptr ? nullptr : static_cast<std::complex<A>*>(data) + numbers;
  };
  Eig one = call;
  one.matrices.offsets += index;
  one.matrices.count = 1;
  one.eigenvalues = shifted(call.eigenvalues, index * call.n);
  one.right = shifted(call.right, index * call.n * call.n);
  one.left = shifted(call.left, index * call.n * call.n);
  one.info += index;
  return one;
}

template <class A>
void solve_range(const Eig& call, const EigKernels& kernels, const Tensor& like, int64_t begin, int64_t end) {
  // A copy, so that LAPACK sees the same alignment wherever a matrix stands in the batch.
  const Tensor matrix = torch::stable::new_empty(like, {call.n, call.n});
  for (int64_t index = begin; index < end; ++index) {
    const Eig one = only<A>(call, index);
    copy_matrix(call.matrices, index, call.n, call.n, static_cast<A*>(matrix.data_ptr()));
    if (!solve_one<A>(matrix, one)) {
      WorkQueue only_group{0, 1};
      kernels.eig(one, only_group);
    }
  }
}

}  // namespace

void solve_by_lapack(const Eig& call, const EigKernels& kernels, const Tensor& like) {
  torch::stable::parallel_for(0, call.matrices.count, 1, [&](int64_t begin, int64_t end) {
    const OneBlasThread one;
    call.is_float64 ? solve_range<double>(call, kernels, like, begin, end)
                    : solve_range<float>(call, kernels, like, begin, end);
  });
}

}  // namespace overtone
