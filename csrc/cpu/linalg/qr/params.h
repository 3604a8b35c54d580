// What the QR kernels of every ISA level compute, and how the ops in qr.cpp call them.
//
// A work item is a group of small matrices, factored side by side in the lanes of vectors, or one larger matrix. No two
// items share a sum, so threads never change the result.
#pragma once

#include <cstdint>

#include "cpu/dtype.h"
#include "cpu/isa/dispatch.h"
#include "cpu/matrix_batch.h"

namespace overtone {

// Matrices of one work item when they are small: a multiple of every level's number of lanes.
constexpr int64_t kQrGroup = 16;
// Elements of A or Q up to which a matrix is small.
constexpr int64_t kSmallQr = 40 * 40;

// A = QR with R's diagonal ≥ 0. A matrix that is not finite, or whose R is not, gets info 1, and its results are NaN.
struct QrForward {
  Dtype type;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t q_columns = 0;  // 0: only R is wanted
  int64_t r_rows = 0;
  MatrixBatch a;
  void* q = nullptr;  // [count, rows, q_columns]
  void* r = nullptr;  // [count, r_rows, columns]
  int32_t* info = nullptr;

  bool is_small() const { return rows * (columns > q_columns ? columns : q_columns) <= kSmallQr; }
  int64_t items() const { return is_small() ? (a.count + kQrGroup - 1) / kQrGroup : a.count; }
};

// ∂A = (∂Q + Q copyltu(R ∂Rᵀ − ∂Qᵀ Q)) R⁻ᵀ, where copyltu mirrors the lower triangle; rows ≥ columns. A matrix whose R
// is not finite gets zeros. Where R has a zero on its diagonal there is no gradient, and `singular` is 1.
struct QrBackward {
  Dtype type;
  int64_t rows = 0;
  int64_t columns = 0;
  MatrixBatch grad_q;  // no data: no gradient
  MatrixBatch grad_r;
  const void* q = nullptr;  // [count, rows, columns]
  const void* r = nullptr;  // [count, columns, columns]
  void* grad_a = nullptr;   // [count, rows, columns]
  int32_t* singular = nullptr;
};

struct QrKernels {
  const char* isa;
  void (*forward)(const QrForward&, int64_t begin, int64_t end);
  void (*backward)(const QrBackward&, int64_t begin, int64_t end);
};

OVERTONE_KERNELS(QrKernels, qr_kernels);

}  // namespace overtone
