// A = QR with diag R ≥ 0 of small matrices, up to 32 × 32: Householder, a warp per matrix.
#pragma once

#include "cuda/team.h"

namespace overtone::cuda {

template <class T>
class QrSolver {
 public:
  static constexpr int shared_size(int rows, int columns, int q_columns) {
    return rows * ((columns | 1) + (q_columns | 1)) + 2 * kWarp;
  }

  OVERTONE_DEVICE QrSolver(const QrCall<T>& call, int64_t index, T* memory)
      : call_(call),
        index_(index),
        rows_(call.rows),
        columns_(call.columns),
        rank_(call.rows < call.columns ? call.rows : call.columns),
        team_(memory),
        taus_(memory),
        signs_(memory + kWarp),
        a_{memory + 2 * kWarp, columns_ | 1},
        q_{a_.data + rows_ * a_.row_stride, call.q_columns | 1} {}

  OVERTONE_DEVICE void run() {
    bool solved = load();
    if (solved) {
      for (int k = 0; k < rank_; ++k) {
        make_reflector(k);
        reflect(k, a_, k + 1, columns_);
        team_.sync();
      }
      if (call_.q_columns > 0) {
        form_q();
      }
      solved = finish_r();
    }
    store(solved);
  }

 private:
  struct Rows {
    T* data;
    int row_stride;
    OVERTONE_DEVICE T& at(int i, int j) const { return data[i * row_stride + j]; }
  };

  OVERTONE_DEVICE bool load() {
    T largest = 0;
    for (int k = team_.rank(); k < rows_ * columns_; k += team_.size()) {
      const int i = k / columns_, j = k % columns_;
      const T x = call_.a.at(index_, i, j);
      largest = max(largest, size_or_infinity(x));
      a_.at(i, j) = x;
    }
    if (!(team_.largest(largest) <= kMax<T>)) {
      return false;
    }
    scale_column();
    return true;
  }

  // Every column by its own power of two: that scales the same column of R and leaves Q alone. A lane per column.
  OVERTONE_DEVICE void scale_column() {
    const int j = team_.rank();
    T largest = 0;
    for (int i = 0; i < rows_ && j < columns_; ++i) {
      largest = max(largest, abs(a_.at(i, j)));
    }
    scale_ = Scale<T>::to_one(largest);
    for (int i = 0; i < rows_ && j < columns_; ++i) {
      a_.at(i, j) = scale_.apply(a_.at(i, j));
    }
    team_.sync();
  }

  // R's signs, and its columns' own sizes. Whether no element is beyond the largest number.
  OVERTONE_DEVICE bool finish_r() {
    const int j = team_.rank();
    T largest = 0;
    for (int i = 0; i < rank_ && i <= j && j < columns_; ++i) {
      T& x = a_.at(i, j);
      x = scale_.undo(x) * signs_[i];
      largest = max(largest, size_or_infinity(x));
    }
    return team_.largest(largest) <= kMax<T>;
  }

  // I − τ v vᵀ that clears column k below the diagonal; a lane per row. The column is scaled to size one first: squares
  // must not vanish, however small it is beside others.
  OVERTONE_DEVICE void make_reflector(int k) {
    const int i = team_.rank();
    T x = i >= k && i < rows_ ? a_.at(i, k) : T(0);
    const Scale<T> scale = Scale<T>::to_one(team_.largest(abs(x)));
    x = scale.apply(x);
    const T below = team_.sum(i > k ? x * x : T(0));
    const T head = team_.sum(i == k ? x : T(0));
    const bool is_clear = below == 0;
    const T diagonal = is_clear ? head : -copysign(sqrt(head * head + below), head);
    if (i == k) {
      a_.at(k, k) = scale.undo(diagonal);
      taus_[k] = is_clear ? T(0) : (diagonal - head) / diagonal;
      signs_[k] = copysign(T(1), diagonal);
    } else if (i > k && i < rows_) {
      a_.at(i, k) = is_clear ? T(0) : x / (head - diagonal);
    }
    team_.sync();
  }

  // Column k's reflector meets columns [begin, end) of x; a lane per column.
  OVERTONE_DEVICE void reflect(int k, const Rows& x, int begin, int end) {
    const T tau = taus_[k];
    for (int j = begin + team_.rank(); j < end; j += team_.size()) {
      T sum = x.at(k, j);
      for (int i = k + 1; i < rows_; ++i) {
        sum += a_.at(i, k) * x.at(i, j);
      }
      sum *= tau;
      x.at(k, j) -= sum;
      for (int i = k + 1; i < rows_; ++i) {
        x.at(i, j) -= sum * a_.at(i, k);
      }
    }
  }

  // From the identity, its signs such that R's diagonal becomes positive. A lane keeps its column.
  OVERTONE_DEVICE void form_q() {
    for (int j = team_.rank(); j < call_.q_columns; j += team_.size()) {
      for (int i = 0; i < rows_; ++i) {
        q_.at(i, j) = i != j ? T(0) : j < rank_ ? signs_[j] : T(1);
      }
    }
    for (int k = rank_ - 1; k >= 0; --k) {
      reflect(k, q_, 0, call_.q_columns);
    }
    team_.sync();
  }

  OVERTONE_DEVICE void store(bool solved) {
    T* const q = call_.q + index_ * rows_ * call_.q_columns;
    for (int k = team_.rank(); k < rows_ * call_.q_columns; k += team_.size()) {
      q[k] = solved ? q_.at(k / call_.q_columns, k % call_.q_columns) : kNaN<T>;
    }
    T* const r = call_.r + index_ * call_.r_rows * columns_;
    for (int k = team_.rank(); k < call_.r_rows * columns_; k += team_.size()) {
      const int i = k / columns_, j = k % columns_;
      r[k] = !solved ? kNaN<T> : j < i ? T(0) : a_.at(i, j);
    }
    if (team_.rank() == 0) {
      call_.info[index_] = solved ? 0 : 1;
    }
  }

  const QrCall<T>& call_;
  int64_t index_;
  int rows_, columns_, rank_;
  WarpTeam<T> team_;
  T *taus_, *signs_;
  Rows a_, q_;
  Scale<T> scale_;  // of the lane's column
};

// kWarpsPerBlock matrices per block.
template <class T>
__global__ void qr_warp(QrCall<T> call) {
  const int warp = threadIdx.x / kWarp;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + warp;
  if (index < call.a.count) {
    const int size = QrSolver<T>::shared_size(call.rows, call.columns, call.q_columns);
    QrSolver<T>(call, index, shared_memory<T>() + warp * size).run();
  }
}

}  // namespace overtone::cuda
