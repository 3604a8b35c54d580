// Householder reduction to Hessenberg form, in one pass over memory per column.
//
// The same code reduces kLanes interleaved matrices (S, what a number is, is a vector: one number per lane) or one
// matrix stored by rows (S is A, and a vector holds neighbours of a row). Interleaved is best while a group fits into
// the cache; beyond that a matrix at a time.
#pragma once

#include "cpu/linalg/eig/matrix.h"

namespace overtone::OVERTONE_ISA {

// On plain numbers what simd.h has on vectors.
template <class A>
  requires std::is_floating_point_v<A>
OVERTONE_INLINE bool less(A a, A b) {
  return a < b;
}
template <class A>
  requires std::is_floating_point_v<A>
OVERTONE_INLINE A select(bool condition, A yes, A no) {
  return condition ? yes : no;
}
OVERTONE_INLINE float sqrt(float x) { return __builtin_sqrtf(x); }
OVERTONE_INLINE double sqrt(double x) { return __builtin_sqrt(x); }
OVERTONE_INLINE bool any(bool condition) { return condition; }

template <class A, class S>
struct NumberTraits;

template <class A>
struct NumberTraits<A, Vector<A>> {
  using Flag = Mask<A>;
  static constexpr int kPerVector = 1;
  static OVERTONE_INLINE Flag none() { return no_lane<A>(); }
  static OVERTONE_INLINE Flag negated(Flag flag) { return ~flag; }
  static OVERTONE_INLINE Vector<A> magnitude(Vector<A> x) { return abs<A>(x); }
  static OVERTONE_INLINE Vector<A> maximum(Vector<A> a, Vector<A> b) { return max<A>(a, b); }
  static OVERTONE_INLINE Vector<A> spread(Vector<A> x) { return x; }
  static OVERTONE_INLINE Vector<A> total(Vector<A> x) { return x; }
};

template <class A>
struct NumberTraits<A, A> {
  using Flag = bool;
  static constexpr int kPerVector = kLanes<A>;
  static OVERTONE_INLINE Flag none() { return false; }
  static OVERTONE_INLINE Flag negated(Flag flag) { return !flag; }
  static OVERTONE_INLINE A magnitude(A x) { return x < 0 ? -x : x; }
  static OVERTONE_INLINE A maximum(A a, A b) { return a > b ? a : b; }
  static OVERTONE_INLINE Vector<A> spread(A x) { return broadcast<A>(x); }
  static OVERTONE_INLINE A total(Vector<A> x) { return reduce_add<A>(x); }
};

// P A P with P = I − tau v vᵀ is the rank-two update A − v wᵀ − z vᵀ, w = tau vᵀA, z = tau A v − (tau vᵀ(tau A v)) v.
// The pass that applies it also forms vᵀA and A v of the next column's reflector, so A is read and written once.
template <class A, class S>
class Hessenberg {
 public:
  using V = Vector<A>;
  using Traits = NumberTraits<A, S>;
  using Flag = typename Traits::Flag;

  // `a`: n rows, `stride` vectors apart; what fills a row's last vector must be zero. `work`: work_size(n) vectors.
  // `taus`: n numbers, or null if the reflectors are not kept below the subdiagonal.
  Hessenberg(V* a, int64_t n, int64_t stride, V* work, S* taus)
      : a_(a), n_(n), stride_(stride), width_(vectors(n)), taus_(taus) {
    V** parts[] = {&v_, &w_, &z_, &next_v_, &next_w_, &next_z_};
    for (V** part : parts) {
      *part = work;
      work += width_;
    }
  }

  static constexpr int64_t vectors(int64_t n) { return (n + Traits::kPerVector - 1) / Traits::kPerVector; }
  static constexpr int64_t work_size(int64_t n) { return 6 * vectors(n); }

  // Matrices `perron` have the eigenvector (1, …, 1): a reflector takes it to the first axis, and its eigenvalue to the
  // corner, below which there is nothing then.
  void run(Flag perron) {
    for (int64_t i = 0; i < width_; ++i) {
      v_[i] = w_[i] = z_[i] = next_v_[i] = next_w_[i] = next_z_[i] = V{};
    }
    if (any(perron)) {
      reflect_ones(perron);
    }
    split_ = perron;
    // Step k applies the reflector of column k − 1 and prepares that of column k.
    for (int64_t k = 0; k + 1 < n_; ++k) {
      const bool has_next = k + 2 < n_;
      const S tau = has_next ? next_reflector(k) : S{};
      update(k, has_next);
      if (has_next) {
        finish(k, tau);
      }
      split_ = Traits::none();
    }
  }

 private:
  OVERTONE_INLINE S& at(int64_t i, int64_t j) const { return reinterpret_cast<S*>(a_ + i * stride_)[j]; }
  static OVERTONE_INLINE S& number(V* vectors, int64_t i) { return reinterpret_cast<S*>(vectors)[i]; }

  // The pending update becomes that of the reflector from (1, …, 1) to −√n (1, 0, …).
  void reflect_ones(Flag matrices) {
    const S zero{}, one = zero + 1;
    const S root = sqrt(zero + static_cast<A>(n_));
    for (int64_t i = 0; i < n_; ++i) {
      number(next_v_, i) = i == 0 ? one : one / (one + root);
    }
    for (int64_t i = 0; i < n_; ++i) {
      const V* row = a_ + i * stride_;
      const V factor = Traits::spread(number(next_v_, i));
      V sum{};
      for (int64_t j = 0; j < width_; ++j) {
        sum += row[j] * next_v_[j];
        next_w_[j] += factor * row[j];
      }
      number(next_z_, i) = Traits::total(sum);
    }
    set_pending(0, select(matrices, one + one / root, zero));
  }

  // The reflector that clears column k below the subdiagonal, from the column as the pending update leaves it. Its
  // squares need no scaling: balancing has seen to the matrix's size, and a column of nothing is left as it is.
  S next_reflector(int64_t k) {
    const S zero{}, one = zero + 1;
    const S w = number(w_, k), v = number(v_, k);
    const auto updated = [&](int64_t i) { return at(i, k) - number(v_, i) * w - number(z_, i) * v; };
    const S x = updated(k + 1);
    const S squares = sum_in_pairs(k + 2, [&](int64_t i) {
      const S y = updated(i);
      number(next_v_, i) = y;
      return y * y;
    });
    const S all = x * x + squares;
    const Flag on = less(zero, squares) & less(zero + kTiny<A> * kTiny<A>, all) & Traits::negated(split_);
    const S length = sqrt(all);
    const S alpha = select(on, select(less(x, zero), length, -length), one);
    const S per_difference = select(on, one / select(on, x - alpha, one), zero);
    for (int64_t i = k + 2; i < n_; ++i) {
      number(next_v_, i) *= per_difference;
    }
    subdiagonal_ = select(split_, zero, select(on, alpha, x));
    number(next_v_, k + 1) = one;
    number(next_v_, k) = zero;
    return select(on, (alpha - x) / alpha, zero);
  }

  // The sum of term(i) for i from `begin` to n, even and odd ones apart: two chains of additions instead of one.
  template <class Term>
  OVERTONE_INLINE S sum_in_pairs(int64_t begin, const Term& term) const {
    S even{}, odd{};
    int64_t i = begin;
    for (; i + 2 <= n_; i += 2) {
      even += term(i);
      odd += term(i + 1);
    }
    return i < n_ ? even + odd + term(i) : even + odd;
  }

  // Applies the pending update to columns from k on and forms next_z = A next_v, next_w = next_vᵀ A.
  void update(int64_t k, bool has_next) {
    for (int64_t j = k / Traits::kPerVector; j < width_; ++j) {
      next_w_[j] = V{};
      if (!has_next) {
        next_v_[j] = V{};
      }
    }
    update_rows<false>(0, k, k);  // these have no part in v
    update_rows<true>(k, n_, k);
  }

  template <bool left>
  void update_rows(int64_t begin, int64_t end, int64_t k) {
    constexpr int kRows = OVERTONE_VECTOR_BYTES == 64 ? 6 : 4;  // what the registers hold
    int64_t i = begin;
    for (; i + kRows <= end; i += kRows) {
      update_block<kRows, left>(i, k);
    }
    update_last_block<kRows - 1, left>(end - i, i, k);
  }

  // The rows below the last whole block, at most `most`, in a block of their own.
  template <int most, bool left>
  OVERTONE_INLINE void update_last_block(int64_t rows, int64_t i, int64_t k) {
    if constexpr (most > 0) {
      if (rows == most) {
        update_block<most, left>(i, k);
      } else {
        update_last_block<most - 1, left>(rows, i, k);
      }
    }
  }

  // Columns before k share a vector with column k in the stored-by-rows case: v and w are zero there.
  template <int rows, bool left>
  OVERTONE_INLINE void update_block(int64_t i, int64_t k) {
    V v[rows], z[rows], next_v[rows], sum[rows];
    OVERTONE_UNROLL
    for (int r = 0; r < rows; ++r) {
      v[r] = Traits::spread(number(v_, i + r));
      z[r] = Traits::spread(number(z_, i + r));
      next_v[r] = i + r > k ? Traits::spread(number(next_v_, i + r)) : V{};
      sum[r] = V{};
    }
    V* row = a_ + i * stride_;
    for (int64_t j = k / Traits::kPerVector; j < width_; ++j) {
      const V v_j = v_[j], next_j = next_v_[j];
      V w_j{}, next_w{};
      if constexpr (left) {
        w_j = w_[j];
        next_w = next_w_[j];
      }
      OVERTONE_UNROLL
      for (int r = 0; r < rows; ++r) {
        V& element = row[r * stride_ + j];
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
      number(next_z_, i + r) = Traits::total(sum[r]);
    }
  }

  // Column k takes its final form, and the next update becomes the pending one.
  void finish(int64_t k, S tau) {
    at(k + 1, k) = subdiagonal_;
    for (int64_t i = k + 2; i < n_; ++i) {
      at(i, k) = taus_ != nullptr ? number(next_v_, i) : S{};
    }
    if (taus_ != nullptr) {
      taus_[k] = tau;
    }
    set_pending(k + 1, tau);
  }

  // From next_v, which begins at `begin`, A next_v and next_vᵀ A.
  void set_pending(int64_t begin, S tau) {
    const S gamma = tau * tau * sum_in_pairs(begin, [&](int64_t i) { return number(next_v_, i) * number(next_z_, i); });
    for (int64_t i = 0; i < begin; ++i) {
      number(v_, i) = number(w_, i) = S{};
      number(z_, i) = tau * number(next_z_, i);
    }
    for (int64_t i = begin; i < n_; ++i) {
      number(v_, i) = number(next_v_, i);
      number(w_, i) = tau * number(next_w_, i);
      number(z_, i) = tau * number(next_z_, i) - gamma * number(next_v_, i);
    }
  }

  V* a_;
  int64_t n_, stride_, width_;
  V *v_, *w_, *z_, *next_v_, *next_w_, *next_z_;
  S* taus_;
  S subdiagonal_;
  Flag split_;  // where nothing is below the next column's diagonal
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
  clear_cross(n - 1);
  for (int64_t k = n - 2; k >= 0; --k) {
    const int64_t begin = k + 1;  // rows and columns that reflector k acts on
    if (begin + 1 < n) {
      v[begin] = one;
      w[begin] = zero;
      for (int64_t i = begin + 1; i < n; ++i) {
        v[i] = a.row(i)[k];
        w[i] = zero;
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

}  // namespace overtone::OVERTONE_ISA
