// y = GELU(x W₁ᵀ + b₁) W₂ᵀ + b₂ and its gradient, as the kernels of every ISA level compute them.
//
// Backward has two phases. The first goes over tokens like forward, a block of them at a time, and leaves GELU(h) and
// ∂h for the second, which goes over hidden channels: each of them is a row or a column of the weights' gradients, so
// that no two threads ever add to the same sum.
#pragma once

#include <cstdint>

#include "cpu/element_type.h"
#include "cpu/work_queue.h"

namespace overtone {

struct MlpMatrix {
  void* data = nullptr;
  int64_t row_stride = 0;
  int64_t column_stride = 0;
};

struct MlpShape {
  ElementType type = ElementType::float32;
  int64_t tokens = 0;
  int64_t inputs = 0;
  int64_t hidden = 0;
  int64_t outputs = 0;
};

// A weight [depth, columns] as the right operand of products: in panels, as wide as a register tile.
struct MlpPacking {
  ElementType type = ElementType::float32;
  MlpMatrix weight;
  int64_t depth = 0;
  int64_t columns = 0;
  void* panels = nullptr;
};

struct MlpForward {
  MlpShape shape;
  MlpMatrix x;              // [tokens, inputs]
  const void* w1 = nullptr;  // panels of W₁ᵀ
  const void* b1 = nullptr;  // [hidden]
  const void* w2 = nullptr;  // panels of W₂ᵀ
  const void* b2 = nullptr;  // [outputs]
  void* pre = nullptr;       // [tokens, pre_stride]: h = x W₁ᵀ + b₁; null: not wanted
  int64_t pre_stride = 0;    // at least `hidden`, whole vectors
  void* y = nullptr;         // [tokens, outputs]
};

struct MlpBackward {
  MlpShape shape;
  MlpMatrix x;
  MlpMatrix grad_y;          // [tokens, outputs]
  const void* w1 = nullptr;  // panels of W₁
  const void* w2 = nullptr;  // panels of W₂
  const void* pre = nullptr;
  int64_t pre_stride = 0;
  void* active = nullptr;    // GELU(h) in panels [tokens, hidden]; null where no weight's gradient is wanted
  void* grad_pre = nullptr;  // ∂h, the same
  void* grad_x = nullptr;    // [tokens, inputs]; null: not wanted
  void* grad_w1 = nullptr;   // [hidden, inputs]
  void* grad_b1 = nullptr;   // [hidden]
  void* grad_w2 = nullptr;   // [outputs, hidden]
  void* grad_b2 = nullptr;   // [outputs]
};

struct MlpKernels {
  const char* level;
  int64_t (*packed_size)(int64_t depth, int64_t columns, ElementType type);  // elements
  int64_t (*packing_items)(const MlpPacking&);
  void (*pack)(const MlpPacking&, WorkQueue&);
  int64_t (*token_items)(const MlpShape&);
  void (*forward)(const MlpForward&, WorkQueue&);
  void (*backward_tokens)(const MlpBackward&, WorkQueue&);
  int64_t (*weight_items)(const MlpShape&);
  void (*backward_weights)(const MlpBackward&, WorkQueue&);
};

namespace baseline {
extern const MlpKernels mlp_kernels;
}
namespace avx2 {
extern const MlpKernels mlp_kernels;
}
namespace avx512 {
extern const MlpKernels mlp_kernels;
}

}  // namespace overtone
