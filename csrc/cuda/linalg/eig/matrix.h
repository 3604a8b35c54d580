// The two forms a nonsymmetric matrix has on its way to its eigenvalues.
#pragma once

#include "cuda/team.h"

namespace overtone::cuda {

// By rows, in shared memory or, if it is too large for that, in global memory.
template <class T, bool in_shared>
struct DenseMatrix {
  T* data;
  int n;

  // In shared memory odd, so that neither rows nor columns meet in few banks.
  static constexpr int row_stride(int n) { return in_shared ? n | 1 : n; }
  static constexpr int64_t size(int n) { return static_cast<int64_t>(n) * row_stride(n); }

  OVERTONE_DEVICE T& at(int i, int j) const { return data[i * row_stride(n) + j]; }

  // done(i, Σ_j element(i, j)) over columns [begin, end) for every row i, by one thread. Rows of shared memory have a
  // thread each; those of global memory have a warp, so that neighbouring lanes read neighbours.
  template <class Team, class Element, class Done>
  OVERTONE_DEVICE void for_rows(Team& team, int begin, int end, Element element, Done done) const {
    if constexpr (in_shared) {
      for (int i = team.rank(); i < n; i += team.size()) {
        T sum = 0;
        for (int j = begin; j < end; ++j) {
          sum += element(i, j);
        }
        done(i, sum);
      }
    } else {
      for (int i = team.warp(); i < n; i += team.warps()) {
        T sum = 0;
        for (int j = begin + team.rank() % kWarp; j < end; j += kWarp) {
          sum += element(i, j);
        }
        sum = sum_warp(sum);
        if (team.rank() % kWarp == 0) {
          done(i, sum);
        }
      }
    }
  }
};

// A Hessenberg matrix in the memory of the dense one it came from.
template <class T>
struct DenseHessenberg {
  T* data;
  int n;

  static constexpr int size(int n) { return static_cast<int>(DenseMatrix<T, true>::size(n)); }

  OVERTONE_DEVICE T& at(int i, int j) const { return data[i * DenseMatrix<T, true>::row_stride(n) + j]; }
};

// The Hessenberg part and what a bulge needs: row i holds the columns from i − 3 on. Half of the dense matrix.
template <class T>
struct PackedHessenberg {
  T* data;
  int n;

  static constexpr int size(int n) { return n * (n + 7) / 2; }

  OVERTONE_DEVICE T& at(int i, int j) const { return data[i * (n + 2) - i * (i - 1) / 2 + j + 3]; }
};

}  // namespace overtone::cuda
