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

// X[:, j] ← X[:, j] − τ (v · X[:, j]) v for kColumns columns, in the rows from `first` on; v is `first`'s column of
// `reflectors` below its one on the diagonal.
template <class A, int kColumns>
OVERTONE_INLINE void reflect_lanes(const LaneMatrix<A>& reflectors, int64_t first, int64_t rows, Vector<A> tau,
                                   const LaneMatrix<A>& x, int64_t column) {
  Vector<A> sums[kColumns];
  OVERTONE_UNROLL
  for (int j = 0; j < kColumns; ++j) {
    sums[j] = x.get(first, column + j);
  }
  for (int64_t i = first + 1; i < rows; ++i) {
    const Vector<A> v = reflectors.get(i, first);
    OVERTONE_UNROLL
    for (int j = 0; j < kColumns; ++j) {
      sums[j] += v * x.get(i, column + j);
    }
  }
  OVERTONE_UNROLL
  for (int j = 0; j < kColumns; ++j) {
    sums[j] *= tau;
    x.set(first, column + j, x.get(first, column + j) - sums[j]);
  }
  for (int64_t i = first + 1; i < rows; ++i) {
    const Vector<A> v = reflectors.get(i, first);
    OVERTONE_UNROLL
    for (int j = 0; j < kColumns; ++j) {
      x.set(i, column + j, x.get(i, column + j) - sums[j] * v);
    }
  }
}

template <class A>
void reflect_lanes(const LaneMatrix<A>& reflectors, int64_t first, int64_t rows, Vector<A> tau, const LaneMatrix<A>& x,
                   int64_t begin, int64_t end) {
  int64_t j = begin;
  for (; j + 8 <= end; j += 8) {
    reflect_lanes<A, 8>(reflectors, first, rows, tau, x, j);
  }
  for (; j + 4 <= end; j += 4) {
    reflect_lanes<A, 4>(reflectors, first, rows, tau, x, j);
  }
  for (; j + 2 <= end; j += 2) {
    reflect_lanes<A, 2>(reflectors, first, rows, tau, x, j);
  }
  for (; j < end; ++j) {
    reflect_lanes<A, 1>(reflectors, first, rows, tau, x, j);
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
      reflect_lanes<A>(a_, k, call_.rows, load_full(taus_ + k * kLanes<A>), a_, k + 1, call_.columns);
    }
    if (call_.q_columns > 0) {
      form_q();
      store_lanes(q_, call_.rows, call_.q_columns, count,
                  static_cast<A*>(call_.q) + first * call_.rows * call_.q_columns);
    }
    finish_r();
    store_lanes(a_, call_.r_rows, call_.columns, count, static_cast<A*>(call_.r) + first * call_.r_rows * call_.columns);
    for (int lane = 0; lane < count; ++lane) {
      call_.info[first + lane] = lane_of(solved, lane) ? 0 : 1;
      if (!lane_of(solved, lane)) {
        poison_results<A>(call_, first + lane);
      }
    }
  }

 private:
  // Scales matrices of an unusual size; which lanes are finite.
  Mask<A> normalize() {
    Vector<A> largest{};
    Vector<A> poison{};
    for (int64_t i = 0; i < call_.rows; ++i) {
      for (int64_t j = 0; j < call_.columns; ++j) {
        const Vector<A> v = a_.get(i, j);
        largest = larger<A>(absolute<A>(v), largest);
        poison += v * A{0};
      }
    }
    const Vector<A> one = broadcast(A{1});
    const Mask<A> usual =
        less_equal(broadcast(kSmallSize<A>), largest) & less_equal(largest, broadcast(1 / kSmallSize<A>));
    const Vector<A> scale = select(usual, one, inverse_power_of_two<A>(largest));
    unscale_ = one / scale;
    if (!all(usual)) {
      for (int64_t i = 0; i < call_.rows; ++i) {
        for (int64_t j = 0; j < call_.columns; ++j) {
          a_.set(i, j, a_.get(i, j) * scale);
        }
      }
    }
    return equal(poison, Vector<A>{});
  }

  // The reflector I − τ v vᵀ that clears column k below the diagonal; v replaces the column.
  void make_reflector(int64_t k) {
    Vector<A> largest{};
    for (int64_t i = k; i < call_.rows; ++i) {
      largest = larger<A>(absolute<A>(a_.get(i, k)), largest);
    }
    // Every column is scaled by itself: its squares must neither overflow nor vanish.
    const Vector<A> scale = inverse_power_of_two<A>(largest);
    Vector<A> below{};
    for (int64_t i = k + 1; i < call_.rows; ++i) {
      const Vector<A> part = a_.get(i, k) * scale;
      below += part * part;
    }
    const Vector<A> head = a_.get(k, k) * scale;
    const Vector<A> norm = square_root(head * head + below);
    const Mask<A> is_clear = equal(below, Vector<A>{});
    const Vector<A> diagonal = select(is_clear, head, with_sign_of<A>(norm, -head));
    const Vector<A> factor = select(is_clear, Vector<A>{}, scale / (head - diagonal));
    for (int64_t i = k + 1; i < call_.rows; ++i) {
      a_.set(i, k, a_.get(i, k) * factor);
    }
    store_full(select(is_clear, Vector<A>{}, (diagonal - head) / diagonal), taus_ + k * kLanes<A>);
    a_.set(k, k, diagonal / scale);
    store_full(with_sign_of<A>(broadcast(A{1}), diagonal), signs_ + k * kLanes<A>);
  }

  void form_q() {
    for (int64_t i = 0; i < call_.rows; ++i) {
      for (int64_t j = 0; j < call_.q_columns; ++j) {
        q_.set(i, j, i == j ? broadcast(A{1}) : Vector<A>{});
      }
    }
    for (int64_t k = rank_ - 1; k >= 0; --k) {
      reflect_lanes<A>(a_, k, call_.rows, load_full(taus_ + k * kLanes<A>), q_, k, call_.q_columns);
    }
    for (int64_t i = 0; i < call_.rows; ++i) {
      for (int64_t j = 0; j < rank_; ++j) {
        q_.set(i, j, q_.get(i, j) * load_full(signs_ + j * kLanes<A>));
      }
    }
  }

  void finish_r() {
    for (int64_t i = 0; i < call_.r_rows; ++i) {
      const int64_t diagonal = std::min(i, call_.columns);
      for (int64_t j = 0; j < diagonal; ++j) {
        a_.set(i, j, Vector<A>{});
      }
      for (int64_t j = diagonal; j < call_.columns; ++j) {
        a_.set(i, j, a_.get(i, j) * (load_full(signs_ + i * kLanes<A>) * unscale_));
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
