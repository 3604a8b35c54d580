// Composed weights on CPU tensors: from the dispatcher to the kernels of the current ISA level.
// Shapes and types were validated by python/overtone/ops; what is checked here again is what memory safety needs.
#include "cpu/spectrum.h"

#include <algorithm>
#include <tuple>

#include "cpu/isa.h"
#include "cpu/tensor.h"

namespace overtone {
namespace {

const SpectrumKernels& kernels(const char* op) {
#if defined(__x86_64__)
  static const SpectrumKernels* const table[kVectorLevels] = {&baseline::spectrum_kernels, &avx2::spectrum_kernels,
                                                              &avx512::spectrum_kernels};
#else
  static const SpectrumKernels* const table[kVectorLevels] = {&baseline::spectrum_kernels, nullptr, nullptr};
#endif
  const SpectrumKernels& chosen = for_current_isa(table);
  note_kernel(op, chosen.level);
  return chosen;
}

std::vector<int64_t> vectors_shape(const Tensor& matrix) {
  std::vector<int64_t> sizes = sizes_of(matrix);
  sizes.pop_back();
  return sizes;
}

ElementType checked_type(const Tensor& matrix, const Tensor& eigenvalues, const char* op) {
  STD_TORCH_CHECK(matrix.is_cpu() && matrix.dim() >= 2 && matrix.size(-1) == matrix.size(-2) &&
                      (matrix.scalar_type() == ScalarType::Float || matrix.scalar_type() == ScalarType::Double),
                  op, ": the matrix must be a float32 or float64 CPU tensor [..., n, n]");
  STD_TORCH_CHECK(eigenvalues.is_cpu() && eigenvalues.scalar_type() == matrix.scalar_type() &&
                      has_shape(eigenvalues, vectors_shape(matrix)) && eigenvalues.is_contiguous(),
                  op, ": eigenvalues must be contiguous [..., n] with the matrix' device and dtype");
  return element_type(matrix, op, "matrix");
}

void check_like(const Tensor& tensor, const Tensor& matrix, bool contiguous, const char* name, const char* op) {
  STD_TORCH_CHECK(tensor.is_cpu() && tensor.scalar_type() == matrix.scalar_type() &&
                      has_shape(tensor, sizes_of(matrix)) && (!contiguous || tensor.is_contiguous()),
                  op, ": ", name, " does not fit the matrix' device, dtype or shape");
}

template <class Call>
void for_matrices(const Call& call, int64_t count, void (*kernel)(const Call&, int64_t, int64_t)) {
  constexpr int64_t kFlopsPerTask = 200000;
  const int64_t flops = std::max<int64_t>(1, 4 * call.size * call.size * call.size);
  if (count > 0) {
    torch::stable::parallel_for(0, count, std::max<int64_t>(1, kFlopsPerTask / flops),
                                [&](int64_t begin, int64_t end) { kernel(call, begin, end); });
  }
}

void raise_failed(const std::vector<int32_t>& failed, const Tensor& matrix, const char* op, const char* reason) {
  const auto bad = std::find(failed.begin(), failed.end(), 1);
  if (bad != failed.end()) {
    std::vector<int64_t> leading = vectors_shape(matrix);
    leading.pop_back();
    STD_TORCH_CHECK(false, op, ": matrix", member_name(bad - failed.begin(), leading), " ", reason);
  }
}

std::tuple<Tensor, Tensor, Tensor> compose_symmetric(Tensor theta, Tensor eigenvalues) {
  constexpr const char* op = "compose_symmetric";
  const MatricesView matrices(theta);
  ComposeForward call;
  call.type = checked_type(theta, eigenvalues, op);
  call.size = theta.size(-1);
  call.matrix = matrices.batch;
  call.eigenvalues = eigenvalues.data_ptr();
  Tensor weight = torch::stable::new_empty(theta, sizes_of(theta));
  Tensor q = torch::stable::new_empty(theta, sizes_of(theta));
  Tensor r = torch::stable::new_empty(theta, sizes_of(theta));
  call.weight = weight.data_ptr();
  call.basis = q.data_ptr();
  call.r = r.data_ptr();
  std::vector<int32_t> failed(call.matrix.count);
  call.failed = failed.data();
  for_matrices(call, call.matrix.count, kernels(op).symmetric_forward);
  raise_failed(failed, theta, op, "of theta is not finite");
  return {weight, q, r};
}

std::tuple<Tensor, Tensor> compose_symmetric_backward(Tensor grad_weight, Tensor eigenvalues, Tensor q, Tensor r) {
  constexpr const char* op = "compose_symmetric_backward";
  const MatricesView grads(grad_weight);
  ComposeBackward call;
  call.type = checked_type(q, eigenvalues, op);
  call.size = q.size(-1);
  check_like(grad_weight, q, false, "grad_weight", op);
  check_like(q, q, true, "q", op);
  check_like(r, q, true, "r", op);
  call.grad_weight = grads.batch;
  call.eigenvalues = eigenvalues.data_ptr();
  call.basis = q.data_ptr();
  call.r = r.data_ptr();
  Tensor grad_theta = torch::stable::new_empty(q, sizes_of(q));
  Tensor grad_eigenvalues = torch::stable::new_empty(q, vectors_shape(q));
  call.grad_matrix = grad_theta.data_ptr();
  call.grad_eigenvalues = grad_eigenvalues.data_ptr();
  std::vector<int32_t> failed(call.grad_weight.count);
  call.failed = failed.data();
  for_matrices(call, call.grad_weight.count, kernels(op).symmetric_backward);
  raise_failed(failed, q, op, "of theta has no gradient: its columns are linearly dependent");
  return {grad_theta, grad_eigenvalues};
}

std::tuple<Tensor, Tensor> compose_general(Tensor v, Tensor eigenvalues) {
  constexpr const char* op = "compose_general";
  const MatricesView matrices(v);
  ComposeForward call;
  call.type = checked_type(v, eigenvalues, op);
  call.size = v.size(-1);
  call.matrix = matrices.batch;
  call.eigenvalues = eigenvalues.data_ptr();
  Tensor weight = torch::stable::new_empty(v, sizes_of(v));
  Tensor inverse = torch::stable::new_empty(v, sizes_of(v));
  call.weight = weight.data_ptr();
  call.basis = inverse.data_ptr();
  std::vector<int32_t> failed(call.matrix.count);
  call.failed = failed.data();
  for_matrices(call, call.matrix.count, kernels(op).general_forward);
  raise_failed(failed, v, op, "of v has no inverse: it is singular or not finite");
  return {weight, inverse};
}

std::tuple<Tensor, Tensor> compose_general_backward(Tensor grad_weight, Tensor v, Tensor eigenvalues, Tensor inverse) {
  constexpr const char* op = "compose_general_backward";
  const MatricesView grads(grad_weight);
  const MatricesView matrices(v);
  ComposeBackward call;
  call.type = checked_type(v, eigenvalues, op);
  call.size = v.size(-1);
  check_like(grad_weight, v, false, "grad_weight", op);
  check_like(inverse, v, true, "inverse", op);
  call.grad_weight = grads.batch;
  call.matrix = matrices.batch;
  call.eigenvalues = eigenvalues.data_ptr();
  call.basis = inverse.data_ptr();
  Tensor grad_v = torch::stable::new_empty(v, sizes_of(v));
  Tensor grad_eigenvalues = torch::stable::new_empty(v, vectors_shape(v));
  call.grad_matrix = grad_v.data_ptr();
  call.grad_eigenvalues = grad_eigenvalues.data_ptr();
  std::vector<int32_t> failed(call.matrix.count);
  call.failed = failed.data();
  for_matrices(call, call.matrix.count, kernels(op).general_backward);
  return {grad_v, grad_eigenvalues};
}

}  // namespace
}  // namespace overtone

STABLE_TORCH_LIBRARY_IMPL(overtone, CPU, m) {
  m.impl("compose_symmetric", TORCH_BOX(&overtone::compose_symmetric));
  m.impl("compose_symmetric_backward", TORCH_BOX(&overtone::compose_symmetric_backward));
  m.impl("compose_general", TORCH_BOX(&overtone::compose_general));
  m.impl("compose_general_backward", TORCH_BOX(&overtone::compose_general_backward));
}
