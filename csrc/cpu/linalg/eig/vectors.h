// Eigenvectors of interleaved quasi-triangular matrices by back substitution.
#pragma once

#include "cpu/linalg/eig/matrix.h"

namespace overtone::OVERTONE_ISA {

template <class A>
struct Complex {
  Vector<A> re, im;

  OVERTONE_INLINE Complex operator+(Complex other) const { return {re + other.re, im + other.im}; }
  OVERTONE_INLINE Complex operator-(Complex other) const { return {re - other.re, im - other.im}; }
  OVERTONE_INLINE Complex operator-() const { return {-re, -im}; }
  OVERTONE_INLINE Complex operator*(Vector<A> factor) const { return {re * factor, im * factor}; }
  OVERTONE_INLINE Complex operator*(Complex other) const {
    return {re * other.re - im * other.im, re * other.im + im * other.re};
  }
  OVERTONE_INLINE Vector<A> size() const { return max<A>(abs<A>(re), abs<A>(im)); }
};

template <class A>
OVERTONE_INLINE Complex<A> select(Mask<A> mask, const Complex<A>& yes, const Complex<A>& no) {
  return {select(mask, yes.re, no.re), select(mask, yes.im, no.im)};
}

// Scaled, because |b|² may underflow.
template <class A>
OVERTONE_INLINE Complex<A> divide(const Complex<A>& a, const Complex<A>& b) {
  const Vector<A> inverse = 1 / b.size();
  const Complex<A> scaled = b * inverse;
  const Vector<A> factor = inverse / (scaled.re * scaled.re + scaled.im * scaled.im);
  return Complex<A>{a.re * scaled.re + a.im * scaled.im, a.im * scaled.re - a.re * scaled.im} * factor;
}

// kColumns eigenvectors of T at a time. T's blocks of two rows, which the lanes have at different places, hold pairs of
// complex eigenvalues, in either order.
template <class A>
class SchurVectors {
 public:
  using V = Vector<A>;
  static constexpr int kColumns = 4;
  // Of each row: real and imaginary parts of the block's columns.
  static constexpr int64_t size(int64_t n) { return (n + 1) * 2 * kColumns; }

  // `x`: size(n) vectors.
  SchurVectors(HessenbergLanes<A> t, const V* real, const V* imag, V* x)
      : t_(t), n_(t.n), real_(real), imag_(imag), x_(x) {
    norm_ = max<A>(t.largest(), V{} + kTiny<A>);
  }

  OVERTONE_INLINE V* row(int64_t i) const { return x_ + i * 2 * kColumns; }
  // Rows [0, height) may differ from zero.
  int64_t height() const { return height_; }

  // The eigenvectors of eigenvalues [k, k + count).
  void solve(int64_t k, int count) {
    begin_ = k;
    height_ = std::min(k + count + 1, n_);
    for (int64_t i = 0; i <= n_ && i <= height_; ++i) {
      for (int c = 0; c < 2 * kColumns; ++c) {
        row(i)[c] = V{};
      }
    }
    for (int c = 0; c < kColumns; ++c) {
      known_from_[c] = c < count ? start(k + c, c) : V{};  // columns beyond the last are zero
    }
    Complex<A> ahead[kColumns] = {};  // Σ T(i, j) x_j over j > i + 1, of the row i to be solved next
    Complex<A> upper[kColumns] = {};  // the first row's value where two rows were solved together
    for (int64_t i = height_ - 1; i >= 0; --i) {
      Complex<A> above[kColumns] = {};  // and that of the row above it over j > i
      if (i > 0) {
        multiply(i - 1, i + 1, above);
      }
      solve_row(i, ahead, above, upper);
      for (int c = 0; c < kColumns; ++c) {
        ahead[c] = above[c];
      }
    }
  }

 private:
  OVERTONE_INLINE Complex<A> get(int64_t i, int c) const { return {row(i)[2 * c], row(i)[2 * c + 1]}; }
  OVERTONE_INLINE void set(int64_t i, int c, const Complex<A>& value) const {
    row(i)[2 * c] = value.re;
    row(i)[2 * c + 1] = value.im;
  }

  // Lanes where rows i − 1 and i are a block.
  OVERTONE_INLINE Mask<A> is_pair(int64_t i) const {
    return i > 0 && i < n_ ? ~equal(t_.row(i)[i - 1], V{}) : no_lane<A>();
  }

  // The eigenvector's own rows: 1, or the eigenvector of the block. Returns the first row that is known.
  V start(int64_t k, int c) const {
    const V zero{}, one = zero + 1;
    const Mask<A> first = is_pair(k + 1), second = is_pair(k);
    set(k, c, {one, zero});
    if (any(first)) {
      set_pair(k, first, k, c);
    }
    if (any(second)) {
      set_pair(k - 1, second, k, c);
    }
    return zero + static_cast<A>(k) - select(second, one, zero);
  }

  void set_pair(int64_t i, Mask<A> lanes, int64_t k, int c) const {
    const V zero{}, one = zero + 1;
    const V a = t_.row(i)[i], b = t_.row(i)[i + 1], lower = t_.row(i + 1)[i], d = t_.row(i + 1)[i + 1];
    const Mask<A> by_upper = less_equal(abs<A>(lower), abs<A>(b));
    const V divisor = select(lanes, select(by_upper, b, lower), one);
    const Complex<A> other = Complex<A>{real_[k] - select(by_upper, a, d), imag_[k]} * (one / divisor);
    const Complex<A> unit{one, zero};
    set(i, c, select(lanes, select(by_upper, unit, other), get(i, c)));
    set(i + 1, c, select(lanes, select(by_upper, other, unit), get(i + 1, c)));
  }

  // Σ T(i, j) x_j over j ≥ begin.
  OVERTONE_INLINE void multiply(int64_t i, int64_t begin, Complex<A> (&sums)[kColumns]) const {
    const V* t = t_.row(i);
    for (int64_t j = begin; j < height_; ++j) {
      const V* x = row(j);
      OVERTONE_UNROLL
      for (int c = 0; c < kColumns; ++c) {
        sums[c].re += t[j] * x[2 * c];
        sums[c].im += t[j] * x[2 * c + 1];
      }
    }
  }

  // Row i, and row i − 1 with it where the two are a block; that one's value waits in `upper`.
  void solve_row(int64_t i, Complex<A> (&ahead)[kColumns], Complex<A> (&above)[kColumns],
                 Complex<A> (&upper)[kColumns]) {
    const V zero{};
    const Mask<A> below = is_pair(i + 1), pair = is_pair(i);
    const V index = zero + static_cast<A>(i);
    const V* t = t_.row(i);
    for (int c = 0; c < kColumns; ++c) {
      const Mask<A> unknown = less(index, known_from_[c]);
      if (!any(unknown)) {
        continue;
      }
      const int64_t k = std::min(begin_ + c, n_ - 1);
      const Complex<A> shift{real_[k], imag_[k]};
      const Complex<A> right = -(ahead[c] + get(i + 1, c) * (i + 1 < n_ ? t[i + 1] : zero));
      Complex<A> value = divide(right, safe(Complex<A>{t[i], zero} - shift, shift));
      if (any(pair & unknown)) {
        Complex<A> both[2];
        solve_block(i - 1, shift, -above[c], right, both);
        value = select(pair, both[1], value);
        value = select(below, upper[c], value);
        upper[c] = both[0];
      } else {
        value = select(below, upper[c], value);
      }
      set(i, c, select(unknown, value, get(i, c)));
      const V size = select(unknown, max<A>(value.size(), select(pair, upper[c].size(), zero)), zero);
      if (any(less(zero + kLarge, size))) {
        shrink(i, c, size, above[c], upper[c]);
      }
    }
  }

  // (B − shift) x = (r0, r1) with B = T's rows and columns i, i + 1, by elimination with row pivoting.
  OVERTONE_INLINE void solve_block(int64_t i, const Complex<A>& shift, const Complex<A>& r0, const Complex<A>& r1,
                                   Complex<A> (&x)[2]) const {
    const V zero{};
    const Complex<A> a{t_.row(i)[i] - shift.re, -shift.im}, b{t_.row(i)[i + 1], zero};
    const Complex<A> c{t_.row(i + 1)[i], zero}, d{t_.row(i + 1)[i + 1] - shift.re, -shift.im};
    const Mask<A> exchange = less(a.size(), c.size());
    const Complex<A> top = select(exchange, c, a), top_right = select(exchange, d, b);
    const Complex<A> low = select(exchange, a, c), low_right = select(exchange, b, d);
    const Complex<A> pivot = safe(top, shift);
    const Complex<A> factor = divide(low, pivot);
    const Complex<A> first = select(exchange, r1, r0), second = select(exchange, r0, r1);
    x[1] = divide(second - factor * first, safe(low_right - factor * top_right, shift));
    x[0] = divide(first - top_right * x[1], pivot);
  }

  // A divisor of rounding's size at least: eigenvalues that agree would divide by zero.
  OVERTONE_INLINE Complex<A> safe(const Complex<A>& divisor, const Complex<A>& shift) const {
    const V least = max<A>(shift.size() * kRounding<A>, norm_ * (kRounding<A> * kRounding<A>));
    const Mask<A> small = less(divisor.size(), least);
    return {select(small, least, divisor.re), select(small, V{}, divisor.im)};
  }

  // The vector so far, by a power of two, where it threatens to overflow.
  void shrink(int64_t i, int c, V size, Complex<A>& above, Complex<A>& upper) {
    typedef typename VectorOf<Bits<A>>::type IntegerVector;
    const V one = V{} + 1, infinity = V{} + std::numeric_limits<A>::infinity();
    const V power = (V)((IntegerVector)size & (IntegerVector)infinity);
    const V factor = select(less(V{} + kLarge, size), one / select(less(V{} + kLarge, size), power, one), one);
    for (int64_t r = i; r < height_; ++r) {
      set(r, c, get(r, c) * factor);
    }
    above = above * factor;
    upper = upper * factor;
  }

  static constexpr A kLarge = sizeof(A) == 8 ? static_cast<A>(1e100) : static_cast<A>(1e8);

  HessenbergLanes<A> t_;
  int64_t n_;
  const V *real_, *imag_;
  V* x_;
  V norm_;
  int64_t begin_ = 0, height_ = 0;
  V known_from_[kColumns];
};

}  // namespace overtone::OVERTONE_ISA
