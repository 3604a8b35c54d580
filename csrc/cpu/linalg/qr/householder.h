// Blocked Householder QR of one matrix, on its transpose: a column of the matrix is a row in memory.
//
// A panel of kPanel columns is reduced column by column; its reflectors, gathered as I − V T Vᵀ, then meet all other
// columns in two products, with V and with Y = V T. Q is built from the identity by the same products, last panel
// first.
#pragma once

#include "cpu/gemm/blocked.h"

namespace overtone::OVERTONE_ISA {

constexpr int64_t kPanel = 16;
constexpr int64_t kReflectRows = 48;  // columns of the matrix that meet a panel at a time: they stay in the L2 cache

// A power of two p with p · largest in [1, 4), so that scaling by it is exact. (On the exponents' bits; zero and
// subnormal numbers get the largest p there is.)
template <class A>
OVERTONE_INLINE Vector<A> inverse_power_of_two(Vector<A> largest) {
  typedef typename VectorOf<Bits<A>>::type IntegerVector;
  constexpr int kMantissa = std::numeric_limits<A>::digits - 1;
  constexpr Bits<A> kHighest = 2 * std::numeric_limits<A>::max_exponent - 2;  // 254, 2046
  const IntegerVector exponent = (IntegerVector)abs<A>(largest) >> kMantissa;
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
  const IntegerVector magnitude = (IntegerVector)abs<A>(v);
  return (Vector<A>)(magnitude > (IntegerVector)largest ? magnitude : (IntegerVector)largest);
}

// The number of running sums per column that a panel's dot products need to keep the arithmetic units busy.
template <class A>
constexpr int kDotChains = kPanel / kLanes<A> >= 4 ? 1 : 2;

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
        scratch_(Scratch<A>::padded(std::max(columns, q_columns) * ld_) +
                 2 * Scratch<A>::padded(panels_ * kPanel * ld_) + 2 * Scratch<A>::padded(kPanel * ld_) +
                 Scratch<A>::padded(kReflectRows * kPanel) + 2 * Scratch<A>::padded(kPanel * kPanel) +
                 Scratch<A>::padded(ld_) + Scratch<A>::padded(columns)),
        x_(scratch_.take(std::max(columns, q_columns) * ld_)),
        v_rows_(scratch_.take(panels_ * kPanel * ld_)),
        y_(scratch_.take(panels_ * kPanel * ld_)),
        v_(scratch_.take(kPanel * ld_)),
        y_rows_(scratch_.take(kPanel * ld_)),
        w_(scratch_.take(kReflectRows * kPanel)),
        t_(scratch_.take(kPanel * kPanel)),
        t_columns_(scratch_.take(kPanel * kPanel)),
        signs_(scratch_.take(ld_)),
        unscales_(scratch_.take(columns)) {}

  // Takes a matrix; false if it is not finite. Columns of an unusual size are scaled, each by its own power of two:
  // that scales the same column of R and leaves Q alone.
  bool load(const StridedMatrix& a) {
    pack_block(transposed(a), 0, 0, columns_, rows_, x_, ld_);
    std::fill(signs_, signs_ + ld_, A{1});
    is_scaled_ = false;
    for (int64_t j = 0; j < columns_; ++j) {
      const A largest = largest_of_column(j);
      if (!(largest <= std::numeric_limits<A>::max())) {
        return false;
      }
      const bool is_usual = largest == 0 || (largest >= kSmallSize<A> && largest <= 1 / kSmallSize<A>);
      const A scale = is_usual ? A{1} : inverse_power_of_two<A>(broadcast(largest))[0];
      unscales_[j] = 1 / scale;
      is_scaled_ = is_scaled_ || !is_usual;
      for (int64_t i = 0; !is_usual && i < ld_; i += kLanes<A>) {
        A* const part = x_ + j * ld_ + i;
        store_full(load_full(part) * scale, part);
      }
    }
    return true;
  }

  void factor() {
    for (int64_t first = 0; first < rank_; first += kPanel) {
      const int64_t width = std::min(kPanel, rank_ - first);
      const int64_t rest = columns_ - first - width;
      factor_panel(first, width);
      if (rest > 0 || q_columns_ > 0) {
        fold_factor(first);
      }
      reflect(first, x_ + (first + width) * ld_, rest, y_rows_, v_);
    }
  }

  // R's first `r_rows` rows; false if an element is beyond the largest number.
  bool store_r(int64_t r_rows, A* r) const {
    Vector<A> not_finite{};
    store_transposed(x_, ld_, columns_, r_rows, r, columns_, [&](int64_t j, int64_t i, Vector<A> v) {
      const Vector<A> part = v * (load_full(signs_ + i) * unscales_[j]);
      not_finite += is_scaled_ ? part * A{0} : Vector<A>{};
      return part;
    });
    return reduce_add<A>(not_finite) == 0;
  }

  // Q's first columns, contiguous. R is lost.
  void store_q(A* q) {
    std::fill(x_, x_ + q_columns_ * ld_, A{0});
    for (int64_t j = 0; j < q_columns_; ++j) {
      x_[j * ld_ + j] = signs_[j];
    }
    // A panel meets its own columns, still those of the identity, and the later ones, still zero in the panel's rows.
    for (int64_t first = (panels_ - 1) * kPanel; first >= 0; first -= kPanel) {
      const int64_t width = std::min(kPanel, q_columns_ - first);
      reflect_identity(first, width);
      reflect(first, x_ + (first + width) * ld_, q_columns_ - first - width, panel_rows(first), y_ + first * ld_,
              width);
    }
    store_transposed(x_, ld_, q_columns_, rows_, q, q_columns_, [](int64_t, int64_t, Vector<A> v) { return v; });
  }

 private:
  // NaN if there is one.
  A largest_of_column(int64_t j) const {
    Vector<A> lanes{};
    for (int64_t i = 0; i < ld_; i += kLanes<A>) {
      lanes = larger_magnitude<A>(load_full(x_ + j * ld_ + i), lanes);
    }
    return reduce_lanes<A>(
        lanes, [](Vector<A> a, Vector<A> b) { return larger_magnitude<A>(a, b); },
        std::make_index_sequence<size_t{kLanes<A>}>());
  }

  static constexpr int kPanelVectors = static_cast<int>(kPanel / kLanes<A>);

  // The reflectors of the panel that begins at column `first`, row by row; while it is factored, the panel itself.
  A* panel_rows(int64_t first) const { return v_rows_ + first * ld_; }

  // Reduces the panel's columns one by one, as rows of kPanel elements: then the dot products of a column with all the
  // others need no sum over lanes, and one of them is its norm. Column c of p keeps the multiple 1 / inverses_[c] of
  // its reflector until all are done.
  void factor_panel(int64_t first, int64_t width) {
    const int64_t rows = rows_ - first;
    A* p = panel_rows(first);
    pack_columns(buffer_rows<A>(x_, first * ld_ + first, ld_), width, rows, A{1}, p, kPanel);
    std::fill(taus_, taus_ + kPanel, A{0});
    std::fill(inverses_, inverses_ + kPanel, A{0});
    std::fill(t_columns_, t_columns_ + kPanel * kPanel, A{0});
    dot_column(p, 0, rows);
    for (int64_t c = 0; c < width; ++c) {
      make_reflector(p, c, rows);
      signs_[first + c] = p[c * kPanel + c] < 0 ? A{-1} : A{1};
      gather_reflector(p, c);
      if (c + 1 < width) {
        apply_reflector(p, c, rows);
      }
    }
    store_panel(first, width);
  }

  // dots_[j] = Σ p[i][c] p[i][j] over the rows below c. prepare(row, v, vector) changes the rows' vectors from
  // kFirst on just before they are read. Sums of more than kSumRows rows are sums of sums: a long running sum would
  // lose digits that LAPACK keeps.
  template <int kFirst, class Prepare>
  OVERTONE_INLINE void dot_column(A* p, int64_t c, int64_t rows, const Prepare& prepare) {
    constexpr int kChains = kDotChains<A>;
    Vector<A> totals[kPanelVectors] = {};
    for (int64_t begin = c + 1; begin < rows; begin += kSumRows) {
      const int64_t end = std::min(rows, begin + kSumRows);
      Vector<A> sums[kChains][kPanelVectors] = {};
      const auto add_row = [&](A* row, Vector<A>(&sum)[kPanelVectors]) {
        Vector<A> part[kPanelVectors];
        OVERTONE_UNROLL
        for (int v = 0; v < kPanelVectors; ++v) {
          part[v] = load_full(row + v * kLanes<A>);
        }
        prepare(row, part);
        const Vector<A> factor = broadcast(row[c]);
        OVERTONE_UNROLL
        for (int v = 0; v < kPanelVectors; ++v) {
          sum[v] += factor * part[v];
        }
      };
      int64_t i = begin;
      for (; i + kChains <= end; i += kChains) {
        OVERTONE_UNROLL
        for (int chain = 0; chain < kChains; ++chain) {
          add_row(p + (i + chain) * kPanel, sums[chain]);
        }
      }
      for (; i < end; ++i) {
        add_row(p + i * kPanel, sums[0]);
      }
      OVERTONE_UNROLL
      for (int v = 0; v < kPanelVectors; ++v) {
        totals[v] += kChains == 2 ? sums[0][v] + sums[kChains - 1][v] : sums[0][v];
      }
    }
    OVERTONE_UNROLL
    for (int v = 0; v < kPanelVectors; ++v) {
      store_full(totals[v], dots_ + v * kLanes<A>);
    }
  }

  void dot_column(A* p, int64_t c, int64_t rows) {
    dot_column<0>(p, c, rows, [](A*, Vector<A>(&)[kPanelVectors]) {});
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

  // Column c of T, in a row of t_columns_: the product of the panel's reflectors is I − V T Vᵀ, T upper triangular.
  // Its dot products with the reflectors before it are among dots_.
  void gather_reflector(const A* p, int64_t c) {
    Vector<A> sums[kPanelVectors] = {};
    for (int64_t k = 0; k < c; ++k) {
      const A dot = inverses_[k] * (p[c * kPanel + k] + inverses_[c] * dots_[k]);
      OVERTONE_UNROLL
      for (int v = 0; v < kPanelVectors; ++v) {
        sums[v] += dot * load_full(t_columns_ + k * kPanel + v * kLanes<A>);
      }
    }
    OVERTONE_UNROLL
    for (int v = 0; v < kPanelVectors; ++v) {
      store_full(-taus_[c] * sums[v], t_columns_ + c * kPanel + v * kLanes<A>);
    }
    t_columns_[c * kPanel + c] = taus_[c];
  }

  // Column c's reflector meets the columns right of it, and dots_ becomes that of column c + 1.
  void apply_reflector(A* p, int64_t c, int64_t rows) {
    A factors[kPanel] = {};
    for (int64_t j = c + 1; j < kPanel; ++j) {
      const A factor = taus_[c] * (p[c * kPanel + j] + inverses_[c] * dots_[j]);
      p[c * kPanel + j] -= factor;
      factors[j] = inverses_[c] * factor;
    }
    apply_from_vector(p, c, rows, factors, std::make_integer_sequence<int, kPanelVectors>());
  }

  template <int... kVector>
  OVERTONE_INLINE void apply_from_vector(A* p, int64_t c, int64_t rows, const A* factors,
                                         std::integer_sequence<int, kVector...>) {
    const int64_t first = (c + 1) / kLanes<A>;  // the vectors before it hold finished columns
    (void)((first == kVector && (apply_from<kVector>(p, c, rows, factors), true)) || ...);
  }

  template <int kFirst>
  void apply_from(A* p, int64_t c, int64_t rows, const A* factors) {
    Vector<A> factor[kPanelVectors] = {};
    OVERTONE_UNROLL
    for (int v = kFirst; v < kPanelVectors; ++v) {
      factor[v] = load_full(factors + v * kLanes<A>);
    }
    const auto update = [&](A* row, Vector<A>(&part)[kPanelVectors]) {
      const Vector<A> left = broadcast(row[c]);
      OVERTONE_UNROLL
      for (int v = kFirst; v < kPanelVectors; ++v) {
        part[v] -= left * factor[v];
        store_full(part[v], row + v * kLanes<A>);
      }
    };
    if (c + 1 < rows) {
      Vector<A> part[kPanelVectors];
      OVERTONE_UNROLL
      for (int v = 0; v < kPanelVectors; ++v) {
        part[v] = load_full(p + (c + 1) * kPanel + v * kLanes<A>);
      }
      update(p + (c + 1) * kPanel, part);
    }
    dot_column<kFirst>(p, c + 1, rows, update);
  }

  // R's part of the panel back to x, zeros below it; the reflectors with their zeros and ones.
  void store_panel(int64_t first, int64_t width) {
    const int64_t rows = rows_ - first;
    A* p = panel_rows(first);
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
  }

  // Y = V T, and both also by columns: what multiplies rows of x from the right.
  void fold_factor(int64_t first) {
    const int64_t rows = rows_ - first;
    const A* v = panel_rows(first);
    const auto unchanged = [](int64_t, int64_t, Vector<A> part) { return part; };
    store_transposed(t_columns_, kPanel, kPanel, kPanel, t_, kPanel, unchanged);
    gemm<A, Operand::row_major>(rows, kPanelVectors, kPanel, v, kPanel, t_, kPanel, StoreTo<A>{y_rows_, kPanel});
    store_columns(v, rows, v_);
    store_columns(y_rows_, rows, y_ + first * ld_);
  }

  // Rows of kPanel elements to columns ld_ apart, zeros up to the next whole vector.
  void store_columns(const A* source, int64_t rows, A* out) const {
    const int64_t padded = padded_to(rows, kLanes<A>);
    for (int64_t j = 0; j < kPanel; ++j) {
      std::fill(out + j * ld_ + rows, out + j * ld_ + padded, A{0});
    }
    store_transposed(source, kPanel, rows, kPanel, out, ld_, [](int64_t, int64_t, Vector<A> part) { return part; });
  }

  // x ← x − (x L) R for `count` rows of x from element `first` on: L [rows][kPanel], R [kPanel][ld]. The first `zeros`
  // of these elements are zero.
  void reflect(int64_t first, A* x, int64_t count, const A* left, const A* right, int64_t zeros = 0) {
    const int64_t size = rows_ - first;
    for (int64_t begin = 0; begin < count; begin += kReflectRows) {
      const int64_t strip = std::min(kReflectRows, count - begin);
      A* rows = x + begin * ld_ + first;
      multiply_in_parts<A>(strip, kPanelVectors, size - zeros, rows + zeros, ld_, left + zeros * kPanel, kPanel, w_,
                           kPanel);
      subtract_product(first, strip, right, rows);
    }
  }

  // The same for a panel's own `count` columns of Q: x L is the beginning of V, with R's signs.
  void reflect_identity(int64_t first, int64_t count) {
    const A* v = panel_rows(first);
    for (int64_t i = 0; i < count * kPanel; ++i) {
      w_[i] = signs_[first + i / kPanel] * v[i];
    }
    subtract_product(first, count, y_ + first * ld_, x_ + first * ld_ + first);
  }

  // From `count` rows, elements from `first` on: w R.
  void subtract_product(int64_t first, int64_t count, const A* right, A* rows) const {
    const int vectors = static_cast<int>(padded_to(rows_ - first, kLanes<A>) / kLanes<A>);
    gemm<A, Operand::row_major>(count, vectors, kPanel, w_, kPanel, right, ld_, SubtractFrom<A>{rows, ld_});
  }

  int64_t rows_, columns_, q_columns_, rank_, ld_, panels_;
  Scratch<A> scratch_;
  A* x_;          // [columns][ld]: the matrix transposed, then R transposed, then Q transposed
  A* v_rows_;     // [panels][rows][kPanel]: the reflectors V
  A* y_;          // [panels · kPanel][ld]: Y = V T, by columns
  A* v_;          // [kPanel][ld]: those of the panel at hand, by columns
  A* y_rows_;     // [rows][kPanel]
  A* w_;          // [kReflectRows][kPanel]
  A* t_;          // [kPanel][kPanel]
  A* t_columns_;  // its transpose
  A* signs_;      // of R's diagonal as the reflectors leave it
  A taus_[kPanel];
  A inverses_[kPanel];
  A dots_[kPanel];
  A* unscales_;  // of the columns
  bool is_scaled_ = false;
};

}  // namespace overtone::OVERTONE_ISA
