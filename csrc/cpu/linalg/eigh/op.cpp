// Symmetric eigenproblems on CPU tensors: from the dispatcher to the kernels of the current ISA level.
// Shapes and types were validated by python/overtone/ops; what is checked here again is what memory safety needs.
#include "cpu/linalg/eigh/params.h"

#include <algorithm>
#include <tuple>

#include "cpu/isa/isa.h"
#include "cpu/linalg/eigh/lapack.h"
#include "cpu/tensor.h"

namespace overtone {
namespace {

// Runs work(begin, end) over items of `per_item` matrices.
template <class Work>
void for_matrices(int64_t count, int64_t per_item, int64_t size, const Work& work) {
  const double n = static_cast<double>(size);
  parallel_ranges((count + per_item - 1) / per_item, {6 * n * n * n * static_cast<double>(per_item)}, work);
}

// Whether a matrix per lane is faster than LAPACK, which takes as long for n / lapack_speedup matrices as an item of
// lanes does (benchmarks/linalg/crossover.py; the figures for AVX-512 are those of a machine whose LAPACK uses it too).
// Threads must not matter, or they would change the bits.
bool prefer_lanes(Dtype type, int64_t count, int64_t per_item, int64_t n, bool vectors) {
  const bool is_wide = vector_isa() == Isa::avx512;
  const int64_t speedup_with_vectors = !is_wide ? 40 : type == Dtype::float64 ? 30 : 25;
  const int64_t lapack_speedup = vectors ? speedup_with_vectors : is_wide ? 45 : 50;
  const int64_t items = (count + per_item - 1) / per_item;
  return n <= 16 || items * n <= count * lapack_speedup;
}

std::tuple<Tensor, Tensor, Tensor> eigh_ex(Tensor a, bool upper, bool vectors) {
  constexpr const char* op = "eigh";
  check_matrices(a, /*square=*/true, "A", op);
  const MatricesView matrices(a);
  EighParams call;
  call.type = dtype_of(a, op, "A");
  call.n = a.size(-1);
  call.upper = upper;
  call.a = matrices.batch;
  std::vector<int64_t> leading = sizes_of(a);
  leading.resize(leading.size() - 2);
  std::vector<int64_t> of_values = leading;
  of_values.push_back(call.n);
  Tensor out_values = allocated(a, of_values);
  Tensor out_vectors = allocated(a, vectors ? sizes_of(a) : std::vector<int64_t>{0, 0});
  Tensor info = allocated(a, leading, ScalarType::Int);
  call.values = out_values.data_ptr();
  call.vectors = vectors ? out_vectors.data_ptr() : nullptr;
  call.info = static_cast<int32_t*>(info.data_ptr());
  if (call.n == 0) {
    std::fill_n(call.info, call.a.count, 0);
  } else if (const auto& run = eigh_kernels_table.get(op);
             prefer_lanes(call.type, call.a.count, run.matrices_per_item(call), call.n, vectors)) {
    for_matrices(call.a.count, run.matrices_per_item(call), call.n,
                 [&](int64_t begin, int64_t end) { run.solve(call, begin, end); });
  } else {
    record_kernel(op, "lapack");
    solve_by_lapack(call, run, a);
  }
  return {out_values, torch::stable::transpose(out_vectors, -2, -1), info};
}

std::tuple<Tensor, Tensor> eigh_backward(std::optional<Tensor> grad_values, std::optional<Tensor> grad_vectors,
                                         Tensor values, Tensor vectors, Tensor info) {
  constexpr const char* op = "eigh_backward";
  check_matrices(vectors, /*square=*/true, "eigenvectors", op);
  const std::vector<int64_t> shape = sizes_of(vectors);
  std::vector<int64_t> of_values = shape;
  of_values.pop_back();
  const std::vector<int64_t> leading(of_values.begin(), of_values.end() - 1);
  EighBackward call;
  call.type = dtype_of(vectors, op, "eigenvectors");
  const ScalarType type = vectors.scalar_type();
  check_tensor(values, {of_values, type, true}, "eigenvalues", op);
  check_tensor(grad_values, {of_values, type, true}, "grad_eigenvalues", op);
  check_tensor(grad_vectors, {shape, type}, "grad_eigenvectors", op);
  check_tensor(info, {leading, ScalarType::Int, true}, "info", op);
  call.n = shape.back();
  const MatricesView by_row(torch::stable::transpose(vectors, -2, -1));
  call.vectors = by_row.batch;
  call.values = values.data_ptr();
  call.info = static_cast<const int32_t*>(info.data_ptr());
  call.grad_values = grad_values.has_value() ? grad_values->data_ptr() : nullptr;
  std::optional<MatricesView> grad_view;
  if (grad_vectors.has_value()) {
    grad_view.emplace(*grad_vectors);
    call.grad_vectors = grad_view->batch;
  }
  Tensor grad_a = allocated(vectors, shape);
  std::vector<int64_t> of_pairs = leading;
  of_pairs.push_back(2);
  Tensor undetermined_pair = allocated(vectors, of_pairs, ScalarType::Int);
  call.grad_a = grad_a.data_ptr();
  call.undetermined_pair = static_cast<int32_t*>(undetermined_pair.data_ptr());
  if (call.n == 0) {
    std::fill_n(call.undetermined_pair, 2 * call.vectors.count, -1);
  } else if (const auto& run = eigh_kernels_table.get(op); prefer_lanes(
                 call.type, call.vectors.count, run.matrices_per_backward_item(call), call.n, /*vectors=*/true)) {
    for_matrices(call.vectors.count, run.matrices_per_backward_item(call), call.n,
                 [&](int64_t begin, int64_t end) { run.backward(call, begin, end); });
  } else {
    backward_by_blas(call, run, vectors);
  }
  return {grad_a, undetermined_pair};
}

}  // namespace
}  // namespace overtone

STABLE_TORCH_LIBRARY_IMPL(overtone, CPU, m) {
  OVERTONE_IMPL_AS(m, eigh_ex, "eigh");
  OVERTONE_IMPL(m, eigh_backward);
}
