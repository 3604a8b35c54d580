// From a matrix to a tensor that holds its panels.
#pragma once

#include "cpu/gemm/params.h"
#include "cpu/tensor.h"

namespace overtone {

inline Tensor packed(const PackingKernels& kernels, PanelPacking packing, const Tensor& like, ScalarType type) {
  Tensor panels = allocated(like, {kernels.panel_elements(packing)}, type);
  packing.panels = panels.data_ptr();
  parallel_items(kernels.panel_count(packing), kLargeItems,
                 [&](WorkQueue& queue) { kernels.pack_panels(packing, queue); });
  return panels;
}

}  // namespace overtone
