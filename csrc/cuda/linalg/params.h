// What the kernels compute, as plain structs shared by the ops, the launches and the host stand-in. Addresses are the
// device's.
#pragma once

#include "cuda/device.h"
#include "info.h"

namespace overtone::cuda {

// [count] matrices of a batch in global memory, with any strides.
template <class T>
struct Matrices {
  const T* data;
  int64_t count;
  int64_t matrix_stride;
  int64_t row_stride;
  int64_t column_stride;

  OVERTONE_DEVICE T at(int64_t matrix, int i, int j) const {
    return data[matrix * matrix_stride + i * row_stride + j * column_stride];
  }
};

// As Eigh in cpu/linalg/eigh/params.h.
template <class T>
struct EighParams {
  Matrices<T> a;
  int n;
  bool upper;
  T* values;   // [count][n], ascending
  T* vectors;  // [count][n][n], an eigenvector per row; null if they are not wanted
  int32_t* info;
};

// As Eig in cpu/linalg/eig/params.h, without eigenvectors.
template <class T>
struct EigParams {
  Matrices<T> a;
  int n;
  bool row_stochastic;
  T* values;     // [count][n][2]: (real, imaginary)
  T* workspace;  // [count][n][n] where a matrix is too large for shared memory; otherwise null
  int32_t* info;
};

// As QrForward in cpu/linalg/qr/params.h.
template <class T>
struct QrCall {
  Matrices<T> a;
  int rows;
  int columns;
  int q_columns;  // 0: only R is wanted
  int r_rows;
  T* q;  // [count][rows][q_columns]
  T* r;  // [count][r_rows][columns]
  int32_t* info;
};

}  // namespace overtone::cuda
