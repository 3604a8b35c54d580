// Householder QR of small matrices, one per SIMD lane, in lock-step.
#pragma once

#include "cpu/gemm/pack.h"
#include "cpu/linalg/lanes.h"
#include "cpu/linalg/qr/householder.h"
#include "cpu/linalg/qr/params.h"

namespace overtone::OVERTONE_ISA {

// A matrix that has no decomposition has NaN for one.
template <class A>
void poison_results(const QrForward& call, int64_t index) {
  constexpr A kNaN = std::numeric_limits<A>::quiet_NaN();
  A* q = static_cast<A*>(call.q) + index * call.rows * call.q_columns;
  A* r = static_cast<A*>(call.r) + index * call.r_rows * call.columns;
  std::fill(q, q + call.rows * call.q_columns, kNaN);
  std::fill(r, r + call.r_rows * call.columns, kNaN);
}

// One reflector, or two neighbouring ones that meet x in one pass over memory: x ← x − V T (Vᵀ x). A store of a vector
// takes longer than the arithmetic on it, and two need no more stores than one. V's columns begin with a one, the
// second a row below the first; ones and what is above them are not stored.
template <class A>
struct LaneReflectors {
  const A* v;
  int64_t v_stride;
  int64_t rows;
  Vector<A> t00, t01, t10, t11;  // T; with one reflector t00 alone
};

// They meet kColumns neighbouring columns of x. Unless `kHasHead` the first rows of x, as many as there are reflectors,
// are zero, and are not read. Pointers and strides are locals: a member would be read again after every store.
template <int kReflectors, bool kHasHead, int kColumns, class A>
OVERTONE_INLINE void reflect_block(const LaneReflectors<A>& reflectors, A* x, int64_t x_stride) {
  const A* v = reflectors.v;
  const int64_t v_stride = reflectors.v_stride;
  const int64_t rows = reflectors.rows;
  const Vector<A> t00 = reflectors.t00;
  Vector<A> first[kColumns] = {}, second[kColumns] = {};
  for (int64_t i = kReflectors; i < rows; ++i) {
    const Vector<A> v0 = load_full(v + i * v_stride);
    const Vector<A> v1 = kReflectors == 2 ? load_full(v + i * v_stride + kLanes<A>) : v0;
    OVERTONE_UNROLL
    for (int j = 0; j < kColumns; ++j) {
      const Vector<A> part = load_full(x + i * x_stride + j * kLanes<A>);
      first[j] += v0 * part;
      if constexpr (kReflectors == 2) {
        second[j] += v1 * part;
      }
    }
  }
  const Vector<A> below = kReflectors == 2 ? load_full(v + v_stride) : Vector<A>{};
  OVERTONE_UNROLL
  for (int j = 0; j < kColumns; ++j) {
    A* const head = x + j * kLanes<A>;
    const Vector<A> head0 = kHasHead ? load_full(head) : Vector<A>{};
    const Vector<A> head1 = kHasHead && kReflectors == 2 ? load_full(head + x_stride) : Vector<A>{};
    const Vector<A> dot0 = first[j] + head0 + below * head1;
    const Vector<A> dot1 = second[j] + head1;
    first[j] = t00 * dot0;
    if constexpr (kReflectors == 2) {
      first[j] += reflectors.t01 * dot1;
      second[j] = reflectors.t10 * dot0 + reflectors.t11 * dot1;
      store_full(head1 - below * first[j] - second[j], head + x_stride);
    }
    store_full(head0 - first[j], head);
  }
  for (int64_t i = kReflectors; i < rows; ++i) {
    const Vector<A> v0 = load_full(v + i * v_stride);
    const Vector<A> v1 = kReflectors == 2 ? load_full(v + i * v_stride + kLanes<A>) : v0;
    OVERTONE_UNROLL
    for (int j = 0; j < kColumns; ++j) {
      A* const out = x + i * x_stride + j * kLanes<A>;
      Vector<A> part = load_full(out) - v0 * first[j];
      if constexpr (kReflectors == 2) {
        part -= v1 * second[j];
      }
      store_full(part, out);
    }
  }
}

// The same for `columns` columns; blocks as wide as the registers allow.
template <int kReflectors, bool kHasHead, class A>
OVERTONE_INLINE void reflect_columns(const LaneReflectors<A>& reflectors, A* x, int64_t x_stride, int64_t columns) {
  constexpr int kWidest = OVERTONE_VECTOR_BYTES == 64 ? 8 : 4;
  for (; columns >= kWidest; columns -= kWidest, x += kWidest * kLanes<A>) {
    reflect_block<kReflectors, kHasHead, kWidest>(reflectors, x, x_stride);
  }
  for (; columns >= 4; columns -= 4, x += 4 * kLanes<A>) {
    reflect_block<kReflectors, kHasHead, 4>(reflectors, x, x_stride);
  }
  for (; columns >= 2; columns -= 2, x += 2 * kLanes<A>) {
    reflect_block<kReflectors, kHasHead, 2>(reflectors, x, x_stride);
  }
  if (columns == 1) {
    reflect_block<kReflectors, kHasHead, 1>(reflectors, x, x_stride);
  }
}

template <class A>
class LaneQr {
 public:
  explicit LaneQr(const QrForward& call)
      : call_(call),
        rank_(std::min(call.rows, call.columns)),
        scratch_(Scratch<A>::padded(InterleavedMatrix<A>::size(call.rows, call.columns)) +
                 Scratch<A>::padded(InterleavedMatrix<A>::size(call.rows, call.q_columns)) +
                 3 * Scratch<A>::padded(call.rows * kLanes<A>) + Scratch<A>::padded(call.columns * kLanes<A>)),
        a_(scratch_.take(InterleavedMatrix<A>::size(call.rows, call.columns)), call.columns),
        q_(scratch_.take(InterleavedMatrix<A>::size(call.rows, call.q_columns)), call.q_columns),
        taus_(scratch_.take(call.rows * kLanes<A>)),
        signs_(scratch_.take(call.rows * kLanes<A>)),
        overlaps_(scratch_.take(call.rows * kLanes<A>)),
        unscales_(scratch_.take(call.columns * kLanes<A>)) {}

  // Matrices [first, first + kLanes) of the batch.
  void run(int64_t first) {
    const int count = static_cast<int>(std::min<int64_t>(kLanes<A>, call_.a.count - first));
    load_lanes(call_.a, first, call_.rows, call_.columns, a_);
    const Mask<A> is_finite = normalize();
    expect_group(first + kLanes<A>);
    factor();
    if (call_.q_columns > 0) {
      form_q();
      store_lanes(q_, call_.rows, call_.q_columns, count,
                  static_cast<A*>(call_.q) + first * call_.rows * call_.q_columns);
    }
    const Mask<A> solved = is_finite & finish_r();
    store_lanes(a_, call_.r_rows, call_.columns, count,
                static_cast<A*>(call_.r) + first * call_.r_rows * call_.columns);
    for (int lane = 0; lane < count; ++lane) {
      call_.info[first + lane] = lane_of(solved, lane) ? 0 : 1;
      if (!lane_of(solved, lane)) {
        poison_results<A>(call_, first + lane);
      }
    }
  }

 private:
  // Gathers the lines that the group from `first` on is read from and written to, so that they are asked for bit by bit
  // beside the arithmetic of the group before it: prefetcher_.prefetch_row() is called 2 · rank times. Waiting for them
  // took as long as half the arithmetic at n = 16; of matrices below n = 8 asking takes longer.
  void expect_group(int64_t first) {
    prefetcher_.clear();
    constexpr int64_t kWorthAsking = 8;
    if (rank_ < kWorthAsking || first + kLanes<A> > call_.a.count) {
      return;
    }
    const auto add = [&](const void* data, int64_t begin, int64_t size) {
      const int64_t piece = std::max<int64_t>(1, size * kLanes<A> / (2 * rank_));
      prefetcher_.add(buffer_rows<A>(data, begin, piece), size * kLanes<A> / piece, piece);
    };
    const int64_t q_size = call_.rows * call_.q_columns;
    const int64_t r_size = call_.r_rows * call_.columns;
    const int64_t a_size = call_.rows * call_.columns;
    const int64_t* offsets = call_.a.offsets + first;
    add(call_.q, first * q_size, q_size);
    add(call_.r, first * r_size, r_size);
    if (offsets[kLanes<A> - 1] - offsets[0] == (kLanes<A> - 1) * a_size) {
      add(call_.a.data, offsets[0], a_size);
    }
  }

  // Scales columns of an unusual size, each by its own power of two: that scales the same column of R and leaves Q
  // alone. Returns which lanes are finite. (Here and below a local copy of a member: the member would be read again
  // after every store.)
  Mask<A> normalize() {
    const InterleavedMatrix<A> a = a_;
    const int64_t rows = call_.rows;
    const Vector<A> one = broadcast(A{1}), small = broadcast(kSmallSize<A>);
    Vector<A> largest_of_all{};
    is_scaled_ = false;
    for (int64_t j = 0; j < call_.columns; ++j) {
      Vector<A> largest{};
      for (int64_t i = 0; i < rows; ++i) {
        largest = larger_magnitude<A>(a.get(i, j), largest);
      }
      largest_of_all = larger_magnitude<A>(largest, largest_of_all);
      const Mask<A> usual =
          (less_equal(small, largest) & less_equal(largest, one / small)) | equal(largest, Vector<A>{});
      if (!all(usual)) {
        scale_column(j, select(usual, one, inverse_power_of_two<A>(largest)));
      }
    }
    return less_equal(largest_of_all, broadcast(std::numeric_limits<A>::max()));
  }

  void scale_column(int64_t j, const Vector<A>& scale) {
    const Vector<A> factor = scale;
    for (int64_t k = 0; k < call_.columns && !is_scaled_; ++k) {
      store_full(broadcast(A{1}), unscales_ + k * kLanes<A>);
    }
    is_scaled_ = true;
    store_full(broadcast(A{1}) / factor, unscales_ + j * kLanes<A>);
    for (int64_t i = 0; i < call_.rows; ++i) {
      a_.set(i, j, a_.get(i, j) * factor);
    }
  }

  // The sum of term(i) over the rows from `begin` on, in two chains: each addition waits for the one before it.
  template <class Term>
  OVERTONE_INLINE Vector<A> sum_over_rows(int64_t begin, const Term& term) const {
    const int64_t rows = call_.rows;
    Vector<A> even{}, odd{};
    int64_t i = begin;
    for (; i + 2 <= rows; i += 2) {
      even += term(i);
      odd += term(i + 1);
    }
    return i < rows ? even + odd + term(i) : even + odd;
  }

  // Of scale times column k: its diagonal element, the squares below it, and the norm of both.
  struct Column {
    Vector<A> head, below, norm;
  };

  // Not inlined: neighbours decide whether a lane is measured once or twice, and the compiler must not round the two
  // differently (a product and a sum may become one operation or stay two).
  __attribute__((noinline)) void measure(int64_t k, const Vector<A>& scale, Column& column) const {
    const InterleavedMatrix<A> a = a_;
    const Vector<A> factor = scale;
    const Vector<A> head = a.get(k, k) * factor;
    const Vector<A> below = sum_over_rows(k + 1, [&](int64_t i) {
      const Vector<A> part = a.get(i, k) * factor;
      return part * part;
    });
    column = {head, below, sqrt(head * head + below)};
  }

  // For every lane whose column is of an unusual size the power of two that makes it usual, otherwise 1: squares must
  // neither overflow nor vanish, however small the column is beside others.
  Vector<A> column_scale(int64_t k, Mask<A> usual) const {
    Vector<A> largest{};
    for (int64_t i = k; i < call_.rows; ++i) {
      largest = larger_magnitude<A>(a_.get(i, k), largest);
    }
    return select(usual, broadcast(A{1}), inverse_power_of_two<A>(largest));
  }

  // The reflector I − τ v vᵀ that clears column k below the diagonal; v replaces the column.
  void make_reflector(int64_t k) {
    const InterleavedMatrix<A> a = a_;
    const int64_t rows = call_.rows;
    const Vector<A> one = broadcast(A{1});
    Vector<A> scale = one;
    Column column;
    measure(k, scale, column);
    const Mask<A> usual =
        less_equal(broadcast(kSmallSize<A>), column.norm) & less_equal(column.norm, broadcast(1 / kSmallSize<A>));
    if (!all(usual)) {
      scale = column_scale(k, usual);
      measure(k, scale, column);
    }
    const auto [head, below, norm] = column;
    const Mask<A> is_clear = equal(below, Vector<A>{});
    const Vector<A> diagonal = select(is_clear, head, copysign<A>(norm, -head));
    const Vector<A> inverse = select(is_clear, Vector<A>{}, one / (head - diagonal));
    for (int64_t i = k + 1; i < rows; ++i) {
      a.set(i, k, a.get(i, k) * scale * inverse);  // one after the other: scale · inverse may overflow
    }
    store_full(select(is_clear, Vector<A>{}, (diagonal - head) / diagonal), taus_ + k * kLanes<A>);
    a.set(k, k, all(usual) ? diagonal : diagonal / scale);
    store_full(copysign<A>(one, diagonal), signs_ + k * kLanes<A>);
  }

  // Two reflectors at a time: the second one's column meets the first alone, all columns behind it both at once.
  void factor() {
    const InterleavedMatrix<A> a = a_;
    const int64_t columns = call_.columns;
    int64_t k = 0;
    for (; k + 2 <= rank_; k += 2) {
      prefetcher_.prefetch_row();
      make_reflector(k);
      reflect_columns<1, true>(single(k), a.at(k, k + 1), a.row_stride, 1);
      prefetcher_.prefetch_row();
      make_reflector(k + 1);
      store_full(overlap(k), overlaps_ + k * kLanes<A>);
      prefetcher_.prefetch_row();
      reflect_columns<2, true>(pair(k, false), a.at(k, k + 2), a.row_stride, columns - k - 2);
    }
    if (k < rank_) {
      make_reflector(k);
      reflect_columns<1, true>(single(k), a.at(k, k + 1), a.row_stride, columns - k - 1);
    }
  }

  Vector<A> tau(int64_t k) const { return load_full(taus_ + k * kLanes<A>); }

  LaneReflectors<A> single(int64_t k) const {
    return {a_.at(k, k), a_.row_stride, call_.rows - k, tau(k), Vector<A>{}, Vector<A>{}, Vector<A>{}};
  }

  // Reflectors k and k + 1; k + 1 comes first if `reversed`.
  LaneReflectors<A> pair(int64_t k, bool reversed) const {
    const Vector<A> both = -load_full(overlaps_ + k * kLanes<A>);
    return {a_.at(k, k),
            a_.row_stride,
            call_.rows - k,
            tau(k),
            reversed ? both : Vector<A>{},
            reversed ? Vector<A>{} : both,
            tau(k + 1)};
  }

  // The dot product of the vectors of reflectors k and k + 1, times both their τ.
  Vector<A> overlap(int64_t k) const {
    const InterleavedMatrix<A> a = a_;
    const Vector<A> sum = sum_over_rows(k + 2, [&](int64_t i) { return a.get(i, k) * a.get(i, k + 1); });
    return tau(k) * tau(k + 1) * (a.get(k + 1, k) + sum);
  }

  // From the identity, its signs such that R's diagonal becomes positive; last reflectors first.
  void form_q() {
    const int64_t behind = call_.q_columns - rank_;
    for (int64_t i = 0; i < behind; ++i) {
      std::fill(q_.at(rank_ + i, rank_), q_.at(rank_ + i, rank_ + behind), A{0});
      q_.set(rank_ + i, rank_ + i, broadcast(A{1}));
    }
    int64_t k = rank_;
    if (k % 2 == 1) {
      --k;
      reflect_columns<1, false>(single(k), q_.at(k, k + 1), q_.row_stride, call_.q_columns - k - 1);
      reflect_identity<1>(k, single(k));
    }
    while (k > 0) {
      k -= 2;
      prefetcher_.prefetch_row();
      reflect_columns<2, false>(pair(k, true), q_.at(k, k + 2), q_.row_stride, call_.q_columns - k - 2);
      reflect_identity<2>(k, pair(k, true));
    }
  }

  // The reflectors' own columns of Q, until now those of the identity.
  template <int kReflectors>
  void reflect_identity(int64_t k, const LaneReflectors<A>& reflectors) {
    const InterleavedMatrix<A> a = a_, q = q_;
    const int64_t rows = call_.rows;
    const Vector<A> sign0 = load_full(signs_ + k * kLanes<A>);
    const Vector<A> factor00 = reflectors.t00 * sign0;
    q.set(k, k, sign0 - factor00);
    if constexpr (kReflectors == 1) {
      for (int64_t i = k + 1; i < rows; ++i) {
        q.set(i, k, -factor00 * a.get(i, k));
      }
    } else {
      const Vector<A> sign1 = load_full(signs_ + (k + 1) * kLanes<A>);
      const Vector<A> below = a.get(k + 1, k);
      const Vector<A> factor01 = (reflectors.t00 * below + reflectors.t01) * sign1;
      const Vector<A> factor11 = reflectors.t11 * sign1;
      q.set(k, k + 1, -factor01);
      q.set(k + 1, k, -factor00 * below);
      q.set(k + 1, k + 1, sign1 - factor01 * below - factor11);
      for (int64_t i = k + 2; i < rows; ++i) {
        const Vector<A> v0 = a.get(i, k), v1 = a.get(i, k + 1);
        q.set(i, k, -factor00 * v0);
        q.set(i, k + 1, -factor01 * v0 - factor11 * v1);
      }
    }
  }

  // R's zeros and signs, and its columns' own sizes; the lanes in which no element is beyond the largest number.
  Mask<A> finish_r() {
    const InterleavedMatrix<A> a = a_;
    const int64_t columns = call_.columns;
    Vector<A> not_finite{};
    for (int64_t i = 0; i < call_.r_rows; ++i) {
      const int64_t diagonal = std::min(i, columns);
      std::fill(a.at(i, 0), a.at(i, diagonal), A{0});
      const Vector<A> sign = diagonal < columns ? load_full(signs_ + i * kLanes<A>) : Vector<A>{};
      for (int64_t j = diagonal; j < columns; ++j) {
        a.set(i, j, a.get(i, j) * sign);
      }
      for (int64_t j = diagonal; is_scaled_ && j < columns; ++j) {
        const Vector<A> element = a.get(i, j) * load_full(unscales_ + j * kLanes<A>);
        not_finite += element * A{0};
        a.set(i, j, element);
      }
    }
    return equal(not_finite, Vector<A>{});
  }

  const QrForward& call_;
  int64_t rank_;
  Scratch<A> scratch_;
  InterleavedMatrix<A> a_;
  InterleavedMatrix<A> q_;
  A* taus_;
  A* signs_;
  A* overlaps_;  // of the pairs
  A* unscales_;  // of the columns, where any is scaled
  bool is_scaled_ = false;
  Prefetcher prefetcher_;
};

}  // namespace overtone::OVERTONE_ISA
