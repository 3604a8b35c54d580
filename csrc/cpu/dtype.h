// The element types the CPU kernels read and write. No torch header: kernels of every instruction set include it.
#pragma once

#include <cstdint>

namespace overtone {

enum class Dtype { float32, float64, bfloat16, float16 };

inline __attribute__((always_inline)) int64_t bytes_of(Dtype type) {
  return type == Dtype::float64 ? 8 : type == Dtype::float32 ? 4 : 2;
}

}  // namespace overtone
