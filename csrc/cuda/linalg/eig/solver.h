// Eigenvalues of nonsymmetric matrices: scale, balance, reduce to Hessenberg form, Francis' double shift.
#pragma once

#include <type_traits>

#include "cuda/linalg/eig/balance.h"
#include "cuda/linalg/eig/francis.h"
#include "cuda/linalg/eig/hessenberg.h"

namespace overtone::cuda {

// `in_shared`: the dense matrix is in shared memory and becomes the Hessenberg form in place. Otherwise it is in global
// memory, and the Hessenberg form, half of it, is packed into shared memory.
template <class T, class Team, bool in_shared>
class EigSolver {
 public:
  using Dense = DenseMatrix<T, in_shared>;
  using H = std::conditional_t<in_shared, DenseHessenberg<T>, PackedHessenberg<T>>;

  // Numbers of shared memory that a matrix takes.
  static constexpr int shared_size(int n) {
    return Team::kScratch + kWork + (in_shared ? vectors_size(n) : 2 * n) + H::size(n);
  }

  OVERTONE_DEVICE EigSolver(const EigParams<T>& call, int64_t index, T* memory)
      : call_(call), index_(index), n_(call.n), team_(memory) {
    memory += Team::kScratch;
    work_ = reinterpret_cast<TrailingUpdate<T>*>(memory);
    values_ = memory + kWork;
    T* const matrix = values_ + (in_shared ? vectors_size(n_) : 2 * n_);
    vectors_ = in_shared ? values_ : matrix;
    a_ = {in_shared ? matrix : call.workspace + index * n_ * n_, n_};
    h_ = {matrix, n_};
  }

  OVERTONE_DEVICE void run() {
    int32_t info = load() ? kSolved : kUnsolved;
    bool isolated = false;
    if (info == kSolved && call_.row_stochastic && !rows_sum_to_one()) {
      info = kNotStochastic;
    }
    if (info == kSolved) {
      scale(largest_, work_->scale);
      Balance<T, Team, in_shared> balance(team_, a_, vectors_);
      isolated = balance.run(call_.row_stochastic);
      scale(balance.largest(), work_->balanced_scale);  // balancing may have made it small
      const bool perron = call_.row_stochastic && !isolated && n_ > 1;
      HessenbergReduction<T, Team, in_shared>(team_, a_, vectors_).run(perron);
      pack();
      info = francis() && are_representable() ? kSolved : kUnsolved;
    }
    store(info, call_.row_stochastic && isolated);
  }

 private:
  static constexpr int kWork = (sizeof(TrailingUpdate<T>) + sizeof(T) - 1) / sizeof(T);

  // Of what balancing and the reduction need beside the matrix. It lies where the eigenvalues will be, or in global
  // memory's case the Hessenberg form, which is never smaller.
  static constexpr int vectors_size(int n) { return 4 * n; }

  // Whether all of the matrix is finite.
  OVERTONE_DEVICE bool load() {
    T largest = 0;
    for (int k = team_.rank(); k < n_ * n_; k += team_.size()) {
      const int i = k / n_, j = k % n_;
      const T x = call_.a.at(index_, i, j);
      largest = max(largest, size_or_infinity(x));
      a_.at(i, j) = x;
    }
    largest_ = team_.largest(largest);
    return largest_ <= kMax<T>;
  }

  OVERTONE_DEVICE bool rows_sum_to_one() {
    const T tolerance = 4 * kRounding<T> * T(n_);
    T worst = 0;
    a_.for_rows(
        team_, 0, n_, [&](int i, int j) { return a_.at(i, j); }, [&](int, T sum) { worst = max(worst, abs(sum - 1)); });
    return team_.largest(worst) <= tolerance;
  }

  // Numbers of a usual size are left alone.
  OVERTONE_DEVICE void scale(T largest, Scale<T>& kept) {
    constexpr T kSafe = T(1e-6);  // far above kTiny, which is absolute
    const bool is_usual = largest == 0 || (largest > kSafe && largest < 1 / kSafe);
    const Scale<T> by = is_usual ? Scale<T>{} : Scale<T>::to_one(largest);
    if (team_.rank() == 0) {
      kept = by;
    }
    if (is_usual) {
      return;
    }
    for (int k = team_.rank(); k < n_ * n_; k += team_.size()) {
      T& x = a_.at(k / n_, k % n_);
      x = by.apply(x);
    }
    team_.sync();
  }

  OVERTONE_DEVICE T at_own_size(T value) const { return work_->scale.undo(work_->balanced_scale.undo(value)); }

  // At their own size eigenvalues may be beyond the largest number.
  OVERTONE_DEVICE bool are_representable() {
    T largest = 0;
    for (int i = team_.rank(); i < 2 * n_; i += team_.size()) {
      largest = max(largest, size_or_infinity(at_own_size(values_[i])));
    }
    return team_.largest(largest) <= kMax<T>;
  }

  OVERTONE_DEVICE void pack() {
    if constexpr (!in_shared) {
      team_.sync();  // the vectors were here
      for (int i = 0; i < n_; ++i) {
        const int begin = i < 3 ? 0 : i - 3;
        for (int j = begin + team_.rank(); j < n_; j += team_.size()) {
          h_.at(i, j) = j + 1 < i ? T(0) : a_.at(i, j);
        }
      }
      team_.sync();
    }
  }

  // Whether it converged.
  OVERTONE_DEVICE bool francis() {
    T *const real = values_, *const imag = values_ + n_;
    const bool is_alone = team_.warps() == 1;  // then everything is near
    Francis<T, H> leader(h_, is_alone ? n_ : TrailingUpdate<T>::kReflectors, real, imag);
    if (team_.warp() == 0) {
      leader.measure();
    }
    for (;;) {
      if (team_.warp() == 0) {
        leader.next(*work_);
      }
      team_.sync();
      if (work_->done) {
        return work_->converged;
      }
      if (!is_alone) {
        reflect_trailing(h_, *work_, team_.rank(), team_.size());
      }
      team_.sync();
    }
  }

  OVERTONE_DEVICE void store(int32_t info, bool find_perron) {
    const T *real = values_, *imag = values_ + n_;
    const int perron = find_perron && info == kSolved ? nearest_to_one(real, imag) : 0;
    T* const out = call_.values + index_ * n_ * 2;
    for (int i = team_.rank(); i < n_; i += team_.size()) {
      const int place = i == perron ? 0 : i < perron ? i + 1 : i;
      out[2 * place] = info == kSolved ? at_own_size(real[i]) : kNaN<T>;
      out[2 * place + 1] = info == kSolved ? at_own_size(imag[i]) : kNaN<T>;
    }
    if (team_.rank() == 0) {
      call_.info[index_] = info;
    }
  }

  // Which real eigenvalue it is; the others keep their order, in which complex pairs are neighbours.
  OVERTONE_DEVICE int nearest_to_one(const T* real, const T* imag) const {
    int nearest = 0;
    T distance = kInfinity<T>;
    for (int i = 0; i < n_; ++i) {
      const T candidate = abs(real[i] - 1);
      if (imag[i] == 0 && candidate < distance) {
        nearest = i;
        distance = candidate;
      }
    }
    return nearest;
  }

  const EigParams<T>& call_;
  int64_t index_;
  int n_;
  Team team_;
  TrailingUpdate<T>* work_;
  T* values_;   // 2 n numbers: the eigenvalues
  T* vectors_;  // vectors_size(n) numbers
  Dense a_;
  H h_;
  T largest_ = 0;
};

// n ≤ 32, kWarpsPerBlock matrices per block.
template <class T>
__global__ void eig_warp(EigParams<T> call) {
  using Solver = EigSolver<T, WarpTeam<T>, true>;
  const int warp = threadIdx.x / kWarp;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + warp;
  if (index < call.a.count) {
    Solver(call, index, shared_memory<T>() + warp * Solver::shared_size(call.n)).run();
  }
}

// threads_for(n) threads per block.
template <class T, bool in_shared>
__global__ void eig_block(EigParams<T> call) {
  EigSolver<T, BlockTeam<T>, in_shared>(call, blockIdx.x, shared_memory<T>()).run();
}

}  // namespace overtone::cuda
