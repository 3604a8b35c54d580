// Views of tensors with any strides, in elements, as the kernels of every instruction set see them. No torch header.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cpu/dtype.h"

namespace overtone {

// A matrix of any element type. Its functions are always inlined: compiled for AVX-512, one must not be the copy that
// the linker keeps for everyone.
struct StridedMatrix {
  Dtype type = Dtype::float32;
  void* data = nullptr;
  int64_t row_stride = 0;
  int64_t column_stride = 0;

  template <class T>
  __attribute__((always_inline)) T* at(int64_t row, int64_t column) const {
    return static_cast<T*>(data) + row * row_stride + column * column_stride;
  }

  // What lies below and right of an element.
  __attribute__((always_inline)) StridedMatrix from(int64_t row, int64_t column) const {
    const int64_t offset = row * row_stride + column * column_stride;
    return {type, static_cast<char*>(data) + offset * bytes_of(type), row_stride, column_stride};
  }

  __attribute__((always_inline)) StridedMatrix transposed() const { return {type, data, column_stride, row_stride}; }
};

// That of float and double.
template <class A>
inline constexpr Dtype kDtype = std::is_same_v<A, double> ? Dtype::float64 : Dtype::float32;

// Rows in a buffer of floats or doubles.
template <class A>
__attribute__((always_inline)) inline StridedMatrix buffer_rows(const void* data, int64_t offset, int64_t row_stride) {
  return {kDtype<A>, const_cast<A*>(static_cast<const A*>(data)) + offset, row_stride, 1};
}

// Token matrices [samples, N, C].
struct StridedTokens {
  const void* data = nullptr;
  int64_t token_stride = 0;
  int64_t channel_stride = 0;
  const int64_t* sample_offsets = nullptr;  // [samples]
};

// [batch, heads, tokens, width].
struct StridedHeads {
  void* data = nullptr;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t token_stride = 0;
  int64_t width_stride = 0;
};

}  // namespace overtone
