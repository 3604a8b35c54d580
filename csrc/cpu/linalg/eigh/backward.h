// The gradient of symmetric eigenproblems, a matrix per lane.
#pragma once

#include "cpu/linalg/eigh/params.h"
#include "cpu/linalg/lanes.h"
#include "cpu/simd/scratch.h"

namespace overtone::OVERTONE_ISA {

// store(i, j, Σ_l left(i, l) right(l, j)) for every lane, in blocks that stay in registers.
template <class A, int kRows, int kColumns, class Left, class Right, class Store>
OVERTONE_INLINE void lane_product_block(int64_t n, int64_t i, int64_t j, const Left& left, const Right& right,
                                        const Store& store) {
  Vector<A> sums[kRows][kColumns] = {};
  for (int64_t l = 0; l < n; ++l) {
    Vector<A> factors[kColumns];
    OVERTONE_UNROLL
    for (int c = 0; c < kColumns; ++c) {
      factors[c] = right(l, j + c);
    }
    OVERTONE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const Vector<A> factor = left(i + r, l);
      OVERTONE_UNROLL
      for (int c = 0; c < kColumns; ++c) {
        sums[r][c] += factor * factors[c];
      }
    }
  }
  OVERTONE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    OVERTONE_UNROLL
    for (int c = 0; c < kColumns; ++c) {
      store(i + r, j + c, sums[r][c]);
    }
  }
}

template <class A, class Left, class Right, class Store>
void lane_product(int64_t n, const Left& left, const Right& right, const Store& store) {
  constexpr int kBlock = OVERTONE_VECTOR_BYTES == 64 ? 4 : 3;
  int64_t i = 0;
  for (; i + kBlock <= n; i += kBlock) {
    int64_t j = 0;
    for (; j + kBlock <= n; j += kBlock) {
      lane_product_block<A, kBlock, kBlock>(n, i, j, left, right, store);
    }
    for (; j < n; ++j) {
      lane_product_block<A, kBlock, 1>(n, i, j, left, right, store);
    }
  }
  for (; i < n; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      lane_product_block<A, 1, 1>(n, i, j, left, right, store);
    }
  }
}

// One matrix's entries of K where eigenvalues are equal to rounding; eigh.h says what they are.
template <class A>
class DegenerateEigenspaces {
 public:
  // `m` is Vᵀ grad_V and `k` is K; elements of a row are `stride` apart, as are eigenvalues.
  DegenerateEigenspaces(int64_t n, const A* values, const A* grad_values, const A* m, A* k, int64_t row_stride,
                        int64_t stride)
      : n_(n), values_(values), grad_values_(grad_values), m_(m), k_(k), row_stride_(row_stride), stride_(stride) {}

  // Pairs this close, relative to the largest eigenvalue, must have a limit: their order is the solver's rounding.
  static A tolerance(int64_t n) {
    return 2 * static_cast<A>(__builtin_sqrt(static_cast<double>(n))) * std::numeric_limits<A>::epsilon();
  }

  // Equal eigenvalues may be split by this much, A's own rounding included. In between the limit is taken where the
  // gradients determine it: dividing by such a gap leaves few digits or none.
  static A near_tolerance(int64_t n) { return 64 * static_cast<A>(n) * std::numeric_limits<A>::epsilon(); }

  // Fills in K, or reports the pair.
  void fill(int32_t* undetermined_pair) const {
    const A scale = std::max(abs(value(0)), abs(value(n_ - 1)));
    if (next_eigenspace(0, n_, near_tolerance(n_) * scale).begin == n_) {
      return;
    }
    A size = 0;
    for (int64_t i = 0; i < n_; ++i) {
      for (int64_t j = 0; j < n_; ++j) {
        size = std::max(size, abs(m(i, j)));
      }
    }
    for_each_eigenspace(0, n_, near_tolerance(n_) * scale, [&](Range near) {
      int32_t suspect[2];
      if (fill_eigenspace(near, size, scale, suspect)) {
        return true;
      }
      return for_each_eigenspace(near.begin, near.end, tolerance(n_) * scale,
                                 [&](Range equal) { return fill_eigenspace(equal, size, scale, undetermined_pair); });
    });
  }

 private:
  struct Range {
    int64_t begin;
    int64_t end;
  };

  A width(Range range) const { return value(range.end - 1) - value(range.begin); }

  // The first two or more neighbours from `begin` on that are no more than `gap` apart; empty at `end` if there are
  // none.
  Range next_eigenspace(int64_t begin, int64_t end, A gap) const {
    for (; begin < end; ++begin) {
      int64_t last = begin;
      while (last + 1 < end && value(last + 1) - value(last) <= gap) {
        ++last;
      }
      if (last > begin) {
        return {begin, last + 1};
      }
    }
    return {end, end};
  }

  // visit(range) for all of them, while it returns true.
  template <class Visit>
  bool for_each_eigenspace(int64_t begin, int64_t end, A gap, const Visit& visit) const {
    for (Range range = next_eigenspace(begin, end, gap); range.begin < end;
         range = next_eigenspace(range.end, end, gap)) {
      if (!visit(range)) {
        return false;
      }
    }
    return true;
  }

  static A abs(A x) { return x < 0 ? -x : x; }
  A value(int64_t i) const { return values_[i * stride_]; }
  A grad_value(int64_t i) const { return grad_values_ == nullptr ? A(0) : grad_values_[i * stride_]; }
  A m(int64_t i, int64_t j) const { return m_[i * row_stride_ + j * stride_]; }
  A& k(int64_t i, int64_t j) const { return k_[i * row_stride_ + j * stride_]; }
  // Of the products by which the gradients were made, relative to their size.
  A rounding() const { return 4 * static_cast<A>(n_) * std::numeric_limits<A>::epsilon(); }

  // False, and the pair, if the gradients do not determine K there. `size` is that of m, `scale` that of eigenvalues.
  bool fill_eigenspace(Range range, A size, A scale, int32_t* undetermined_pair) const {
    const auto [begin, end] = range;
    // Across the eigenspace f varies by f' times its width; we let f'/f be 4 / scale.
    const A variation = rounding() + (scale > 0 ? 4 * width(range) / scale : A(0));
    const A negligible = rounding() * size;
    A largest = 0;
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t j = begin; j < i; ++j) {
        if (!(abs(m(i, j) - m(j, i)) <= variation * size)) {
          return report(j, i, undetermined_pair);  // the loss depends on the choice of basis
        }
        if (abs(m(i, j)) > largest) {
          largest = abs(m(i, j));
          report(j, i, undetermined_pair);
        }
      }
    }
    A factor = 0;
    if (largest > negligible && !find_factor(range, variation, negligible, scale, &factor)) {
      return false;  // with the pair of the largest entry
    }
    std::fill_n(undetermined_pair, 2, -1);
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t j = begin; j < i; ++j) {
        k(i, j) = k(j, i) = factor * A(0.5) * (m(i, j) + m(j, i));
      }
    }
    return true;
  }

  // The c with grad_λ_k = c m_kk for all of the eigenspace.
  bool find_factor(Range range, A variation, A negligible, A scale, A* factor) const {
    const auto [begin, end] = range;
    A product = 0;
    A square = 0;
    A largest = 0;
    for (int64_t i = begin; i < end; ++i) {
      product += grad_value(i) * m(i, i);
      square += m(i, i) * m(i, i);
      largest = std::max(largest, abs(grad_value(i)));
    }
    if (largest == 0) {
      // f' = 0, or the eigenvalues are not part of the graph: then a gap that can be told from zero counts.
      return width(range) <= static_cast<A>(end - begin) * tolerance(n_) * scale;
    }
    if (!(square > negligible * negligible)) {
      return false;
    }
    *factor = product / square;
    for (int64_t i = begin; i < end; ++i) {
      if (!(abs(grad_value(i) - *factor * m(i, i)) <= variation * largest + abs(*factor) * negligible)) {
        return false;
      }
    }
    return true;
  }

  static bool report(int64_t i, int64_t j, int32_t* undetermined_pair) {
    undetermined_pair[0] = static_cast<int32_t>(i);
    undetermined_pair[1] = static_cast<int32_t>(j);
    return false;
  }

  int64_t n_;
  const A* values_;
  const A* grad_values_;
  const A* m_;
  A* k_;
  int64_t row_stride_;
  int64_t stride_;
};

// The same for one matrix that has contiguous memory of its own.
template <class A>
void divide_by_gaps(const EighBackward& call, int64_t index, const A* m, A* k) {
  const int64_t n = call.n;
  const A* values = static_cast<const A*>(call.values) + index * n;
  const A* grad_values = call.grad_values == nullptr ? nullptr : static_cast<const A*>(call.grad_values) + index * n;
  for (int64_t i = 0; i < n; ++i) {
    k[i * n + i] = grad_values == nullptr ? A(0) : grad_values[i];
    for (int64_t j = 0; j < i; ++j) {
      const A element = m == nullptr ? A(0) : A(0.5) * (m[i * n + j] - m[j * n + i]) / (values[j] - values[i]);
      k[i * n + j] = element;
      k[j * n + i] = element;
    }
  }
  if (m != nullptr) {
    DegenerateEigenspaces<A>(n, values, grad_values, m, k, n, 1).fill(call.undetermined_pair + 2 * index);
  }
}

template <class A>
class EighGradient {
 public:
  explicit EighGradient(const EighBackward& call)
      : call_(call),
        n_(call.n),
        memory_(3 * Scratch<A>::padded(InterleavedMatrix<A>::size(n_, n_)) + 2 * Scratch<A>::padded(n_ * kLanes<A>)),
        v_(memory_.take(InterleavedMatrix<A>::size(n_, n_)), n_),
        m_(memory_.take(InterleavedMatrix<A>::size(n_, n_)), n_),
        k_(memory_.take(InterleavedMatrix<A>::size(n_, n_)), n_),
        values_(memory_.take(n_ * kLanes<A>)),
        grad_values_(memory_.take(n_ * kLanes<A>)) {}

  void run(int64_t first) {
    const int count = static_cast<int>(std::min<int64_t>(call_.vectors.count - first, kLanes<A>));
    std::fill_n(call_.undetermined_pair + 2 * first, 2 * count, -1);
    load(first);
    if (call_.grad_vectors.data != nullptr) {
      // v_ holds Vᵀ, and k_ the gradient of V.
      product(v_, k_, m_);
      divide_by_gaps(first, count);
    } else {
      fill_diagonal();
    }
    product(k_, v_, m_);
    lane_product<A>(
        n_, [&](int64_t i, int64_t l) { return v_.get(l, i); }, [&](int64_t l, int64_t j) { return m_.get(l, j); },
        [&](int64_t i, int64_t j, Vector<A> sum) { k_.set(i, j, sum); });
    store_lanes<A>(k_, n_, n_, count, static_cast<A*>(call_.grad_a) + first * n_ * n_);
  }

 private:
  // A matrix that was not solved becomes zero, and so does its gradient.
  void load(int64_t first) {
    A flags[kLanes<A>];
    for (int lane = 0; lane < kLanes<A>; ++lane) {
      flags[lane] = static_cast<A>(call_.info[std::min(first + lane, call_.vectors.count - 1)]);
    }
    const Mask<A> is_solved = equal(load_full(flags), Vector<A>{});
    load_lanes<A>(call_.vectors, first, n_, n_, v_);
    load_values(call_.values, first, values_);
    if (call_.grad_values != nullptr) {
      load_values(call_.grad_values, first, grad_values_);
    } else {
      std::fill_n(grad_values_, n_ * kLanes<A>, A(0));
    }
    if (call_.grad_vectors.data != nullptr) {
      load_lanes<A>(call_.grad_vectors, first, n_, n_, k_);
    }
    if (all(is_solved)) {
      return;
    }
    for (int64_t i = 0; i < n_; ++i) {
      for (A* values : {values_, grad_values_}) {
        A* p = values + i * kLanes<A>;
        store_full(select(is_solved, load_full(p), Vector<A>{}), p);
      }
      for (int64_t j = 0; j < n_; ++j) {
        v_.set(i, j, select(is_solved, v_.get(i, j), Vector<A>{}));
        if (call_.grad_vectors.data != nullptr) {
          k_.set(i, j, select(is_solved, k_.get(i, j), Vector<A>{}));
        }
      }
    }
  }

  void load_values(const void* source, int64_t first, A* out) const {
    const A* lanes[kLanes<A>];
    for (int lane = 0; lane < kLanes<A>; ++lane) {
      lanes[lane] = static_cast<const A*>(source) + std::min(first + lane, call_.vectors.count - 1) * n_;
    }
    interleave_run<A>(lanes, n_, out);
  }

  void product(const InterleavedMatrix<A>& left, const InterleavedMatrix<A>& right,
               const InterleavedMatrix<A>& out) const {
    lane_product<A>(
        n_, [&](int64_t i, int64_t l) { return left.get(i, l); }, [&](int64_t l, int64_t j) { return right.get(l, j); },
        [&](int64_t i, int64_t j, Vector<A> sum) { out.set(i, j, sum); });
  }

  Vector<A> value(int64_t i) const { return load_full(values_ + i * kLanes<A>); }

  void fill_diagonal() const {
    for (int64_t i = 0; i < n_; ++i) {
      for (int64_t j = 0; j < n_; ++j) {
        k_.set(i, j, i == j ? load_full(grad_values_ + i * kLanes<A>) : Vector<A>{});
      }
    }
  }

  void divide_by_gaps(int64_t first, int count) const {
    const Vector<A> largest = max<A>(abs<A>(value(0)), abs<A>(value(n_ - 1)));
    const Vector<A> tolerance = DegenerateEigenspaces<A>::near_tolerance(n_) * largest;
    Mask<A> is_near = no_lane<A>();
    for (int64_t i = 0; i < n_; ++i) {
      k_.set(i, i, load_full(grad_values_ + i * kLanes<A>));
      for (int64_t j = 0; j < i; ++j) {
        const Vector<A> element = A(0.5) * (m_.get(i, j) - m_.get(j, i)) / (value(j) - value(i));
        k_.set(i, j, element);
        k_.set(j, i, element);
      }
      if (i > 0) {
        is_near = is_near | less_equal(value(i) - value(i - 1), tolerance);
      }
    }
    for (int lane = 0; lane < count && any(is_near); ++lane) {
      if (lane_of(is_near, lane)) {
        const DegenerateEigenspaces<A> equal(n_, values_ + lane, grad_values_ + lane, m_.data + lane, k_.data + lane,
                                             m_.row_stride, kLanes<A>);
        equal.fill(call_.undetermined_pair + 2 * (first + lane));
      }
    }
  }

  const EighBackward& call_;
  int64_t n_;
  Scratch<A> memory_;
  InterleavedMatrix<A> v_;
  InterleavedMatrix<A> m_;
  InterleavedMatrix<A> k_;
  A* values_;
  A* grad_values_;
};

}  // namespace overtone::OVERTONE_ISA
