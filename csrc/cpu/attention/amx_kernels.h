// The attention kernels for bfloat16 on tiles.
#pragma once

#include "cpu/attention/amx_backward.h"

namespace overtone::OVERTONE_ISA {

inline int64_t packed_size(const WeightPacking& call) {  // in float32 elements
  return tiles_of(call.rows, kTileDepth) * tiles_of(call.columns, kTileSize) * kTileElements / 2;
}

inline int64_t panels(const WeightPacking& call) { return tiles_of(call.columns, kTileSize); }

inline void pack_weight(const WeightPacking& call, WorkQueue& queue) {
  const int64_t depth_tiles = tiles_of(call.rows, kTileDepth);
  const MatrixRows source{call.type, const_cast<void*>(call.data), call.row_stride, call.column_stride};
  for (int64_t item; (item = queue.pop()) >= 0;) {
    const int64_t column = item * kTileSize;
    MatrixRows panel = source;
    panel.data = static_cast<char*>(source.data) + column * source.column_stride * bytes_of(source.type);
    const float* column_scale = static_cast<const float*>(call.column_scale);
    const PairScales scales{static_cast<const float*>(call.row_scale),
                            column_scale == nullptr ? nullptr : column_scale + column};
    pack_row_pairs(panel, call.rows, std::min(kTileSize, call.columns - column), scales,
                   static_cast<BFloat16*>(call.packed) + item * depth_tiles * kTileElements, depth_tiles);
  }
}

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
    .packed_size = &packed_size,
    .panels = &panels,
    .pack_weight = &pack_weight,
    .attention_forward = &attention_forward,
    .heads_backward = &heads_backward_tiles,
    .basis_backward = &basis_backward_tiles,
    .attention_backward = &attention_backward,
};

}  // namespace overtone::OVERTONE_ISA
