// Householder QR of small matrices, one per SIMD lane, in lock-step.
#pragma once

#include "cpu/householder.h"
#include "cpu/interleave.h"
#include "cpu/qr.h"

namespace overtone::OVERTONE_LEVEL {

// A matrix that has no decomposition has NaN for one.
template <class A>
void poison_results(const QrForward& call, int64_t member) {
  constexpr A kNaN = std::numeric_limits<A>::quiet_NaN();
  A* q = static_cast<A*>(call.q) + member * call.rows * call.q_columns;
  A* r = static_cast<A*>(call.r) + member * call.r_rows * call.columns;
  std::fill(q, q + call.rows * call.q_columns, kNaN);
  std::fill(r, r + call.r_rows * call.columns, kNaN);
}

// x_j ← x_j − τ (v · x_j) v for kColumns neighbouring columns x_j, all of `rows` rows; v's first element is 1 and not
// read. Pointers and strides are locals: a member would be read again after every store.
template <class A, int kColumns>
OVERTONE_INLINE void reflect_lanes(const A* v, int64_t v_stride, A* x, int64_t x_stride, int64_t rows, Vector<A> tau) {
  Vector<A> sums[kColumns];
  OVERTONE_UNROLL
  for (int j = 0; j < kColumns; ++j) {
    sums[j] = load_full(x + j * kLanes<A>);
  }
  for (int64_t i = 1; i < rows; ++i) {
    const Vector<A> v_part = load_full(v + i * v_stride);
    OVERTONE_UNROLL
    for (int j = 0; j < kColumns; ++j) {
      sums[j] += v_part * load_full(x + i * x_stride + j * kLanes<A>);
    }
  }
  OVERTONE_UNROLL
  for (int j = 0; j < kColumns; ++j) {
    sums[j] *= tau;
    store_full(load_full(x + j * kLanes<A>) - sums[j], x + j * kLanes<A>);
  }
  for (int64_t i = 1; i < rows; ++i) {
    const Vector<A> v_part = load_full(v + i * v_stride);
    A* out = x + i * x_stride;
    OVERTONE_UNROLL
    for (int j = 0; j < kColumns; ++j) {
      store_full(load_full(out + j * kLanes<A>) - sums[j] * v_part, out + j * kLanes<A>);
    }
  }
}

// The same for `columns` columns.
template <class A>
void reflect_lanes(const A* v, int64_t v_stride, A* x, int64_t x_stride, int64_t rows, int64_t columns, Vector<A> tau) {
  for (; columns >= 8; columns -= 8, x += 8 * kLanes<A>) {
    reflect_lanes<A, 8>(v, v_stride, x, x_stride, rows, tau);
  }
  for (; columns >= 4; columns -= 4, x += 4 * kLanes<A>) {
    reflect_lanes<A, 4>(v, v_stride, x, x_stride, rows, tau);
  }
  for (; columns >= 2; columns -= 2, x += 2 * kLanes<A>) {
    reflect_lanes<A, 2>(v, v_stride, x, x_stride, rows, tau);
  }
  if (columns == 1) {
    reflect_lanes<A, 1>(v, v_stride, x, x_stride, rows, tau);
  }
}

template <class A>
class LaneQr {
 public:
  explicit LaneQr(const QrForward& call)
      : call_(call),
        rank_(std::min(call.rows, call.columns)),
        scratch_(Scratch<A>::padded(LaneMatrix<A>::size(call.rows, call.columns)) +
                 Scratch<A>::padded(LaneMatrix<A>::size(call.rows, call.q_columns)) +
                 2 * Scratch<A>::padded(call.rows * kLanes<A>)),
        a_(scratch_.take(LaneMatrix<A>::size(call.rows, call.columns)), call.columns),
        q_(scratch_.take(LaneMatrix<A>::size(call.rows, call.q_columns)), call.q_columns),
        taus_(scratch_.take(call.rows * kLanes<A>)),
        signs_(scratch_.take(call.rows * kLanes<A>)) {}

  // Matrices [first, first + kLanes) of the batch.
  void run(int64_t first) {
    const int count = static_cast<int>(std::min<int64_t>(kLanes<A>, call_.a.count - first));
    load_lanes(call_.a, first, call_.rows, call_.columns, a_);
    const Mask<A> solved = normalize();
    for (int64_t k = 0; k < rank_; ++k) {
      make_reflector(k);
      reflect(k, a_, k + 1, call_.columns);
    }
    if (call_.q_columns > 0) {
      form_q();
      store_lanes(q_, call_.rows, call_.q_columns, count,
                  static_cast<A*>(call_.q) + first * call_.rows * call_.q_columns);
    }
    finish_r();
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
  // Scales matrices of an unusual size; which lanes are finite. (Here and below a local copy of a member: the member
  // would be read again after every store.)
  Mask<A> normalize() {
    const LaneMatrix<A> a = a_;
    const int64_t rows = call_.rows;
    const int64_t columns = call_.columns;
    Vector<A> largest{};
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < columns; ++j) {
        largest = larger_magnitude<A>(a.get(i, j), largest);
      }
    }
    const Vector<A> one = broadcast(A{1});
    const Mask<A> usual =
        less_equal(broadcast(kSmallSize<A>), largest) & less_equal(largest, broadcast(1 / kSmallSize<A>));
    const Vector<A> scale = select(usual, one, inverse_power_of_two<A>(largest));
    unscale_ = one / scale;
    if (!all(usual)) {
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t j = 0; j < columns; ++j) {
          a.set(i, j, a.get(i, j) * scale);
        }
      }
    }
    return less_equal(largest, broadcast(std::numeric_limits<A>::max()));
  }

  // Of scale times column k: its diagonal element, the squares below it, and the norm of both.
  struct Column {
    Vector<A> head, below, norm;
  };

  // Not inlined: neighbours decide whether a lane is measured once or twice, and the compiler must not round the two
  // differently (a product and a sum may become one operation or stay two).
  __attribute__((noinline)) void measure(int64_t k, const Vector<A>& scale, Column& column) const {
    const LaneMatrix<A> a = a_;
    const Vector<A> factor = scale;
    const Vector<A> head = a.get(k, k) * factor;
    Vector<A> below{};
    for (int64_t i = k + 1; i < call_.rows; ++i) {
      const Vector<A> part = a.get(i, k) * factor;
      below += part * part;
    }
    column = {head, below, square_root(head * head + below)};
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
    const LaneMatrix<A> a = a_;
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
    const Vector<A> diagonal = select(is_clear, head, with_sign_of<A>(norm, -head));
    const Vector<A> inverse = select(is_clear, Vector<A>{}, one / (head - diagonal));
    for (int64_t i = k + 1; i < rows; ++i) {
      a.set(i, k, a.get(i, k) * scale * inverse);  // one after the other: scale · inverse may overflow
    }
    store_full(select(is_clear, Vector<A>{}, (diagonal - head) / diagonal), taus_ + k * kLanes<A>);
    a.set(k, k, diagonal / scale);
    store_full(with_sign_of<A>(one, diagonal), signs_ + k * kLanes<A>);
  }

  // Column k's reflector meets the columns [begin, end) of x.
  void reflect(int64_t k, const LaneMatrix<A>& x, int64_t begin, int64_t end) {
    reflect_lanes<A>(a_.at(k, k), a_.row_stride, x.at(k, begin), x.row_stride, call_.rows - k, end - begin,
                     load_full(taus_ + k * kLanes<A>));
  }

  // From the identity, its signs such that R's diagonal becomes positive.
  void form_q() {
    std::fill(q_.data, q_.data + LaneMatrix<A>::size(call_.rows, call_.q_columns), A{0});
    for (int64_t j = 0; j < call_.q_columns; ++j) {
      q_.set(j, j, j < rank_ ? load_full(signs_ + j * kLanes<A>) : broadcast(A{1}));
    }
    for (int64_t k = rank_ - 1; k >= 0; --k) {
      reflect(k, q_, k, call_.q_columns);
    }
  }

  void finish_r() {
    const LaneMatrix<A> a = a_;
    const int64_t columns = call_.columns;
    for (int64_t i = 0; i < call_.r_rows; ++i) {
      const int64_t diagonal = std::min(i, columns);
      std::fill(a.at(i, 0), a.at(i, diagonal), A{0});
      const Vector<A> scale = diagonal < columns ? load_full(signs_ + i * kLanes<A>) * unscale_ : Vector<A>{};
      for (int64_t j = diagonal; j < columns; ++j) {
        a.set(i, j, a.get(i, j) * scale);
      }
    }
  }

  const QrForward& call_;
  int64_t rank_;
  Scratch<A> scratch_;
  LaneMatrix<A> a_;
  LaneMatrix<A> q_;
  A* taus_;
  A* signs_;
  Vector<A> unscale_;
};

}  // namespace overtone::OVERTONE_LEVEL
