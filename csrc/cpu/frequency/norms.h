// The norms' kernels and what surrounds them, for the ops that take norms of their result.
#pragma once

#include <vector>

#include "cpu/frequency/params.h"
#include "cpu/tensor.h"

namespace overtone {

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

template <class Body>
void for_frequency_items(const FrequencyShape& shape, const Body& body) {
  const int64_t elements = shape.tokens * shape.blocks_per_item() * kChannelBlock;
  parallel_ranges(shape.items(), {6.0 * static_cast<double>(elements)}, body);
}

}  // namespace overtone
