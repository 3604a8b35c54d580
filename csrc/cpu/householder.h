// Blocked Householder QR of one matrix, on its transpose: a column of the matrix is a row in memory.
//
// A panel of kPanel columns is reduced column by column; its reflectors, gathered as I − V T Vᵀ, then meet all other
// columns in three products. Q is built from the identity by the same products, last panel first.
#pragma once

#include "cpu/product.h"

namespace overtone::OVERTONE_LEVEL {

constexpr int64_t kPanel = 32;
constexpr int64_t kReflectRows = 48;  // columns of the matrix that meet a panel at a time: they stay in the L2 cache

// A power of two p with p · largest in [1, 4), so that scaling by it is exact. (On the exponents' bits; zero and
// subnormal numbers get the largest p there is.)
template <class A>
OVERTONE_INLINE Vector<A> inverse_power_of_two(Vector<A> largest) {
  typedef typename VectorOf<Bits<A>>::type IntegerVector;
  constexpr int kMantissa = std::numeric_limits<A>::digits - 1;
  constexpr Bits<A> kHighest = 2 * std::numeric_limits<A>::max_exponent - 2;  // 254, 2046
  const IntegerVector exponent = (IntegerVector)absolute<A>(largest) >> kMantissa;
  const IntegerVector inverse = kHighest - exponent;
  return (Vector<A>)((inverse > 1 ? inverse : IntegerVector{} + 1) << kMantissa);
}

// Matrices whose largest element is below this, or above its inverse, are scaled before they are factored.
template <class A>
constexpr A kSmallSize = std::is_same_v<A, double> ? A{0x1p-400} : A{0x1p-40};

// The largest magnitude of a row of whole vectors.
template <class A>
OVERTONE_INLINE A largest_magnitude(const A* x, int64_t size) {
  Vector<A> largest{};
  for (int64_t i = 0; i < size; i += kLanes<A>) {
    largest = larger<A>(absolute<A>(load_full(x + i)), largest);
  }
  return largest_lane<A>(largest);
}

// x_j ← x_j − τ (v · x_j) v for kColumns rows x_j, `ld` apart. Side by side, so that v is read once for all of them and
// as many sums are under way as the arithmetic units take.
template <class A, int kColumns>
OVERTONE_INLINE void reflect_rows(const A* v, A tau, A* x, int64_t ld, int64_t size) {
  Vector<A> sums[kColumns] = {};
  for (int64_t i = 0; i < size; i += kLanes<A>) {
    const Vector<A> v_part = load_full(v + i);
    OVERTONE_UNROLL
    for (int j = 0; j < kColumns; ++j) {
      sums[j] += v_part * load_full(x + j * ld + i);
    }
  }
  Vector<A> factors[kColumns];
  OVERTONE_UNROLL
  for (int j = 0; j < kColumns; ++j) {
    factors[j] = broadcast<A>(tau * sum_of_lanes<A>(sums[j]));
  }
  for (int64_t i = 0; i < size; i += kLanes<A>) {
    const Vector<A> v_part = load_full(v + i);
    OVERTONE_UNROLL
    for (int j = 0; j < kColumns; ++j) {
      store_full(load_full(x + j * ld + i) - factors[j] * v_part, x + j * ld + i);
    }
  }
}

template <class A>
class Householder {
 public:
  // `q_columns` columns of Q can be formed: at most `rows`.
  Householder(int64_t rows, int64_t columns, int64_t q_columns)
      : rows_(rows),
        columns_(columns),
        q_columns_(q_columns),
        rank_(std::min(rows, columns)),
        ld_(padded_stride<A>(rows)),
        panels_((rank_ + kPanel - 1) / kPanel),
        scratch_(Scratch<A>::padded(std::max(columns, q_columns) * ld_) + Scratch<A>::padded(panels_ * kPanel * ld_) +
                 Scratch<A>::padded(ld_ * kPanel) + Scratch<A>::padded(panels_ * kPanel * kPanel) +
                 2 * Scratch<A>::padded(kReflectRows * kPanel) + 2 * Scratch<A>::padded(kPanel * kPanel) +
                 Scratch<A>::padded(ld_)),
        x_(scratch_.take(std::max(columns, q_columns) * ld_)),
        v_(scratch_.take(panels_ * kPanel * ld_)),
        v_rows_(scratch_.take(ld_ * kPanel)),
        t_(scratch_.take(panels_ * kPanel * kPanel)),
        w_(scratch_.take(kReflectRows * kPanel)),
        wt_(scratch_.take(kReflectRows * kPanel)),
        factor_(scratch_.take(kPanel * kPanel)),
        gram_(scratch_.take(kPanel * kPanel)),
        signs_(scratch_.take(ld_)) {}

  // Takes a matrix; false if it is not finite.
  bool load(const MatrixRows& a) {
    pack_block(transposed(a), 0, 0, columns_, rows_, x_, ld_);
    std::fill(signs_, signs_ + ld_, A{1});
    A largest = 0;
    Vector<A> poison{};  // x · 0 is not zero for infinities and NaN, which comparisons would skip
    for (int64_t j = 0; j < columns_; ++j) {
      largest = std::max(largest, largest_magnitude(x_ + j * ld_, ld_));
      for (int64_t i = 0; i < ld_; i += kLanes<A>) {
        poison += load_full(x_ + j * ld_ + i) * A{0};
      }
    }
    // Matrices of a usual size stay as they are: scaling them would change nothing.
    const bool is_usual = largest >= kSmallSize<A> && largest <= 1 / kSmallSize<A>;
    const A scale = is_usual ? A{1} : inverse_power_of_two<A>(broadcast(largest))[0];
    unscale_ = 1 / scale;
    for (int64_t j = 0; !is_usual && j < columns_; ++j) {
      for (int64_t i = 0; i < ld_; i += kLanes<A>) {
        store_full(load_full(x_ + j * ld_ + i) * scale, x_ + j * ld_ + i);
      }
    }
    return sum_of_lanes<A>(poison) == 0;
  }

  void factor() {
    for (int64_t first = 0; first < rank_; first += kPanel) {
      const int64_t width = std::min(kPanel, rank_ - first);
      factor_panel(first, width);
      gather_panel(first);
      transpose_factor(first, /*transposed=*/false);
      reflect(first, x_ + (first + width) * ld_, columns_ - first - width);
    }
  }

  // R's first `r_rows` rows.
  void store_r(int64_t r_rows, A* r) const {
    store_transposed(x_, ld_, columns_, r_rows, r, columns_, [&](int64_t j, int64_t i, Vector<A> v) {
      v *= load_full(signs_ + i) * unscale_;
      if (j >= i + kLanes<A> - 1) {
        return v;
      }
      A lanes[kLanes<A>] = {};  // zero below the diagonal
      for (int lane = 0; lane <= j - i; ++lane) {
        lanes[lane] = v[lane];
      }
      return load_full(lanes);
    });
  }

  // Q's first columns, contiguous. R is lost.
  void store_q(A* q) {
    std::fill(x_, x_ + q_columns_ * ld_, A{0});
    for (int64_t j = 0; j < q_columns_; ++j) {
      x_[j * ld_ + j] = 1;
    }
    for (int64_t first = (panels_ - 1) * kPanel; first >= 0; first -= kPanel) {
      pack_columns(buffer_rows<A>(v_, first * ld_ + first, ld_), kPanel, rows_ - first, v_rows_, kPanel);
      transpose_factor(first, /*transposed=*/true);
      reflect(first, x_ + first * ld_, q_columns_ - first);
    }
    store_transposed(x_, ld_, q_columns_, rows_, q, q_columns_,
                     [&](int64_t j, int64_t, Vector<A> v) { return v * signs_[j]; });
  }

 private:
  // Reduces the panel's columns one by one. Every reflector is kept whole, with its zeros and its one.
  void factor_panel(int64_t first, int64_t width) {
    const int64_t size = padded_to(rows_ - first, kLanes<A>);
    std::fill(v_ + first * ld_, v_ + (first + kPanel) * ld_, A{0});
    for (int64_t c = 0; c < width; ++c) {
      const int64_t column = first + c;
      const A tau = make_reflector(first, column, size);
      taus_[c] = tau;
      if (tau != 0) {
        reflect_each(v_ + column * ld_ + first, tau, x_ + (column + 1) * ld_ + first, width - c - 1, size);
      }
    }
    std::fill(taus_ + width, taus_ + kPanel, A{0});
  }

  // The reflector I − τ v vᵀ that clears the column below its diagonal; τ.
  A make_reflector(int64_t first, int64_t column, int64_t size) {
    A* x = x_ + column * ld_;
    A* v = v_ + column * ld_;
    std::copy(x + column, x + rows_, v + column);
    // The column is scaled by itself: its squares must neither overflow nor vanish, however small it is beside others.
    const A scale = inverse_power_of_two<A>(broadcast(largest_magnitude(v + first, size)))[0];
    const A head = v[column] * scale;
    v[column] = 0;
    Vector<A> squares{};
    for (int64_t i = first; i < first + size; i += kLanes<A>) {
      const Vector<A> part = load_full(v + i) * scale;
      squares += part * part;
    }
    const A below = sum_of_lanes<A>(squares);
    v[column] = 1;
    if (below == 0) {
      std::fill(v + column + 1, v + rows_, A{0});
      signs_[column] = x[column] < 0 ? A{-1} : A{1};
      return 0;
    }
    const A norm = std::sqrt(head * head + below);
    const A diagonal = head < 0 ? norm : -norm;
    const A inverse = 1 / (head - diagonal);
    for (int64_t i = first; i < first + size; i += kLanes<A>) {
      store_full(load_full(v + i) * scale * inverse, v + i);
    }
    v[column] = 1;
    x[column] = diagonal / scale;
    signs_[column] = diagonal < 0 ? A{-1} : A{1};
    return (diagonal - head) / diagonal;
  }

  void reflect_each(const A* v, A tau, A* x, int64_t count, int64_t size) const {
    int64_t j = 0;
    for (; j + 8 <= count; j += 8) {
      reflect_rows<A, 8>(v, tau, x + j * ld_, ld_, size);
    }
    for (; j + 4 <= count; j += 4) {
      reflect_rows<A, 4>(v, tau, x + j * ld_, ld_, size);
    }
    for (; j < count; ++j) {
      reflect_rows<A, 1>(v, tau, x + j * ld_, ld_, size);
    }
  }

  // T of the panel: the product of its reflectors is I − V T Vᵀ, T upper triangular.
  void gather_panel(int64_t first) {
    const A* v = v_ + first * ld_ + first;
    pack_columns(buffer_rows<A>(v, 0, ld_), kPanel, rows_ - first, v_rows_, kPanel);
    gemm<A, Operand::rows, Layout::row_major, Finishing::in_registers>(
        kPanel, kPanel / kLanes<A>, rows_ - first, v, ld_, v_rows_, kPanel,
        [&](int64_t row, int k, Vector<A> sum) { store_full(sum, gram_ + row * kPanel + k * kLanes<A>); });
    A* t = t_ + first * kPanel;
    std::fill(t, t + kPanel * kPanel, A{0});
    for (int64_t c = 0; c < kPanel; ++c) {
      for (int64_t i = 0; i < c; ++i) {
        A sum = 0;
        for (int64_t k = i; k < c; ++k) {
          sum += t[i * kPanel + k] * gram_[k * kPanel + c];
        }
        t[i * kPanel + c] = -taus_[c] * sum;
      }
      t[c * kPanel + c] = taus_[c];
    }
  }

  void transpose_factor(int64_t first, bool transposed) {
    const A* t = t_ + first * kPanel;
    for (int64_t i = 0; i < kPanel; ++i) {
      for (int64_t j = 0; j < kPanel; ++j) {
        factor_[i * kPanel + j] = transposed ? t[j * kPanel + i] : t[i * kPanel + j];
      }
    }
  }

  // x ← x − (x V) F Vᵀ for `count` rows of x.
  void reflect(int64_t first, A* x, int64_t count) {
    const int64_t size = rows_ - first;
    const int vectors = static_cast<int>(padded_to(size, kLanes<A>) / kLanes<A>);
    constexpr int kPanelVectors = static_cast<int>(kPanel / kLanes<A>);
    for (int64_t begin = 0; begin < count; begin += kReflectRows) {
      const int64_t strip = std::min(kReflectRows, count - begin);
      A* rows = x + begin * ld_ + first;
      gemm<A, Operand::rows, Layout::row_major, Finishing::in_registers>(
          strip, kPanelVectors, size, rows, ld_, v_rows_, kPanel,
          [&](int64_t row, int v, Vector<A> sum) { store_full(sum, w_ + row * kPanel + v * kLanes<A>); });
      gemm<A, Operand::rows, Layout::row_major, Finishing::in_registers>(
          strip, kPanelVectors, kPanel, w_, kPanel, factor_, kPanel,
          [&](int64_t row, int v, Vector<A> sum) { store_full(sum, wt_ + row * kPanel + v * kLanes<A>); });
      gemm<A, Operand::rows, Layout::row_major, Finishing::in_registers>(
          strip, vectors, kPanel, wt_, kPanel, v_ + first * ld_ + first, ld_, [&](int64_t row, int v, Vector<A> sum) {
            A* out = rows + row * ld_ + v * kLanes<A>;
            store_full(load_full(out) - sum, out);
          });
    }
  }

  int64_t rows_, columns_, q_columns_, rank_, ld_, panels_;
  Scratch<A> scratch_;
  A* x_;       // [columns][ld]: the matrix transposed, then R transposed, then Q transposed
  A* v_;       // [panels · kPanel][ld]: the reflectors
  A* v_rows_;  // [rows][kPanel]: those of the panel at hand, transposed
  A* t_;       // [panels][kPanel][kPanel]
  A* w_;
  A* wt_;
  A* factor_;  // T of the panel at hand, or its transpose
  A* gram_;    // VᵀV of the panel at hand
  A* signs_;   // of R's diagonal as the reflectors leave it
  A taus_[kPanel];
  A unscale_ = 1;
};

}  // namespace overtone::OVERTONE_LEVEL
