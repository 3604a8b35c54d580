// The attention kernels for bfloat16.
#pragma once

#include "cpu/attention/bf16_backward.h"

namespace overtone::OVERTONE_ISA {

inline void attention_forward(const AttentionForward& call, WorkQueue& queue) {
  Bf16ForwardWorker worker(call);
  for (int64_t item; (item = queue.pop()) >= 0;) {
    worker.run(item);
  }
}

inline void attention_backward(const AttentionBackward& call, WorkQueue& queue) {
  Bf16BackwardWorker worker(call);
  for (int64_t item; (item = queue.pop()) >= 0;) {
    worker.run(item);
  }
}

extern const AttentionKernels attention_kernels = {
    .isa = OVERTONE_ISA_NAME,
    .is_bf16 = true,
    .feature_block = kBf16FeatureBlock,
    .packing = amx_panel_packing,
    .attention_forward = &attention_forward,
    .out_backward = &out_backward_bf16,
    .weight_backward = &weight_backward_bf16,
    .attention_backward = &attention_backward,
};

}  // namespace overtone::OVERTONE_ISA
