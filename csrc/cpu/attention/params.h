// What the attention kernels of every ISA level compute, and how the ops in attention.cpp call them.
//
// Forward's work items are blocks of queries of one image: all heads, then the projection with diag(λ) U and the
// residual while the heads are still in cache; the item that finishes an image takes its norms. Backward's phases are
// sets of items of their own. No item shares a sum with another, so threads never change the result.
#pragma once

#include <cstdint>

#include "cpu/frequency/params.h"
#include "cpu/gemm/params.h"
#include "cpu/isa/dispatch.h"
#include "cpu/parallel.h"
#include "cpu/strided.h"

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

  bool is_used() const { return bias != nullptr || flags != nullptr || causal; }
};

// Tokens of one item of heads_backward, features of one item of basis_backward.
constexpr int64_t kTokenBlock = 192;
constexpr int64_t kFeatureBlock = 48;
constexpr int64_t kTileFeatureBlock = 32;  // where the kernels use tiles

struct AttentionInputs {
  AttentionShape shape;
  ElementType type;
  StridedHeads query, key, value;
  AttentionMask mask;
  double scale = 1;
};

// y = residual + heads · weight, where heads = softmax(scale · Q Kᵀ + bias) V; and what backward needs to make the same
// softmax again. (Not one logarithm of the sum: rounded at the size of the logits, it would cost digits where they are
// large.)
struct AttentionForward : AttentionInputs {
  int64_t query_block = 0;         // queries of one item
  const void* weight = nullptr;    // diag(λ) U, in panels
  const void* residual = nullptr;  // [batch, queries, channels] with strides, or null
  int64_t residual_strides[3] = {0, 0, 0};
  void* y = nullptr;                    // contiguous, of `type`
  void* wide_y = nullptr;               // the same before rounding, of the statistics' type; or null
  void* heads = nullptr;                // [batch, queries, features], of the statistics' type; or null
  void* softmax_rows = nullptr;         // [batch, heads, queries, 2]: maximum (base 2) and 1 / sum; or null
  const NormsForward* norms = nullptr;  // of y, or null
  bool has_wide_image = false;          // norms read one image of y, before rounding, that the item keeps
  void (*norms_kernel)(const NormsForward&, int64_t begin, int64_t end) = nullptr;
  int64_t* blocks_left = nullptr;  // [batch]: the item that takes the last one takes the image's norms

  int64_t blocks() const { return (shape.queries + query_block - 1) / query_block; }
  int64_t items() const { return shape.batch * blocks(); }
};

// grad_heads = G Uᵀ diag(λ).
struct HeadsBackward {
  AttentionShape shape;
  bool is_float64 = false;
  const void* grad_y = nullptr;  // [batch, queries, channels] contiguous, of the statistics' type
  const void* weight = nullptr;  // Uᵀ diag(λ), in panels
  void* grad_heads = nullptr;    // [batch, queries, features], of the statistics' type; with tiles bfloat16

  int64_t items() const { return (shape.batch * shape.queries + kTokenBlock - 1) / kTokenBlock; }
};

// With M = headsᵀ G: ∂U = diag(λ) M, ∂λ = Σ over columns of U ⊙ M; what is not wanted is null.
struct BasisBackward {
  AttentionShape shape;
  ElementType type;  // of the basis
  int64_t feature_block = kFeatureBlock;
  const void* grad_y = nullptr;
  const void* packed_grad = nullptr;  // with tiles: grad_y, in panels
  const void* heads = nullptr;
  const void* eigenvalues = nullptr;  // [features], of the statistics' type
  const void* basis = nullptr;        // [features, channels] with strides
  int64_t basis_strides[2] = {0, 0};
  void* grad_basis = nullptr;        // [features, channels] contiguous, of the statistics' type
  void* grad_eigenvalues = nullptr;  // [features], of the statistics' type

  int64_t items() const { return (shape.features() + feature_block - 1) / feature_block; }
};

// ∂query, ∂key, ∂value of one image and head from ∂heads; what is not wanted is null.
struct AttentionBackward : AttentionInputs {
  const void* heads = nullptr;
  const void* softmax_rows = nullptr;
  const void* grad_heads = nullptr;  // as heads_backward left it
  StridedHeads grad_query{}, grad_key{}, grad_value{};
  void* grad_logits = nullptr;  // [batch, heads, queries, keys], of the statistics' type: only for a bias' gradient

  int64_t items() const { return shape.batch * shape.heads; }
};

struct AttentionKernels {
  const char* isa;
  bool uses_tiles;        // AMX's, for bfloat16 alone
  int64_t feature_block;  // features of one item of basis_backward
  PackingKernels packing;
  void (*attention_forward)(const AttentionForward&, WorkQueue&);
  void (*heads_backward)(const HeadsBackward&, WorkQueue&);
  void (*basis_backward)(const BasisBackward&, WorkQueue&);
  void (*attention_backward)(const AttentionBackward&, WorkQueue&);
};

OVERTONE_KERNELS(AttentionKernels, attention_kernels);

}  // namespace overtone
