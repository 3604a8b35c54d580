// Householder's reduction of symmetric matrices to tridiagonal form, a matrix per lane: A = Q T Qᵀ.
//
// Works from the last row upwards on the lower triangle, so that what a step reads lies in rows. One pass over the rest
// of the matrix per step: it applies the previous step's update and multiplies by this step's vector.
#pragma once

#include "cpu/linalg/lanes.h"

namespace overtone::OVERTONE_ISA {

// Where T goes. Entries are `stride` elements apart: QL keeps several groups of lanes side by side.
template <class A>
struct LaneTridiagonal {
  A* diagonal;      // [n]
  A* off_diagonal;  // [n], the last one zero
  int64_t stride;
};

template <class A>
class Tridiagonalization {
 public:
  static int64_t scratch_size(int64_t n) { return 4 * n * kLanes<A>; }

  // `a`: the lower triangle, at most about 1 in size; it becomes the reflectors that form_q reads.
  Tridiagonalization(const InterleavedMatrix<A>& a, int64_t n, A* scratch)
      : a_(a), n_(n), tau_(scratch), products_(tau_ + n * kLanes<A>), w_{products_ + n * kLanes<A>, nullptr} {
    w_[1] = w_[0] + n * kLanes<A>;
  }

  void reduce(const LaneTridiagonal<A>& t) {
    for (int64_t i = n_ - 1; i >= 0; --i) {
      if (i < n_ - 1) {
        update_row(i);
      }
      store_full(a_.get(i, i), t.diagonal + i * t.stride);
      if (i >= 2) {
        store_full(make_reflector(i), t.off_diagonal + (i - 1) * t.stride);
        i < n_ - 1 ? multiply<true>(i) : multiply<false>(i);
        finish_update(i);
      } else if (i == 1) {
        store_full(a_.get(1, 0), t.off_diagonal);
        if (n_ > 2) {
          update_corner();
        }
        store_full(a_.get(0, 0), t.diagonal);
        break;
      }
    }
    store_full(Vector<A>{}, t.off_diagonal + (n_ - 1) * t.stride);
  }

  // Qᵀ: row c is the c-th column of Q. A few columns at a time go through all reflectors, so that they stay in the
  // first-level cache.
  void form_q(InterleavedMatrix<A> q) const {
    for (int64_t c = 0; c < n_; ++c) {
      for (int64_t r = 0; r < n_; ++r) {
        q.set(c, r, broadcast(A(c == r)));
      }
    }
    int64_t c = 0;
    for (; c + 4 <= n_; c += 4) {
      reflect<4>(c, q);
    }
    for (; c < n_; ++c) {
      reflect<1>(c, q);
    }
  }

 private:
  // Squares below this are rounding error of a matrix of size 1; sums of smaller ones would lose digits to underflow.
  static constexpr A kNegligibleSquare = std::numeric_limits<A>::min() / std::numeric_limits<A>::epsilon();

  static OVERTONE_INLINE Vector<A> at(const A* vectors, int64_t i) { return load_full(vectors + i * kLanes<A>); }
  static OVERTONE_INLINE void put(Vector<A> v, A* vectors, int64_t i) { store_full(v, vectors + i * kLanes<A>); }

  // The reflector of step i is kept in row i, its vector's last element (which is 1) included.
  A* reflector(int64_t i) const { return a_.at(i, 0); }
  A* update_of(int64_t i) const { return w_[i & 1]; }

  // The update of step i + 1, on row i.
  void update_row(int64_t i) const {
    const InterleavedMatrix<A> a = a_;
    const A* v = reflector(i + 1);
    const A* w = update_of(i + 1);
    const Vector<A> vi = at(v, i);
    const Vector<A> wi = at(w, i);
    for (int64_t j = 0; j <= i; ++j) {
      a.set(i, j, a.get(i, j) - vi * at(w, j) - wi * at(v, j));
    }
  }

  void update_corner() const { a_.set(0, 0, a_.get(0, 0) - A(2) * at(reflector(2), 0) * at(update_of(2), 0)); }

  // H = I − τ v vᵀ that takes row i to its last element but the diagonal, which is returned.
  OVERTONE_INLINE Vector<A> make_reflector(int64_t i) const {
    A* row = reflector(i);
    Vector<A> rest{};
    for (int64_t j = 0; j < i - 1; ++j) {
      rest += at(row, j) * at(row, j);
    }
    const Vector<A> first = at(row, i - 1);
    const Mask<A> is_reduced = less_equal(rest, broadcast(kNegligibleSquare));
    const Vector<A> image = -copysign<A>(sqrt(first * first + rest), first);
    put(select(is_reduced, Vector<A>{}, (image - first) / image), tau_, i);
    const Vector<A> scale = select(is_reduced, Vector<A>{}, A(1) / (first - image));
    for (int64_t j = 0; j < i - 1; ++j) {
      put(at(row, j) * scale, row, j);
    }
    put(broadcast(A(1)), row, i - 1);
    return select(is_reduced, first, image);
  }

  // The leading block, updated by step i + 1 if there was one, times the vector of step i.
  template <bool kUpdate>
  void multiply(int64_t i) const {
    int64_t r = 0;
    for (; r + 2 <= i; r += 2) {
      multiply_rows<kUpdate, 2>(i, r);
    }
    if (r < i) {
      multiply_rows<kUpdate, 1>(i, r);
    }
  }

  template <bool kUpdate, int kRows>
  OVERTONE_INLINE void multiply_rows(int64_t i, int64_t row) const {
    // Local copies: the compiler must take every store of a vector for a change of any member.
    const InterleavedMatrix<A> a = a_;
    A* products = products_;
    const A* v = reflector(i);
    const A* old_v = kUpdate ? reflector(i + 1) : v;
    const A* old_w = update_of(i + 1);
    Vector<A> vr[kRows];
    Vector<A> old_vr[kRows];
    Vector<A> old_wr[kRows];
    Vector<A> sum[kRows] = {};
    OVERTONE_UNROLL
    for (int k = 0; k < kRows; ++k) {
      vr[k] = at(v, row + k);
      old_vr[k] = at(old_v, row + k);
      old_wr[k] = kUpdate ? at(old_w, row + k) : Vector<A>{};
    }
    const auto updated = [&](int k, int64_t j, Vector<A> old_vj, Vector<A> old_wj) {
      Vector<A> element = a.get(row + k, j);
      if constexpr (kUpdate) {
        element = element - old_vr[k] * old_wj - old_wr[k] * old_vj;
        a.set(row + k, j, element);
      }
      return element;
    };
    for (int64_t j = 0; j < row; ++j) {
      const Vector<A> vj = at(v, j);
      const Vector<A> old_vj = kUpdate ? at(old_v, j) : Vector<A>{};
      const Vector<A> old_wj = kUpdate ? at(old_w, j) : Vector<A>{};
      Vector<A> product = at(products, j);
      OVERTONE_UNROLL
      for (int k = 0; k < kRows; ++k) {
        const Vector<A> element = updated(k, j, old_vj, old_wj);
        sum[k] += element * vj;
        product += element * vr[k];
      }
      put(product, products, j);
    }
    OVERTONE_UNROLL
    for (int k = 0; k < kRows; ++k) {
      OVERTONE_UNROLL
      for (int j = 0; j <= k; ++j) {
        const Vector<A> element = updated(k, row + j, old_vr[j], old_wr[j]);
        sum[k] += element * vr[j];
        if (j < k) {
          sum[j] += element * vr[k];
        }
      }
    }
    OVERTONE_UNROLL
    for (int k = 0; k < kRows; ++k) {
      put(sum[k], products, row + k);
    }
  }

  // From the products Av to w, so that HAH = A − v wᵀ − w vᵀ.
  void finish_update(int64_t i) const {
    const A* v = reflector(i);
    const A* products = products_;
    const Vector<A> tau = at(tau_, i);
    Vector<A> dot{};
    for (int64_t j = 0; j < i; ++j) {
      dot += at(products, j) * at(v, j);
    }
    const Vector<A> half = A(0.5) * tau * dot;
    A* w = update_of(i);
    for (int64_t j = 0; j < i; ++j) {
      put(tau * (at(products, j) - half * at(v, j)), w, j);
    }
  }

  // All reflectors on columns of Q. The pass that applies one also multiplies by the next.
  template <int kColumns>
  OVERTONE_INLINE void reflect(int64_t column, InterleavedMatrix<A> q) const {
    const InterleavedMatrix<A> a = a_;
    const A* tau = tau_;
    const int64_t n = n_;
    Vector<A> dots[kColumns] = {};
    const int64_t first = std::max<int64_t>(2, column + 1);  // those before it do not reach these columns
    for (int64_t r = 0; r < std::min(first, n); ++r) {
      add_products<kColumns>(q, column, r, first < n ? a.get(first, r) : Vector<A>{}, dots);
    }
    for (int64_t i = first; i < n; ++i) {
      Vector<A> factors[kColumns];
      OVERTONE_UNROLL
      for (int k = 0; k < kColumns; ++k) {
        factors[k] = dots[k] * at(tau, i);
        dots[k] = Vector<A>{};
      }
      const A* v = a.at(i, 0);
      const A* next = i + 1 < n ? a.at(i + 1, 0) : v;  // after the last one the sums are not read
      for (int64_t r = 0; r < i; ++r) {
        const Vector<A> vr = at(v, r);
        const Vector<A> next_r = at(next, r);
        OVERTONE_UNROLL
        for (int k = 0; k < kColumns; ++k) {
          const Vector<A> element = q.get(column + k, r) - factors[k] * vr;
          q.set(column + k, r, element);
          dots[k] += element * next_r;
        }
      }
      add_products<kColumns>(q, column, i, at(next, i), dots);
    }
  }

  template <int kColumns>
  static OVERTONE_INLINE void add_products(const InterleavedMatrix<A>& q, int64_t column, int64_t r, Vector<A> factor,
                                           Vector<A> (&sums)[kColumns]) {
    OVERTONE_UNROLL
    for (int k = 0; k < kColumns; ++k) {
      sums[k] += q.get(column + k, r) * factor;
    }
  }

  InterleavedMatrix<A> a_;
  int64_t n_;
  A* tau_;       // [n]
  A* products_;  // [n]
  A* w_[2];      // [n] each: this step's update and the previous one's
};

}  // namespace overtone::OVERTONE_ISA
