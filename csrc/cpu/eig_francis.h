// Real Schur form of interleaved Hessenberg matrices: Francis' double shift, every lane in its own window.
//
// All lanes walk through the same rows; a lane takes part in a step only where that row is inside its window, and its
// reflector is the identity elsewhere. So what a lane computes never depends on its neighbours. Reflectors are applied
// near the diagonal at once, and to the rest of the matrix kReflectors at a time: each element is then loaded and
// stored once for several reflectors instead of three times for each.
#pragma once

#include "cpu/eig_matrix.h"

namespace overtone::OVERTONE_LEVEL {

constexpr int kReflectors = 4;

// Up to this size everything is near.
constexpr int64_t kUnblocked = 20;

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

template <class A>
class Francis {
 public:
  using V = Vector<A>;

  // `schur.data`: null for eigenvalues only; otherwise the transformations are applied to it from the right, and H
  // becomes the whole Schur form.
  Francis(HessenbergLanes<A> h, DenseLanes<A> schur, V* real, V* imag)
      : h_(h), n_(h.n), schur_(schur), real_(real), imag_(imag) {}

  // Lanes that did not converge.
  Mask<A> run() {
    const V zero{};
    last_ = zero + static_cast<A>(n_ - 1);
    first_ = sweeps_ = phase_ = zero;
    norm_ = h_.largest();
    const int64_t limit = 30 * std::max<int64_t>(10, n_);
    for (int64_t sweep = 0; sweep < limit; ++sweep) {
      deflate();
      if (!any(less_equal(zero, last_))) {
        break;
      }
      chase();
    }
    return less_equal(zero, last_);
  }

 private:
  // Finds every lane's window [first, last], from the bottom up; windows of one or two rows are done and left behind.
  void deflate() {
    const V zero{}, eps = zero + kRounding<A>;
    Mask<A> searching = less_equal(zero, last_);
    const V negligible = norm_ * select(less(sweeps_, zero + kPatience), zero + kNothing<A>, eps);
    for (int64_t i = static_cast<int64_t>(largest_lane<A>(last_)); i >= 0 && any(searching); --i) {
      const V index = zero + static_cast<A>(i);
      Mask<A> cut = searching & less_equal(index, last_);
      if (i > 0) {
        V& below = h_.row(i)[i - 1];
        const V around = absolute<A>(h_.row(i)[i]) + absolute<A>(h_.row(i - 1)[i - 1]);
        cut = cut & less_equal(absolute<A>(below), larger<A>(eps * around, negligible));
        if (!any(cut)) {
          continue;
        }
        below = select(cut, zero, below);
      }
      const Mask<A> one = cut & equal(last_, index), two = cut & equal(last_, index + 1);
      if (any(one)) {
        real_[i] = select(one, h_.row(i)[i], real_[i]);
        imag_[i] = select(one, zero, imag_[i]);
      }
      if (any(two)) {
        split(i, two);
      }
      const Mask<A> done = one | two;
      last_ = select(done, index - 1, last_);
      sweeps_ = select(done, zero, sweeps_);
      phase_ = select(done, zero, phase_);
      first_ = select(cut, index, first_);
      searching = searching & (~cut | done);
    }
  }

  // The eigenvalues of rows i, i + 1 of lanes `two`; a real pair is made triangular if the Schur form is wanted.
  void split(int64_t i, Mask<A> two) {
    const V zero{}, one = zero + 1;
    const V a = h_.row(i)[i], b = h_.row(i)[i + 1], c = h_.row(i + 1)[i], d = h_.row(i + 1)[i + 1];
    const V p = (a - d) * static_cast<A>(0.5);
    const V b_size = absolute<A>(b), c_size = absolute<A>(c);
    const V more = larger<A>(b_size, c_size);
    const V less_or_equal = smaller<A>(b_size, c_size);
    const V less_signed =
        select(less(with_sign_of<A>(one, b) * with_sign_of<A>(one, c), zero), -less_or_equal, less_or_equal);
    const V size = larger<A>(absolute<A>(p), more);
    const V scale = select(less(zero, size), size, one);
    const V discriminant = p / scale * p + more / scale * less_signed;
    const Mask<A> is_real = less_equal(zero, discriminant);
    const V root = square_root(scale) * square_root(absolute<A>(discriminant));
    const V z = select(less(p, zero), p - root, p + root);
    const Mask<A> nothing = equal(z, zero);
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
    const V size = larger<A>(absolute<A>(c), absolute<A>(z));
    lanes = lanes & less(zero, size);
    const V inverse = one / select(lanes, size, one);
    const V z_scaled = z * inverse, c_scaled = c * inverse;
    const V length = square_root(select(lanes, z_scaled * z_scaled + c_scaled * c_scaled, one));
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
    const V zero{};
    const Mask<A> active = less_equal(zero, last_);
    sweeps_ += 1;
    phase_ += 1;
    V start[3];
    first_column(active, start);
    const int64_t begin = -static_cast<int64_t>(largest_lane<A>(select(active, -first_, zero - static_cast<A>(n_))));
    const int64_t end = static_cast<int64_t>(largest_lane<A>(last_));  // a reflector for each row but the last
    const int64_t top = schur_.data != nullptr ? 0 : begin;
    const int64_t right = schur_.data != nullptr ? n_ - 1 : end;
    Reflector<A> reflectors[kReflectors];
    if (schur_.data == nullptr && n_ <= kUnblocked) {
      for (int64_t k = begin; k < end; ++k) {
        reflectors[0] = next_reflector(k, active, start);
        reflect_near(reflectors[0], k, begin, end, end);
      }
      return;
    }
    for (int64_t k0 = begin; k0 < end; k0 += kReflectors) {
      const int64_t k1 = std::min(k0 + kReflectors, end);
      const int64_t near = std::min(k1 + 2, right);
      for (int64_t k = k0; k < k1; ++k) {
        reflectors[k - k0] = next_reflector(k, active, start);
        reflect_near(reflectors[k - k0], k, k0, near, end);
      }
      reflect_far(reflectors, k0, k1, near, top, right);
    }
  }

  // The first column of (H − σ₁)(H − σ₂) in every window, up to a factor: what the bulge starts with. The shifts are
  // the eigenvalues of the last two rows; of two real ones the one closer to the corner is taken twice.
  void first_column(Mask<A> active, V (&start)[3]) {
    const V zero{}, one = zero + 1;
    const V last = select(active, last_, zero + 2), before = last - 1;
    const V first = select(active, first_, zero), second = first + 1;
    const V before_row = h_.row_offset(before), last_row = h_.row_offset(last);
    V a = h_.gather(before_row + before), b = h_.gather(before_row + last);
    V c = h_.gather(last_row + before), d = h_.gather(last_row + last);
    const V first_row = h_.row_offset(first), second_row = h_.row_offset(second);
    const V h00 = h_.gather(first_row + first), h01 = h_.gather(first_row + second);
    const V h10 = h_.gather(second_row + first), h11 = h_.gather(second_row + second);
    const V h21 = h_.gather(h_.row_offset(second + 1) + second);
    const Mask<A> at_top = active & equal(phase_, zero + kExceptional);
    const Mask<A> at_bottom = active & equal(phase_, zero + 2 * kExceptional);
    if (any(at_top | at_bottom)) {  // a stalled lane: shifts that have nothing to do with its eigenvalues
      const V above = h_.gather(before_row + before - 1);
      const V s = select(at_top, absolute<A>(h10) + absolute<A>(h21), absolute<A>(c) + absolute<A>(above));
      const Mask<A> exceptional = at_top | at_bottom;
      a = select(exceptional, static_cast<A>(0.75) * s + select(at_top, h00, d), a);
      b = select(exceptional, static_cast<A>(-0.4375) * s, b);
      c = select(exceptional, s, c);
      d = select(exceptional, a, d);
      phase_ = select(at_bottom, zero, phase_);
    }
    const V size = absolute<A>(a) + absolute<A>(b) + absolute<A>(c) + absolute<A>(d);
    const V scale = select(less(zero + kNothing<A>, size), size, one);
    const V inverse = one / scale;
    a *= inverse, b *= inverse, c *= inverse, d *= inverse;
    const V middle = (a + d) * static_cast<A>(0.5);
    const V determinant = (a - middle) * (d - middle) - b * c;
    const V root = square_root(absolute<A>(determinant));
    const Mask<A> is_complex = less(zero, determinant);
    const V plus = middle + root, minus = middle - root;
    const V closer = select(less_equal(absolute<A>(plus - d), absolute<A>(minus - d)), plus, minus);
    const V shift = select(is_complex, middle, closer) * scale;
    const V shift_imag = select(is_complex, root * scale, zero);

    const V difference = h00 - shift;
    const V length = absolute<A>(difference) + absolute<A>(shift_imag) + absolute<A>(h10);
    const V per_length = one / select(less(zero + kNothing<A>, length), length, one);
    const V h10_scaled = h10 * per_length;
    start[0] = h10_scaled * h01 + difference * (difference * per_length) + shift_imag * (shift_imag * per_length);
    start[1] = h10_scaled * (h00 + h11 - 2 * shift);
    start[2] = h10_scaled * h21;
  }

  // The reflector at row k that starts or moves the bulge, and the column left of it.
  OVERTONE_INLINE Reflector<A> next_reflector(int64_t k, Mask<A> active, const V (&start)[3]) {
    const V zero{}, one = zero + 1, row = zero + static_cast<A>(k);
    const Mask<A> inside = active & less_equal(first_, row) & less(row, last_);
    const Mask<A> moves = inside & less(first_, row);
    V p = zero, q = zero, r = zero;
    if (k > 0) {
      p = h_.row(k)[k - 1];
      q = h_.row(k + 1)[k - 1];
      r = h_.row(k + 2)[k - 1];
    }
    const V old[3] = {p, q, r};
    p = select(moves, p, start[0]);
    q = select(moves, q, start[1]);
    r = select(less(row + 1, last_), select(moves, r, start[2]), zero);
    const V squares = p * p + q * q + r * r;
    const Mask<A> on = inside & less(zero + kNothing<A> * kNothing<A>, squares);
    const V length = square_root(select(on, squares, one));
    const V s = select(less(p, zero), -length, length);
    const V sum = select(on, p + s, one);
    const V per_sum = select(on, one / sum, zero);
    Reflector<A> reflector;
    reflector.tau = select(on, sum / s, zero);
    reflector.v1 = q * per_sum;
    reflector.v2 = r * per_sum;
    reflector.tau_v1 = reflector.tau * reflector.v1;
    reflector.tau_v2 = reflector.tau * reflector.v2;
    if (k > 0) {
      h_.row(k)[k - 1] = select(moves & on, -s, old[0]);
      h_.row(k + 1)[k - 1] = select(moves, zero, old[1]);
      h_.row(k + 2)[k - 1] = select(moves, zero, old[2]);
    }
    return reflector;
  }

  // What the next reflectors of this block read: columns up to `near`, rows from k0 on.
  OVERTONE_INLINE void reflect_near(const Reflector<A>& reflector, int64_t k, int64_t k0, int64_t near, int64_t end) {
    V *x0 = h_.row(k), *x1 = h_.row(k + 1), *x2 = h_.row(k + 2);
    for (int64_t j = k; j <= near; ++j) {
      reflect(reflector, x0[j], x1[j], x2[j]);
    }
    const int64_t bottom = std::min(k + 3, end);
    for (int64_t i = k0; i <= bottom; ++i) {
      V* x = h_.row(i) + k;
      reflect(reflector, x[0], x[1], x[2]);
    }
  }

  void reflect_far(const Reflector<A>* reflectors, int64_t k0, int64_t k1, int64_t near, int64_t top, int64_t right) {
    switch (k1 - k0) {
      case 1:
        return reflect_far_by<1>(reflectors, k0, near, top, right);
      case 2:
        return reflect_far_by<2>(reflectors, k0, near, top, right);
      case 3:
        return reflect_far_by<3>(reflectors, k0, near, top, right);
      default:
        return reflect_far_by<kReflectors>(reflectors, k0, near, top, right);
    }
  }

  template <int count>
  void reflect_far_by(const Reflector<A>* stored, int64_t k0, int64_t near, int64_t top, int64_t right) {
    Reflector<A> reflectors[count];
    OVERTONE_UNROLL
    for (int i = 0; i < count; ++i) {
      reflectors[i] = stored[i];
    }
    V* rows[count + 2];
    OVERTONE_UNROLL
    for (int i = 0; i < count + 2; ++i) {
      rows[i] = h_.row(k0 + i);
    }
    for (int64_t j = near + 1; j <= right; ++j) {
      reflect_chain<count, A>(reflectors, [&](int i) { return rows[i] + j; });
    }
    for (int64_t i = top; i < k0; ++i) {
      V* x = h_.row(i) + k0;
      reflect_chain<count, A>(reflectors, [&](int c) { return x + c; });
    }
    if (schur_.data != nullptr) {
      for (int64_t i = 0; i < n_; ++i) {
        V* x = schur_.row(i) + k0;
        reflect_chain<count, A>(reflectors, [&](int c) { return x + c; });
      }
    }
  }

  static constexpr A kExceptional = 10;  // sweeps without a deflation before the shifts are changed
  static constexpr A kPatience = 15;     // and before the test for deflation looks at the norm of the whole matrix

  HessenbergLanes<A> h_;
  int64_t n_;
  DenseLanes<A> schur_;
  V *real_, *imag_;
  V first_, last_;  // windows; last = −1 where a lane is done
  V sweeps_;        // since the last deflation
  V phase_;         // of the shifts: ordinary ones until kExceptional, then until 2 · kExceptional
  V norm_;
};

}  // namespace overtone::OVERTONE_LEVEL
