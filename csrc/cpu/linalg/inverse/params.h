// What the inverse kernels of every ISA level compute. A work item is one matrix.
#pragma once

#include <cstdint>

#include "cpu/dtype.h"
#include "cpu/isa/dispatch.h"
#include "cpu/matrix_batch.h"

namespace overtone {

struct InverseParams {
  Dtype type;
  int64_t size = 0;
  MatrixBatch a;
  void* inverse = nullptr;  // [count, size, size]
  int32_t* info = nullptr;  // [count]: 1 if the matrix is singular or not finite; its inverse is NaN
};

struct InverseKernels {
  const char* isa;
  void (*run)(const InverseParams&, int64_t begin, int64_t end);
};

OVERTONE_KERNELS(InverseKernels, inverse_kernels);

}  // namespace overtone
