// The linear layers' kernels for bfloat16.
#pragma once

#include "cpu/linear/bf16_mlp.h"

namespace overtone::OVERTONE_ISA {

template <class Worker, class Call>
void run_bf16_items(const Call& call, WorkQueue& queue) {
  Worker worker(call);
  for (int64_t item; (item = queue.pop()) >= 0;) {
    worker.run(item);
  }
}

extern const Bf16LinearKernels bf16_linear_kernels = {
    .isa = OVERTONE_ISA_NAME,
    .packing = amx_panel_packing,
    .linear_forward = &run_bf16_items<Bf16LinearBlocks, Bf16LinearForward>,
    .linear_backward = &run_bf16_items<Bf16LinearBackwardBlocks, Bf16LinearBackward>,
    .mlp_forward = &run_bf16_items<Bf16MlpForwardBlocks, Bf16MlpForward>,
    .mlp_backward = &run_bf16_items<Bf16MlpBackwardBlocks, Bf16MlpBackward>,
    .weight_gradient = &run_bf16_items<Bf16WeightGradientBlocks, Bf16WeightGradient>,
};

}  // namespace overtone::OVERTONE_ISA
