// Linear layers, and the MLP made of two of them, as the kernels of every instruction set compute them:
//     linear  y = x Wᵀ + b
//     mlp     y = GELU(h) W₂ᵀ + b₂,  h = x W₁ᵀ + b₁
//
// Backward has two phases. The first goes over tokens like forward, a block of them at a time. The second goes over
// the weights' gradients, a block of each at a time, so that no two threads ever add to the same sum.
#pragma once

#include <cstdint>

#include "cpu/gemm/params.h"
#include "cpu/isa/dispatch.h"
#include "cpu/parallel.h"
#include "cpu/strided.h"

namespace overtone {

// Tokens of a work item: their operands and results, a group of hidden channels at a time, stay in the second-level
// cache.
constexpr int64_t kLinearTokens = 128;
// Columns of a block: as many as a work item of the weights' gradients has outputs.
constexpr int64_t kLinearBlock = 96;
// Inputs of a work item of the weights' gradients: blocks, which share their part of the outputs' gradient.
constexpr int64_t kGradientInputs = 2 * kLinearBlock;

// A matrix whose columns may lie in blocks of kLinearBlock, apart from each other.
struct BlockedMatrix : StridedMatrix {
  int64_t block_stride = 0;  // 0: no blocks

  // The rest of a block, or of the matrix if it has none.
  __attribute__((always_inline)) StridedMatrix from(int64_t row, int64_t column) const {
    const int64_t block = block_stride == 0 ? 0 : column / kLinearBlock;
    StridedMatrix part = StridedMatrix::from(row, column - block * kLinearBlock);
    part.data = static_cast<char*>(part.data) + block * block_stride * bytes_of(type);
    return part;
  }
};

// out = x · weight + bias: the layer, and with its weight transposed and no bias ∂x.
struct LinearForward {
  int64_t tokens = 0;
  int64_t inputs = 0;
  int64_t outputs = 0;
  StridedMatrix x;               // [tokens, inputs]
  const void* weight = nullptr;  // panels [inputs, outputs]
  const void* bias = nullptr;    // [outputs], or null
  void* out = nullptr;           // [tokens, outputs]

  int64_t items() const { return (tokens + kLinearTokens - 1) / kLinearTokens; }
};

// ∂W = Gᵀ x and ∂b = Σ_tokens G of one layer.
struct WeightGradient {
  int64_t tokens = 0;
  int64_t inputs = 0;
  int64_t outputs = 0;
  BlockedMatrix grad;           // G [tokens, outputs]
  BlockedMatrix x;              // [tokens, inputs]
  void* grad_weight = nullptr;  // [outputs, inputs]
  void* grad_bias = nullptr;    // [outputs]

  int64_t input_blocks() const { return (inputs + kGradientInputs - 1) / kGradientInputs; }
  int64_t items() const { return (outputs + kLinearBlock - 1) / kLinearBlock * input_blocks(); }
};

struct MlpShape {
  int64_t tokens = 0;
  int64_t inputs = 0;
  int64_t hidden = 0;
  int64_t outputs = 0;
  int64_t stride = 0;  // of rows of h: at least `hidden`, whole vectors for every instruction set

  int64_t blocks() const { return (hidden + kLinearBlock - 1) / kLinearBlock; }
  int64_t items() const { return (tokens + kLinearTokens - 1) / kLinearTokens; }
};

struct MlpForward {
  MlpShape shape;
  StridedMatrix x;           // [tokens, inputs]
  const void* w1 = nullptr;  // panels of W₁ᵀ
  const void* b1 = nullptr;  // [hidden]
  const void* w2 = nullptr;  // panels of W₂ᵀ
  const void* b2 = nullptr;  // [outputs]
  void* pre = nullptr;       // h [tokens, stride]; null: not wanted
  StridedMatrix residual;    // [tokens, outputs], added to y; null: none
  void* y = nullptr;         // [tokens, outputs]
};

// ∂h = (G W₂) ⊙ GELU'(h), ∂x = ∂h W₁; GELU(h) and ∂h are left for the weights' gradients.
struct MlpBackward {
  MlpShape shape;
  StridedMatrix grad_y;      // G [tokens, outputs]
  const void* w1 = nullptr;  // panels of W₁
  const void* w2 = nullptr;  // panels of W₂
  const void* pre = nullptr;
  void* active = nullptr;    // GELU(h) [blocks, tokens, kLinearBlock]; null where no weight's gradient is wanted
  void* grad_pre = nullptr;  // ∂h, the same
  void* grad_x = nullptr;    // [tokens, inputs]; null: not wanted
};

struct LinearKernels {
  const char* isa;
  PackingKernels packing;
  void (*linear_forward)(const LinearForward&, WorkQueue&);
  void (*mlp_forward)(const MlpForward&, WorkQueue&);
  void (*mlp_backward)(const MlpBackward&, WorkQueue&);
  void (*weight_gradient)(const WeightGradient&, WorkQueue&);
};

OVERTONE_KERNELS(LinearKernels, linear_kernels);

}  // namespace overtone
