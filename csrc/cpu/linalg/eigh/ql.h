// The implicit QL algorithm on symmetric tridiagonal matrices, a matrix per lane, several groups of lanes in flight.
//
// Every lane has a window of its own: the first block that has not fallen apart yet. A sweep chases a bulge through all
// windows at once; a lane outside its window keeps its numbers, so that it never notices the others. The rotations of a
// few sweeps are collected and then applied to the eigenvectors in blocks of rows that stay in the first-level cache.
#pragma once

#include "cpu/linalg/lanes.h"
#include "cpu/simd/vector_group.h"

namespace overtone::OVERTONE_ISA {

template <class A, int kGroups>
class ImplicitQl {
 public:
  using P = VectorGroup<A, kGroups>;
  using PMask = VectorGroupMask<A, kGroups>;
  static constexpr int64_t kStride = kGroups * kLanes<A>;  // between entries of d, e, c and s
  static constexpr int kSweeps = 8;                        // whose rotations are collected

  static int64_t scratch_size(int64_t n) { return (2 + 2 * kSweeps) * n * kStride; }

  ImplicitQl(int64_t n, A* scratch) : n_(n), d_(scratch), e_(d_ + n * kStride) {
    for (int sweep = 0; sweep < kSweeps; ++sweep) {
      cosines_[sweep] = e_ + (1 + 2 * sweep) * n * kStride;
      sines_[sweep] = cosines_[sweep] + n * kStride;
    }
  }

  // The entries of group k: where the tridiagonal matrix goes in and the eigenvalues come out, unsorted.
  A* diagonal(int k) const { return d_ + k * kLanes<A>; }
  A* off_diagonal(int k) const { return e_ + k * kLanes<A>; }

  // Row i of z[k] becomes the eigenvector of eigenvalue i; z is null if eigenvectors are not wanted.
  // Returns the lanes that did not converge.
  PMask solve(const InterleavedMatrix<A>* z) {
    begin_ = 0;
    int collected = 0;
    bool is_done = false;
    // LAPACK allows 30 sweeps per eigenvalue; two are usual. What a lane needs does not depend on the others.
    for (int64_t sweep = 0; sweep < 30 * n_ && !is_done; ++sweep) {
      find_windows();
      is_done = first_ > last_;
      if (!is_done) {
        chase(collected);
        begins_[collected] = first_;
        ends_[collected] = last_;
        ++collected;
      }
      if (z != nullptr && (is_done || collected == kSweeps)) {
        for (int k = 0; k < kGroups; ++k) {
          rotate(z[k], k, collected);
        }
      }
      collected = collected == kSweeps || z == nullptr ? 0 : collected;
    }
    if (is_done) {
      return make_mask<A, kGroups>([](int) { return no_lane<A>(); });
    }
    find_windows();
    return is_active_;
  }

 private:
  // Matrices are at most about 1 in size. Entries below this would lose digits when they are squared.
  static constexpr A kNegligible = sizeof(A) == 8 ? A(1e-150) : A(1e-17);

  // Every lane's window [low, high] and its shift; entries [first_, last_] are in some lane's window.
  void find_windows() {
    const P epsilon = P::all(std::numeric_limits<A>::epsilon() / 2);
    const P negligible = P::all(kNegligible);
    const PMask nobody = make_mask<A, kGroups>([](int) { return no_lane<A>(); });
    PMask seen = nobody;
    PMask closed = nobody;
    P low = P::all(0);
    P high = P::all(static_cast<A>(n_ - 1));
    P d_low = P::all(0);
    P d_next = P::all(1);
    P e_low = P::all(1);
    int64_t first = n_;
    int64_t last = -1;
    const A* diagonal = d_;
    A* off_diagonal = e_;
    const int64_t n = n_;
    P d = P::load(diagonal + begin_ * kStride);
    for (int64_t i = begin_; i + 1 < n; ++i) {
      const P next = P::load(diagonal + (i + 1) * kStride);
      const P e = P::load(off_diagonal + i * kStride);
      const PMask is_small = less_equal(abs(e), epsilon * (abs(d) + abs(next)) + negligible);
      const PMask begins = ~(is_small | seen);
      const PMask ends = is_small & seen & ~closed;
      const P index = P::all(static_cast<A>(i));
      select(is_small, P::all(0), e).store(off_diagonal + i * kStride);
      low = select(begins, index, low);
      high = select(ends, index, high);
      d_low = select(begins, d, d_low);
      d_next = select(begins, next, d_next);
      e_low = select(begins, e, e_low);
      seen = seen | begins;
      closed = closed | ends;
      if (any(seen & ~closed)) {
        first = std::min(first, i);
        last = i;
      }
      d = next;
    }
    low_ = low;
    high_ = high;
    is_active_ = seen;
    first_ = first;
    last_ = last;
    begin_ = std::min(first, n - 1);  // what lies before has fallen apart in every lane, for good
    // Wilkinson's shift: the eigenvalue of the window's first 2 × 2 block that is nearer to its first entry.
    const P half = P::all(A(0.5)) * (d_next - d_low);
    const P square = half * half + e_low * e_low;
    const P root = square * rsqrt(square);
    shift_ = d_low - e_low * e_low / (half + copysign(root, half));
  }

  // One sweep, from the end of the windows to their beginning.
  void chase(int sweep) {
    const P zero = P::all(0);
    const P one = P::all(1);
    const P tiny = P::all(kNegligible * kNegligible);
    // Local copies: the compiler must take every store of a vector for a change of any member.
    A* cosines = cosines_[sweep];
    A* sines = sines_[sweep];
    A* diagonal = d_;
    A* off_diagonal = e_;
    const P low = low_;
    const P high = high_;
    const P shift = shift_;
    const PMask is_active = is_active_;
    const int64_t first = first_;
    P c = one;
    P s = one;
    P p = zero;
    P g = zero;
    P next = P::load(diagonal + (last_ + 1) * kStride);
    for (int64_t i = last_; i >= first; --i) {
      const P index = P::all(static_cast<A>(i));
      const PMask starts = is_active & equal(high, P::all(static_cast<A>(i + 1)));
      const PMask is_inside = is_active & less_equal(low, index) & less(index, high);
      const PMask stops = is_active & equal(low, index);
      const P d = P::load(diagonal + i * kStride);
      const P e = P::load(off_diagonal + i * kStride);
      g = select(starts, next - shift, g);
      c = select(starts, one, c);
      s = select(starts, one, s);
      p = select(starts, zero, p);
      const P f = s * e;
      const P b = c * e;
      const P square = f * f + g * g;
      // Both vanish: any rotation will do, and the entries are far below rounding.
      const PMask vanishes = less(square, tiny);
      const P inverse = rsqrt(max(square, tiny));
      s = select(vanishes, zero, f * inverse);
      c = select(vanishes, one, g * inverse);
      const P moved = next - p;
      const P r = (d - moved) * s + P::all(2) * c * b;
      p = s * r;
      g = c * r - b;
      select(is_inside, moved + p, next).store(diagonal + (i + 1) * kStride);
      const PMask chased = is_inside & ~starts;
      select(chased, square * inverse, P::load(off_diagonal + (i + 1) * kStride))
          .store(off_diagonal + (i + 1) * kStride);
      next = select(stops, d - p, d);
      select(stops, g, e).store(off_diagonal + i * kStride);
      select(is_inside, c, one).store(cosines + i * kStride);
      select(is_inside, s, zero).store(sines + i * kStride);
    }
    next.store(diagonal + first * kStride);
  }

  void rotate(InterleavedMatrix<A> z, int group, int sweeps) const {
    int64_t column = 0;
    for (; column + 8 <= n_; column += 8) {
      rotate_block<8>(z, group, sweeps, column);
    }
    if (column + 4 <= n_) {
      rotate_block<4>(z, group, sweeps, column);
      column += 4;
    }
    for (; column < n_; ++column) {
      rotate_block<1>(z, group, sweeps, column);
    }
  }

  template <int kColumns>
  OVERTONE_INLINE void rotate_block(InterleavedMatrix<A> z, int group, int sweeps, int64_t column) const {
    for (int sweep = 0; sweep < sweeps; ++sweep) {
      const A* cosines = cosines_[sweep] + group * kLanes<A>;
      const A* sines = sines_[sweep] + group * kLanes<A>;
      const int64_t begin = begins_[sweep];
      const int64_t end = ends_[sweep];
      Vector<A> carried[kColumns];
      OVERTONE_UNROLL
      for (int k = 0; k < kColumns; ++k) {
        carried[k] = z.get(end + 1, column + k);
      }
      for (int64_t i = end; i >= begin; --i) {
        const Vector<A> c = load_full(cosines + i * kStride);
        const Vector<A> s = load_full(sines + i * kStride);
        OVERTONE_UNROLL
        for (int k = 0; k < kColumns; ++k) {
          const Vector<A> x = z.get(i, column + k);
          z.set(i + 1, column + k, s * x + c * carried[k]);
          carried[k] = c * x - s * carried[k];
        }
      }
      OVERTONE_UNROLL
      for (int k = 0; k < kColumns; ++k) {
        z.set(begin, column + k, carried[k]);
      }
    }
  }

  int64_t n_;
  A* d_;
  A* e_;
  A* cosines_[kSweeps];
  A* sines_[kSweeps];
  int64_t begins_[kSweeps];
  int64_t ends_[kSweeps];
  P low_;
  P high_;
  P shift_;
  PMask is_active_;
  int64_t begin_ = 0;
  int64_t first_ = 0;
  int64_t last_ = -1;
};

}  // namespace overtone::OVERTONE_ISA
