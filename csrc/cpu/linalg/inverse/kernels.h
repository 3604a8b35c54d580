// The composed weights' kernels, written once and compiled for every ISA level.
#pragma once

#include "cpu/linalg/inverse/lu.h"
#include "cpu/linalg/inverse/params.h"
#include "cpu/linalg/qr/householder.h"
#include "cpu/linalg/triangular.h"

namespace overtone::OVERTONE_ISA {

// Rows are products' depth: B[k][j] = rows[k][j], times factors[k] if there are any.
template <class A>
auto rows_of(const MatrixRows& source, int64_t size, const A* factors = nullptr) {
  return [=](int64_t column, int64_t width, int64_t depth, A* out, int64_t ld) {
    pack_block(source, depth, column, size - depth, width, out, ld);
    for (int64_t k = depth; factors != nullptr && k < size; ++k) {
      for (int64_t j = 0; j < ld; j += kLanes<A>) {
        A* vector = out + (k - depth) * ld + j;
        store_full(load_full(vector) * factors[k], vector);
      }
    }
  };
}

// Vectors of a product to rows `ld` apart.
template <class A>
auto to_rows(A* out, int64_t ld) {
  return [=](int64_t row, int64_t column, Vector<A> sum) { store_full(sum, out + row * ld + column); };
}

template <class A>
void copy_rows(const A* source, int64_t ld, int64_t size, A* out) {
  for (int64_t i = 0; i < size; ++i) {
    std::copy(source + i * ld, source + i * ld + size, out + i * size);
  }
}

// Square buffers of one thread, used for one matrix after the other.
template <class A, int kBuffers>
class Squares {
 public:
  explicit Squares(int64_t size)
      : ld(padded_stride<A>(size)),
        scratch_(kBuffers * Scratch<A>::padded(size * ld) + Scratch<A>::padded(multiply_scratch<A>(size, size))) {
    for (A*& buffer : buffers) {
      buffer = scratch_.take(size * ld);
    }
    panel = scratch_.take(multiply_scratch<A>(size, size));
  }

  int64_t ld;
  A* buffers[kBuffers];
  A* panel;

 private:
  Scratch<A> scratch_;
};

template <class A>
void fill_nan(A* out, int64_t size) {
  std::fill(out, out + size, std::numeric_limits<A>::quiet_NaN());
}

template <class A>
void symmetric_forward_items(const ComposeForward& call, int64_t begin, int64_t end) {
  const int64_t n = call.size;
  Householder<A> householder(n, n, n);
  const Squares<A, 1> squares(n);
  for (int64_t member = begin; member < end; ++member) {
    A* q = static_cast<A*>(call.basis) + member * n * n;
    A* r = static_cast<A*>(call.r) + member * n * n;
    A* weight = static_cast<A*>(call.weight) + member * n * n;
    call.failed[member] = householder.load(member_rows<A>(call.matrix, member)) ? 0 : 1;
    if (call.failed[member] != 0) {
      fill_nan(q, n * n);
      fill_nan(r, n * n);
      fill_nan(weight, n * n);
      continue;
    }
    householder.factor();
    householder.store_r(n, r);
    householder.store_q(q);
    // The lower triangle of Q · (Λ Qᵀ), mirrored: half the work, and a weight that is exactly symmetric.
    A* lower = squares.buffers[0];
    multiply<A>(
        n, n, q, n, squares.panel,
        rows_of<A>(transposed(buffer_rows<A>(q, 0, n)), n, static_cast<const A*>(call.eigenvalues) + member * n),
        [n](int64_t column, int64_t) { return Extent{column, n, 0}; }, to_rows(lower, squares.ld));
    mirror_lower(lower, squares.ld, n);
    copy_rows(lower, squares.ld, n, weight);
  }
}

// With G = ∂H: S = Qᵀ (G + Gᵀ) Q = 2 Qᵀ sym(G) Q, ∂λ = diag S / 2, ∂Θ = Q stril(S ∘ (λ_j − λ_i)) R⁻ᵀ.
template <class A>
class SymmetricGradient {
 public:
  explicit SymmetricGradient(const ComposeBackward& call) : call_(call), n_(call.size), squares_(call.size) {}

  void run(int64_t member) {
    const int64_t n = n_;
    const int64_t ld = squares_.ld;
    const A* q = static_cast<const A*>(call_.basis) + member * n * n;
    const A* r = static_cast<const A*>(call_.r) + member * n * n;
    const auto [both, product, q_columns] = squares_.buffers;
    call_.failed[member] = 0;
    for (int64_t j = 0; j < n; ++j) {
      call_.failed[member] |= r[j * n + j] == 0;
    }
    load_both(member_rows<A>(call_.grad_weight, member), both);
    multiply<A>(n, n, both, ld, squares_.panel, rows_of<A>(buffer_rows<A>(q, 0, n), n), whole(n), to_rows(product, ld));
    pack_block(transposed(buffer_rows<A>(q, 0, n)), 0, 0, n, n, q_columns, ld);
    // The upper triangle of S, and of Z = R⁻¹ (S ∘ (λ_i − λ_j)): a panel of columns of S is all that its columns of Z
    // need, and Z is zero below the diagonal.
    A* z = both;
    const A* eigenvalues = static_cast<const A*>(call_.eigenvalues) + member * n;
    A* grad_eigenvalues = static_cast<A*>(call_.grad_eigenvalues) + member * n;
    multiply<A>(
        n, n, q_columns, ld, squares_.panel, rows_of<A>(buffer_rows<A>(product, 0, ld), n),
        [](int64_t column, int64_t width) { return Extent{0, column + width, 0}; }, to_rows(z, ld));
    for (int64_t column = 0; column < n; column += kPanelColumns<A>) {
      const int64_t width = std::min(kPanelColumns<A>, n - column);
      weigh(z, column, width, eigenvalues, grad_eigenvalues);
      solve_triangular<A, Triangle::upper>(r, n, column + width, z + column, ld, width);
    }
    // ∂Θ = Q Zᵀ.
    multiply<A>(
        n, n, q, n, squares_.panel, rows_of<A>(transposed(buffer_rows<A>(z, 0, ld)), n),
        [n](int64_t column, int64_t) { return Extent{0, n, column}; }, to_rows(product, ld));
    copy_rows(product, ld, n, static_cast<A*>(call_.grad_matrix) + member * n * n);
  }

 private:
  // G + Gᵀ.
  void load_both(const MatrixRows& grad, A* both) {
    const int64_t ld = squares_.ld;
    pack_block(grad, 0, 0, n_, n_, both, ld);
    for (int64_t column = 0; column < n_; column += kPanelColumns<A>) {
      const int64_t width = std::min(kPanelColumns<A>, n_ - column);
      const int64_t panel_ld = padded_to(width, kLanes<A>);
      pack_block(transposed(grad), 0, column, n_, width, squares_.panel, panel_ld);
      for (int64_t i = 0; i < n_; ++i) {
        for (int64_t j = 0; j < panel_ld; j += kLanes<A>) {
          A* out = both + i * ld + column + j;
          store_full(load_full(out) + load_full(squares_.panel + i * panel_ld + j), out);
        }
      }
    }
  }

  // z_ij ← z_ij (λ_i − λ_j) above the diagonal of these columns, zero below; ∂λ from the diagonal.
  void weigh(A* z, int64_t column, int64_t width, const A* eigenvalues, A* grad_eigenvalues) const {
    for (int64_t i = 0; i < column + width; ++i) {
      A* row = z + i * squares_.ld;
      if (i >= column) {
        grad_eigenvalues[i] = row[i] / 2;
      }
      for (int64_t j = column; j < column + width; ++j) {
        row[j] = j > i ? row[j] * (eigenvalues[i] - eigenvalues[j]) : A{0};
      }
    }
  }

  const ComposeBackward& call_;
  int64_t n_;
  Squares<A, 3> squares_;
};

template <class A>
void symmetric_backward_items(const ComposeBackward& call, int64_t begin, int64_t end) {
  SymmetricGradient<A> gradient(call);
  for (int64_t member = begin; member < end; ++member) {
    gradient.run(member);
  }
}

template <class A>
void general_forward_items(const ComposeForward& call, int64_t begin, int64_t end) {
  const int64_t n = call.size;
  Inverse<A> inverse(n);
  const Squares<A, 2> squares(n);
  const auto [v, product] = squares.buffers;
  for (int64_t member = begin; member < end; ++member) {
    const MatrixRows matrix = member_rows<A>(call.matrix, member);
    A* basis = static_cast<A*>(call.basis) + member * n * n;
    A* weight = static_cast<A*>(call.weight) + member * n * n;
    call.failed[member] = inverse.run(matrix, basis) ? 0 : 1;
    if (call.failed[member] != 0) {
      fill_nan(basis, n * n);
      fill_nan(weight, n * n);
      continue;
    }
    pack_block(matrix, 0, 0, n, n, v, squares.ld);
    multiply<A>(n, n, v, squares.ld, squares.panel,
                rows_of<A>(buffer_rows<A>(basis, 0, n), n, static_cast<const A*>(call.eigenvalues) + member * n),
                whole(n), to_rows(product, squares.ld));
    copy_rows(product, squares.ld, n, weight);
  }
}

// With G = ∂H: S = Vᵀ G V⁻ᵀ, ∂λ = diag S, ∂V = V⁻ᵀ (S ∘ (λ_j − λ_i)).
template <class A>
void general_backward_items(const ComposeBackward& call, int64_t begin, int64_t end) {
  const int64_t n = call.size;
  const Squares<A, 3> squares(n);
  const auto [left, s, product] = squares.buffers;
  const int64_t ld = squares.ld;
  for (int64_t member = begin; member < end; ++member) {
    const MatrixRows inverse = buffer_rows<A>(call.basis, member * n * n, n);
    const A* eigenvalues = static_cast<const A*>(call.eigenvalues) + member * n;
    A* grad_eigenvalues = static_cast<A*>(call.grad_eigenvalues) + member * n;
    call.failed[member] = 0;
    pack_block(member_rows<A>(call.grad_weight, member), 0, 0, n, n, left, ld);
    multiply<A>(n, n, left, ld, squares.panel, rows_of<A>(transposed(inverse), n), whole(n), to_rows(product, ld));
    pack_block(transposed(member_rows<A>(call.matrix, member)), 0, 0, n, n, left, ld);
    multiply<A>(n, n, left, ld, squares.panel, rows_of<A>(buffer_rows<A>(product, 0, ld), n), whole(n), to_rows(s, ld));
    for (int64_t i = 0; i < n; ++i) {
      grad_eigenvalues[i] = s[i * ld + i];
      for (int64_t j = 0; j < n; ++j) {
        s[i * ld + j] *= eigenvalues[j] - eigenvalues[i];
      }
    }
    pack_block(transposed(inverse), 0, 0, n, n, left, ld);
    multiply<A>(n, n, left, ld, squares.panel, rows_of<A>(buffer_rows<A>(s, 0, ld), n), whole(n), to_rows(product, ld));
    copy_rows(product, ld, n, static_cast<A*>(call.grad_matrix) + member * n * n);
  }
}

inline void symmetric_forward(const ComposeForward& call, int64_t begin, int64_t end) {
  call.type == ElementType::float64 ? symmetric_forward_items<double>(call, begin, end)
                                    : symmetric_forward_items<float>(call, begin, end);
}

inline void symmetric_backward(const ComposeBackward& call, int64_t begin, int64_t end) {
  call.type == ElementType::float64 ? symmetric_backward_items<double>(call, begin, end)
                                    : symmetric_backward_items<float>(call, begin, end);
}

inline void general_forward(const ComposeForward& call, int64_t begin, int64_t end) {
  call.type == ElementType::float64 ? general_forward_items<double>(call, begin, end)
                                    : general_forward_items<float>(call, begin, end);
}

inline void general_backward(const ComposeBackward& call, int64_t begin, int64_t end) {
  call.type == ElementType::float64 ? general_backward_items<double>(call, begin, end)
                                    : general_backward_items<float>(call, begin, end);
}

extern const SpectrumKernels spectrum_kernels = {OVERTONE_ISA_NAME, &symmetric_forward, &symmetric_backward,
                                                 &general_forward, &general_backward};

}  // namespace overtone::OVERTONE_ISA
