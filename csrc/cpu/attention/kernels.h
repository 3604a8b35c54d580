// The attention kernels, written once and compiled for every ISA level.
//
// Everything is computed in A: float for float32 and half inputs, double for float64. Inputs of any type and stride are
// widened while they are packed. A strip of queries meets the keys block by block (one block at ViT sizes), with the
// online softmax, so that memory grows as N and never as N².
#pragma once

#include "cpu/attention/backward.h"
#include "cpu/attention/forward.h"

namespace overtone::OVERTONE_ISA {

// Calls f with a value of the C++ type.
template <class F>
OVERTONE_INLINE void for_type(ElementType type, const F& f) {
  switch (type) {
    case ElementType::float32:
      return f(float{});
    case ElementType::float64:
      return f(double{});
    case ElementType::bfloat16:
      return f(BFloat16{});
    case ElementType::float16:
      return f(Half{});
  }
}

inline void attention_forward(const AttentionForward& call, WorkQueue& queue) {
  for_type(call.type, [&](auto element) {
    ForwardWorker<decltype(element)> worker(call);
    for (int64_t item = queue.pop(); item >= 0;) {
      const int64_t next = queue.pop();
      worker.run(item, next);
      item = next;
    }
  });
}

inline void heads_backward(const HeadsBackward& call, WorkQueue& queue) {
  call.is_float64 ? heads_backward_items<double>(call, queue) : heads_backward_items<float>(call, queue);
}

inline void basis_backward(const BasisBackward& call, WorkQueue& queue) {
  for_type(call.type, [&](auto element) { basis_backward_items<decltype(element)>(call, queue); });
}

template <class A>
void attention_backward_items(const AttentionBackward& call, WorkQueue& queue) {
  BackwardWorker<A> worker(call);
  for (int64_t item = queue.pop(); item >= 0;) {
    const int64_t next = queue.pop();
    worker.run(item, next);
    item = next;
  }
}

inline void attention_backward(const AttentionBackward& call, WorkQueue& queue) {
  call.type == ElementType::float64 ? attention_backward_items<double>(call, queue)
                                    : attention_backward_items<float>(call, queue);
}

extern const AttentionKernels attention_kernels = {
    .isa = OVERTONE_ISA_NAME,
    .uses_tiles = false,
    .feature_block = kFeatureBlock,
    .packing = panel_packing,
    .attention_forward = &attention_forward,
    .heads_backward = &heads_backward,
    .basis_backward = &basis_backward,
    .attention_backward = &attention_backward,
};

}  // namespace overtone::OVERTONE_ISA
