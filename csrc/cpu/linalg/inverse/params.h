// Weights composed of a spectrum, and their gradients, as the kernels of every ISA level compute them: Q Λ Qᵀ with Q
// the orthonormal factor of Θ, and V Λ V⁻¹. A work item is one matrix.
//
// The gradients never divide by the distance of two eigenvalues, and nothing that forward computed is computed again.
#pragma once

#include <cstdint>

#include "cpu/dtype.h"
#include "cpu/isa/dispatch.h"
#include "cpu/matrix_batch.h"

namespace overtone {

struct ComposeForward {
  ElementType type;
  int64_t size = 0;
  MatrixBatch matrix;                 // Θ, or V
  const void* eigenvalues = nullptr;  // [count, size]
  void* weight = nullptr;             // [count, size, size]
  void* basis = nullptr;              // [count, size, size]: Q, or V⁻¹
  void* r = nullptr;                  // [count, size, size]: Θ = QR; null for V
  int32_t* failed = nullptr;          // [count]: 1 if Θ is not finite, or V is singular or not finite
};

struct ComposeBackward {
  ElementType type;
  int64_t size = 0;
  MatrixBatch grad_weight;
  MatrixBatch matrix;  // V; not read for Θ
  const void* eigenvalues = nullptr;
  const void* basis = nullptr;
  const void* r = nullptr;
  void* grad_matrix = nullptr;       // [count, size, size]
  void* grad_eigenvalues = nullptr;  // [count, size]
  int32_t* failed = nullptr;         // [count]: 1 if R has a zero on its diagonal: there is no gradient
};

struct SpectrumKernels {
  const char* isa;
  void (*symmetric_forward)(const ComposeForward&, int64_t begin, int64_t end);
  void (*symmetric_backward)(const ComposeBackward&, int64_t begin, int64_t end);
  void (*general_forward)(const ComposeForward&, int64_t begin, int64_t end);
  void (*general_backward)(const ComposeBackward&, int64_t begin, int64_t end);
};

OVERTONE_KERNELS(SpectrumKernels, spectrum_kernels);

}  // namespace overtone
