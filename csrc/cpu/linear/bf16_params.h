// Linear layers and the MLP in bfloat16, for instruction sets that multiply it (cpu/gemm/bf16.h): the products of
// params.h with bfloat16 operands and float32 sums. Weights come as panels, packed from tensors of either type.
//
// Of the weights' gradients, products over tokens, one operand has a row per channel and a column per token
// ("columns"), the other is in panels ("pairs"). The first phase, which goes over tokens, writes both. The two phases
// take turns over a part of the tokens, so that these operands, larger than all tensors of the call together, stay in
// cache and in memory that is there already. Parts are whole multiples of kGradientSum tokens, in which sums are taken
// one after the other: how long a part is does not change them.
#pragma once

#include "cpu/linear/params.h"

namespace overtone {

constexpr int64_t kGradientSum = 256;

// Where the operands of a weight's gradient lie, for a part of the tokens.
struct GradientLayout {
  int64_t token_stride = 0;  // of rows of columns
  int64_t panel_stride = 0;  // of pairs
};

// out = x · weight + bias.
struct Bf16LinearForward {
  int64_t tokens = 0;
  int64_t inputs = 0;
  int64_t outputs = 0;
  StridedMatrix x;               // [tokens, inputs], bfloat16 or float32
  const void* weight = nullptr;  // panels [inputs, outputs]
  const float* bias = nullptr;   // [outputs], or null
  void* out = nullptr;           // [tokens, outputs], bfloat16

  int64_t items() const { return (tokens + kLinearTokens - 1) / kLinearTokens; }
};

// One layer's ∂x, and the operands of its ∂W. What is not wanted is null.
struct Bf16LinearBackward {
  Bf16LinearForward grad;  // its x is G, its out ∂x
  StridedMatrix x;         // [tokens, inputs]
  void* x_columns = nullptr;
  void* grad_pairs = nullptr;
  GradientLayout layout;
};

struct Bf16MlpForward {
  MlpShape shape;
  StridedMatrix x;            // [tokens, inputs]
  const void* w1 = nullptr;   // panels of W₁ᵀ
  const float* b1 = nullptr;  // [hidden]
  const void* w2 = nullptr;   // panels of W₂ᵀ
  const float* b2 = nullptr;  // [outputs]
  void* pre = nullptr;        // h [tokens, stride], bfloat16; null: not wanted
  StridedMatrix residual;     // [tokens, outputs]; null: none
  StridedMatrix y;            // [tokens, outputs]
};

// ∂x, and the operands of ∂W₁ = (xᵀ ∂h)ᵀ and ∂W₂ = Gᵀ GELU(h); all of them null where no weight's gradient is wanted.
struct Bf16MlpBackward {
  MlpShape shape;
  StridedMatrix grad_y;      // G [tokens, outputs], bfloat16 or float32
  StridedMatrix x;           // [tokens, inputs]
  const void* w1 = nullptr;  // panels of W₁
  const void* w2 = nullptr;  // panels of W₂
  const void* pre = nullptr;
  void* grad_x = nullptr;  // [tokens, inputs], bfloat16; null: not wanted
  void* x_columns = nullptr;
  void* grad_columns = nullptr;
  void* active_pairs = nullptr;    // GELU(h)
  void* grad_pre_pairs = nullptr;  // ∂h
  GradientLayout layout;
};

constexpr int64_t kGradientRows = 96;     // of an item
constexpr int64_t kGradientColumns = 64;  // of an item: four panels

// A product over a part of the tokens [rows, columns], and sums over tokens of either operand: one of them a bias'
// gradient.
struct Bf16WeightGradient {
  int64_t tokens = 0;
  int64_t rows = 0;
  int64_t columns = 0;
  const void* left = nullptr;   // columns
  const void* right = nullptr;  // pairs
  GradientLayout layout;
  bool is_first = true;  // part of the tokens
  bool is_last = true;
  float* sums = nullptr;         // [items, kGradientRows, kGradientColumns]
  float* grad_weight = nullptr;  // [rows, columns], or [columns, rows]: written after the last part
  bool is_transposed = false;
  float* row_sums = nullptr;     // [rows], or null
  float* column_sums = nullptr;  // [columns], or null

  int64_t row_blocks() const { return (rows + kGradientRows - 1) / kGradientRows; }
  int64_t items() const { return (columns + kGradientColumns - 1) / kGradientColumns * row_blocks(); }
};

struct Bf16LinearKernels {
  const char* isa;
  PackingKernels packing;
  void (*linear_forward)(const Bf16LinearForward&, WorkQueue&);
  void (*linear_backward)(const Bf16LinearBackward&, WorkQueue&);
  void (*mlp_forward)(const Bf16MlpForward&, WorkQueue&);
  void (*mlp_backward)(const Bf16MlpBackward&, WorkQueue&);
  void (*weight_gradient)(const Bf16WeightGradient&, WorkQueue&);
};

OVERTONE_KERNELS(Bf16LinearKernels, bf16_linear_kernels);

}  // namespace overtone
