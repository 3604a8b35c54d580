// What the attention kernels of every ISA level compute, and how the ops in attention.cpp call them.
//
// Forward has two phases, each a set of independent work items: attention rows (an image, a head, a block of queries)
// write the heads' output once, and projection rows (an image, a block of tokens) multiply it with diag(λ) U and add
// the residual. Backward mirrors it. No item shares a sum with another, so threads never change the result.
#pragma once

#include <cstdint>

#include "cpu/element_type.h"

namespace overtone {

struct AttentionShape {
  int64_t batch = 0;
  int64_t heads = 0;
  int64_t queries = 0;
  int64_t keys = 0;
  int64_t width = 0;     // of a head
  int64_t channels = 0;  // of y

  int64_t features() const { return heads * width; }
};

// A tensor [batch, heads, tokens, width] with any strides, in elements.
struct HeadTensor {
  void* data = nullptr;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t token_stride = 0;
  int64_t width_stride = 0;
};

// Added to the logits (bias), or which keys take part (flags), broadcast by strides of 0 to [batch, heads, queries,
// keys].
struct AttentionMask {
  const void* bias = nullptr;  // of the statistics' type
  const bool* flags = nullptr;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t query_stride = 0;
  int64_t key_stride = 0;
  bool causal = false;
};

// Queries of one work item.
constexpr int64_t kQueryBlock = 384;
// Tokens of one projection item.
constexpr int64_t kTokenBlock = 48;

struct AttentionInputs {
  AttentionShape shape;
  ElementType type;
  HeadTensor query, key, value;
  AttentionMask mask;
  double scale = 1;
};

// heads = softmax(scale · Q Kᵀ + bias) V, and what backward needs to make the same softmax again. (Not one logarithm of
// the sum: rounded at the size of the logits, it would cost digits where they are large.)
struct AttentionForward : AttentionInputs {
  void* heads = nullptr;         // [batch, queries, features], of the statistics' type
  void* softmax_rows = nullptr;  // [batch, heads, queries, 2]: maximum (base 2) and 1 / sum

  int64_t blocks() const { return (shape.queries + kQueryBlock - 1) / kQueryBlock; }
  int64_t items() const { return shape.batch * shape.heads * blocks(); }
};

// y = residual + heads · weight, weight packed by pack_weight.
struct ProjectionForward {
  AttentionShape shape;
  ElementType type;  // of residual and y
  const void* heads = nullptr;
  const void* weight = nullptr;
  const void* residual = nullptr;  // [batch, queries, channels] with strides, or null
  int64_t residual_strides[3] = {0, 0, 0};
  void* y = nullptr;       // contiguous, of `type`
  void* wide_y = nullptr;  // the same before rounding, of the statistics' type; or null

  int64_t blocks() const { return (shape.queries + kTokenBlock - 1) / kTokenBlock; }
  int64_t items() const { return shape.batch * blocks(); }
};

// grad_heads = (G Uᵀ) diag(λ), and each item's share of ∂λ.
struct ProjectionBackward {
  AttentionShape shape;
  bool is_float64 = false;
  const void* grad_y = nullptr;  // [batch, queries, channels] contiguous, of the statistics' type
  const void* weight = nullptr;  // Uᵀ, packed by pack_weight
  const void* heads = nullptr;
  const void* eigenvalues = nullptr;   // [features], of the statistics' type
  void* grad_heads = nullptr;          // [batch, queries, features]
  double* grad_eigenvalues = nullptr;  // [items][features], or null

  int64_t blocks() const { return (shape.queries + kTokenBlock - 1) / kTokenBlock; }
  int64_t items() const { return shape.batch * blocks(); }
};

// ∂U = diag(λ) headsᵀ G, in blocks of features.
struct BasisBackward {
  AttentionShape shape;
  bool is_float64 = false;
  const void* grad_y = nullptr;
  const void* heads = nullptr;
  const void* eigenvalues = nullptr;
  void* grad_basis = nullptr;  // [features, channels] contiguous, of the statistics' type

  int64_t items() const { return (shape.features() + kTokenBlock - 1) / kTokenBlock; }
};

// ∂query, ∂key, ∂value of one image and head from ∂heads; what is not wanted is null.
struct AttentionBackward : AttentionInputs {
  const void* heads = nullptr;
  const void* softmax_rows = nullptr;
  const void* grad_heads = nullptr;
  HeadTensor grad_query{}, grad_key{}, grad_value{};
  void* grad_logits = nullptr;  // [batch, heads, queries, keys], of the statistics' type: only for a bias' gradient

  int64_t items() const { return shape.batch * shape.heads; }
};

// A matrix in the layout the projections read; `size` says how many elements that takes.
struct WeightPacking {
  int64_t rows = 0;
  int64_t columns = 0;
  const void* data = nullptr;  // of `type`
  ElementType type;
  int64_t row_stride = 0;
  int64_t column_stride = 0;
  const void* row_scale = nullptr;  // [rows] of the statistics' type, or null
  void* packed = nullptr;
};

struct AttentionKernels {
  const char* level;
  int64_t (*packed_size)(const WeightPacking&);
  void (*pack_weight)(const WeightPacking&);
  void (*attention_forward)(const AttentionForward&, int64_t begin, int64_t end);
  void (*projection_forward)(const ProjectionForward&, int64_t begin, int64_t end);
  void (*projection_backward)(const ProjectionBackward&, int64_t begin, int64_t end);
  void (*basis_backward)(const BasisBackward&, int64_t begin, int64_t end);
  void (*attention_backward)(const AttentionBackward&, int64_t begin, int64_t end);
};

namespace baseline {
extern const AttentionKernels attention_kernels;
}
namespace avx2 {
extern const AttentionKernels attention_kernels;
}
namespace avx512 {
extern const AttentionKernels attention_kernels;
}

}  // namespace overtone
