// LAPACK through torch, a matrix at a time: what it is given, and what becomes of its errors.
#pragma once

#include <array>
#include <cmath>
#include <exception>
#include <optional>

#include "cpu/tensor.h"

namespace overtone {

// The size of a matrix's elements, found while they are looked through for NaN and Inf.
template <class A>
class MatrixSize {
 public:
  void add(A x) {
    const A magnitude = std::abs(x);
    largest_ = magnitude > largest_ ? magnitude : largest_;
    not_finite_ += x * 0;
  }
  bool is_finite() const { return not_finite_ == 0; }

  // The matrix is 2^exponent times what LAPACK is to get: a power of two loses no digit, an even one not even under
  // square roots. A matrix whose squares are safe is left alone.
  int exponent() const {
    constexpr A kSafe = sizeof(A) == 8 ? static_cast<A>(0x1p400) : static_cast<A>(0x1p36);
    const bool is_safe = largest_ == 0 || (1 / kSafe <= largest_ && largest_ <= kSafe);
    return is_safe ? 0 : std::ilogb(largest_) / 2 * 2;
  }

 private:
  A largest_ = 0;
  A not_finite_ = 0;
};

// In two steps: 2^-exponent itself may overflow.
template <class A>
void scale_down(A* numbers, int64_t count, int exponent) {
  if (exponent != 0) {
    const A first = std::ldexp(A{1}, -exponent / 2), second = std::ldexp(A{1}, -exponent - -exponent / 2);
    for (int64_t i = 0; i < count; ++i) {
      numbers[i] = numbers[i] * first * second;
    }
  }
}

// The results of an op that throws where LAPACK did not converge, or has no memory: then nothing. Either way our own
// kernels take the matrix, and say so if they cannot.
template <size_t results, class... Arguments>
std::optional<std::array<Tensor, results>> call_lapack(const char* op, const Arguments&... arguments) {
  std::array<StableIValue, std::max(results, sizeof...(arguments))> stack{torch::stable::detail::from(arguments)...};
  if (torch_call_dispatcher(op, "", stack.data(), TORCH_ABI_VERSION) != TORCH_SUCCESS) {
    return std::nullopt;
  }
  std::array<Tensor, results> found;
  for (size_t i = 0; i < results; ++i) {
    found[i] = torch::stable::detail::to<Tensor>(stack[i]);
  }
  return found;
}

}  // namespace overtone
