// The attention kernels for bfloat16 on tiles.
#pragma once

#include "cpu/attention/amx_backward.h"

namespace overtone::OVERTONE_ISA {

inline void attention_forward(const AttentionForward& call, WorkQueue& queue) {
  AmxForwardWorker worker(call);
  for (int64_t item; (item = queue.pop()) >= 0;) {
    worker.run(item);
  }
}

inline void attention_backward(const AttentionBackward& call, WorkQueue& queue) {
  AmxBackwardWorker worker(call);
  for (int64_t item; (item = queue.pop()) >= 0;) {
    worker.run(item);
  }
}

extern const AttentionKernels attention_kernels = {
    .isa = OVERTONE_ISA_NAME,
    .uses_amx = true,
    .feature_block = kAmxFeatureBlock,
    .packing = amx_panel_packing,
    .attention_forward = &attention_forward,
    .out_backward = &out_backward_amx,
    .weight_backward = &weight_backward_amx,
    .attention_backward = &attention_backward,
};

}  // namespace overtone::OVERTONE_ISA
