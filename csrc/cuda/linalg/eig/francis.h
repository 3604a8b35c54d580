// Eigenvalues of a Hessenberg matrix: Francis' double shift. As cpu/linalg/eig/francis.h.
//
// One warp, the leader, finds the window, chooses the shifts and chases the bulge through the part of the matrix near
// the diagonal, a few reflectors at a time; all threads of the team then apply those to the rest of the window, each
// element loaded and stored once. Where the team is a warp everything is near.
#pragma once

#include "cuda/linalg/eig/matrix.h"

namespace overtone::cuda {

// I − tau (1, v1, v2)ᵀ (1, v1, v2), on three neighbouring rows or columns.
template <class T>
struct Reflector {
  T tau, v1, v2, tau_v1, tau_v2;

  OVERTONE_DEVICE void apply(T& x0, T& x1, T& x2) const {
    const T t = x0 + v1 * x1 + v2 * x2;
    x0 -= tau * t;
    x1 -= tau_v1 * t;
    x2 -= tau_v2 * t;
  }

  // On the elements that `at` names by their place; the third may be missing.
  template <class At>
  OVERTONE_DEVICE void apply_in_place(At at, bool has_third) const {
    T x0 = at(0), x1 = at(1), x2 = has_third ? at(2) : T(0);
    apply(x0, x1, x2);
    at(0) = x0;
    at(1) = x1;
    if (has_third) {
      at(2) = x2;
    }
  }
};

// Reflectors [k0, k1) of the window's rows [top, bottom], near: up to this column they have been applied.
template <class T>
struct TrailingUpdate {
  static constexpr int kReflectors = 8;
  Reflector<T> reflectors[kReflectors];
  int k0, k1, near, top, bottom;
  bool done, converged;
  Scale<T> scale, balanced_scale;  // of the matrix: they wait here rather than in registers
};

// What the leader knows; the same in each of its lanes.
template <class T, class H>
class Francis {
 public:
  // `near_steps`: reflectors between two calls of the trailing update; `real`, `imag`: the eigenvalues, in shared
  // memory.
  OVERTONE_DEVICE Francis(const H& h, int near_steps, T* real, T* imag)
      : h_(h), lane_(threadIdx.x % kWarp), near_steps_(near_steps), real_(real), imag_(imag), last_(h.n - 1), k_(h.n) {}

  // To be called by the leader before the first reflectors.
  OVERTONE_DEVICE void measure() {
    for (int i = 0; i < h_.n; ++i) {
      for (int j = (i > 0 ? i - 1 : 0) + lane_; j < h_.n; j += kWarp) {
        norm_ = max(norm_, abs(h_.at(i, j)));
      }
    }
    norm_ = reduce_warp(norm_, [](T a, T b) { return max(a, b); });
    __syncwarp();
  }

  // The next reflectors. Lane 0 writes `work`; everybody must have read the previous one.
  OVERTONE_DEVICE void next(TrailingUpdate<T>& work) {
    if (k_ >= last_) {  // the sweep is over
      find_window();
      const bool converged = last_ < 0, done = converged || total_sweeps_ == 30 * (h_.n < 10 ? 10 : h_.n);
      if (lane_ == 0) {
        work.done = done;
        work.converged = converged;
      }
      if (done) {
        return;
      }
      begin_sweep();
    }
    const int k0 = k_, k1 = k0 + near_steps_ < last_ ? k0 + near_steps_ : last_;
    const int near = k1 + 2 < last_ ? k1 + 2 : last_;
    for (int k = k0; k < k1; ++k) {
      const Reflector<T> reflector = step(k, k0, near);
      if (lane_ == 0 && k - k0 < TrailingUpdate<T>::kReflectors) {
        work.reflectors[k - k0] = reflector;
      }
    }
    k_ = k1;
    if (lane_ == 0) {
      work.k0 = k0;
      work.k1 = k1;
      work.near = near;
      work.top = first_;
      work.bottom = last_;
    }
  }

 private:
  // Of the rows up to `last`, the last one that nothing connects with the one before.
  OVERTONE_DEVICE int find_cut(T negligible) const {
    for (int base = last_; base > 0; base -= kWarp) {
      const int i = base - lane_;
      int cut = 0;
      if (i > 0) {
        const T around = abs(h_.at(i, i)) + abs(h_.at(i - 1, i - 1));
        cut = abs(h_.at(i, i - 1)) <= max(kRounding<T> * around, negligible) ? i : 0;
      }
      cut = reduce_warp(cut, [](int a, int b) { return max(a, b); });
      if (cut > 0) {
        return cut;
      }
    }
    return 0;
  }

  // The window [first, last] at the end; windows of one or two rows are done and left behind.
  OVERTONE_DEVICE void find_window() {
    const T negligible = norm_ * (sweeps_ < kPatience ? Real<T>::kTiny : kRounding<T>);
    while (last_ >= 0) {
      const int cut = find_cut(negligible);
      __syncwarp();  // everybody has read
      if (cut > 0 && lane_ == 0) {
        h_.at(cut, cut - 1) = 0;
      }
      if (cut + 1 < last_) {
        first_ = cut;
        __syncwarp();
        return;
      }
      if (cut == last_) {
        if (lane_ == 0) {
          real_[cut] = h_.at(cut, cut);
          imag_[cut] = 0;
        }
      } else {
        split(cut);
      }
      last_ = cut - 1;
      sweeps_ = phase_ = 0;
      __syncwarp();
    }
  }

  // The eigenvalues of rows i, i + 1.
  OVERTONE_DEVICE void split(int i) const {
    const T a = h_.at(i, i), b = h_.at(i, i + 1), c = h_.at(i + 1, i), d = h_.at(i + 1, i + 1);
    const T p = (a - d) * T(0.5);
    const T more = max(abs(b), abs(c)), rest = min(abs(b), abs(c));
    const T rest_signed = (b < 0) != (c < 0) ? -rest : rest;
    const T size = max(abs(p), more), scale = size > 0 ? size : T(1);
    const T discriminant = p / scale * p + more / scale * rest_signed;
    const T root = sqrt(scale) * sqrt(abs(discriminant));
    if (lane_ != 0) {
      return;
    }
    if (discriminant >= 0) {
      const T z = p < 0 ? p - root : p + root;
      real_[i] = d + z;
      // more / z may overflow where there is no rest, and infinity times zero is NaN.
      real_[i + 1] = z == 0 || rest == 0 ? d : d - more / z * rest_signed;
      imag_[i] = imag_[i + 1] = 0;
    } else {
      real_[i] = real_[i + 1] = d + p;
      imag_[i] = root;
      imag_[i + 1] = -root;
    }
  }

  // The first column of (H − σ₁)(H − σ₂) in the window, up to a factor: what the bulge starts with. The shifts are the
  // eigenvalues of the last two rows; of two real ones the one closer to the corner is taken twice.
  OVERTONE_DEVICE void begin_sweep() {
    ++total_sweeps_;
    ++sweeps_;
    ++phase_;
    k_ = first_;
    const int f = first_, l = last_;
    T a = h_.at(l - 1, l - 1), b = h_.at(l - 1, l), c = h_.at(l, l - 1), d = h_.at(l, l);
    const T h00 = h_.at(f, f), h01 = h_.at(f, f + 1), h10 = h_.at(f + 1, f), h11 = h_.at(f + 1, f + 1);
    const T h21 = h_.at(f + 2, f + 1);
    if (phase_ == kExceptional || phase_ == 2 * kExceptional) {  // stalled: shifts that are no eigenvalues
      const bool at_top = phase_ == kExceptional;
      const T s = at_top ? abs(h10) + abs(h21) : abs(c) + abs(h_.at(l - 1, l - 2));
      a = T(0.75) * s + (at_top ? h00 : d);
      b = T(-0.4375) * s;
      c = s;
      d = a;
      phase_ = at_top ? phase_ : 0;
    }
    const T size = abs(a) + abs(b) + abs(c) + abs(d);
    const T scale = size > Real<T>::kTiny ? size : T(1), inverse = 1 / scale;
    a *= inverse, b *= inverse, c *= inverse, d *= inverse;
    const T middle = (a + d) * T(0.5), determinant = (a - middle) * (d - middle) - b * c;
    const T root = sqrt(abs(determinant));
    const T plus = middle + root, minus = middle - root;
    const T closer = abs(plus - d) <= abs(minus - d) ? plus : minus;
    const bool is_complex = determinant > 0;
    const T shift = (is_complex ? middle : closer) * scale, shift_imag = is_complex ? root * scale : T(0);
    const T difference = h00 - shift;
    const T length = abs(difference) + abs(shift_imag) + abs(h10);
    const T per_length = length > Real<T>::kTiny ? 1 / length : T(1), h10_scaled = h10 * per_length;
    start_[0] = h10_scaled * h01 + difference * (difference * per_length) + shift_imag * (shift_imag * per_length);
    start_[1] = h10_scaled * (h00 + h11 - 2 * shift);
    start_[2] = h10_scaled * h21;
    __syncwarp();  // everybody has read
  }

  // Makes the reflector at row k that starts or moves the bulge, and applies it to the columns up to `near` and to the
  // rows from k0 on.
  OVERTONE_DEVICE Reflector<T> step(int k, int k0, int near) {
    const bool moves = k > first_, has_third = k + 1 < last_;
    const T p = moves ? h_.at(k, k - 1) : start_[0];
    const T q = moves ? h_.at(k + 1, k - 1) : start_[1];
    const T r = !has_third ? T(0) : moves ? h_.at(k + 2, k - 1) : start_[2];
    const T squares = p * p + q * q + r * r;
    const bool on = squares > Real<T>::kTiny * Real<T>::kTiny;
    const T s = on ? copysign(sqrt(squares), p) : T(1);
    const T sum = p + s, per_sum = on ? 1 / sum : T(0), tau = on ? sum / s : T(0);
    const Reflector<T> reflector{tau, q * per_sum, r * per_sum, tau * (q * per_sum), tau * (r * per_sum)};
    for (int j = k + lane_; j <= near; j += kWarp) {
      reflector.apply_in_place([&](int place) -> T& { return h_.at(k + place, j); }, has_third);
    }
    __syncwarp();
    const int bottom = k + 3 < last_ ? k + 3 : last_;
    for (int i = k0 + lane_; i <= bottom; i += kWarp) {
      reflector.apply_in_place([&](int place) -> T& { return h_.at(i, k + place); }, has_third);
    }
    if (moves && lane_ == 0) {
      h_.at(k, k - 1) = on ? -s : p;
      h_.at(k + 1, k - 1) = 0;
      if (has_third) {
        h_.at(k + 2, k - 1) = 0;
      }
    }
    __syncwarp();
    return reflector;
  }

  static constexpr int kExceptional = 10;  // sweeps without a deflation before the shifts are changed
  static constexpr int kPatience = 15;     // and before the test for deflation looks at the norm of the whole matrix

  H h_;
  int lane_, near_steps_;
  T *real_, *imag_;
  T norm_ = 0, start_[3];
  int first_ = 0, last_, k_;
  int sweeps_ = 0, phase_ = 0, total_sweeps_ = 0;  // since the last deflation; of the shifts; since the beginning
};

// The reflectors on what is not near: rows k0… right of `near`, then the columns above k0.
template <class T, class H>
OVERTONE_DEVICE void reflect_trailing(const H& h, const TrailingUpdate<T>& work, int rank, int size) {
  constexpr int kMaxReflectors = TrailingUpdate<T>::kReflectors;
  const int k0 = work.k0, count = work.k1 - k0, right = work.bottom - work.near;
  // `places`: elements that the chain of reflectors touches.
  const int places = k0 + count + 1 < work.bottom ? count + 2 : work.bottom - k0 + 1;
  for (int item = rank; item < right + k0 - work.top; item += size) {
    const bool is_column = item < right;
    const int across = is_column ? work.near + 1 + item : work.top + item - right;
    T part[kMaxReflectors + 2];
    OVERTONE_UNROLL
    for (int i = 0; i < kMaxReflectors + 2; ++i) {
      part[i] = i >= places ? T(0) : is_column ? h.at(k0 + i, across) : h.at(across, k0 + i);
    }
    OVERTONE_UNROLL
    for (int i = 0; i < kMaxReflectors; ++i) {
      if (i < count) {
        work.reflectors[i].apply(part[i], part[i + 1], part[i + 2]);
      }
    }
    OVERTONE_UNROLL
    for (int i = 0; i < kMaxReflectors + 2; ++i) {
      if (i < places) {
        (is_column ? h.at(k0 + i, across) : h.at(across, k0 + i)) = part[i];
      }
    }
  }
}

}  // namespace overtone::cuda
