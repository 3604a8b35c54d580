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
constexpr A kSmallSize = A{0x1p-10};

// Of two magnitudes the larger; infinity is larger than any number, and NaN than infinity. (As integers: comparisons of
// numbers would lose the NaN.)
template <class A>
OVERTONE_INLINE Vector<A> larger_magnitude(Vector<A> v, std::type_identity_t<Vector<A>> largest) {
  typedef typename VectorOf<Bits<A>>::type IntegerVector;
  const IntegerVector magnitude = (IntegerVector)absolute<A>(v);
  return (Vector<A>)(magnitude > (IntegerVector)largest ? magnitude : (IntegerVector)largest);
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
    Vector<A> largest_lanes{};
    for (int64_t i = 0; i < columns_ * ld_; i += kLanes<A>) {
      largest_lanes = larger_magnitude<A>(load_full(x_ + i), largest_lanes);
    }
    A largest = 0;
    for (int lane = 0; lane < kLanes<A>; ++lane) {
      if (!(largest_lanes[lane] <= std::numeric_limits<A>::max())) {
        return false;
      }
      largest = std::max<A>(largest, largest_lanes[lane]);
    }
    const bool is_usual = largest >= kSmallSize<A> && largest <= 1 / kSmallSize<A>;
    const A scale = is_usual ? A{1} : inverse_power_of_two<A>(broadcast(largest))[0];
    unscale_ = 1 / scale;
    for (int64_t i = 0; !is_usual && i < columns_ * ld_; i += kLanes<A>) {
      store_full(load_full(x_ + i) * scale, x_ + i);
    }
    return true;
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
    store_transposed(x_, ld_, columns_, r_rows, r, columns_,
                     [&](int64_t, int64_t i, Vector<A> v) { return v * (load_full(signs_ + i) * unscale_); });
  }

  // Q's first columns, contiguous. R is lost.
  void store_q(A* q) {
    std::fill(x_, x_ + q_columns_ * ld_, A{0});
    for (int64_t j = 0; j < q_columns_; ++j) {
      x_[j * ld_ + j] = signs_[j];
    }
    for (int64_t first = (panels_ - 1) * kPanel; first >= 0; first -= kPanel) {
      pack_columns(buffer_rows<A>(v_, first * ld_ + first, ld_), kPanel, rows_ - first, A{1}, v_rows_, kPanel);
      transpose_factor(first, /*transposed=*/true);
      reflect(first, x_ + first * ld_, q_columns_ - first);
    }
    store_transposed(x_, ld_, q_columns_, rows_, q, q_columns_, [](int64_t, int64_t, Vector<A> v) { return v; });
  }

 private:
  static constexpr int kPanelVectors = static_cast<int>(kPanel / kLanes<A>);

  // Reduces the panel's columns one by one, as rows of kPanel elements: then the dot products of a column with all the
  // others need no sum over lanes, and one of them is its norm. Column c of p keeps the multiple 1 / inverses_[c] of
  // its reflector until all are done.
  void factor_panel(int64_t first, int64_t width) {
    const int64_t rows = rows_ - first;
    A* p = v_rows_;
    pack_columns(buffer_rows<A>(x_, first * ld_ + first, ld_), width, rows, A{1}, p, kPanel);
    std::fill(taus_, taus_ + kPanel, A{0});
    std::fill(inverses_, inverses_ + kPanel, A{0});
    dot_column(p, 0, rows);
    for (int64_t c = 0; c < width; ++c) {
      make_reflector(p, c, rows);
      signs_[first + c] = p[c * kPanel + c] < 0 ? A{-1} : A{1};
      if (c + 1 < width) {
        apply_reflector(p, c, rows);
      }
    }
    store_panel(first, width);
  }

  // dots_[j] = Σ p[i][c] p[i][j] over the rows below c, each of which is prepared just before it is read. Two sums are
  // under way at a time.
  template <class Prepare>
  OVERTONE_INLINE void dot_column(A* p, int64_t c, int64_t rows, const Prepare& prepare) {
    Vector<A> sums[2][kPanelVectors] = {};
    int64_t i = c + 1;
    for (; i + 2 <= rows; i += 2) {
      prepare(p + i * kPanel);
      prepare(p + (i + 1) * kPanel);
      OVERTONE_UNROLL
      for (int v = 0; v < kPanelVectors; ++v) {
        sums[0][v] += p[i * kPanel + c] * load_full(p + i * kPanel + v * kLanes<A>);
        sums[1][v] += p[(i + 1) * kPanel + c] * load_full(p + (i + 1) * kPanel + v * kLanes<A>);
      }
    }
    if (i < rows) {
      prepare(p + i * kPanel);
      for (int v = 0; v < kPanelVectors; ++v) {
        sums[0][v] += p[i * kPanel + c] * load_full(p + i * kPanel + v * kLanes<A>);
      }
    }
    OVERTONE_UNROLL
    for (int v = 0; v < kPanelVectors; ++v) {
      store_full(sums[0][v] + sums[1][v], dots_ + v * kLanes<A>);
    }
  }

  void dot_column(A* p, int64_t c, int64_t rows) {
    dot_column(p, c, rows, [](A*) {});
  }

  // The reflector I − τ v vᵀ, v = (1, inverse · what is below), that clears column c below its diagonal.
  void make_reflector(A* p, int64_t c, int64_t rows) {
    A& diagonal = p[c * kPanel + c];
    // The column is scaled by itself: its squares must neither overflow nor vanish, however small it is beside others.
    constexpr A kSmallSquare = kSmallSize<A> * kSmallSize<A>;
    const A total = diagonal * diagonal + dots_[c];
    A scale = 1;
    if (!(total >= kSmallSquare && total <= 1 / kSmallSquare)) {
      A largest = 0;
      for (int64_t i = c; i < rows; ++i) {
        largest = std::max(largest, std::abs(p[i * kPanel + c]));
      }
      scale = inverse_power_of_two<A>(broadcast(largest))[0];
      for (int64_t i = c; i < rows; ++i) {
        p[i * kPanel + c] *= scale;
      }
      dot_column(p, c, rows);
    }
    const A head = diagonal;
    const A below = dots_[c];
    if (below > 0) {
      const A norm = std::sqrt(head * head + below);
      diagonal = head < 0 ? norm : -norm;
      inverses_[c] = 1 / (head - diagonal);
      taus_[c] = (diagonal - head) / diagonal;
    }
    diagonal /= scale;
  }

  // Column c's reflector meets the columns right of it, and dots_ becomes that of column c + 1.
  void apply_reflector(A* p, int64_t c, int64_t rows) {
    A factors[kPanel] = {};
    for (int64_t j = c + 1; j < kPanel; ++j) {
      const A factor = taus_[c] * (p[c * kPanel + j] + inverses_[c] * dots_[j]);
      p[c * kPanel + j] -= factor;
      factors[j] = inverses_[c] * factor;
    }
    Vector<A> factor[kPanelVectors];
    OVERTONE_UNROLL
    for (int v = 0; v < kPanelVectors; ++v) {
      factor[v] = load_full(factors + v * kLanes<A>);
    }
    const auto update = [&](A* row) {
      const A left = row[c];
      OVERTONE_UNROLL
      for (int v = 0; v < kPanelVectors; ++v) {
        store_full(load_full(row + v * kLanes<A>) - left * factor[v], row + v * kLanes<A>);
      }
    };
    if (c + 1 < rows) {
      update(p + (c + 1) * kPanel);
    }
    dot_column(p, c + 1, rows, update);
  }

  // R's part of the panel back to x, zeros below it; the reflectors, with their zeros and ones, to both their layouts.
  void store_panel(int64_t first, int64_t width) {
    const int64_t rows = rows_ - first;
    A* p = v_rows_;
    for (int64_t j = 0; j < width; ++j) {
      A* x = x_ + (first + j) * ld_ + first;
      for (int64_t i = 0; i <= j; ++i) {
        x[i] = p[i * kPanel + j];
        p[i * kPanel + j] = i == j ? A{1} : A{0};
      }
      std::fill(x + j + 1, x + rows, A{0});
    }
    for (int64_t i = 0; i < rows; ++i) {
      for (int v = 0; i >= kPanel && v < kPanelVectors; ++v) {
        A* part = p + i * kPanel + v * kLanes<A>;
        store_full(load_full(part) * load_full(inverses_ + v * kLanes<A>), part);
      }
      for (int64_t j = 0; i < kPanel && j < i; ++j) {
        p[i * kPanel + j] *= inverses_[j];
      }
    }
    std::fill(v_ + first * ld_, v_ + (first + kPanel) * ld_, A{0});
    store_transposed(p, kPanel, rows, kPanel, v_ + first * ld_ + first, ld_,
                     [](int64_t, int64_t, Vector<A> v) { return v; });
  }

  // T of the panel: the product of its reflectors is I − V T Vᵀ, T upper triangular.
  void gather_panel(int64_t first) {
    const A* v = v_ + first * ld_ + first;
    gemm<A, Operand::rows>(
        kPanel, kPanelVectors, rows_ - first, v, ld_, v_rows_, kPanel,
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
    for (int64_t begin = 0; begin < count; begin += kReflectRows) {
      const int64_t strip = std::min(kReflectRows, count - begin);
      A* rows = x + begin * ld_ + first;
      gemm<A, Operand::rows>(
          strip, kPanelVectors, size, rows, ld_, v_rows_, kPanel,
          [&](int64_t row, int v, Vector<A> sum) { store_full(sum, w_ + row * kPanel + v * kLanes<A>); });
      gemm<A, Operand::rows>(
          strip, kPanelVectors, kPanel, w_, kPanel, factor_, kPanel,
          [&](int64_t row, int v, Vector<A> sum) { store_full(sum, wt_ + row * kPanel + v * kLanes<A>); });
      gemm<A, Operand::rows>(strip, vectors, kPanel, wt_, kPanel, v_ + first * ld_ + first, ld_,
                             [&](int64_t row, int v, Vector<A> sum) {
                               A* out = rows + row * ld_ + v * kLanes<A>;
                               store_full(load_full(out) - sum, out);
                             });
    }
  }

  int64_t rows_, columns_, q_columns_, rank_, ld_, panels_;
  Scratch<A> scratch_;
  A* x_;       // [columns][ld]: the matrix transposed, then R transposed, then Q transposed
  A* v_;       // [panels · kPanel][ld]: the reflectors
  A* v_rows_;  // [rows][kPanel]: those of the panel at hand, transposed; while it is factored, the panel itself
  A* t_;       // [panels][kPanel][kPanel]
  A* w_;
  A* wt_;
  A* factor_;  // T of the panel at hand, or its transpose
  A* gram_;    // VᵀV of the panel at hand
  A* signs_;   // of R's diagonal as the reflectors leave it
  A taus_[kPanel];
  A inverses_[kPanel];
  A dots_[kPanel];
  A unscale_ = 1;
};

}  // namespace overtone::OVERTONE_LEVEL
