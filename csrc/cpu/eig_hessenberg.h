// Householder reduction of interleaved matrices to Hessenberg form, in one pass over memory per column.
#pragma once

#include "cpu/eig_matrix.h"

namespace overtone::OVERTONE_LEVEL {

// P A P with P = I − tau v vᵀ is the rank-two update A − v wᵀ − z vᵀ, w = tau vᵀA, z = tau A v − (tau vᵀ(tau A v)) v.
// The pass that applies it also forms vᵀA and A v of the next column's reflector, so A is read and written once.
template <class A>
class Hessenberg {
 public:
  using V = Vector<A>;

  // `work`: 6 n vectors. `taus`: n vectors, or null if the reflectors are not kept below the subdiagonal.
  Hessenberg(DenseLanes<A> a, V* work, V* taus)
      : a_(a),
        n_(a.n),
        v_(work),
        w_(work + n_),
        z_(work + 2 * n_),
        next_v_(work + 3 * n_),
        next_w_(work + 4 * n_),
        next_z_(work + 5 * n_),
        taus_(taus) {}

  static constexpr int64_t work_size(int64_t n) { return 6 * n; }

  // Lanes `perron` have the eigenvector (1, …, 1): a reflector takes it to the first axis, and its eigenvalue to the
  // corner, below which there is nothing then.
  void run(Mask<A> perron) {
    const V zero{};
    for (int64_t i = 0; i < n_; ++i) {
      v_[i] = w_[i] = z_[i] = zero;
    }
    if (any(perron)) {
      reflect_ones(perron);
    }
    split_ = perron;
    // Step k applies the reflector of column k − 1 and prepares that of column k.
    for (int64_t k = 0; k + 1 < n_; ++k) {
      const bool has_next = k + 2 < n_;
      V tau = zero;
      if (has_next) {
        tau = next_reflector(k);
      }
      update(k, has_next);
      if (has_next) {
        finish(k, tau);
      }
      split_ = no_lane<A>();
    }
  }

 private:
  // The pending update becomes that of the reflector from (1, …, 1) to −√n (1, 0, …).
  void reflect_ones(Mask<A> lanes) {
    const V zero{}, one = zero + 1;
    const V root = square_root(zero + static_cast<A>(n_));
    const V tau = select(lanes, one + one / root, zero);
    for (int64_t i = 0; i < n_; ++i) {
      next_v_[i] = i == 0 ? one : one / (one + root);
      next_w_[i] = zero;
    }
    for (int64_t i = 0; i < n_; ++i) {
      const V* row = a_.row(i);
      V sum = zero;
      for (int64_t j = 0; j < n_; ++j) {
        sum += row[j] * next_v_[j];
        next_w_[j] += next_v_[i] * row[j];
      }
      next_z_[i] = sum;
    }
    set_pending(0, tau);
  }

  // The reflector that clears column k below the subdiagonal, from the column as the pending update leaves it.
  V next_reflector(int64_t k) {
    const V zero{}, one = zero + 1;
    V size = zero;
    for (int64_t i = k + 1; i < n_; ++i) {
      next_v_[i] = a_.row(i)[k] - v_[i] * w_[k] - z_[i] * v_[k];
      size = larger<A>(size, absolute<A>(next_v_[i]));
    }
    const Mask<A> some = less(zero + kNothing<A>, size);
    const V scale = select(some, size, one), per_scale = one / scale;
    const V x = next_v_[k + 1] * per_scale;
    V squares = zero;
    for (int64_t i = k + 2; i < n_; ++i) {
      const V part = next_v_[i] * per_scale;
      squares += part * part;
    }
    const Mask<A> on = some & less(zero, squares) & ~split_;
    const V length = square_root(x * x + squares);
    const V alpha = select(on, select(less(x, zero), length, -length), one);
    const V per_difference = select(on, per_scale / select(on, x - alpha, one), zero);
    for (int64_t i = k + 2; i < n_; ++i) {
      next_v_[i] *= per_difference;
    }
    subdiagonal_ = select(split_, zero, select(on, alpha * scale, next_v_[k + 1]));
    next_v_[k + 1] = one;
    next_v_[k] = zero;
    return select(on, (alpha - x) / alpha, zero);
  }

  // Applies the pending update to columns from k on and forms next_z = A next_v, next_w = next_vᵀ A.
  void update(int64_t k, bool has_next) {
    const V zero{};
    for (int64_t j = k; j < n_; ++j) {
      next_w_[j] = zero;
    }
    if (!has_next) {
      for (int64_t j = k; j < n_; ++j) {
        next_v_[j] = zero;
      }
    }
    update_rows<false>(0, k, k);  // these have no part in v
    update_rows<true>(k, n_, k);
  }

  template <bool left>
  void update_rows(int64_t begin, int64_t end, int64_t k) {
    int64_t i = begin;
    for (; i + 4 <= end; i += 4) {
      update_block<4, left>(i, k);
    }
    for (; i < end; ++i) {
      update_block<1, left>(i, k);
    }
  }

  template <int rows, bool left>
  OVERTONE_INLINE void update_block(int64_t i, int64_t k) {
    V v[rows], z[rows], next_v[rows], sum[rows];
    OVERTONE_UNROLL
    for (int r = 0; r < rows; ++r) {
      v[r] = v_[i + r];
      z[r] = z_[i + r];
      next_v[r] = i + r > k ? next_v_[i + r] : V{};
      sum[r] = V{};
    }
    for (int64_t j = k; j < n_; ++j) {
      const V v_j = v_[j], next_j = next_v_[j];
      V w_j{}, next_w{};
      if constexpr (left) {
        w_j = w_[j];
        next_w = next_w_[j];
      }
      OVERTONE_UNROLL
      for (int r = 0; r < rows; ++r) {
        V& element = a_.row(i + r)[j];
        V x = element - z[r] * v_j;
        if constexpr (left) {
          x -= v[r] * w_j;
          next_w += next_v[r] * x;
        }
        element = x;
        sum[r] += x * next_j;
      }
      if constexpr (left) {
        next_w_[j] = next_w;
      }
    }
    OVERTONE_UNROLL
    for (int r = 0; r < rows; ++r) {
      next_z_[i + r] = sum[r];
    }
  }

  // Column k takes its final form, and the next update becomes the pending one.
  void finish(int64_t k, V tau) {
    a_.row(k + 1)[k] = subdiagonal_;
    for (int64_t i = k + 2; i < n_; ++i) {
      a_.row(i)[k] = taus_ != nullptr ? next_v_[i] : V{};
    }
    if (taus_ != nullptr) {
      taus_[k] = tau;
    }
    set_pending(k + 1, tau);
  }

  // From next_v, which begins at `begin`, A next_v and next_vᵀ A.
  void set_pending(int64_t begin, V tau) {
    V product{};
    for (int64_t i = begin; i < n_; ++i) {
      product += next_v_[i] * next_z_[i];
    }
    const V gamma = tau * tau * product;
    for (int64_t i = 0; i < n_; ++i) {
      v_[i] = i >= begin ? next_v_[i] : V{};
      z_[i] = tau * next_z_[i] - gamma * v_[i];
    }
    for (int64_t j = begin; j < n_; ++j) {
      w_[j] = tau * next_w_[j];
    }
  }

  DenseLanes<A> a_;
  int64_t n_;
  V *v_, *w_, *z_, *next_v_, *next_w_, *next_z_, *taus_;
  V subdiagonal_;
  Mask<A> split_;  // lanes in which nothing is below the next column's diagonal
};

// The product of the reflectors that `Hessenberg` left below the subdiagonal, in their place, and a column of zeros
// beside it, as in HessenbergLanes. `work`: 2 n vectors.
template <class A>
void accumulate_reflectors(DenseLanes<A> a, const Vector<A>* taus, Vector<A>* work) {
  using V = Vector<A>;
  const int64_t n = a.n;
  const V zero{}, one = zero + 1;
  V *v = work, *w = work + n;
  const auto clear_cross = [&](int64_t k) {
    for (int64_t i = k; i < n; ++i) {
      a.row(k)[i] = a.row(i)[k] = zero;
    }
    a.row(k)[k] = one;
  };
  for (int64_t i = 0; i < n; ++i) {
    a.row(i)[n] = zero;
  }
  if (n > 0) {
    clear_cross(n - 1);
  }
  for (int64_t k = n - 2; k >= 0; --k) {
    const int64_t begin = k + 1;  // rows and columns that reflector k acts on
    const bool has_reflector = k + 2 < n;
    if (has_reflector) {
      v[begin] = one;
      for (int64_t i = begin + 1; i < n; ++i) {
        v[i] = a.row(i)[k];
      }
      for (int64_t j = begin; j < n; ++j) {
        w[j] = zero;
      }
      for (int64_t i = begin; i < n; ++i) {
        for (int64_t j = begin; j < n; ++j) {
          w[j] += v[i] * a.row(i)[j];
        }
      }
      for (int64_t i = begin; i < n; ++i) {
        const V factor = taus[k] * v[i];
        for (int64_t j = begin; j < n; ++j) {
          a.row(i)[j] -= factor * w[j];
        }
      }
    }
    clear_cross(k);
  }
}

}  // namespace overtone::OVERTONE_LEVEL
