// Before the reduction: numbers of a safe size, eigenvalues that can be read off isolated, rows and columns balanced.
#pragma once

#include "cpu/linalg/eig/matrix.h"

namespace overtone::OVERTONE_ISA {

// A becomes D⁻¹ Pᵀ A P D / 2^e, with a permutation P and powers of two D in every lane.
template <class A>
class Balance {
 public:
  using V = Vector<A>;

  Balance(DenseLanes<A> a, V* work)
      : a_(a),
        n_(a.n),
        rows_(work),
        columns_(work + n_),
        scale_(work + 2 * n_),
        order_(reinterpret_cast<Bits<A>*>(work + 3 * n_)),
        counts_(reinterpret_cast<Bits<A>*>(work + 4 * n_)) {}

  static constexpr int64_t work_size(int64_t n) { return 5 * n; }

  // With `keep_norms` D is the identity.
  void run(bool keep_norms) {
    const V zero{}, one = zero + 1;
    undo_[0] = undo_[1] = one;
    std::fill(exponents_, exponents_ + kLanes<A>, 0);
    finite_ = every_lane<A>();
    isolated_ = no_lane<A>();
    for (int64_t i = 0; i < n_; ++i) {
      scale_[i] = one;
      for (int lane = 0; lane < kLanes<A>; ++lane) {
        order_[i * kLanes<A> + lane] = static_cast<Bits<A>>(i);
      }
    }
    row_column_norms();
    const Mask<A> safe =
        less(zero + kSafe, largest_) & less(largest_, zero + 1 / kSafe) & less(sum_, zero + 1 / kSafe / kSafe);
    if (!all(safe | equal(sum_, zero))) {
      clear_unless_finite();
      resize(finite_ & ~safe);
      row_column_norms();
    }
    permute();
    if (!keep_norms) {
      balance();
    }
  }

  Mask<A> finite() const { return finite_; }
  // Lanes of which some eigenvalues could be read off.
  Mask<A> isolated() const { return isolated_; }
  V scale(int64_t i) const { return scale_[i]; }
  int64_t original_index(int64_t i, int lane) const { return order_[i * kLanes<A> + lane]; }
  // Times 2^e, in two steps because 2^e itself may overflow.
  V undo_size(V x) const { return x * undo_[0] * undo_[1]; }

 private:
  static constexpr A kSafe = static_cast<A>(1e-6);  // far above kTiny, which is absolute

  // Sums of moduli by rows and by columns, without the diagonal; the largest modulus and the sum of all.
  void row_column_norms() {
    const V zero{};
    largest_ = sum_ = zero;
    for (int64_t j = 0; j < n_; ++j) {
      columns_[j] = zero;
    }
    for (int64_t i = 0; i < n_; ++i) {
      const V* row = a_.row(i);
      V sum = zero;
      const auto add = [&](int64_t begin, int64_t end) {
        for (int64_t j = begin; j < end; ++j) {
          const V size = abs<A>(row[j]);
          sum += size;
          columns_[j] += size;
          largest_ = max<A>(largest_, size);
        }
      };
      add(0, i);
      add(i + 1, n_);
      rows_[i] = sum;
      const V diagonal = abs<A>(row[i]);
      largest_ = max<A>(largest_, diagonal);
      sum_ += sum + diagonal;
    }
  }

  // Lanes with NaN or Inf become zero.
  void clear_unless_finite() {
    const V zero{}, most = zero + std::numeric_limits<A>::max();
    for (int64_t i = 0; i < n_; ++i) {
      for (int64_t j = 0; j < n_; ++j) {
        finite_ = finite_ & less_equal(abs<A>(a_.row(i)[j]), most);
      }
    }
    for_each([&](V x) { return select(finite_, x, V{}); });
  }

  // Lanes with very large or very small numbers: their largest becomes about one.
  void resize(Mask<A> lanes) {
    A factors[2][kLanes<A>], undos[2][kLanes<A>], largest[kLanes<A>];
    std::memcpy(largest, &largest_, sizeof largest);
    const auto power = [](int exponent, int half) {
      return static_cast<A>(__builtin_ldexp(1.0, half == 0 ? exponent / 2 : exponent - exponent / 2));
    };
    for (int lane = 0; lane < kLanes<A>; ++lane) {
      // Even, so that square roots of products are scaled exactly too.
      const int exponent = lane_of(lanes, lane) && largest[lane] > 0 ? __builtin_ilogb(largest[lane]) / 2 * 2 : 0;
      exponents_[lane] += exponent;
      for (int half = 0; half < 2; ++half) {
        factors[half][lane] = power(-exponent, half);
        undos[half][lane] = power(exponents_[lane], half);
      }
    }
    V factor[2];
    std::memcpy(factor, factors, sizeof factor);
    std::memcpy(undo_, undos, sizeof undo_);
    for_each([&](V x) { return x * factor[0] * factor[1]; });
  }

  template <class Function>
  void for_each(Function function) {
    for (int64_t i = 0; i < n_; ++i) {
      V* row = a_.row(i);
      for (int64_t j = 0; j < n_; ++j) {
        row[j] = function(row[j]);
      }
    }
  }

  // Where a row or column has nothing off the diagonal, the diagonal is an eigenvalue: permuted to the end or the
  // beginning it splits off exactly. A triangular matrix, causal attention, is solved by this alone.
  void permute() {
    const V zero{};
    Mask<A> lanes = no_lane<A>();
    for (int64_t i = 0; i < n_; ++i) {
      lanes = lanes | equal(rows_[i], zero) | equal(columns_[i], zero);
    }
    if (n_ < 2 || !any(lanes)) {
      return;
    }
    isolated_ = lanes;
    for (int lane = 0; lane < kLanes<A>; ++lane) {
      if (lane_of(lanes, lane)) {
        permute(lane);
      }
    }
    row_column_norms();
  }

  A& element(int64_t i, int64_t j, int lane) { return reinterpret_cast<A*>(a_.row(i) + j)[lane]; }
  Bits<A>& count(int64_t i, int lane) { return counts_[i * kLanes<A> + lane]; }

  void permute(int lane) {
    int64_t begin = 0, end = n_;  // what is not isolated yet
    count_nonzeros(begin, end, lane, [&](int64_t i, int64_t j) { return element(i, j, lane) != 0; });
    for (int64_t i = find_zero(begin, end, lane); i >= 0; i = find_zero(begin, end, lane)) {
      --end;
      swap(i, end, lane);
      for (int64_t r = begin; r < end; ++r) {
        count(r, lane) -= element(r, end, lane) != 0;
      }
    }
    count_nonzeros(begin, end, lane, [&](int64_t i, int64_t j) { return element(j, i, lane) != 0; });
    for (int64_t i = find_zero(begin, end, lane); i >= 0; i = find_zero(begin, end, lane)) {
      swap(i, begin, lane);
      for (int64_t c = begin + 1; c < end; ++c) {
        count(c, lane) -= element(begin, c, lane) != 0;
      }
      ++begin;
    }
  }

  template <class Nonzero>
  void count_nonzeros(int64_t begin, int64_t end, int lane, Nonzero nonzero) {
    for (int64_t i = begin; i < end; ++i) {
      Bits<A> found = 0;
      for (int64_t j = begin; j < end; ++j) {
        found += i != j && nonzero(i, j);
      }
      count(i, lane) = found;
    }
  }

  int64_t find_zero(int64_t begin, int64_t end, int lane) {
    for (int64_t i = end - 1; i >= begin; --i) {
      if (count(i, lane) == 0) {
        return i;
      }
    }
    return -1;
  }

  template <class T>
  static OVERTONE_INLINE void exchange(T& a, T& b) {
    const T kept = a;
    a = b;
    b = kept;
  }

  // Rows and columns i and j change places.
  void swap(int64_t i, int64_t j, int lane) {
    if (i == j) {
      return;
    }
    for (int64_t k = 0; k < n_; ++k) {
      exchange(element(i, k, lane), element(j, k, lane));
    }
    for (int64_t k = 0; k < n_; ++k) {
      exchange(element(k, i, lane), element(k, j, lane));
    }
    exchange(count(i, lane), count(j, lane));
    exchange(order_[i * kLanes<A> + lane], order_[j * kLanes<A> + lane]);
  }

  // Rows and columns of very different size cost accuracy: D makes them alike, as LAPACK does. The diagonal counts in
  // both norms, so that rounding noise beside large diagonals is not blown up.
  void balance() {
    const V zero{};
    Mask<A> lanes = no_lane<A>();
    for (int64_t i = 0; i < n_; ++i) {
      const V diagonal = abs<A>(a_.row(i)[i]);
      const V row = rows_[i] + diagonal, column = columns_[i] + diagonal;
      const Mask<A> connected = less(zero, rows_[i]) & less(zero, columns_[i]);
      lanes = lanes | (connected & (less(row * kUnlike, column) | less(column * kUnlike, row)));
    }
    if (!any(lanes)) {
      return;
    }
    const V before = largest_;
    for (int round = 0; round < kRounds && any(lanes); ++round) {
      lanes = balance_once(lanes);
    }
    undo_if_harmful(before);
  }

  // Errors of the balanced matrix come back multiplied by up to max D / min D. Where the balanced matrix is not smaller
  // by as much, nearly reducible attention for instance, balancing would do harm.
  void undo_if_harmful(V before) {
    row_column_norms();
    V most = scale_[0], least = scale_[0];
    for (int64_t i = 1; i < n_; ++i) {
      most = max<A>(most, scale_[i]);
      least = min<A>(least, scale_[i]);
    }
    const Mask<A> harmful = less(before * kHarm, most / least * largest_);
    if (any(harmful)) {
      take_back(harmful);
    }
    const V zero{};
    const Mask<A> shrunk = less(zero, largest_) & less(largest_, zero + kSafe) & ~harmful;
    if (any(shrunk)) {
      resize(shrunk);
    }
  }

  void take_back(Mask<A> harmful) {
    const V one = V{} + 1;
    for (int64_t i = 0; i < n_; ++i) {
      const V up = select(harmful, scale_[i], one);
      for (int64_t k = 0; k < n_; ++k) {
        a_.row(i)[k] *= up;
      }
      for (int64_t k = 0; k < n_; ++k) {
        a_.row(k)[i] *= one / up;
      }
      scale_[i] = select(harmful, one, scale_[i]);
    }
  }

  // The lanes in which something changed.
  Mask<A> balance_once(Mask<A> lanes) {
    const V zero{}, one = zero + 1;
    Mask<A> changed = no_lane<A>();
    for (int64_t i = 0; i < n_; ++i) {
      V row = zero, column = zero;
      for (int64_t k = 0; k < n_; ++k) {
        row += abs<A>(a_.row(i)[k]);
        column += abs<A>(a_.row(k)[i]);
      }
      const V diagonal = abs<A>(a_.row(i)[i]);
      const Mask<A> connected = lanes & less(diagonal, row) & less(diagonal, column);
      const V factor = power_of_two(sqrt(select(connected, row, one) / select(connected, column, one)));
      const V per_factor = one / factor, scale = scale_[i] * factor;
      const Mask<A> better = connected & less(column * factor + row * per_factor, kGain * (column + row)) &
                             less(zero + 1 / kMaxScale, scale) & less(scale, zero + kMaxScale);
      if (!any(better)) {
        continue;
      }
      changed = changed | better;
      const V up = select(better, factor, one), down = select(better, per_factor, one);
      scale_[i] *= up;
      for (int64_t k = 0; k < n_; ++k) {
        a_.row(k)[i] *= up;
      }
      for (int64_t k = 0; k < n_; ++k) {
        a_.row(i)[k] *= down;
      }
    }
    return changed;
  }

  // The power of two below or at √2 x, for positive x.
  static V power_of_two(V x) {
    typedef typename VectorOf<Bits<A>>::type IntegerVector;
    const V infinity = V{} + std::numeric_limits<A>::infinity();
    return (V)((IntegerVector)(x * static_cast<A>(1.41421356)) & (IntegerVector)infinity);
  }

  static constexpr A kUnlike = 32;  // below that there is little to gain
  static constexpr A kGain = static_cast<A>(0.95);
  static constexpr A kHarm = 4;
  static constexpr int kRounds = 20;
  static constexpr A kMaxScale = sizeof(A) == 8 ? static_cast<A>(0x1p500) : static_cast<A>(0x1p60);  // two have a ratio

  DenseLanes<A> a_;
  int64_t n_;
  V *rows_, *columns_, *scale_;
  Bits<A>*order_, *counts_;
  V largest_, sum_;
  V undo_[2];
  int exponents_[kLanes<A>];  // of what the lanes were divided by
  Mask<A> finite_, isolated_;
};

}  // namespace overtone::OVERTONE_ISA
