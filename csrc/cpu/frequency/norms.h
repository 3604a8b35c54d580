// The norms' kernels and what surrounds them, for the ops that take norms of their result.
#pragma once

#include <vector>

#include "cpu/frequency/params.h"
#include "cpu/tensor.h"

namespace overtone {

// Of the current ISA level.
const FrequencyKernels& frequency_kernels();

// What the norms' forward kernel leaves, block by block, and the norms of it.
class NormSums {
 public:
  explicit NormSums(NormsForward& call);
  void store(Tensor& low, Tensor& high) const;

 private:
  double norm(const std::vector<double>& squared, int64_t sample) const;

  FrequencyShape shape_;
  std::vector<double> low_squared_;
  std::vector<double> high_squared_;
  std::vector<int> exponents_;
};

// What the norms' backward kernel multiplies with: grad / norm of every sample of x, and zero where the norm is zero.
class NormScales {
 public:
  NormScales(const Tensor& grad_low, const Tensor& grad_high, const Tensor& low, const Tensor& high, const Tensor& x,
             NormsBackward& call, const char* op);

 private:
  std::vector<double> low_;
  std::vector<double> high_;
  std::vector<int> exponents_;
};

// A few thousand elements per task hide the cost of waking a thread.
template <class Body>
void for_frequency_items(const FrequencyShape& shape, const Body& body) {
  constexpr int64_t kElementsPerTask = 32768;
  const int64_t elements = shape.tokens * shape.blocks_per_item() * kChannelBlock;
  const int64_t grain = elements >= kElementsPerTask ? 1 : kElementsPerTask / (elements < 1 ? 1 : elements);
  parallel_ranges(shape.items(), grain, body);
}

}  // namespace overtone
