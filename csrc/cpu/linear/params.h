// Linear layers, and the MLP made of two of them, as the kernels of every ISA level compute them:
//     linear  y = x Wᵀ + b
//     mlp     y = GELU(h) W₂ᵀ + b₂,  h = x W₁ᵀ + b₁
//
// Backward has two phases. The first goes over tokens like forward, a block of them at a time. The second goes over
// the weights' gradients, a block of each at a time, so that no two threads ever add to the same sum.
#pragma once

#include <cstdint>

#include "cpu/dtype.h"
#include "cpu/isa/dispatch.h"
#include "cpu/parallel.h"

namespace overtone {

// Columns of a block: as many as a work item of the weights' gradients has outputs.
constexpr int64_t kLinearBlock = 96;

// A matrix of any strides, whose type the call has.
struct LinearMatrix {
  void* data = nullptr;
  int64_t row_stride = 0;
  int64_t column_stride = 0;
  int64_t block_stride = 0;  // if not zero: between blocks of kLinearBlock columns, which lie apart from each other
};

// A weight [depth, columns] as the right operand of products: in panels, as wide as a register tile.
struct LinearPacking {
  ElementType type = ElementType::float32;
  LinearMatrix weight;
  int64_t depth = 0;
  int64_t columns = 0;
  void* panels = nullptr;
};

// out = x · weight + bias.
struct LinearTokens {
  ElementType type = ElementType::float32;
  int64_t tokens = 0;
  int64_t inputs = 0;
  int64_t outputs = 0;
  LinearMatrix x;                // [tokens, inputs]
  const void* weight = nullptr;  // panels [inputs, outputs]
  const void* bias = nullptr;    // [outputs], or null
  void* out = nullptr;           // [tokens, outputs]
};

// ∂W = Gᵀ x and ∂b = Σ_tokens G of one layer.
struct LinearWeightGradient {
  ElementType type = ElementType::float32;
  int64_t tokens = 0;
  int64_t inputs = 0;
  int64_t outputs = 0;
  LinearMatrix grad;            // G [tokens, outputs]
  LinearMatrix x;               // [tokens, inputs]
  void* grad_weight = nullptr;  // [outputs, inputs]
  void* grad_bias = nullptr;    // [outputs]
};

struct MlpShape {
  ElementType type = ElementType::float32;
  int64_t tokens = 0;
  int64_t inputs = 0;
  int64_t hidden = 0;
  int64_t outputs = 0;
  int64_t stride = 0;  // of rows of h: at least `hidden`, whole vectors on every level

  int64_t blocks() const { return (hidden + kLinearBlock - 1) / kLinearBlock; }
};

struct MlpForward {
  MlpShape shape;
  LinearMatrix x;            // [tokens, inputs]
  const void* w1 = nullptr;  // panels of W₁ᵀ
  const void* b1 = nullptr;  // [hidden]
  const void* w2 = nullptr;  // panels of W₂ᵀ
  const void* b2 = nullptr;  // [outputs]
  void* pre = nullptr;       // h [tokens, stride]; null: not wanted
  void* y = nullptr;         // [tokens, outputs]
};

// ∂h = (G W₂) ⊙ GELU'(h), ∂x = ∂h W₁; GELU(h) and ∂h are left for the weights' gradients.
struct MlpBackward {
  MlpShape shape;
  LinearMatrix grad_y;       // G [tokens, outputs]
  const void* w1 = nullptr;  // panels of W₁
  const void* w2 = nullptr;  // panels of W₂
  const void* pre = nullptr;
  void* active = nullptr;    // GELU(h) [blocks, tokens, kLinearBlock]; null where no weight's gradient is wanted
  void* grad_pre = nullptr;  // ∂h, the same
  void* grad_x = nullptr;    // [tokens, inputs]; null: not wanted
};

struct LinearKernels {
  const char* isa;
  int64_t (*packed_size)(const LinearPacking&);  // elements
  int64_t (*packing_items)(const LinearPacking&);
  void (*pack)(const LinearPacking&, WorkQueue&);
  int64_t (*token_items)(int64_t tokens);
  void (*tokens)(const LinearTokens&, WorkQueue&);
  void (*mlp_forward)(const MlpForward&, WorkQueue&);
  void (*mlp_backward)(const MlpBackward&, WorkQueue&);
  int64_t (*weight_items)(const LinearWeightGradient&);
  void (*weight)(const LinearWeightGradient&, WorkQueue&);
};

OVERTONE_KERNELS(LinearKernels, linear_kernels);

}  // namespace overtone
