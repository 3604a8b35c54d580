// Whether a nonsymmetric matrix can be left to LAPACK, whose balancing cannot be turned off.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace overtone {

// Errors of the balanced matrix D⁻¹AD come back multiplied by up to max D / min D. Where rows and columns are alike in
// size there is little to balance; elsewhere it is done here first, as LAPACK does it, to see whether the matrix
// becomes smaller by as much. (Our own solver takes back what does harm.)
class BalancingTrial {
 public:
  // `a`: n rows, `stride` elements apart.
  template <class A>
  static bool is_harmless(const A* a, int64_t n, int64_t stride) {
    return are_alike(a, n, stride) || BalancingTrial(a, n, stride).gains_what_it_costs();
  }

 private:
  // Of row and column i: the sums off the diagonal, and the diagonal.
  struct Sums {
    double row = 0, column = 0, diagonal = 0;

    bool is_connected() const { return row > 0 && column > 0; }
    double whole_row() const { return row + diagonal; }
    double whole_column() const { return column + diagonal; }
    bool are_alike() const {
      return !is_connected() || (whole_row() * kUnlike >= whole_column() && whole_column() * kUnlike >= whole_row());
    }
  };

  template <class A>
  static bool are_alike(const A* a, int64_t n, int64_t stride) {
    std::vector<Sums> sums(n);
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        const double size = std::abs(a[i * stride + j]);
        (i == j ? sums[i].diagonal : sums[i].row) += size;
        sums[j].column += i == j ? 0 : size;
      }
    }
    return std::all_of(sums.begin(), sums.end(), [](const Sums& of) { return of.are_alike(); });
  }

  template <class A>
  BalancingTrial(const A* a, int64_t n, int64_t stride) : n_(n), a_(n * n), scale_(n, 1.0) {
    for (int64_t i = 0; i < n; ++i) {
      std::transform(a + i * stride, a + i * stride + n, &a_[i * n], [](A x) { return std::abs(x); });
    }
  }

  bool gains_what_it_costs() {
    const double before = *std::max_element(a_.begin(), a_.end());
    for (int round = 0; round < kRounds && balance_once(); ++round) {
    }
    const auto [least, most] = std::minmax_element(scale_.begin(), scale_.end());
    return *most / *least * *std::max_element(a_.begin(), a_.end()) <= kHarm * before;  // not if it overflows
  }

  // Whether anything changed.
  bool balance_once() {
    bool changed = false;
    for (int64_t i = 0; i < n_; ++i) {
      const Sums of = sums(i);
      const double row = of.whole_row(), column = of.whole_column();
      const double factor = of.is_connected() ? std::exp2(std::round(std::log2(row / column) / 2)) : 1;
      if (column * factor + row / factor < kGain * (column + row)) {
        changed = true;
        scale_[i] *= factor;
        for (int64_t k = 0; k < n_; ++k) {
          a_[k * n_ + i] *= factor;
        }
        for (int64_t k = 0; k < n_; ++k) {
          a_[i * n_ + k] /= factor;
        }
      }
    }
    return changed;
  }

  Sums sums(int64_t i) const {
    Sums of;
    of.diagonal = a_[i * n_ + i];
    for (int64_t k = 0; k < n_; ++k) {
      of.row += k == i ? 0 : a_[i * n_ + k];
      of.column += k == i ? 0 : a_[k * n_ + i];
    }
    return of;
  }

  // As in eig_balance.h.
  static constexpr double kUnlike = 32, kGain = 0.95, kHarm = 4;
  static constexpr int kRounds = 20;

  int64_t n_;
  std::vector<double> a_, scale_;  // moduli of D⁻¹AD, and D
};

}  // namespace overtone
