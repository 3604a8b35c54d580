// A batch of matrices in memory, as the kernels of every ISA level see it. No torch header.
#pragma once

#include <cstdint>

namespace overtone {

// [..., rows, columns] with any strides; `count` is the number of matrices.
struct MatrixBatch {
  const void* data = nullptr;
  int64_t row_stride = 0;
  int64_t column_stride = 0;
  const int64_t* offsets = nullptr;  // [count], in elements
  int64_t count = 0;
};

}  // namespace overtone
