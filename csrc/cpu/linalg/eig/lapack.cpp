#include "cpu/linalg/eig/lapack.h"

#include <algorithm>
#include <cmath>
#include <complex>

#include "cpu/linalg/blas.h"
#include "cpu/linalg/eig/balancing_trial.h"
#include "cpu/linalg/lapack.h"

namespace overtone {
namespace {

// [n, n] with any strides to rows, transposed and conjugated or as it is; false if it is not finite.
template <class C>
bool copy_rows(const Tensor& from, bool adjoint, int64_t n, C* to) {
  const C* data = static_cast<const C*>(from.data_ptr());
  const int64_t row = from.stride(adjoint ? 1 : 0), column = from.stride(adjoint ? 0 : 1);
  C not_finite = 0;
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      const C x = data[i * row + j * column];
      to[i * n + j] = adjoint ? std::conj(x) : x;
      not_finite += C(x.real() * 0, x.imag() * 0);
    }
  }
  return not_finite == C(0);
}

// Times 2^exponent; false if they are not finite then.
template <class A>
bool copy_values(const Tensor& from, int64_t n, int exponent, std::complex<A>* to) {
  const auto* values = static_cast<const std::complex<A>*>(from.data_ptr());
  bool is_finite = true;
  for (int64_t i = 0; i < n; ++i) {
    to[i] = {std::ldexp(values[i].real(), exponent), std::ldexp(values[i].imag(), exponent)};
    is_finite = is_finite && std::isfinite(to[i].real()) && std::isfinite(to[i].imag());
  }
  return is_finite;
}

// torch unpacks LAPACK's eigenvectors before it looks whether there are any: where LAPACK gave up, it takes what the
// memory of the eigenvalues held before for eigenvalues, and a pair that seems to begin with the last one for a column
// beyond the last, which it reads and writes. A row and a column of zeros at the end keep that inside its memory:
// LAPACK splits them off before it begins, and returns their eigenvalue, zero, last, whatever happens to the others.
constexpr int64_t kBorder = 1;

template <class A>
bool is_border_last(const Tensor& values, const Tensor& right, int64_t n) {
  using C = std::complex<A>;
  const C* vectors = static_cast<const C*>(right.data_ptr());
  C others = 0;
  for (int64_t j = 0; j < n; ++j) {
    others += std::abs(vectors[n * right.stride(0) + j * right.stride(1)]);
  }
  return static_cast<const C*>(values.data_ptr())[n] == C(0) && others == C(0);
}

template <class A>
Tensor inverse(const Tensor& right, int64_t n) {
  const Tensor square = allocated(right, {n, n});
  copy_rows(right, false, n, static_cast<std::complex<A>*>(square.data_ptr()));
  const auto found = call_lapack<2>("aten::linalg_inv_ex", square, false);
  if (!found.has_value()) {
    fail("eig", "torch's linalg.inv_ex failed on a matrix of ", n, " x ", n);
  }
  return (*found)[0];
}

// `matrix`: [n, n], or with a border where eigenvectors are wanted. False where LAPACK has no result that is finite.
template <class A>
bool solve_one(const Tensor& matrix, int exponent, const EigParams& one) {
  using C = std::complex<A>;
  *one.info = kSolved;
  if (one.right == nullptr) {
    const auto values = call_lapack<1>("aten::linalg_eigvals", matrix);
    return values.has_value() && copy_values<A>((*values)[0], one.n, exponent, static_cast<C*>(one.eigenvalues));
  }
  const auto found = call_lapack<2>("aten::linalg_eig", matrix);
  if (!found.has_value()) {
    return false;
  }
  const auto& [values, right] = *found;
  if (!is_border_last<A>(values, right, one.n) || !copy_rows(right, false, one.n, static_cast<C*>(one.right))) {
    return false;
  }
  if (one.left != nullptr) {
    copy_rows(inverse<A>(right, one.n), true, one.n, static_cast<C*>(one.left));
  }
  return copy_values<A>(values, one.n, exponent, static_cast<C*>(one.eigenvalues));
}

// The call of one matrix of the batch.
template <class A>
EigParams only(const EigParams& call, int64_t index) {
  const auto shifted = [](void* data, int64_t numbers) -> void* {
    return data == nullptr ? nullptr : static_cast<std::complex<A>*>(data) + numbers;
  };
  EigParams one = call;
  one.matrices.offsets += index;
  one.matrices.count = 1;
  one.eigenvalues = shifted(call.eigenvalues, index * call.n);
  one.right = shifted(call.right, index * call.n * call.n);
  one.left = shifted(call.left, index * call.n * call.n);
  one.info += index;
  return one;
}

template <class A>
void solve_range(const EigParams& call, const EigKernels& kernels, const Tensor& like, int64_t begin, int64_t end) {
  const int64_t n = call.n, size = n + (call.right != nullptr ? kBorder : 0);
  // A copy, so that LAPACK sees the same alignment wherever a matrix stands in the batch.
  const Tensor matrix = allocated(like, {size, size});
  A* elements = static_cast<A*>(matrix.data_ptr());
  for (int64_t index = begin; index < end; ++index) {
    const EigParams one = only<A>(call, index);
    const A* source = static_cast<const A*>(call.matrices.data) + call.matrices.offsets[index];
    MatrixSize<A> found;
    std::fill_n(elements, size * size, A{0});
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        const A x = source[i * call.matrices.row_stride + j * call.matrices.column_stride];
        elements[i * size + j] = x;
        found.add(x);
      }
    }
    const int exponent = found.is_finite() ? found.exponent() : 0;
    scale_down(elements, size * size, exponent);
    const bool is_fit = found.is_finite() && BalancingTrial::is_harmless(elements, n, size);
    if (!is_fit || !solve_one<A>(matrix, exponent, one)) {  // MKL's nonsymmetric solver dies of NaN
      WorkQueue only_group{0, 1};
      kernels.eig(one, only_group);
    }
  }
}

}  // namespace

void solve_by_lapack(const EigParams& call, const EigKernels& kernels, const Tensor& like) {
  parallel_ranges(call.matrices.count, kLargeItems, [&](int64_t begin, int64_t end) {
    const OneBlasThread one;
    call.is_float64 ? solve_range<double>(call, kernels, like, begin, end)
                    : solve_range<float>(call, kernels, like, begin, end);
  });
}

}  // namespace overtone
