// What the attention kernels of every instruction set compute, and how op.cpp calls them.
//
// Forward's work items are blocks of queries of one batch element: all heads, then the projection while the heads are
// still in cache; the item that finishes a batch element takes its norms. Backward's phases are sets of items of their
// own. No item shares a sum with another, so threads never change the result.
//
// The accumulate type is float64 for float64 queries and float32 for all others.
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
  int64_t num_heads = 0;
  int64_t q_len = 0;
  int64_t kv_len = 0;
  int64_t head_dim = 0;
  int64_t out_dim = 0;

  int64_t inner_dim() const { return num_heads * head_dim; }
};

// Added to the logits (bias), or which keys are attended to (flags), broadcast by strides of 0 to [batch, num_heads,
// q_len, kv_len].
struct AttentionMask {
  const void* bias = nullptr;  // of the accumulate type
  const bool* flags = nullptr;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t query_stride = 0;
  int64_t key_stride = 0;
  bool causal = false;

  bool is_used() const { return bias != nullptr || flags != nullptr || causal; }
};

// Tokens of one item of out_backward, rows of the weight in one item of weight_backward.
constexpr int64_t kTokenBlock = 192;
constexpr int64_t kFeatureBlock = 48;
constexpr int64_t kBf16FeatureBlock = 32;

// out = gain · softmax(scale · Q Kᵀ + mask) V + addend, for every head.
struct AttentionProblem {
  AttentionShape shape;
  Dtype type;  // of query, key and value
  StridedHeads query, key, value;
  AttentionMask mask;
  double scale = 1;
  const void* gain = nullptr;  // [num_heads], of the accumulate type; null is 1
  StridedHeads addend;         // [batch, num_heads, q_len, head_dim]; no data adds nothing
  Dtype addend_type = Dtype::float32;
};

// Where the norms of y are taken: nowhere; in y, which is not rounded; in a tensor of y before rounding; or in a buffer
// that stays in the cache, where an item has all queries of its batch element.
enum class NormsSource { none, y, unrounded, scratch };

// y = residual + sample_scale · (out · weight + bias), and what backward needs to make the same softmax again. (Not one
// logarithm of the sum: rounded at the size of the logits, it would cost digits where they are large.)
struct AttentionForward : AttentionProblem {
  int64_t query_block = 0;             // queries of one item
  const void* weight = nullptr;        // [inner_dim, out_dim], in panels
  const void* bias = nullptr;          // [out_dim], of the accumulate type; or null
  const void* sample_scale = nullptr;  // [batch], of the accumulate type; or null
  StridedMatrix residual;              // [q_len, out_dim] of the first batch element; or no data
  int64_t residual_batch_stride = 0;
  StridedMatrix y;                // [batch · q_len, out_dim], contiguous
  void* unrounded = nullptr;      // y before rounding, for the norms, of the accumulate type; or null
  void* attn_out = nullptr;       // [batch, q_len, inner_dim], of the accumulate type; or null
  void* softmax_stats = nullptr;  // [batch, num_heads, q_len, 2]: maximum (base 2) and 1 / sum; or null
  NormsSource norms_source = NormsSource::none;
  const NormsForward* norms = nullptr;  // of y
  void (*norms_kernel)(const NormsForward&, int64_t begin, int64_t end) = nullptr;
  int64_t* blocks_left = nullptr;  // [batch]: the item that takes the last one takes the norms

  int64_t blocks() const { return (shape.q_len + query_block - 1) / query_block; }
  int64_t items() const { return shape.batch * blocks(); }
};

// grad_out = grad_y · weightᵀ.
struct OutBackward {
  AttentionShape shape;
  bool is_float64 = false;
  const void* grad_y = nullptr;  // [batch, q_len, out_dim] contiguous, of the accumulate type
  const void* weight = nullptr;  // weightᵀ, in panels
  void* grad_out = nullptr;      // [batch, q_len, inner_dim], of the accumulate type; in the bf16 kernels bf16
  void* grad_addend = nullptr;   // in the bf16 kernels the same before rounding, or null

  int64_t items() const { return (shape.batch * shape.q_len + kTokenBlock - 1) / kTokenBlock; }
};

// grad_weight = attn_outᵀ · grad_y.
struct WeightBackward {
  AttentionShape shape;
  bool is_float64 = false;
  int64_t feature_block = kFeatureBlock;
  const void* grad_y = nullptr;
  const void* packed_grad = nullptr;  // in the bf16 kernels: grad_y, in panels
  const void* attn_out = nullptr;
  void* grad_weight = nullptr;  // [inner_dim, out_dim] contiguous, of the accumulate type

  int64_t items() const { return (shape.inner_dim() + feature_block - 1) / feature_block; }
};

// ∂query, ∂key, ∂value of one batch element and head from ∂out; what is not wanted is null.
struct AttentionBackward : AttentionProblem {
  const void* attn_out = nullptr;
  const void* softmax_stats = nullptr;
  const void* grad_out = nullptr;  // as out_backward left it
  StridedHeads grad_query{}, grad_key{}, grad_value{};
  void* grad_logits = nullptr;  // [batch, num_heads, q_len, kv_len], of the accumulate type: only for a mask's gradient
  double* grad_gain = nullptr;  // [batch, num_heads], to be summed over the batch

  int64_t items() const { return shape.batch * shape.num_heads; }
};

struct AttentionKernels {
  const char* isa;
  bool is_bf16;           // for bf16 alone
  int64_t feature_block;  // rows of the weight in one item of weight_backward
  PackingKernels packing;
  void (*attention_forward)(const AttentionForward&, WorkQueue&);
  void (*out_backward)(const OutBackward&, WorkQueue&);
  void (*weight_backward)(const WeightBackward&, WorkQueue&);
  void (*attention_backward)(const AttentionBackward&, WorkQueue&);
};

OVERTONE_KERNELS(AttentionKernels, attention_kernels);

}  // namespace overtone
