// Composed weights on CPU tensors: from the dispatcher to the kernels of the current ISA level.
// Shapes and types were validated by python/overtone/ops; what is checked here again is what memory safety needs.
#include "cpu/linalg/inverse/params.h"

#include <algorithm>
#include <tuple>

#include "cpu/isa/isa.h"
#include "cpu/tensor.h"

namespace overtone {
namespace {

std::vector<int64_t> vectors_shape(const Tensor& matrix) {
  std::vector<int64_t> sizes = sizes_of(matrix);
  sizes.pop_back();
  return sizes;
}

ElementType checked_type(const Tensor& matrix, const Tensor& eigenvalues, const char* name, const char* op) {
  check_matrices(matrix, /*square=*/true, name, op);
  check_tensor(eigenvalues, {vectors_shape(matrix), matrix.scalar_type(), true}, "eigenvalues", op);
  return element_type(matrix, op, name);
}

void check_like(const Tensor& tensor, const Tensor& matrix, bool contiguous, const char* name, const char* op) {
  check_tensor(tensor, {sizes_of(matrix), matrix.scalar_type(), contiguous}, name, op);
}

template <class Call>
void for_matrices(const Call& call, int64_t count, void (*kernel)(const Call&, int64_t, int64_t)) {
  const double n = static_cast<double>(call.size);
  parallel_ranges(count, {4 * n * n * n}, [&](int64_t begin, int64_t end) { kernel(call, begin, end); });
}

void raise_failed(const std::vector<int32_t>& failed, const Tensor& matrix, const char* op, const char* reason) {
  const auto bad = std::find(failed.begin(), failed.end(), 1);
  if (bad != failed.end()) {
    std::vector<int64_t> leading = vectors_shape(matrix);
    leading.pop_back();
    fail(op, "matrix", member_name(bad - failed.begin(), leading), " ", reason);
  }
}

std::tuple<Tensor, Tensor, Tensor> compose_symmetric(Tensor theta, Tensor eigenvalues) {
  constexpr const char* op = "compose_symmetric";
  ComposeForward call;
  call.type = checked_type(theta, eigenvalues, "theta", op);
  const MatricesView matrices(theta);
  call.size = theta.size(-1);
  call.matrix = matrices.batch;
  call.eigenvalues = eigenvalues.data_ptr();
  Tensor weight = allocated(theta, sizes_of(theta));
  Tensor q = allocated(theta, sizes_of(theta));
  Tensor r = allocated(theta, sizes_of(theta));
  call.weight = weight.data_ptr();
  call.basis = q.data_ptr();
  call.r = r.data_ptr();
  std::vector<int32_t> failed = buffer<int32_t>(call.matrix.count);
  call.failed = failed.data();
  for_matrices(call, call.matrix.count, spectrum_kernels_table.get(op).symmetric_forward);
  raise_failed(failed, theta, op, "of theta is not finite");
  return {weight, q, r};
}

std::tuple<Tensor, Tensor> compose_symmetric_backward(Tensor grad_weight, Tensor eigenvalues, Tensor q, Tensor r) {
  constexpr const char* op = "compose_symmetric_backward";
  ComposeBackward call;
  call.type = checked_type(q, eigenvalues, "q", op);
  call.size = q.size(-1);
  check_like(grad_weight, q, false, "grad_weight", op);
  const MatricesView grads(grad_weight);
  check_like(q, q, true, "q", op);
  check_like(r, q, true, "r", op);
  call.grad_weight = grads.batch;
  call.eigenvalues = eigenvalues.data_ptr();
  call.basis = q.data_ptr();
  call.r = r.data_ptr();
  Tensor grad_theta = allocated(q, sizes_of(q));
  Tensor grad_eigenvalues = allocated(q, vectors_shape(q));
  call.grad_matrix = grad_theta.data_ptr();
  call.grad_eigenvalues = grad_eigenvalues.data_ptr();
  std::vector<int32_t> failed = buffer<int32_t>(call.grad_weight.count);
  call.failed = failed.data();
  for_matrices(call, call.grad_weight.count, spectrum_kernels_table.get(op).symmetric_backward);
  raise_failed(failed, q, op, "of theta has no gradient: its columns are linearly dependent");
  return {grad_theta, grad_eigenvalues};
}

std::tuple<Tensor, Tensor> compose_general(Tensor v, Tensor eigenvalues) {
  constexpr const char* op = "compose_general";
  ComposeForward call;
  call.type = checked_type(v, eigenvalues, "v", op);
  const MatricesView matrices(v);
  call.size = v.size(-1);
  call.matrix = matrices.batch;
  call.eigenvalues = eigenvalues.data_ptr();
  Tensor weight = allocated(v, sizes_of(v));
  Tensor inverse = allocated(v, sizes_of(v));
  call.weight = weight.data_ptr();
  call.basis = inverse.data_ptr();
  std::vector<int32_t> failed = buffer<int32_t>(call.matrix.count);
  call.failed = failed.data();
  for_matrices(call, call.matrix.count, spectrum_kernels_table.get(op).general_forward);
  raise_failed(failed, v, op, "of v has no inverse: it is singular or not finite");
  return {weight, inverse};
}

std::tuple<Tensor, Tensor> compose_general_backward(Tensor grad_weight, Tensor v, Tensor eigenvalues, Tensor inverse) {
  constexpr const char* op = "compose_general_backward";
  ComposeBackward call;
  call.type = checked_type(v, eigenvalues, "v", op);
  call.size = v.size(-1);
  check_like(grad_weight, v, false, "grad_weight", op);
  const MatricesView grads(grad_weight);
  const MatricesView matrices(v);
  check_like(inverse, v, true, "inverse", op);
  call.grad_weight = grads.batch;
  call.matrix = matrices.batch;
  call.eigenvalues = eigenvalues.data_ptr();
  call.basis = inverse.data_ptr();
  Tensor grad_v = allocated(v, sizes_of(v));
  Tensor grad_eigenvalues = allocated(v, vectors_shape(v));
  call.grad_matrix = grad_v.data_ptr();
  call.grad_eigenvalues = grad_eigenvalues.data_ptr();
  std::vector<int32_t> failed = buffer<int32_t>(call.matrix.count);
  call.failed = failed.data();
  for_matrices(call, call.matrix.count, spectrum_kernels_table.get(op).general_backward);
  return {grad_v, grad_eigenvalues};
}

}  // namespace
}  // namespace overtone

STABLE_TORCH_LIBRARY_IMPL(overtone, CPU, m) {
  OVERTONE_IMPL(m, compose_symmetric);
  OVERTONE_IMPL(m, compose_symmetric_backward);
  OVERTONE_IMPL(m, compose_general);
  OVERTONE_IMPL(m, compose_general_backward);
}
