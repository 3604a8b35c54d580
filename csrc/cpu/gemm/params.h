// Matrices as the right operands of products, packed once for all rows that are multiplied with them.
#pragma once

#include <cstdint>

#include "cpu/parallel.h"
#include "cpu/strided.h"

namespace overtone {

// source [depth, columns] to panels of columns as wide as a register tile (on AMX: a tile).
struct PanelPacking {
  StridedMatrix source;
  int64_t depth = 0;
  int64_t columns = 0;
  void* panels = nullptr;
};

// One instruction set's. A work item is a panel.
struct PackingKernels {
  int64_t (*panel_elements)(const PanelPacking&);  // float32, or float64 for float64
  int64_t (*panel_count)(const PanelPacking&);
  void (*pack_panels)(const PanelPacking&, WorkQueue&);
};

}  // namespace overtone
