// LayerNorm of float32 tokens, rounded to bfloat16 for the products that follow, and its gradient.
#pragma once

#include <cstdint>

#include "cpu/isa/dispatch.h"
#include "cpu/parallel.h"

namespace overtone {

// Of a work item.
constexpr int64_t kNormTokens = 128;

struct LayerNormTokens {
  int64_t tokens = 0;
  int64_t channels = 0;
  const float* x = nullptr;       // [tokens, channels], contiguous
  const float* weight = nullptr;  // [channels]

  int64_t items() const { return (tokens + kNormTokens - 1) / kNormTokens; }
};

// y = (x − mean) rstd ⊙ weight + bias
struct LayerNormForward : LayerNormTokens {
  const float* bias = nullptr;  // [channels]
  float eps = 0;
  void* y = nullptr;      // [tokens, channels], bfloat16
  float* rows = nullptr;  // [tokens, 2]: mean and rstd
};

// With x̂ = (x − mean) rstd and g = grad_y ⊙ weight: ∂x = rstd (g − mean(g) − x̂ mean(g ⊙ x̂)), ∂weight = Σ grad_y ⊙ x̂,
// ∂bias = Σ grad_y. What is not wanted is null.
struct LayerNormBackward : LayerNormTokens {
  const void* grad_y = nullptr;  // [tokens, channels], contiguous
  bool is_bf16 = false;          // grad_y: otherwise float32
  const float* rows = nullptr;
  float* grad_x = nullptr;  // [tokens, channels]
  float* sums = nullptr;    // [items, 2, channels]: what every item adds to ∂weight and to ∂bias
};

struct LayerNormKernels {
  const char* isa;
  void (*forward)(const LayerNormForward&, WorkQueue&);
  void (*backward)(const LayerNormBackward&, WorkQueue&);
};

OVERTONE_KERNELS(LayerNormKernels, layer_norm_kernels);

}  // namespace overtone
