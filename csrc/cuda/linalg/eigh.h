// Symmetric eigenproblems: scale, Householder's reduction to tridiagonal form, implicit QL, sort.
//
// A thread per row. Every thread runs QL's recurrence redundantly and rotates its own row of eigenvectors with it, so
// that a sweep has no barrier inside: it reads one copy of the tridiagonal matrix, and thread 0 writes the other.
#pragma once

#include "cuda/team.h"

namespace overtone::cuda {

template <class T, class Team>
class EighSolver {
 public:
  // Numbers of shared memory that a matrix takes.
  static constexpr int shared_size(int n) { return Team::kScratch + n * row_stride(n) + 9 * n + 1; }

  // `memory` is the team's own shared memory; a team has at least n threads.
  OVERTONE_DEVICE EighSolver(const EighParams<T>& call, int64_t index, T* memory)
      : call_(call), index_(index), n_(call.n), team_(memory), a_(memory + Team::kScratch) {
    T* vectors = a_ + n_ * row_stride(n_);
    for (int half = 0; half < 2; ++half) {
      v_[half] = vectors + half * n_;
      w_[half] = vectors + (2 + half) * n_;
      d_[half] = vectors + (4 + half) * n_;
      e_[half] = vectors + (6 + half) * n_;
    }
    tau_ = vectors + 8 * n_;
    pivot_ = vectors + 9 * n_;
  }

  OVERTONE_DEVICE void run() {
    const bool finite = load();
    bool solved = false;
    if (finite) {
      tridiagonalize();
      if (call_.vectors != nullptr) {
        form_q();
      }
      solved = (call_.vectors != nullptr ? ql<true>() : ql<false>()) && are_representable();
    }
    if (team_.rank() == 0) {
      call_.info[index_] = solved ? 0 : 1;
    }
    solved ? store() : poison();
  }

 private:
  // Odd, so that neither rows nor columns meet in few banks.
  static constexpr int row_stride(int n) { return n | 1; }
  OVERTONE_DEVICE T& a(int i, int j) const { return a_[i * row_stride(n_) + j]; }

  // Both triangles from the one that is to be read, scaled; whether all of it is finite.
  OVERTONE_DEVICE bool load() {
    T largest = 0;
    for (int k = team_.rank(); k < n_ * n_; k += team_.size()) {
      const int i = k / n_, j = k % n_;
      const bool mirrored = (i < j) != call_.upper && i != j;
      const T x = mirrored ? call_.a.at(index_, j, i) : call_.a.at(index_, i, j);
      largest = max(largest, size_or_infinity(x));
      a(i, j) = x;
    }
    largest = team_.largest(largest);
    if (!(largest <= kMax<T>)) {
      return false;
    }
    scale_ = Scale<T>::to_one(largest);
    for (int k = team_.rank(); k < n_ * n_; k += team_.size()) {
      T& x = a(k / n_, k % n_);
      x = scale_.apply(x);
    }
    team_.sync();
    return true;
  }

  // A = Q T Qᵀ, from the last row upwards: T goes to d, e, and the reflectors replace the rows that made them. A step
  // passes over the matrix once: it applies the previous step's A − v wᵀ − w vᵀ and multiplies by its own vector.
  OVERTONE_DEVICE void tridiagonalize() {
    const int own = team_.rank();
    T old_v = 0, old_w = 0;  // this thread's elements of the previous step's vectors
    for (int i = n_ - 1; i >= 1; --i) {
      T x = 0;
      if (own <= i) {
        x = a(i, own);
        if (i < n_ - 1) {
          x -= v_[0][i] * old_w + w_[0][i] * old_v;
        }
      }
      if (own == i) {
        d_[0][i] = x;
      }
      if (i == 1) {
        finish_corner(x, old_v, old_w);
        break;
      }
      T *const v = v_[1], *const w = w_[1];
      const T tau = make_reflector(i, x, v);
      T product = 0;
      if (own < i) {
        for (int j = 0; j < i; ++j) {
          T element = a(own, j);
          if (i < n_ - 1) {
            element -= old_v * w_[0][j] + old_w * v_[0][j];
            a(own, j) = element;
          }
          product += element * v[j];
        }
      }
      old_v = own < i ? v[own] : T(0);
      const T half = T(0.5) * tau * team_.sum(product * old_v);
      old_w = tau * (product - half * old_v);
      if (own < i) {
        w[own] = old_w;
      }
      exchange(v_);
      exchange(w_);
      team_.sync();
    }
    if (n_ == 1 && own == 0) {
      d_[0][0] = a(0, 0);
    }
    if (own == 0) {
      e_[0][n_ - 1] = 0;
    }
    team_.sync();
  }

  // At their own size eigenvalues may be beyond the largest number.
  OVERTONE_DEVICE bool are_representable() {
    const int own = team_.rank();
    return team_.largest(own < n_ ? size_or_infinity(scale_.undo(d_[0][own])) : T(0)) <= kMax<T>;
  }

  OVERTONE_DEVICE void finish_corner(T x, T old_v, T old_w) {
    if (team_.rank() == 0) {
      e_[0][0] = x;
      d_[0][0] = a(0, 0) - 2 * old_v * old_w;
    }
  }

  // I − τ v vᵀ that takes the elements x of row i before the diagonal to the last of them. Returns τ.
  OVERTONE_DEVICE T make_reflector(int i, T x, T* v) {
    // Squares below this are rounding error of a matrix of size 1; sums of smaller ones would lose digits.
    constexpr T kNegligible = std::numeric_limits<T>::min() / std::numeric_limits<T>::epsilon();
    const int own = team_.rank();
    if (own == i - 1) {
      *pivot_ = x;
    }
    const T rest = team_.sum(own < i - 1 ? x * x : T(0));
    const T first = *pivot_;
    const bool is_reduced = rest <= kNegligible;
    const T image = -copysign(sqrt(first * first + rest), first);
    const T scale = is_reduced ? T(0) : 1 / (first - image);
    const T tau = is_reduced ? T(0) : (image - first) / image;
    if (own < i) {
      a(i, own) = v[own] = own == i - 1 ? T(1) : x * scale;
    }
    if (own == i - 1) {
      e_[0][i - 1] = is_reduced ? first : image;
      tau_[i] = tau;
    }
    team_.sync();
    return tau;
  }

  OVERTONE_DEVICE static void exchange(T* (&pair)[2]) {
    T* const first = pair[0];
    pair[0] = pair[1];
    pair[1] = first;
  }

  // Q in place of the reflectors. The one in row i acts on what is before it; a thread has a column to itself.
  OVERTONE_DEVICE void form_q() {
    const int own = team_.rank();
    for (int i = 0; i < n_; ++i) {
      if (i >= 2 && own < i) {
        T product = 0;
        for (int r = 0; r < i; ++r) {
          product += a(i, r) * a(r, own);
        }
        product *= tau_[i];
        for (int r = 0; r < i; ++r) {
          a(r, own) -= product * a(i, r);
        }
      }
      team_.sync();  // row i has been read
      if (own < i) {
        a(i, own) = 0;
      } else if (own == i) {
        for (int r = 0; r < i; ++r) {
          a(r, i) = 0;
        }
        a(i, i) = 1;
      }
    }
    team_.sync();
  }

  // Eigenvalues to d_[0], unsorted; column j of a becomes the eigenvector of eigenvalue j.
  template <bool vectors>
  OVERTONE_DEVICE bool ql() {
    const int own = team_.rank();
    // LAPACK allows 30 sweeps per eigenvalue; two are usual.
    for (int sweep = 0;; ++sweep) {
      const T *d = d_[0], *e = e_[0];
      const bool is_small =
          own + 1 >= n_ || abs(e[own]) <= kRounding<T> * (abs(d[own]) + abs(d[own + 1])) + kNegligible;
      // The window: from the first row that has not fallen apart to the first after it that has.
      const int low = static_cast<int>(team_.smallest(is_small ? T(n_) : T(own)));
      if (low == n_) {
        return true;
      }
      if (sweep == 30 * n_) {
        return false;
      }
      const int high = static_cast<int>(team_.smallest(is_small && own > low && own < n_ ? T(own) : T(n_ - 1)));
      if (own < n_) {
        if (own < low || own > high) {
          d_[1][own] = d[own];
        }
        if (own < low || own >= high) {
          e_[1][own] = is_small ? T(0) : e[own];
        }
      }
      chase<vectors>(low, high);
      exchange(d_);
      exchange(e_);
      team_.sync();
    }
  }

  // One sweep from the end of the window to its beginning. No thread waits for another.
  template <bool vectors>
  OVERTONE_DEVICE void chase(int low, int high) {
    const int own = team_.rank();
    const bool writes = own == 0, rotates = vectors && own < n_;
    const T *d = d_[0], *e = e_[0];
    T *const new_d = d_[1], *const new_e = e_[1];
    T* const row = a_ + own * row_stride(n_);
    T next = d[high];
    T c = 1, s = 1, p = 0, g = next - shift(d[low], d[low + 1], e[low]);
    T carried = rotates ? row[high] : T(0);
    for (int i = high - 1; i >= low; --i) {
      const T d_i = d[i], e_i = e[i];
      const T f = s * e_i, b = c * e_i, square = f * f + g * g;
      // Both vanish: any rotation will do, and the entries are far below rounding.
      const bool vanishes = square < kNegligible * kNegligible;
      const T inverse = 1 / sqrt(max(square, kNegligible * kNegligible));
      s = vanishes ? T(0) : f * inverse;
      c = vanishes ? T(1) : g * inverse;
      const T moved = next - p;
      const T r = (d_i - moved) * s + 2 * c * b;
      p = s * r;
      g = c * r - b;
      next = d_i;
      if (writes) {
        new_d[i + 1] = moved + p;
        if (i + 1 < high) {
          new_e[i + 1] = square * inverse;
        }
      }
      if (rotates) {
        const T x = row[i];
        row[i + 1] = s * x + c * carried;
        carried = c * x - s * carried;
      }
    }
    if (writes) {
      new_d[low] = next - p;
      new_e[low] = g;
    }
    if (rotates) {
      row[low] = carried;
    }
  }

  // Wilkinson's: the eigenvalue of the window's first 2 × 2 block that is nearer to its first entry.
  OVERTONE_DEVICE static T shift(T d, T d_next, T e) {
    const T half = T(0.5) * (d_next - d);
    return d - e * e / (half + copysign(sqrt(half * half + e * e), half));
  }

  // Ascending: an eigenvalue's place is the number of those that go before it.
  OVERTONE_DEVICE void store() {
    const int own = team_.rank();
    if (own < n_) {
      const T value = d_[0][own];
      int place = 0;
      for (int j = 0; j < n_; ++j) {
        const T other = d_[0][j];
        place += other < value || (other == value && j < own);
      }
      v_[0][place] = T(own);
      call_.values[index_ * n_ + place] = scale_.undo(value);
    }
    team_.sync();
    if (call_.vectors != nullptr) {
      T* const out = call_.vectors + index_ * n_ * n_;
      for (int k = own; k < n_ * n_; k += team_.size()) {
        out[k] = a(k % n_, static_cast<int>(v_[0][k / n_]));
      }
    }
  }

  OVERTONE_DEVICE void poison() {
    for (int i = team_.rank(); i < n_; i += team_.size()) {
      call_.values[index_ * n_ + i] = kNaN<T>;
    }
    if (call_.vectors != nullptr) {
      for (int k = team_.rank(); k < n_ * n_; k += team_.size()) {
        call_.vectors[index_ * n_ * n_ + k] = kNaN<T>;
      }
    }
  }

  // Matrices are at most about 1 in size. Entries below this would lose digits when they are squared.
  static constexpr T kNegligible = sizeof(T) == 8 ? T(1e-150) : T(1e-17);

  const EighParams<T>& call_;
  int64_t index_;
  int n_;
  Team team_;
  T* a_;             // n × n
  T *v_[2], *w_[2];  // the previous step's and this step's
  T *d_[2], *e_[2];  // what a sweep reads and what it writes
  T *tau_, *pivot_;
  Scale<T> scale_;
};

// n ≤ 32, kWarpsPerBlock matrices per block.
template <class T>
__global__ void eigh_warp(EighParams<T> call) {
  using Solver = EighSolver<T, WarpTeam<T>>;
  const int warp = threadIdx.x / kWarp;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + warp;
  if (index < call.a.count) {
    Solver(call, index, shared_memory<T>() + warp * Solver::shared_size(call.n)).run();
  }
}

// threads_for(n) threads per block.
template <class T>
__global__ void eigh_block(EighParams<T> call) {
  EighSolver<T, BlockTeam<T>>(call, blockIdx.x, shared_memory<T>()).run();
}

}  // namespace overtone::cuda
