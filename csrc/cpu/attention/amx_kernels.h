// The attention kernels for bfloat16 on tiles.
#pragma once

#include "cpu/attention/amx_backward.h"

namespace overtone::OVERTONE_ISA {

inline void attention_forward(const AttentionForward& call, WorkQueue& queue) {
  TileForwardWorker worker(call);
  for (int64_t item; (item = queue.pop()) >= 0;) {
    worker.run(item);
  }
}

inline void attention_backward(const AttentionBackward& call, WorkQueue& queue) {
  TileBackwardWorker worker(call);
  for (int64_t item; (item = queue.pop()) >= 0;) {
    worker.run(item);
  }
}

extern const AttentionKernels attention_kernels = {
    .isa = OVERTONE_ISA_NAME,
    .uses_tiles = true,
    .feature_block = kTileFeatureBlock,
    .packing = amx_panel_packing,
    .attention_forward = &attention_forward,
    .heads_backward = &heads_backward_tiles,
    .basis_backward = &basis_backward_tiles,
    .attention_backward = &attention_backward,
};

}  // namespace overtone::OVERTONE_ISA
