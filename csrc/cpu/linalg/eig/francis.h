// Real Schur form of interleaved Hessenberg matrices: Francis' double shift, every lane in its own window.
//
// All lanes walk through the same rows; a lane takes part in a step only where that row is inside its window, and its
// reflector is the identity elsewhere. So what a lane computes never depends on its neighbours. The bulge stays in
// registers: finding its next reflector, roots and divisions one after another, takes long, and meanwhile those found
// before are applied to the rest of the matrix. Two at a time, because stores are what limits that; with more of them
// too little is left beside the bulge.
#pragma once

#include "cpu/gemm/prefetch.h"
#include "cpu/linalg/eig/matrix.h"

namespace overtone::OVERTONE_ISA {

// I − tau (1, v1, v2)ᵀ (1, v1, v2), on three neighbouring rows or columns.
template <class A>
struct Reflector {
  Vector<A> tau, v1, v2, tau_v1, tau_v2;
};

template <class A>
OVERTONE_INLINE void reflect(const Reflector<A>& r, Vector<A>& x0, Vector<A>& x1, Vector<A>& x2) {
  const Vector<A> t = x0 + r.v1 * x1 + r.v2 * x2;
  x0 -= r.tau * t;
  x1 -= r.tau_v1 * t;
  x2 -= r.tau_v2 * t;
}

// `count` reflectors, each one place further; `at` gives the vector of a place.
template <int count, class A, class At>
OVERTONE_INLINE void reflect_chain(const Reflector<A>* reflectors, At at) {
  Vector<A> part[count + 2];
  OVERTONE_UNROLL
  for (int i = 0; i < count + 2; ++i) {
    part[i] = *at(i);
  }
  OVERTONE_UNROLL
  for (int i = 0; i < count; ++i) {
    reflect(reflectors[i], part[i], part[i + 1], part[i + 2]);
  }
  OVERTONE_UNROLL
  for (int i = 0; i < count + 2; ++i) {
    *at(i) = part[i];
  }
}

// A reflector in memory. Two products are cheaper than storing them.
template <class A>
struct StoredReflector {
  Vector<A> tau, v1, v2;
};

// A copy of a block that the compiler keeps in registers.
template <int size, class A>
struct LocalBlock {
  Reflector<A> reflectors[size];

  OVERTONE_INLINE explicit LocalBlock(const StoredReflector<A>* block) {
    OVERTONE_UNROLL
    for (int i = 0; i < size; ++i) {
      const auto [tau, v1, v2] = block[i];
      reflectors[i] = {tau, v1, v2, tau * v1, tau * v2};
    }
  }
};

template <class A>
class Francis {
 public:
  using V = Vector<A>;

  // `schur.data`: null for eigenvalues only; otherwise the transformations are applied to it from the right, and H
  // becomes the whole Schur form. `prefetcher`: memory to ask for, a bit at every sweep.
  Francis(HessenbergLanes<A> h, DenseLanes<A> schur, V* real, V* imag, Prefetcher& prefetcher)
      : h_(h), n_(h.n), schur_(schur), real_(real), imag_(imag), prefetcher_(prefetcher) {}

  // Lanes that did not converge.
  Mask<A> run() {
    const V zero{};
    last_ = zero + static_cast<A>(n_ - 1);
    end_ = n_ - 1;
    corner_ = {zero, zero, zero, zero};
    start_ = {zero, zero, zero, zero, zero};
    first_ = sweeps_ = phase_ = zero;
    norm_ = h_.largest();
    const int64_t limit = 30 * std::max<int64_t>(10, n_);
    for (int64_t sweep = 0; sweep < limit; ++sweep) {
      deflate();
      if (end_ < 0) {
        break;
      }
      prefetcher_.prefetch_row();
      chase();
    }
    read_eigenvalues();
    return less_equal(zero, last_);
  }

 private:
  // Finds every lane's window [first, last], from the bottom up; windows of one or two rows are done and left behind.
  // What the shifts need is picked up on the way.
  void deflate() {
    const V zero{}, eps = zero + kRounding<A>;
    const V negligible = norm_ * select(less(sweeps_, zero + kPatience), zero + kTiny<A>, eps);
    // Local copies: the compiler must take every store of a vector for a change of any member.
    V last = last_, a = corner_.a, b = corner_.b, c = corner_.c, d = corner_.d;
    Mask<A> searching = less_equal(zero, last);
    last_begin_ = 0;
    for (int64_t i = end_; i >= 0 && any(searching); --i) {
      const V index = zero + static_cast<A>(i);
      V* row = h_.row(i);
      Mask<A> cut = searching & less_equal(index, last);
      if (i > 0) {
        const V* above = h_.row(i - 1);
        const V here = row[i], before = above[i - 1], left = row[i - 1];
        const Mask<A> at_last = equal(last, index);
        a = select(at_last, before, a), b = select(at_last, above[i], b);
        c = select(at_last, left, c), d = select(at_last, here, d);
        const V around = abs<A>(here) + abs<A>(before);
        cut = cut & less_equal(abs<A>(left), max<A>(eps * around, negligible));
        if (!any(cut)) {
          continue;
        }
        row[i - 1] = select(cut, zero, left);
      }
      const Mask<A> done = cut & less_equal(last, index + 1), found = cut & ~done;
      last = select(done, index - 1, last);
      sweeps_ = select(done, zero, sweeps_);
      phase_ = select(done, zero, phase_);
      if (any(found)) {
        begin_ = i;
        last_begin_ = std::max(last_begin_, i);
        first_ = select(found, index, first_);
        const V *second = h_.row(i + 1), *third = h_.row(i + 2);
        start_ = {select(found, row[i], start_.h00), select(found, row[i + 1], start_.h01),
                  select(found, second[i], start_.h10), select(found, second[i + 1], start_.h11),
                  select(found, third[i + 1], start_.h21)};
        searching = searching & ~found;
      }
    }
    last_ = last;
    corner_ = {a, b, c, d};
    end_ = static_cast<int64_t>(reduce_max<A>(last));
  }

  // From the blocks of one or two rows on the diagonal.
  void read_eigenvalues() {
    const V zero{};
    for (int64_t i = 0; i < n_; ++i) {
      real_[i] = h_.row(i)[i];
      imag_[i] = zero;
    }
    for (int64_t i = 0; i + 1 < n_; ++i) {
      const Mask<A> two = ~equal(h_.row(i + 1)[i], zero);
      if (any(two)) {
        split(i, two);
      }
    }
  }

  // The eigenvalues of rows i, i + 1 of lanes `two`; a real pair is made triangular if the Schur form is wanted.
  void split(int64_t i, Mask<A> two) {
    const V zero{}, one = zero + 1;
    const V a = h_.row(i)[i], b = h_.row(i)[i + 1], c = h_.row(i + 1)[i], d = h_.row(i + 1)[i + 1];
    const V p = (a - d) * static_cast<A>(0.5);
    const V b_size = abs<A>(b), c_size = abs<A>(c);
    const V more = max<A>(b_size, c_size);
    const V less_or_equal = min<A>(b_size, c_size);
    const V less_signed = select(less(copysign<A>(one, b) * copysign<A>(one, c), zero), -less_or_equal, less_or_equal);
    const V size = max<A>(abs<A>(p), more);
    const V scale = select(less(zero, size), size, one);
    const V discriminant = p / scale * p + more / scale * less_signed;
    const Mask<A> is_real = less_equal(zero, discriminant);
    const V root = sqrt(scale) * sqrt(abs<A>(discriminant));
    const V z = select(less(p, zero), p - root, p + root);
    const Mask<A> nothing = equal(z, zero) | equal(less_or_equal, zero);  // more / z may overflow, and ∞ · 0 is NaN
    const V other = d - select(nothing, zero, more / select(nothing, one, z) * less_signed);
    const V middle = d + p;
    real_[i] = select(two, select(is_real, d + z, middle), real_[i]);
    real_[i + 1] = select(two, select(is_real, other, middle), real_[i + 1]);
    imag_[i] = select(two, select(is_real, zero, root), imag_[i]);
    imag_[i + 1] = select(two, select(is_real, zero, -root), imag_[i + 1]);
    if (schur_.data != nullptr && any(two & is_real)) {
      triangularize(i, two & is_real, z);
    }
  }

  // Rotates rows and columns i, i + 1 so that (i + 1, i) becomes zero; (z, c) is the first eigenvector.
  void triangularize(int64_t i, Mask<A> lanes, V z) {
    const V zero{}, one = zero + 1;
    const V c = h_.row(i + 1)[i];
    const V size = max<A>(abs<A>(c), abs<A>(z));
    lanes = lanes & less(zero, size);
    const V inverse = one / select(lanes, size, one);
    const V z_scaled = z * inverse, c_scaled = c * inverse;
    const V length = sqrt(select(lanes, z_scaled * z_scaled + c_scaled * c_scaled, one));
    const V cosine = select(lanes, z_scaled / length, one), sine = select(lanes, c_scaled / length, zero);
    V *upper = h_.row(i), *lower = h_.row(i + 1);
    for (int64_t j = i; j < n_; ++j) {
      const V x = upper[j], y = lower[j];
      upper[j] = cosine * x + sine * y;
      lower[j] = cosine * y - sine * x;
    }
    const auto rotate_columns = [&](V* row) {
      const V x = row[i], y = row[i + 1];
      row[i] = cosine * x + sine * y;
      row[i + 1] = cosine * y - sine * x;
    };
    for (int64_t r = 0; r <= i + 1; ++r) {
      rotate_columns(h_.row(r));
    }
    for (int64_t r = 0; r < n_; ++r) {
      rotate_columns(schur_.row(r));
    }
    lower[i] = select(lanes, zero, lower[i]);
    upper[i] = select(lanes, real_[i], upper[i]);
    lower[i + 1] = select(lanes, real_[i + 1], lower[i + 1]);
  }

  // One double-shift sweep of every lane that has a window.
  void chase() {
    sweeps_ += 1;
    phase_ += 1;
    V first_column[3];
    shift(first_column);
    Bulge bulge;
    enter(bulge);
    find_next(begin_, first_column, bulge);
    const int64_t rest = chase_blocks<2>(begin_, first_column, bulge);
    chase_blocks<1>(rest, first_column, bulge);
    leave(bulge);
  }

  // Rows k to k + 2 of three columns from k − 1 on, where the next reflector is that of row k.
  struct Bulge {
    V x[3][3];
    Reflector<A> next;
  };

  // What a block's second reflector needs of the first: itself, and two elements of its row, which wait in registers.
  struct Above {
    Reflector<A> reflector;
    V x[2];
  };

  OVERTONE_INLINE void enter(Bulge& bulge) const {
    for (int i = 0; i < 3; ++i) {
      const V* row = h_.row(begin_ + i) + begin_;
      bulge.x[i][0] = i == 0 && begin_ > 0 ? row[-1] : V{};
      bulge.x[i][1] = row[0];
      bulge.x[i][2] = row[1];
    }
  }

  // Of the last row; what the bulge holds below it is what memory holds.
  OVERTONE_INLINE void leave(const Bulge& bulge) const {
    V* row = h_.row(end_) + end_ - 1;
    row[0] = bulge.x[0][0];
    row[1] = bulge.x[0][1];
    row[2] = bulge.x[0][2];
  }

  // Whole blocks of one or two reflectors from row k0 on. A block is applied to the rest of its rows at its end, and to
  // the rest of its columns during the next block. Returns the row after the last block.
  template <int size>
  OVERTONE_INLINE int64_t chase_blocks(int64_t k0, const V (&first_column)[3], Bulge& bulge) {
    const int64_t begin = k0;
    StoredReflector<A> blocks[2][size];
    StoredReflector<A>*block = blocks[0], *before = blocks[1];
    for (; k0 + size <= end_; k0 += size) {
      Above above{bulge.next, {}};
      block[0] = {bulge.next.tau, bulge.next.v1, bulge.next.v2};
      move<0, size>(k0, bulge, above);
      if (k0 + 1 < end_) {
        find_next(k0 + 1, first_column, bulge);
      }
      if (k0 > begin) {
        reflect_columns<size>(before, k0 - size);
      }
      if constexpr (size == 2) {
        block[1] = {bulge.next.tau, bulge.next.v1, bulge.next.v2};
        move<1, size>(k0, bulge, above);
        if (k0 + 2 < end_) {
          find_next(k0 + 2, first_column, bulge);
        }
      }
      reflect_rows<size>(block, k0);
      std::swap(block, before);
    }
    if (k0 > begin) {
      reflect_columns<size>(before, k0 - size);
    }
    return k0;
  }

  // The first column of (H − σ₁)(H − σ₂) in every window, up to a factor: what the bulge starts with. The shifts are
  // the eigenvalues of the last two rows; of two real ones the one closer to the corner is taken twice.
  OVERTONE_INLINE void shift(V (&first_column)[3]) {
    const V zero{}, one = zero + 1;
    V a = corner_.a, b = corner_.b, c = corner_.c, d = corner_.d;
    const V h00 = start_.h00, h01 = start_.h01, h10 = start_.h10, h11 = start_.h11, h21 = start_.h21;
    const Mask<A> active = less_equal(zero, last_);
    const Mask<A> at_top = active & equal(phase_, zero + kExceptional);
    const Mask<A> at_bottom = active & equal(phase_, zero + 2 * kExceptional);
    if (any(at_top | at_bottom)) {  // a stalled lane: shifts that have nothing to do with its eigenvalues
      const V s = select(at_top, abs<A>(h10) + abs<A>(h21), abs<A>(c) + abs<A>(above_corner()));
      const Mask<A> exceptional = at_top | at_bottom;
      a = select(exceptional, static_cast<A>(0.75) * s + select(at_top, h00, d), a);
      b = select(exceptional, static_cast<A>(-0.4375) * s, b);
      c = select(exceptional, s, c);
      d = select(exceptional, a, d);
      phase_ = select(at_bottom, zero, phase_);
    }
    const V size = abs<A>(a) + abs<A>(b) + abs<A>(c) + abs<A>(d);
    const V scale = select(less(zero + kTiny<A>, size), size, one);
    const V inverse = one / scale;
    a *= inverse, b *= inverse, c *= inverse, d *= inverse;
    const V middle = (a + d) * static_cast<A>(0.5);
    const V determinant = (a - middle) * (d - middle) - b * c;
    const V root = sqrt(abs<A>(determinant));
    const Mask<A> is_complex = less(zero, determinant);
    const V plus = middle + root, minus = middle - root;
    const V closer = select(less_equal(abs<A>(plus - d), abs<A>(minus - d)), plus, minus);
    const V shift = select(is_complex, middle, closer) * scale;
    const V shift_imag = select(is_complex, root * scale, zero);

    const V difference = h00 - shift;
    const V length = abs<A>(difference) + abs<A>(shift_imag) + abs<A>(h10);
    const V per_length = one / select(less(zero + kTiny<A>, length), length, one);
    const V h10_scaled = h10 * per_length;
    first_column[0] =
        h10_scaled * h01 + difference * (difference * per_length) + shift_imag * (shift_imag * per_length);
    first_column[1] = h10_scaled * (h00 + h11 - 2 * shift);
    first_column[2] = h10_scaled * h21;
  }

  // The subdiagonal above the last two rows of every window.
  V above_corner() const {
    V result{};
    for (int64_t i = 1; i < n_; ++i) {
      result = select(equal(last_, V{} + static_cast<A>(i + 1)), h_.row(i)[i - 1], result);
    }
    return result;
  }

  // The reflector of row k, which starts or moves the bulge, and the element left of it. Below that element memory
  // holds zeros, whatever the bulge does.
  OVERTONE_INLINE void find_next(int64_t k, const V (&first_column)[3], Bulge& bulge) {
    const V zero{}, one = zero + 1, least = zero + kTiny<A> * kTiny<A>;
    const V row = broadcast(static_cast<A>(k)), below = broadcast(static_cast<A>(k + 1));
    V p = bulge.x[0][0], q = bulge.x[1][0], r = bulge.x[2][0];
    Mask<A> inside = less(row, last_), moves = inside;
    if (k <= last_begin_) {
      inside = inside & less_equal(first_, row);
      moves = inside & less(first_, row);
      p = select(moves, p, first_column[0]), q = select(moves, q, first_column[1]);
      r = select(moves, r, first_column[2]);
    }
    r = select(less(below, last_), r, zero);
    const V squares = p * p + q * q + r * r;
    const Mask<A> on = inside & less(least, squares);
    const V length = sqrt(max<A>(squares, least));
    const V s = select(less(p, zero), -length, length);
    const V sum = p + s, per_sum = one / sum;
    Reflector<A>& reflector = bulge.next;
    reflector.tau = select(on, sum / s, zero);
    reflector.v1 = q * per_sum;
    reflector.v2 = r * per_sum;
    reflector.tau_v1 = reflector.tau * reflector.v1;
    reflector.tau_v2 = reflector.tau * reflector.v2;
    if (k > 0) {
      h_.row(k)[k - 1] = select(moves & on, -s, bulge.x[0][0]);
    }
  }

  // Applies reflector i of a block that begins at row k0 to all that the next one depends on, and moves the bulge down
  // by a row. The second reflector's new column gets the first one before it, and the first one's row gets the second.
  template <int i, int size>
  OVERTONE_INLINE void move(int64_t k0, Bulge& bulge, Above& above) {
    const int64_t k = k0 + i;
    const Reflector<A> reflector = bulge.next;
    V x[3][3];
    OVERTONE_UNROLL
    for (int r = 0; r < 3; ++r) {
      x[r][0] = bulge.x[r][1], x[r][1] = bulge.x[r][2], x[r][2] = h_.row(k + r)[k + 2];
    }
    const V bottom = k + 3 <= end_ ? h_.row(k + 3)[k + 2] : V{};  // of the row below, which begins with it
    if constexpr (i == 1) {
      V* row = h_.row(k0) + k;
      V corner = row[2];
      reflect(above.reflector, corner, x[0][2], x[1][2]);
      reflect(reflector, above.x[0], above.x[1], corner);
      row[0] = above.x[0], row[1] = above.x[1], row[2] = corner;
    }
    OVERTONE_UNROLL
    for (int c = 0; c < 3; ++c) {
      reflect(reflector, x[0][c], x[1][c], x[2][c]);
    }
    OVERTONE_UNROLL
    for (int r = 1; r < 3; ++r) {
      reflect(reflector, x[r][0], x[r][1], x[r][2]);
      bulge.x[r - 1][0] = x[r][0], bulge.x[r - 1][1] = x[r][1], bulge.x[r - 1][2] = x[r][2];
    }
    const V t = reflector.v2 * bottom;
    bulge.x[2][0] = -reflector.tau * t, bulge.x[2][1] = -reflector.tau_v1 * t;
    bulge.x[2][2] = bottom - reflector.tau_v2 * t;
    reflect(reflector, x[0][0], x[0][1], x[0][2]);
    V* row = h_.row(k) + k;
    row[0] = x[0][0];
    if constexpr (i + 1 < size) {
      above.x[0] = x[0][1], above.x[1] = x[0][2];
    } else {
      row[1] = x[0][1], row[2] = x[0][2];
    }
  }

  // A block's columns beside the bulges.
  template <int size>
  OVERTONE_INLINE void reflect_columns(const StoredReflector<A>* stored, int64_t k0) {
    const LocalBlock<size, A> block(stored);
    const auto reflect_rows_of = [&](const auto& matrix, int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        V* x = matrix.row(i) + k0;
        reflect_chain<size, A>(block.reflectors, [&](int c) { return x + c; });
      }
    };
    reflect_rows_of(h_, schur_.data != nullptr ? 0 : begin_, k0);
    if (schur_.data != nullptr) {
      reflect_rows_of(schur_, 0, n_);
    }
  }

  // A block's rows beside the bulges.
  template <int size>
  OVERTONE_INLINE void reflect_rows(const StoredReflector<A>* stored, int64_t k0) {
    const LocalBlock<size, A> block(stored);
    V* rows[size + 2];
    OVERTONE_UNROLL
    for (int i = 0; i < size + 2; ++i) {
      rows[i] = h_.row(k0 + i);
    }
    const int64_t right = schur_.data != nullptr ? n_ - 1 : end_;
    for (int64_t j = k0 + size + 2; j <= right; ++j) {
      reflect_chain<size, A>(block.reflectors, [&](int i) { return rows[i] + j; });
    }
  }

  static constexpr A kExceptional = 10;  // sweeps without a deflation before the shifts are changed
  static constexpr A kPatience = 15;     // and before the test for deflation looks at the norm of the whole matrix

  HessenbergLanes<A> h_;
  int64_t n_;
  DenseLanes<A> schur_;
  V *real_, *imag_;
  V first_, last_;       // windows; last = −1 where a lane is done
  int64_t begin_, end_;  // the rows of all windows
  int64_t last_begin_;   // the row below which no window begins
  struct {
    V a, b, c, d;
  } corner_;  // the last two rows and columns of every window
  struct {
    V h00, h01, h10, h11, h21;
  } start_;   // the first elements of every window
  V sweeps_;  // since the last deflation
  V phase_;   // of the shifts: ordinary ones until kExceptional, then until 2 · kExceptional
  V norm_;
  Prefetcher& prefetcher_;
};

}  // namespace overtone::OVERTONE_ISA
