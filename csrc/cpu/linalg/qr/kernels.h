// The QR kernels, written once and compiled for every ISA level.
#pragma once

#include "cpu/linalg/qr/householder.h"
#include "cpu/linalg/qr/lanes.h"
#include "cpu/linalg/qr/params.h"
#include "cpu/linalg/triangular.h"

namespace overtone::OVERTONE_ISA {

template <class A>
void qr_forward_items(const QrForward& call, int64_t begin, int64_t end) {
  if (call.is_small()) {
    LaneQr<A> lanes(call);
    const int64_t last = std::min(call.a.count, end * kQrGroup);
    for (int64_t first = begin * kQrGroup; first < last; first += kLanes<A>) {
      lanes.run(first);
    }
    return;
  }
  Householder<A> householder(call.rows, call.columns, call.q_columns);
  for (int64_t index = begin; index < end; ++index) {
    bool is_solved = householder.load(matrix_rows<A>(call.a, index));
    if (is_solved) {
      householder.factor();
      is_solved = householder.store_r(call.r_rows, static_cast<A*>(call.r) + index * call.r_rows * call.columns);
    }
    call.info[index] = is_solved ? 0 : 1;
    if (!is_solved) {
      poison_results<A>(call, index);
    } else if (call.q_columns > 0) {
      householder.store_q(static_cast<A*>(call.q) + index * call.rows * call.q_columns);
    }
  }
}

// The gradient of one matrix after the other, in buffers that all of them use.
template <class A>
class QrGradient {
 public:
  explicit QrGradient(const QrBackward& call)
      : call_(call),
        rows_(call.rows),
        columns_(call.columns),
        ld_(padded_stride<A>(call.rows)),
        ld_square_(padded_stride<A>(call.columns)),
        scratch_(Scratch<A>::padded(columns_ * ld_) + Scratch<A>::padded(columns_ * ld_square_) +
                 Scratch<A>::padded(multiply_scratch<A>(columns_, rows_)) + Scratch<A>::padded(columns_ * columns_)),
        x_(scratch_.take(columns_ * ld_)),
        c_(scratch_.take(columns_ * ld_square_)),
        panel_(scratch_.take(multiply_scratch<A>(columns_, rows_))),
        scaled_r_(scratch_.take(columns_ * columns_)) {}

  void run(int64_t index) {
    const A* q = static_cast<const A*>(call_.q) + index * rows_ * columns_;
    const A* r = static_cast<const A*>(call_.r) + index * columns_ * columns_;
    A* grad_a = static_cast<A*>(call_.grad_a) + index * rows_ * columns_;
    call_.singular[index] = 0;
    for (int64_t j = 0; j < columns_; ++j) {
      const A diagonal = r[j * columns_ + j];
      if (std::isnan(diagonal)) {
        std::fill(grad_a, grad_a + rows_ * columns_, A{0});
        return;
      }
      call_.singular[index] |= diagonal == 0;
    }
    load_grad_q(index);
    const A scale = scale_of(r);
    if (scale != 1) {
      r = scaled(r, scale);
    }
    make_lower(index, q, r);
    mirror_lower(c_, ld_square_, columns_);
    add_product(q);
    for (int64_t column = 0; column < rows_; column += kPanelColumns<A>) {
      solve_triangular<A, Triangle::upper>(r, columns_, columns_, x_ + column, ld_,
                                           std::min(kPanelColumns<A>, rows_ - column));
    }
    store_transposed(x_, ld_, columns_, rows_, grad_a, columns_, [](int64_t, int64_t, Vector<A> v) { return v; });
  }

 private:
  // With R and ∂Q scaled by one number ∂A is the same. A power of two by which R ∂Rᵀ neither overflows nor loses digits
  // among subnormal numbers; 1 for an R of usual size.
  A scale_of(const A* r) const {
    constexpr int kMaxExponent = std::numeric_limits<A>::max_exponent - 1;
    const A largest = largest_of(r);
    if (largest == 0 || (largest < kUsual && 1 / kUsual < largest)) {
      return 1;
    }
    A least = largest;  // on the diagonal; what is divided by must remain a normal number
    for (int64_t j = 0; j < columns_; ++j) {
      least = std::min(least, r[j * columns_ + j]);
    }
    const int room = least == 0 ? 0 : std::max(__builtin_ilogb(least) + kMaxExponent - 1, 0);
    return static_cast<A>(__builtin_ldexp(1.0, -std::clamp(__builtin_ilogb(largest), -kMaxExponent, room)));
  }

  A largest_of(const A* r) const {
    const int64_t size = columns_ * columns_;
    Vector<A> largest{};
    int64_t i = 0;
    for (; i + kLanes<A> <= size; i += kLanes<A>) {
      largest = max<A>(abs<A>(load_full(r + i)), largest);
    }
    return reduce_max<A>(max<A>(abs<A>(load(r + i, 1, static_cast<int>(size - i))), largest));
  }

  // R, into memory of its own; ∂Q where it is.
  const A* scaled(const A* r, A scale) {
    for (int64_t i = 0; i < columns_ * columns_; ++i) {
      scaled_r_[i] = r[i] * scale;
    }
    for (int64_t i = 0; i < columns_ * ld_; ++i) {
      x_[i] *= scale;
    }
    return scaled_r_;
  }

  void load_grad_q(int64_t index) {
    if (call_.grad_q.data == nullptr) {
      std::fill(x_, x_ + columns_ * ld_, A{0});
      return;
    }
    const StridedMatrix grad_q = matrix_rows<A>(call_.grad_q, index);
    pack_block(transposed(grad_q), 0, 0, columns_, rows_, x_, ld_);
  }

  // The lower triangle of R ∂Rᵀ − ∂Qᵀ Q.
  void make_lower(int64_t index, const A* q, const A* r) {
    std::fill(c_, c_ + columns_ * ld_square_, A{0});
    if (call_.grad_r.data != nullptr) {
      const StridedMatrix grad_r = matrix_rows<A>(call_.grad_r, index);
      multiply<A>(
          columns_, columns_, r, columns_, panel_,
          [&](int64_t column, int64_t width, int64_t depth, A* out, int64_t ld) {
            pack_block(transposed(grad_r), depth, column, columns_ - depth, width, out, ld);
          },
          [&](int64_t column, int64_t) {
            return Extent{column, columns_, column};  // R is zero left of its diagonal
          },
          [&](int64_t row, int64_t column, Vector<A> sum) { store_full(sum, c_ + row * ld_square_ + column); });
    }
    if (call_.grad_q.data != nullptr) {
      multiply<A>(
          columns_, rows_, x_, ld_, panel_,
          [&](int64_t column, int64_t width, int64_t, A* out, int64_t ld) {
            pack_block(buffer_rows<A>(q, 0, columns_), 0, column, rows_, width, out, ld);
          },
          [&](int64_t column, int64_t) { return Extent{column, columns_, 0}; },
          [&](int64_t row, int64_t column, Vector<A> sum) {
            A* out = c_ + row * ld_square_ + column;
            store_full(load_full(out) - sum, out);
          });
    }
  }

  // x ← ∂Qᵀ + C Qᵀ.
  void add_product(const A* q) {
    multiply<A>(
        rows_, columns_, c_, ld_square_, panel_,
        [&](int64_t column, int64_t width, int64_t, A* out, int64_t ld) {
          pack_block(transposed(buffer_rows<A>(q, 0, columns_)), 0, column, columns_, width, out, ld);
        },
        whole(columns_),
        [&](int64_t row, int64_t column, Vector<A> sum) {
          A* out = x_ + row * ld_ + column;
          store_full(load_full(out) + sum, out);
        });
  }

  static constexpr A kUsual = sizeof(A) == 8 ? static_cast<A>(0x1p500) : static_cast<A>(0x1p60);

  const QrBackward& call_;
  int64_t rows_, columns_, ld_, ld_square_;
  Scratch<A> scratch_;
  A* x_;         // [columns][ld]: ∂Q transposed, and in the end ∂A transposed
  A* c_;         // [columns][ld_square]
  A* panel_;     // of the products
  A* scaled_r_;  // [columns][columns]
};

template <class A>
void qr_backward_items(const QrBackward& call, int64_t begin, int64_t end) {
  QrGradient<A> gradient(call);
  for (int64_t index = begin; index < end; ++index) {
    gradient.run(index);
  }
}

inline void qr_forward(const QrForward& call, int64_t begin, int64_t end) {
  call.type == Dtype::float64 ? qr_forward_items<double>(call, begin, end) : qr_forward_items<float>(call, begin, end);
}

inline void qr_backward(const QrBackward& call, int64_t begin, int64_t end) {
  call.type == Dtype::float64 ? qr_backward_items<double>(call, begin, end)
                              : qr_backward_items<float>(call, begin, end);
}

extern const QrKernels qr_kernels = {OVERTONE_ISA_NAME, &qr_forward, &qr_backward};

}  // namespace overtone::OVERTONE_ISA
