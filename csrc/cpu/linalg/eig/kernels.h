// The nonsymmetric eigen-solver of one group of interleaved matrices.
#pragma once

#include "cpu/linalg/eig/balance.h"
#include "cpu/linalg/eig/francis.h"
#include "cpu/linalg/eig/hessenberg.h"
#include "cpu/linalg/eig/params.h"
#include "cpu/linalg/eig/vectors.h"
#include "cpu/linalg/lanes.h"
#include "cpu/simd/scratch.h"

namespace overtone::OVERTONE_ISA {

template <class A>
class EigGroup {
 public:
  using V = Vector<A>;

  explicit EigGroup(const EigParams& call) : call_(call), n_(call.n), scratch_(size(call) * kLanes<A>) {
    dense_ = {take(n_ * stride(n_) + kSlack) + kSlack, n_, stride(n_)};
    real_ = take(n_);
    imag_ = take(n_);
    balance_work_ = take(Balance<A>::work_size(n_));
    reduction_work_ = take(Hessenberg<A, V>::work_size(n_));
    if (reduces_by_rows(call)) {
      matrices_ = take(kLanes<A> * n_ * rows_stride(n_));
    }
    if (call.right != nullptr) {
      taus_ = take(n_);
      packed_ = take(HessenbergLanes<A>::size(n_));
      right_ = {take(Block::size(n_)), take(2 * kColumns * n_), nullptr, nullptr};
    }
    if (call.left != nullptr) {
      left_ = {take(Block::size(n_)), take(2 * kColumns * n_), take(HessenbergLanes<A>::size(n_)), take(2 * n_)};
    }
  }

  void solve(int64_t group) {
    first_ = group * kLanes<A>;
    count_ = static_cast<int>(std::min<int64_t>(kLanes<A>, call_.matrices.count - first_));
    const InterleavedMatrix<A> lanes(reinterpret_cast<A*>(dense_.data), dense_.stride);
    load_lanes<A>(call_.matrices, first_, n_, n_, lanes);
    expect_group(first_ + call_.threads * kLanes<A>);
    stochastic_ = call_.row_stochastic ? rows_sum_to_one() : every_lane<A>();
    Balance<A> balance(dense_, balance_work_);
    balance.run(call_.row_stochastic);
    const bool vectors = call_.right != nullptr;
    const bool deflates = call_.row_stochastic && !vectors && n_ > 1;
    const Mask<A> perron = deflates ? stochastic_ & balance.finite() & ~balance.isolated() : no_lane<A>();
    const HessenbergLanes<A> h = reduce(perron);
    if (vectors) {
      accumulate_reflectors<A>(dense_, taus_, reduction_work_);
    }
    failed_ = Francis<A>(h, vectors ? dense_ : DenseLanes<A>{}, real_, imag_, prefetcher_).run() | ~balance.finite();
    failed_ = failed_ | ~are_representable(balance);
    unsolved_ = failed_ | ~stochastic_;
    if (vectors) {
      store_vectors(h, balance);
    }
    store_eigenvalues(balance);
  }

 private:
  using Block = SchurVectors<A>;
  static constexpr int kColumns = Block::kColumns;
  static constexpr int64_t kSlack = 8;

  // One side's vectors: in the Schur basis, in the basis of A, and for the left ones the flipped Schur form.
  struct Side {
    V *schur, *vectors, *flipped, *eigenvalues;
  };

  // From this size on a matrix at a time is reduced: a group does not fit into the cache.
  static constexpr int64_t kByRows = 80;

  // Vectors of a row; odd, so that columns do not share few cache lines.
  static constexpr int64_t rows_stride(int64_t n) { return Hessenberg<A, A>::vectors(n) | 1; }

  static bool reduces_by_rows(const EigParams& call) { return call.right == nullptr && call.n >= kByRows; }

  // Wide enough for the Hessenberg form to be packed in place.
  static constexpr int64_t stride(int64_t n) { return InterleavedMatrix<A>::padded_columns(n + 4); }

  static int64_t size(const EigParams& call) {
    const int64_t n = call.n;
    const int64_t values = n * stride(n) + kSlack + 2 * n + Balance<A>::work_size(n) + Hessenberg<A, V>::work_size(n);
    const int64_t side = Block::size(n) + 2 * kColumns * n + HessenbergLanes<A>::size(n);
    const int64_t by_rows = reduces_by_rows(call) ? kLanes<A> * n * rows_stride(n) : 0;
    const int64_t parts = 16 * 64 / sizeof(V);  // each part begins at a cache line
    return values + by_rows + (call.right != nullptr ? side + n : 0) + (call.left != nullptr ? side + 2 * n : 0) +
           parts;
  }

  // Gathers the matrices from `first` on, which this thread is likely to take next, so that they are asked for a row's
  // worth at every sweep. Loading waited for them: 5 % of the time at n = 16.
  void expect_group(int64_t first) {
    prefetcher_.clear();
    const MatrixBatch& batch = call_.matrices;
    if (first + kLanes<A> <= batch.count &&
        batch.offsets[first + kLanes<A> - 1] - batch.offsets[first] == (kLanes<A> - 1) * n_ * n_) {
      const int64_t width = kLanes<A> * n_;
      prefetcher_.add(buffer_rows<A>(batch.data, batch.offsets[first], width), n_, width);
    }
  }

  V* take(int64_t vectors) { return reinterpret_cast<V*>(scratch_.take(vectors * kLanes<A>)); }

  Mask<A> rows_sum_to_one() const {
    const V zero{}, one = zero + 1, tolerance = zero + 4 * kRounding<A> * static_cast<A>(n_);
    Mask<A> result = every_lane<A>();
    for (int64_t i = 0; i < n_; ++i) {
      V sum = zero;
      for (int64_t j = 0; j < n_; ++j) {
        sum += dense_.row(i)[j];
      }
      result = result & less_equal(abs<A>(sum - one), tolerance);
    }
    return result;
  }

  // The Hessenberg form, packed. With eigenvectors the reflectors stay in the dense matrix, so that it is reduced
  // interleaved whatever its size.
  HessenbergLanes<A> reduce(Mask<A> perron) {
    if (reduces_by_rows(call_)) {
      return reduce_by_rows(perron);
    }
    Hessenberg<A, V>(dense_.data, n_, dense_.stride, reduction_work_, taus_).run(perron);
    return packed();
  }

  // One matrix after another, each stored by rows in `matrices_`.
  HessenbergLanes<A> reduce_by_rows(Mask<A> perron) {
    const int64_t row_size = rows_stride(n_) * kLanes<A>, matrix_size = n_ * row_size;
    A* const matrices = reinterpret_cast<A*>(matrices_);
    A* lanes[kLanes<A>];
    for (int64_t i = 0; i < n_; ++i) {
      for (int lane = 0; lane < kLanes<A>; ++lane) {
        lanes[lane] = matrices + lane * matrix_size + i * row_size;
        for (int64_t j = n_; j < row_size; ++j) {
          lanes[lane][j] = 0;
        }
      }
      deinterleave_run<A>(reinterpret_cast<const A*>(dense_.row(i)), n_, kLanes<A>, lanes);
    }
    for (int lane = 0; lane < kLanes<A>; ++lane) {
      V* const matrix = reinterpret_cast<V*>(matrices + lane * matrix_size);
      Hessenberg<A, A>(matrix, n_, rows_stride(n_), reduction_work_, nullptr).run(lane_of(perron, lane));
    }
    const HessenbergLanes<A> h{dense_.data - kSlack, n_};
    for (int64_t i = 0; i < n_; ++i) {
      const int64_t begin = std::max<int64_t>(i - 1, 0);
      const A* rows[kLanes<A>];
      for (int lane = 0; lane < kLanes<A>; ++lane) {
        rows[lane] = matrices + lane * matrix_size + i * row_size + begin;
      }
      interleave_run<A>(rows, n_ - begin, reinterpret_cast<A*>(h.row(i) + begin));
      h.row(i)[n_] = V{};
    }
    clear_border(h);
    return h;
  }

  // The Hessenberg part moves to memory of its own or, if nothing else of the dense matrix is needed, to the beginning
  // of that one's. Rows become shorter, so that nothing is overwritten before it was read.
  HessenbergLanes<A> packed() {
    const HessenbergLanes<A> h{packed_ != nullptr ? packed_ : dense_.data - kSlack, n_};
    for (int64_t i = 0; i < n_; ++i) {
      const V* source = dense_.row(i);
      V* row = h.row(i);
      for (int64_t j = std::max<int64_t>(i - 1, 0); j < n_; ++j) {
        row[j] = source[j];
      }
      row[n_] = V{};
    }
    clear_border(h);
    return h;
  }

  // What a bulge may touch beside the Hessenberg form itself.
  void clear_border(const HessenbergLanes<A>& h) const {
    for (int64_t i = 0; i <= n_; ++i) {
      for (int64_t j = i - 3; j < i - 1; ++j) {
        h.row(i)[j] = V{};
      }
    }
    h.row(n_)[n_ - 1] = h.row(n_)[n_] = V{};
  }

  // The transpose of T, both orders reversed: again quasi-triangular. Its right eigenvectors are T's left ones,
  // reversed and conjugated.
  HessenbergLanes<A> flipped(const HessenbergLanes<A>& t) const {
    const HessenbergLanes<A> result{left_.flipped, n_};
    for (int64_t i = 0; i < n_; ++i) {
      for (int64_t j = std::max<int64_t>(i - 1, 0); j < n_; ++j) {
        result.row(i)[j] = t.row(n_ - 1 - j)[n_ - 1 - i];
      }
      result.row(i)[n_] = V{};
      left_.eigenvalues[i] = real_[n_ - 1 - i];
      left_.eigenvalues[n_ + i] = imag_[n_ - 1 - i];
    }
    clear_border(result);
    return result;
  }

  void store_vectors(const HessenbergLanes<A>& t, const Balance<A>& balance) {
    Block right(t, real_, imag_, right_.schur);
    const bool wants_left = call_.left != nullptr;
    const HessenbergLanes<A> t_left = wants_left ? flipped(t) : t;
    Block left(t_left, wants_left ? left_.eigenvalues : real_, wants_left ? left_.eigenvalues + n_ : imag_,
               left_.schur);
    for (int64_t k = 0; k < n_; k += kColumns) {
      const int count = static_cast<int>(std::min<int64_t>(kColumns, n_ - k));
      right.solve(k, count);
      multiply(right, false, count, right_.vectors);
      scale_rows(right_.vectors, balance, false);
      normalize(right_.vectors, count);
      store_block(right_.vectors, static_cast<A*>(call_.right), k, count, balance);
      if (wants_left) {
        left.solve(n_ - k - count, count);
        multiply(left, true, count, left_.vectors);
        scale_rows(left_.vectors, balance, true);
        normalize(left_.vectors, count);
        pair_with_right(count);
        store_block(left_.vectors, static_cast<A*>(call_.left), k, count, balance);
      }
    }
  }

  // Schur basis times the block. A flipped block comes with its rows and columns reversed.
  void multiply(const Block& block, bool is_flipped, int count, V* out) const {
    for (int64_t i = 0; i < n_; ++i) {
      const V* z = dense_.row(i);
      V sums[2 * kColumns] = {};
      for (int64_t r = 0; r < block.height(); ++r) {
        const V factor = z[is_flipped ? n_ - 1 - r : r];
        const V* x = block.row(r);
        OVERTONE_UNROLL
        for (int c = 0; c < 2 * kColumns; ++c) {
          sums[c] += factor * x[c];
        }
      }
      V* row = out + i * 2 * kColumns;
      for (int c = 0; c < count; ++c) {
        const int source = is_flipped ? count - 1 - c : c;
        row[2 * c] = sums[2 * source];
        row[2 * c + 1] = sums[2 * source + 1];
      }
    }
  }

  void scale_rows(V* vectors, const Balance<A>& balance, bool inverse) const {
    for (int64_t i = 0; i < n_; ++i) {
      const V factor = inverse ? 1 / balance.scale(i) : balance.scale(i);
      for (int c = 0; c < 2 * kColumns; ++c) {
        vectors[i * 2 * kColumns + c] *= factor;
      }
    }
  }

  // To length one; through the largest element, because D may have made the vector very long or short.
  void normalize(V* vectors, int count) const {
    const V zero{}, one = zero + 1;
    for (int c = 0; c < count; ++c) {
      V size = zero;
      for (int64_t i = 0; i < n_; ++i) {
        const V* x = vectors + i * 2 * kColumns + 2 * c;
        size = max<A>(size, max<A>(abs<A>(x[0]), abs<A>(x[1])));
      }
      const V per_size = one / select(less(zero, size), size, one);
      V squares = zero;
      for (int64_t i = 0; i < n_; ++i) {
        V* x = vectors + i * 2 * kColumns + 2 * c;
        x[0] *= per_size;
        x[1] *= per_size;
        squares += x[0] * x[0] + x[1] * x[1];
      }
      const V per_length = one / sqrt(squares);
      for (int64_t i = 0; i < n_; ++i) {
        V* x = vectors + i * 2 * kColumns + 2 * c;
        x[0] *= per_length;
        x[1] *= per_length;
      }
    }
  }

  // The left vectors are still conjugated: w̄ᵀ v becomes one, then w is conjugated back.
  void pair_with_right(int count) {
    for (int c = 0; c < count; ++c) {
      Complex<A> product{};
      for (int64_t i = 0; i < n_; ++i) {
        const V *w = left_.vectors + i * 2 * kColumns + 2 * c, *v = right_.vectors + i * 2 * kColumns + 2 * c;
        product = product + Complex<A>{w[0], w[1]} * Complex<A>{v[0], v[1]};
      }
      const Complex<A> factor = divide({V{} + 1, V{}}, product);
      for (int64_t i = 0; i < n_; ++i) {
        V* w = left_.vectors + i * 2 * kColumns + 2 * c;
        const Complex<A> scaled = Complex<A>{w[0], w[1]} * factor;
        w[0] = scaled.re;
        w[1] = -scaled.im;
      }
    }
  }

  // Columns [k, k + count) of every matrix, rows back in their original order.
  void store_block(const V* vectors, A* out, int64_t k, int count, const Balance<A>& balance) const {
    const V nan = V{} + std::numeric_limits<A>::quiet_NaN();
    A parts[2 * kColumns][kLanes<A>];
    for (int64_t i = 0; i < n_; ++i) {
      for (int c = 0; c < 2 * count; ++c) {
        const V x = select(unsolved_, nan, vectors[i * 2 * kColumns + c] + V{});
        std::memcpy(parts[c], &x, sizeof x);
      }
      for (int lane = 0; lane < count_; ++lane) {
        A* row = out + (((first_ + lane) * n_ + balance.original_index(i, lane)) * n_ + k) * 2;
        for (int c = 0; c < 2 * count; ++c) {
          row[c] = parts[c][lane];
        }
      }
    }
  }

  // At their own size eigenvalues may be beyond the largest number.
  Mask<A> are_representable(const Balance<A>& balance) const {
    V not_finite{};
    for (int64_t i = 0; i < n_; ++i) {
      not_finite += (balance.undo_size(real_[i]) + balance.undo_size(imag_[i])) * A(0);
    }
    return equal(not_finite, V{});
  }

  void store_eigenvalues(const Balance<A>& balance) {
    A* out = static_cast<A*>(call_.eigenvalues) + first_ * n_ * 2;
    const V nan = V{} + std::numeric_limits<A>::quiet_NaN();
    for (int64_t i = 0; i < n_; ++i) {
      // Adding zero makes a negative zero positive: its sign would depend on the neighbours.
      const V real = select(unsolved_, nan, balance.undo_size(real_[i]) + V{});
      const V imag = select(unsolved_, nan, balance.undo_size(imag_[i]) + V{});
      A parts[2][kLanes<A>];
      std::memcpy(parts[0], &real, sizeof real);
      std::memcpy(parts[1], &imag, sizeof imag);
      for (int lane = 0; lane < count_; ++lane) {
        out[(lane * n_ + i) * 2] = parts[0][lane];
        out[(lane * n_ + i) * 2 + 1] = parts[1][lane];
      }
    }
    for (int lane = 0; lane < count_; ++lane) {
      call_.info[first_ + lane] = lane_of(failed_, lane)       ? kUnsolved
                                  : lane_of(stochastic_, lane) ? kSolved
                                                               : kNotStochastic;
      if (call_.row_stochastic && lane_of(balance.isolated(), lane)) {
        put_perron_first(out + lane * n_ * 2);
      }
    }
  }

  // The real eigenvalue closest to one; the others keep their order, in which complex pairs are neighbours.
  void put_perron_first(A* values) const {
    int64_t nearest = 0;
    A distance = std::numeric_limits<A>::infinity();
    for (int64_t i = 0; i < n_; ++i) {
      const A candidate = values[2 * i] < 1 ? 1 - values[2 * i] : values[2 * i] - 1;
      if (values[2 * i + 1] == 0 && candidate < distance) {
        nearest = i;
        distance = candidate;
      }
    }
    const A value = values[2 * nearest];
    for (int64_t i = 2 * nearest - 1; i >= 0; --i) {
      values[i + 2] = values[i];
    }
    values[0] = value;
    values[1] = 0;
  }

  const EigParams& call_;
  int64_t n_;
  Scratch<A> scratch_;
  DenseLanes<A> dense_;
  V *real_, *imag_, *balance_work_, *reduction_work_;
  V* taus_ = nullptr;
  V* packed_ = nullptr;
  V* matrices_ = nullptr;
  Side right_{}, left_{};
  int64_t first_ = 0;
  int count_ = 0;
  Mask<A> stochastic_, failed_, unsolved_;
  Prefetcher prefetcher_;
};

template <class A>
void eig_groups(const EigParams& call, WorkQueue& groups) {
  EigGroup<A> solver(call);
  for (int64_t group = groups.pop(); group >= 0; group = groups.pop()) {
    solver.solve(group);
  }
}

inline void eig(const EigParams& call, WorkQueue& groups) {
  call.is_float64 ? eig_groups<double>(call, groups) : eig_groups<float>(call, groups);
}

inline int64_t eig_lanes(bool is_float64) { return is_float64 ? kLanes<double> : kLanes<float>; }

extern const EigKernels eig_kernels = {OVERTONE_ISA_NAME, &eig_lanes, &eig};

}  // namespace overtone::OVERTONE_ISA
