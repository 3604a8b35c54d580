// Householder's reduction to Hessenberg form by a team of threads.
#pragma once

#include "cuda/linalg/eig/matrix.h"

namespace overtone::cuda {

// P A P with P = I − tau v vᵀ is A − v wᵀ − z vᵀ with w = tau vᵀA and z = tau A v − (tau vᵀ(tau A v)) v.
template <class T, class Team, bool in_shared>
class HessenbergReduction {
 public:
  // `work`: 3 n + 1 numbers in shared memory.
  OVERTONE_DEVICE HessenbergReduction(Team& team, const DenseMatrix<T, in_shared>& a, T* work)
      : team_(team), a_(a), n_(a.n), v_(work), w_(work + n_), z_(work + 2 * n_), head_(work + 3 * n_) {}

  // `perron`: the matrix has the eigenvector (1, …, 1). A reflector takes it to the first axis, and its eigenvalue to
  // the corner, below which there is nothing then.
  OVERTONE_DEVICE void run(bool perron) {
    if (perron) {
      split_perron();
    }
    for (int k = perron ? 1 : 0; k + 2 < n_; ++k) {
      reduce_column(k);
    }
  }

 private:
  OVERTONE_DEVICE void split_perron() {
    const T length = sqrt(T(n_));
    for (int i = team_.rank(); i < n_; i += team_.size()) {
      v_[i] = i == 0 ? T(1) : 1 / (1 + length);
    }
    team_.sync();
    reflect(0, 1 + 1 / length);
    for (int i = 1 + team_.rank(); i < n_; i += team_.size()) {
      a_.at(i, 0) = 0;
    }
    team_.sync();
  }

  // Clears column k below the subdiagonal.
  OVERTONE_DEVICE void reduce_column(int k) {
    T size = 0;
    for (int i = k + 1 + team_.rank(); i < n_; i += team_.size()) {
      const T x = a_.at(i, k);
      size = max(size, abs(x));
      if (i == k + 1) {
        *head_ = x;
      }
    }
    size = team_.largest(size);
    const bool some = size > Real<T>::kTiny;
    const T per_scale = some ? 1 / size : T(1);
    T squares = 0;
    for (int i = k + 2 + team_.rank(); i < n_; i += team_.size()) {
      const T part = a_.at(i, k) * per_scale;
      squares += part * part;
    }
    squares = team_.sum(squares);
    const T x = *head_ * per_scale;
    if (!some || !(squares > 0)) {
      clear_column(k, *head_);
      return;
    }
    const T alpha = -copysign(sqrt(x * x + squares), x);
    const T per_difference = per_scale / (x - alpha);
    for (int i = k + 1 + team_.rank(); i < n_; i += team_.size()) {
      v_[i] = i == k + 1 ? T(1) : a_.at(i, k) * per_difference;
    }
    team_.sync();
    reflect(k + 1, (alpha - x) / alpha);
    clear_column(k, alpha * size);
  }

  OVERTONE_DEVICE void clear_column(int k, T subdiagonal) {
    for (int i = k + 1 + team_.rank(); i < n_; i += team_.size()) {
      a_.at(i, k) = i == k + 1 ? subdiagonal : T(0);
    }
    team_.sync();
  }

  // Both sides, for v that begins at `begin`. Columns before it take no part: of these only column begin − 1 is not
  // zero where v is not, and it is cleared by the caller.
  OVERTONE_DEVICE void reflect(int begin, T tau) {
    T product = 0;
    a_.for_rows(
        team_, begin, n_, [&](int i, int j) { return a_.at(i, j) * v_[j]; },
        [&](int i, T sum) {
          z_[i] = tau * sum;
          product += i >= begin ? v_[i] * sum : T(0);
        });
    for (int j = begin + team_.rank(); j < n_; j += team_.size()) {
      T sum = 0;
      for (int i = begin; i < n_; ++i) {
        sum += v_[i] * a_.at(i, j);
      }
      w_[j] = tau * sum;
    }
    const T gamma = tau * tau * team_.sum(product);
    for (int j = begin + team_.rank(); j < n_; j += team_.size()) {
      const T v_j = v_[j], w_j = w_[j];
      for (int i = 0; i < begin; ++i) {
        a_.at(i, j) -= z_[i] * v_j;
      }
      for (int i = begin; i < n_; ++i) {
        a_.at(i, j) -= v_[i] * w_j + (z_[i] - gamma * v_[i]) * v_j;
      }
    }
    team_.sync();
  }

  Team& team_;
  DenseMatrix<T, in_shared> a_;
  int n_;
  T *v_, *w_, *z_, *head_;
};

}  // namespace overtone::cuda
