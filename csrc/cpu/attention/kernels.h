// The attention kernels, written once and compiled for every ISA level.
//
// Everything is computed in A: float for float32 and half inputs, double for float64. Inputs of any type and stride are
// widened while they are packed. Rows of queries meet the keys block by block (one block at ViT sizes), with the online
// softmax, so that memory grows as N and never as N².
#pragma once

#include "cpu/attention/backward.h"
#include "cpu/attention/forward.h"

namespace overtone::OVERTONE_ISA {

template <class A>
void attention_forward_items(const AttentionForward& call, WorkQueue& queue) {
  ForwardWorker<A> worker(call);
  for (int64_t item = queue.pop(); item >= 0;) {
    const int64_t next = queue.pop();
    worker.run(item, next);
    item = next;
  }
}

inline void attention_forward(const AttentionForward& call, WorkQueue& queue) {
  call.type == Dtype::float64 ? attention_forward_items<double>(call, queue)
                              : attention_forward_items<float>(call, queue);
}

inline void out_backward(const OutBackward& call, WorkQueue& queue) {
  call.is_float64 ? out_backward_items<double>(call, queue) : out_backward_items<float>(call, queue);
}

inline void weight_backward(const WeightBackward& call, WorkQueue& queue) {
  call.is_float64 ? weight_backward_items<double>(call, queue) : weight_backward_items<float>(call, queue);
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
  call.type == Dtype::float64 ? attention_backward_items<double>(call, queue)
                              : attention_backward_items<float>(call, queue);
}

extern const AttentionKernels attention_kernels = {
    .isa = OVERTONE_ISA_NAME,
    .is_bf16 = false,
    .feature_block = kFeatureBlock,
    .packing = panel_packing,
    .attention_forward = &attention_forward,
    .out_backward = &out_backward,
    .weight_backward = &weight_backward,
    .attention_backward = &attention_backward,
};

}  // namespace overtone::OVERTONE_ISA
