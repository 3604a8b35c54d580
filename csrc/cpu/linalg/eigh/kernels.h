// Symmetric eigenproblems, written once and compiled for every ISA level: scale, reduce to tridiagonal form, QL, sort.
#pragma once

#include "cpu/linalg/eigh/backward.h"
#include "cpu/linalg/eigh/params.h"
#include "cpu/linalg/eigh/ql.h"
#include "cpu/linalg/eigh/tridiagonal.h"
#include "cpu/simd/scratch.h"

namespace overtone::OVERTONE_ISA {

// Powers of two that take every lane's matrix to about 1 in size, and its eigenvalues back; two of each, because one
// could overflow. No digit is lost, whether entries are subnormal or near overflow.
template <class A>
struct LaneScale {
  Vector<A> first{};
  Vector<A> second{};

  LaneScale() = default;
  explicit LaneScale(Vector<A> largest) {
    typedef typename VectorOf<Bits<A>>::type IntegerVector;
    constexpr int kDigits = std::numeric_limits<A>::digits - 1;
    constexpr Bits<A> kLargestExponent = 2 * std::numeric_limits<A>::max_exponent - 2;  // biased
    constexpr A kRaise = sizeof(A) == 8 ? A(0x1p512) : A(0x1p64);
    first = select(less(largest, broadcast(1 / kRaise)), broadcast(kRaise), broadcast(A(1)));
    const IntegerVector exponent = (IntegerVector)(largest * first) >> kDigits;
    IntegerVector inverse = kLargestExponent - exponent;
    inverse = inverse < 1 ? IntegerVector{} + 1 : inverse;
    // A zero matrix stays as it is.
    second = select(equal(largest, Vector<A>{}), broadcast(A(1)), (Vector<A>)(inverse << kDigits));
  }

  OVERTONE_INLINE Vector<A> apply(Vector<A> v) const { return v * first * second; }
  OVERTONE_INLINE Vector<A> undo(Vector<A> v) const { return v / second / first; }

  // Whether eigenvalues, at most n in size while they are scaled, may be beyond the largest number when they are not.
  OVERTONE_INLINE Mask<A> may_overflow() const {
    return less(second, broadcast(sizeof(A) == 8 ? A(0x1p-500) : A(0x1p-60)));
  }
};

template <class A, int kGroups>
class EighSolver {
 public:
  static constexpr int64_t kMatrices = kGroups * kLanes<A>;
  static constexpr int64_t kLargestSortedInLanes = 16;

  explicit EighSolver(const EighParams& call)
      : call_(call),
        n_(call.n),
        memory_(scratch_size(call)),
        a_(memory_.take(InterleavedMatrix<A>::size(n_, n_)), n_),
        tridiagonalization_(a_, n_, memory_.take(Tridiagonalization<A>::scratch_size(n_))),
        ql_(n_, memory_.take(ImplicitQl<A, kGroups>::scratch_size(n_))),
        ranks_(memory_.take(n_ * kLanes<A>)) {
    for (int k = 0; k < kGroups && call.vectors != nullptr; ++k) {
      z_[k] = InterleavedMatrix<A>(memory_.take(InterleavedMatrix<A>::size(n_, n_)), n_);
    }
  }

  void solve(int64_t first) {
    for (int k = 0; k < kGroups; ++k) {
      load(k, first + k * kLanes<A>);
      tridiagonalization_.reduce({ql_.diagonal(k), ql_.off_diagonal(k), kMatrices});
      if (call_.vectors != nullptr) {
        tridiagonalization_.form_q(z_[k]);
      }
    }
    const VectorGroupMask<A, kGroups> unconverged = ql_.solve(call_.vectors != nullptr ? z_ : nullptr);
    for (int k = 0; k < kGroups; ++k) {
      const int64_t begin = first + k * kLanes<A>;
      const int count = static_cast<int>(std::clamp<int64_t>(call_.a.count - begin, 0, kLanes<A>));
      if (count > 0) {
        store(k, begin, count, unconverged.part[k] | ~is_finite_[k]);
      }
    }
  }

 private:
  static int64_t scratch_size(const EighParams& call) {
    const int64_t n = call.n;
    const int64_t matrices = call.vectors != nullptr ? 1 + kGroups : 1;
    return matrices * Scratch<A>::padded(InterleavedMatrix<A>::size(n, n)) +
           Scratch<A>::padded(Tridiagonalization<A>::scratch_size(n)) +
           Scratch<A>::padded(ImplicitQl<A, kGroups>::scratch_size(n)) + Scratch<A>::padded(n * kLanes<A>);
  }

  // The triangle that is to be read, as the lower one, scaled. A matrix that is not finite becomes zero.
  void load(int k, int64_t first) {
    MatrixBatch batch = call_.a;
    bool upper = call_.upper;
    if (batch.column_stride != 1 && batch.row_stride == 1) {
      std::swap(batch.row_stride, batch.column_stride);
      upper = !upper;
    }
    const InterleavedMatrix<A> a = a_;
    load_lanes<A>(batch, first, n_, n_, a);
    Vector<A> largest{};
    Vector<A> not_finite{};
    for_lower([&](int64_t i, int64_t j) {
      const Vector<A> element = upper ? a.get(j, i) : a.get(i, j);
      largest = max<A>(abs<A>(element), largest);
      not_finite += element * A(0);
    });
    const Mask<A> is_finite = equal(not_finite, Vector<A>{});
    const LaneScale<A> scale(select(is_finite, largest, Vector<A>{}));
    for_lower([&](int64_t i, int64_t j) {
      const Vector<A> element = upper ? a.get(j, i) : a.get(i, j);
      a.set(i, j, select(is_finite, scale.apply(element), Vector<A>{}));
    });
    is_finite_[k] = is_finite;
    scale_[k] = scale;
  }

  template <class F>
  OVERTONE_INLINE void for_lower(const F& f) const {
    const int64_t n = n_;
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j <= i; ++j) {
        f(i, j);
      }
    }
  }

  void store(int k, int64_t begin, int count, Mask<A> failed) {
    if (any(scale_[k].may_overflow())) {
      failed = failed | ~are_representable(k);
    }
    for (int lane = 0; lane < count; ++lane) {
      call_.info[begin + lane] = lane_of(failed, lane);
    }
    finish(k, failed);
    A* values = static_cast<A*>(call_.values) + begin * n_;
    A* vectors = call_.vectors == nullptr ? nullptr : static_cast<A*>(call_.vectors) + begin * n_ * n_;
    n_ <= kLargestSortedInLanes ? store_sorted(k, count, values, vectors) : store_by_rank(k, count, values, vectors);
  }

  // At their own size eigenvalues may be beyond the largest number.
  Mask<A> are_representable(int k) const {
    Vector<A> not_finite{};
    for (int64_t i = 0; i < n_; ++i) {
      not_finite += scale_[k].undo(value(k, i)) * A(0);
    }
    return equal(not_finite, Vector<A>{});
  }

  // Eigenvalues to their size again; NaN for those who failed.
  void finish(int k, Mask<A> failed) const {
    const Vector<A> poison = broadcast(std::numeric_limits<A>::quiet_NaN());
    const LaneScale<A> scale = scale_[k];
    const InterleavedMatrix<A> z = z_[k];
    for (int64_t i = 0; i < n_; ++i) {
      set_value(k, i, select(failed, poison, scale.undo(value(k, i))));
      for (int64_t j = 0; j < n_ && z.data != nullptr; ++j) {
        // Adding zero: other lanes' rotations may have turned a −0 to 0, which a matrix's own bits must not show.
        z.set(i, j, select(failed, poison, z.get(i, j) + Vector<A>{}));
      }
    }
  }

  OVERTONE_INLINE Vector<A> value(int k, int64_t i) const { return load_full(ql_.diagonal(k) + i * kMatrices); }
  OVERTONE_INLINE void set_value(int k, int64_t i, Vector<A> v) const {
    store_full(v, ql_.diagonal(k) + i * kMatrices);
  }

  // Small matrices: sorted where they are, so that they can be stored in one piece. Batcher's network: which pairs are
  // compared does not depend on the eigenvalues.
  void store_sorted(int k, int count, A* values, A* vectors) const {
    for (int64_t p = kLargestSortedInLanes / 2; p > 0; p /= 2) {
      int64_t distance = p;
      int64_t remainder = 0;
      for (int64_t q = kLargestSortedInLanes / 2; q >= p; q /= 2) {
        for (int64_t i = 0; i + distance < n_; ++i) {
          if ((i & p) == remainder) {
            exchange(k, i, i + distance);
          }
        }
        distance = q - p;
        remainder = p;
      }
    }
    const InterleavedMatrix<A> row(ranks_, n_);
    for (int64_t i = 0; i < n_; ++i) {
      row.set(0, i, value(k, i));
    }
    store_lanes<A>(row, 1, n_, count, values);
    if (vectors != nullptr) {
      store_lanes<A>(z_[k], n_, n_, count, vectors);
    }
  }

  OVERTONE_INLINE void exchange(int k, int64_t i, int64_t j) const {
    const InterleavedMatrix<A> z = z_[k];
    const int64_t n = n_;
    const Vector<A> first = value(k, i);
    const Vector<A> second = value(k, j);
    const Mask<A> swaps = less(second, first);
    set_value(k, i, select(swaps, second, first));
    set_value(k, j, select(swaps, first, second));
    for (int64_t column = 0; column < n && z.data != nullptr; ++column) {
      const Vector<A> upper = z.get(i, column);
      const Vector<A> lower = z.get(j, column);
      z.set(i, column, select(swaps, lower, upper));
      z.set(j, column, select(swaps, upper, lower));
    }
  }

  // Large ones: every eigenvector is stored where it belongs.
  void store_by_rank(int k, int count, A* values, A* vectors) const {
    rank(k);
    for (int64_t i = 0; i < n_; ++i) {
      A value_lanes[kLanes<A>];
      store_full(value(k, i), value_lanes);
      A* lanes[kLanes<A>] = {};
      for (int lane = 0; lane < count; ++lane) {
        const int64_t place = lane * n_ + static_cast<int64_t>(ranks_[i * kLanes<A> + lane]);
        values[place] = value_lanes[lane];
        if (vectors != nullptr) {
          lanes[lane] = vectors + place * n_;
        }
      }
      if (vectors != nullptr) {
        deinterleave_run<A>(z_[k].at(i, 0), n_, count, lanes);
      }
    }
  }

  // Where every eigenvalue goes in ascending order: how many go before it.
  void rank(int k) const {
    const Vector<A> one = broadcast(A(1));
    for (int64_t i = 0; i < n_; ++i) {
      Vector<A> before{};
      for (int64_t j = 0; j < i; ++j) {
        const Mask<A> goes_after = less(value(k, i), value(k, j));
        A* other = ranks_ + j * kLanes<A>;
        store_full(load_full(other) + select(goes_after, one, Vector<A>{}), other);
        before += select(goes_after, Vector<A>{}, one);
      }
      store_full(before, ranks_ + i * kLanes<A>);
    }
  }

  const EighParams& call_;
  int64_t n_;
  Scratch<A> memory_;
  InterleavedMatrix<A> a_;
  Tridiagonalization<A> tridiagonalization_;
  ImplicitQl<A, kGroups> ql_;
  A* ranks_;
  InterleavedMatrix<A> z_[kGroups];
  LaneScale<A> scale_[kGroups];
  Mask<A> is_finite_[kGroups];
};

// Two groups of lanes hide each other's latency; where matrices are large the rotations do, and caches are small.
constexpr int64_t kLargestInPairs = 32;

template <class A>
void eigh_items(const EighParams& call, int64_t begin, int64_t end) {
  const auto solve = [&]<int kGroups>(std::integral_constant<int, kGroups>) {
    EighSolver<A, kGroups> solver(call);
    for (int64_t item = begin; item < end; ++item) {
      solver.solve(item * EighSolver<A, kGroups>::kMatrices);
    }
  };
  call.n <= kLargestInPairs ? solve(std::integral_constant<int, 2>()) : solve(std::integral_constant<int, 1>());
}

inline int64_t eigh_matrices_per_item(const EighParams& call) {
  const int64_t lanes = call.type == Dtype::float64 ? kLanes<double> : kLanes<float>;
  return call.n <= kLargestInPairs ? 2 * lanes : lanes;
}

inline void eigh_solve(const EighParams& call, int64_t begin, int64_t end) {
  call.type == Dtype::float64 ? eigh_items<double>(call, begin, end) : eigh_items<float>(call, begin, end);
}

inline int64_t eigh_matrices_per_backward_item(const EighBackward& call) {
  return call.type == Dtype::float64 ? kLanes<double> : kLanes<float>;
}

template <class A>
void eigh_backward_items(const EighBackward& call, int64_t begin, int64_t end) {
  EighGradient<A> gradient(call);
  for (int64_t item = begin; item < end; ++item) {
    gradient.run(item * kLanes<A>);
  }
}

inline void eigh_backward(const EighBackward& call, int64_t begin, int64_t end) {
  call.type == Dtype::float64 ? eigh_backward_items<double>(call, begin, end)
                              : eigh_backward_items<float>(call, begin, end);
}

inline void eigh_divide_by_gaps(const EighBackward& call, int64_t index, const void* m, void* k) {
  call.type == Dtype::float64 ? divide_by_gaps(call, index, static_cast<const double*>(m), static_cast<double*>(k))
                              : divide_by_gaps(call, index, static_cast<const float*>(m), static_cast<float*>(k));
}

extern const EighKernels eigh_kernels = {OVERTONE_ISA_NAME, &eigh_matrices_per_item,
                                         &eigh_solve,       &eigh_matrices_per_backward_item,
                                         &eigh_backward,    &eigh_divide_by_gaps};

}  // namespace overtone::OVERTONE_ISA
