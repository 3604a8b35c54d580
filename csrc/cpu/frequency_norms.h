// The norms' kernels and what surrounds them, for the ops that take norms of their result.
#pragma once

#include <vector>

#include "cpu/frequency.h"
#include "cpu/tensor.h"

namespace overtone {

// Of the current ISA level.
const FrequencyKernels& frequency_kernels();

// [samples][blocks] of partial sums to norms.
void store_norms(const std::vector<double>& squared, const FrequencyShape& shape, Tensor& norms);

// grad / norm of every sample of x, and zero where the norm is zero. `name` is the norm's.
std::vector<double> norm_scales(const Tensor& grad, const Tensor& norm, const Tensor& x, const char* name,
                                const char* op);

// A few thousand elements per task hide the cost of waking a thread.
template <class Body>
void for_frequency_items(const FrequencyShape& shape, const Body& body) {
  constexpr int64_t kElementsPerTask = 32768;
  const int64_t elements = shape.tokens * shape.blocks_per_item() * kChannelBlock;
  const int64_t grain = elements >= kElementsPerTask ? 1 : kElementsPerTask / (elements < 1 ? 1 : elements);
  parallel_ranges(shape.items(), grain, body);
}

}  // namespace overtone
