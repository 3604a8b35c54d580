// Before the reduction: eigenvalues that can be read off isolated, rows and columns balanced. As
// cpu/linalg/eig/balance.h.
#pragma once

#include "cuda/linalg/eig/matrix.h"

namespace overtone::cuda {

template <class T, class Team, bool in_shared>
class Balance {
 public:
  // `work`: 4 n numbers in shared memory. The matrix is finite and about 1 in size.
  OVERTONE_DEVICE Balance(Team& team, const DenseMatrix<T, in_shared>& a, T* work)
      : team_(team), a_(a), n_(a.n), rows_(work), columns_(work + n_), scale_(work + 2 * n_), counts_(work + 3 * n_) {}

  // Whether some eigenvalues could be read off. With `keep_norms` the matrix is permuted, not scaled.
  OVERTONE_DEVICE bool run(bool keep_norms) {
    row_column_norms();
    const bool isolated = permute();
    if (!keep_norms) {
      balance();
    }
    return isolated;
  }

  // The largest modulus there is now.
  OVERTONE_DEVICE T largest() const { return largest_; }

 private:
  // Sums of moduli by rows and by columns, without the diagonal, and the largest modulus.
  OVERTONE_DEVICE void row_column_norms() {
    a_.for_rows(
        team_, 0, n_, [&](int i, int j) { return i == j ? T(0) : abs(a_.at(i, j)); },
        [&](int i, T sum) { rows_[i] = sum; });
    T largest = 0;
    for (int j = team_.rank(); j < n_; j += team_.size()) {
      T sum = 0;
      for (int i = 0; i < n_; ++i) {
        const T size = abs(a_.at(i, j));
        sum += i == j ? T(0) : size;
        largest = max(largest, size);
      }
      columns_[j] = sum;
    }
    largest_ = team_.largest(largest);
  }

  // Where a row or column has nothing off the diagonal, the diagonal is an eigenvalue: permuted to the end or the
  // beginning it splits off exactly. A triangular matrix, causal attention, is solved by this alone.
  OVERTONE_DEVICE bool permute() {
    T found = 0;
    for (int i = team_.rank(); i < n_; i += team_.size()) {
      found = rows_[i] == 0 || columns_[i] == 0 ? T(1) : found;
    }
    if (n_ < 2 || team_.largest(found) == 0) {
      return false;
    }
    int begin = 0, end = n_;  // what is not isolated yet
    count_nonzeros(begin, end, [&](int i, int j) { return a_.at(i, j); });
    for (int i = find_zero(begin, end); i >= 0; i = find_zero(begin, end)) {
      --end;
      swap(i, end);
      for (int r = begin + team_.rank(); r < end; r += team_.size()) {
        counts_[r] -= a_.at(r, end) != 0 ? T(1) : T(0);
      }
      team_.sync();
    }
    count_nonzeros(begin, end, [&](int i, int j) { return a_.at(j, i); });
    for (int i = find_zero(begin, end); i >= 0; i = find_zero(begin, end)) {
      swap(i, begin);
      for (int c = begin + 1 + team_.rank(); c < end; c += team_.size()) {
        counts_[c] -= a_.at(begin, c) != 0 ? T(1) : T(0);
      }
      ++begin;
      team_.sync();
    }
    row_column_norms();
    return true;
  }

  template <class Element>
  OVERTONE_DEVICE void count_nonzeros(int begin, int end, Element element) {
    for (int i = begin + team_.rank(); i < end; i += team_.size()) {
      T found = 0;
      for (int j = begin; j < end; ++j) {
        found += i != j && element(i, j) != 0 ? T(1) : T(0);
      }
      counts_[i] = found;
    }
    team_.sync();
  }

  OVERTONE_DEVICE int find_zero(int begin, int end) {
    T found = -1;
    for (int i = begin + team_.rank(); i < end; i += team_.size()) {
      found = counts_[i] == 0 ? T(i) : found;
    }
    return static_cast<int>(team_.largest(found));
  }

  OVERTONE_DEVICE static void exchange(T& a, T& b) {
    const T kept = a;
    a = b;
    b = kept;
  }

  // Rows and columns i and j change places.
  OVERTONE_DEVICE void swap(int i, int j) {
    if (i == j) {
      return;
    }
    for (int k = team_.rank(); k < n_; k += team_.size()) {
      exchange(a_.at(i, k), a_.at(j, k));
    }
    team_.sync();
    for (int k = team_.rank(); k < n_; k += team_.size()) {
      exchange(a_.at(k, i), a_.at(k, j));
    }
    if (team_.rank() == 0) {
      exchange(counts_[i], counts_[j]);
    }
    team_.sync();
  }

  // Rows and columns of very different size cost accuracy: powers of two make them alike, as in LAPACK. The diagonal
  // counts in both norms, so that rounding noise beside large diagonals is not blown up.
  OVERTONE_DEVICE void balance() {
    T unlike = 0;
    for (int i = team_.rank(); i < n_; i += team_.size()) {
      const T diagonal = abs(a_.at(i, i)), row = rows_[i] + diagonal, column = columns_[i] + diagonal;
      const bool connected = rows_[i] > 0 && columns_[i] > 0;
      unlike = connected && (row * kUnlike < column || column * kUnlike < row) ? T(1) : unlike;
      scale_[i] = 1;
    }
    if (team_.largest(unlike) == 0) {
      return;
    }
    const T before = largest_;
    for (int round = 0; round < kRounds && balance_once(); ++round) {
    }
    undo_if_harmful(before);
  }

  // Whether something changed.
  OVERTONE_DEVICE bool balance_once() {
    bool changed = false;
    for (int i = 0; i < n_; ++i) {
      const T scale = scale_[i];  // read before the sums wait for everybody: one thread will write it
      T row = 0, column = 0;
      for (int k = team_.rank(); k < n_; k += team_.size()) {
        row += abs(a_.at(i, k));
        column += abs(a_.at(k, i));
      }
      row = team_.sum(row);
      column = team_.sum(column);
      const T diagonal = abs(a_.at(i, i));
      if (!(diagonal < row && diagonal < column)) {
        continue;
      }
      const T factor = power_of_two_below(sqrt(row / column) * T(1.41421356));
      const bool is_better = column * factor + row / factor < kGain * (column + row);
      if (!is_better || !(1 / kMaxScale < scale * factor && scale * factor < kMaxScale)) {
        continue;
      }
      changed = true;
      for (int k = team_.rank(); k < n_; k += team_.size()) {
        if (k == i) {
          scale_[i] = scale * factor;
        } else {
          a_.at(k, i) *= factor;
          a_.at(i, k) *= 1 / factor;
        }
      }
      team_.sync();
    }
    return changed;
  }

  // Errors of the balanced matrix come back multiplied by up to the ratio of the factors. Where the balanced matrix is
  // not smaller by as much, nearly reducible attention for instance, balancing would do harm.
  OVERTONE_DEVICE void undo_if_harmful(T before) {
    row_column_norms();
    T most = 0, least = kMax<T>;
    for (int i = team_.rank(); i < n_; i += team_.size()) {
      most = max(most, scale_[i]);
      least = min(least, scale_[i]);
    }
    most = team_.largest(most);
    least = team_.smallest(least);
    if (!(before * kHarm < most / least * largest_)) {
      return;
    }
    for (int j = team_.rank(); j < n_; j += team_.size()) {
      for (int i = 0; i < n_; ++i) {
        a_.at(i, j) = a_.at(i, j) * scale_[i] * (1 / scale_[j]);
      }
    }
    largest_ = before;
    team_.sync();
  }

  static constexpr T kUnlike = 32;  // below that there is little to gain
  static constexpr T kGain = T(0.95);
  static constexpr T kHarm = 4;
  static constexpr int kRounds = 20;
  static constexpr T kMaxScale = sizeof(T) == 8 ? T(0x1p500) : T(0x1p60);  // two have a ratio

  Team& team_;
  DenseMatrix<T, in_shared> a_;
  int n_;
  T *rows_, *columns_, *scale_, *counts_;
  T largest_ = 0;
};

}  // namespace overtone::cuda
