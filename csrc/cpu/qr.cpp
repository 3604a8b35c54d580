// qr on CPU tensors: from the dispatcher to the kernels of the current ISA level.
// Shapes and types were validated by python/overtone/ops; what is checked here again is what memory safety needs.
#include "cpu/qr.h"

#include <algorithm>
#include <initializer_list>
#include <tuple>

#include "cpu/isa.h"
#include "cpu/memory.h"
#include "cpu/tensor.h"

namespace overtone {
namespace {

const QrKernels& kernels(const char* op) {
#if defined(__x86_64__)
  static const QrKernels* const table[kVectorLevels] = {&baseline::qr_kernels, &avx2::qr_kernels, &avx512::qr_kernels};
#else
  static const QrKernels* const table[kVectorLevels] = {&baseline::qr_kernels, nullptr, nullptr};
#endif
  const QrKernels& chosen = for_current_isa(table);
  note_kernel(op, chosen.level);
  return chosen;
}

// Items per task, so that a task is worth waking a thread for. The operations of an item, which may be more than
// integers count, come as factors.
int64_t grain(std::initializer_list<int64_t> flops_per_item) {
  int64_t items = 200000;
  for (const int64_t factor : flops_per_item) {
    items /= std::max<int64_t>(1, factor);
  }
  return std::max<int64_t>(1, items);
}

ElementType matrix_type(const Tensor& a, const char* op, const char* name) {
  STD_TORCH_CHECK(
      a.is_cpu() && a.dim() >= 2 && (a.scalar_type() == ScalarType::Float || a.scalar_type() == ScalarType::Double), op,
      ": ", name, " must be a float32 or float64 CPU tensor [..., m, n]");
  return element_type(a, op, name);
}

std::tuple<Tensor, Tensor, Tensor> factor(const char* op, const Tensor& a, bool complete, bool need_q) {
  QrForward call;
  call.type = matrix_type(a, op, "A");
  check_fits(a.size(-2), a.size(-1));
  check_fits(complete ? a.size(-2) : 0, a.size(-2));
  const MatricesView matrices(a);
  call.rows = a.size(-2);
  call.columns = a.size(-1);
  call.r_rows = complete ? call.rows : std::min(call.rows, call.columns);
  call.q_columns = need_q ? call.r_rows : 0;
  call.a = matrices.batch;

  std::vector<int64_t> sizes = sizes_of(a);
  sizes.resize(sizes.size() - 2);
  Tensor info = new_tensor(a, sizes, ScalarType::Int);
  sizes.insert(sizes.end(), {call.r_rows, call.columns});
  Tensor r = new_tensor(a, sizes);
  sizes[sizes.size() - 2] = call.rows;
  sizes.back() = call.q_columns;
  Tensor q = new_tensor(a, need_q ? sizes : std::vector<int64_t>{0});
  call.q = q.data_ptr();
  call.r = r.data_ptr();
  call.info = static_cast<int32_t*>(info.data_ptr());
  const auto& run = kernels(op);
  if (call.items() > 0) {
    const int64_t matrices = call.is_small() ? kQrGroup : 1;
    parallel_ranges(0, call.items(), grain({4, call.rows, call.columns, call.r_rows, matrices}),
                    [&](int64_t begin, int64_t end) { run.forward(call, begin, end); });
  }
  return {q, r, info};
}

std::tuple<Tensor, Tensor, Tensor> qr(Tensor a, bool complete, bool need_q) {
  constexpr const char* op = "qr";
  return with_memory_for(op, [&] { return factor(op, a, complete, need_q); });
}

Tensor differentiate(const char* op, const std::optional<Tensor>& grad_q, const std::optional<Tensor>& grad_r,
                     const Tensor& q, const Tensor& r) {
  QrBackward call;
  call.type = matrix_type(q, op, "Q");
  call.rows = q.size(-2);
  call.columns = q.size(-1);
  std::vector<int64_t> leading = sizes_of(q);
  leading.resize(leading.size() - 2);
  std::vector<int64_t> square = leading;
  square.insert(square.end(), {call.columns, call.columns});
  const auto check = [&](const Tensor& tensor, const std::vector<int64_t>& sizes) {
    STD_TORCH_CHECK(tensor.is_cpu() && tensor.scalar_type() == q.scalar_type() && has_shape(tensor, sizes), op,
                    ": R and gradients must have the device, dtype and shape that fit Q");
  };
  check(r, square);
  STD_TORCH_CHECK(call.rows >= call.columns && q.is_contiguous() && r.is_contiguous(), op,
                  ": Q must be tall or square, Q and R contiguous");
  std::optional<MatricesView> q_view;
  std::optional<MatricesView> r_view;
  if (grad_q.has_value()) {
    check(*grad_q, sizes_of(q));
    call.grad_q = q_view.emplace(*grad_q).batch;
  }
  if (grad_r.has_value()) {
    check(*grad_r, square);
    call.grad_r = r_view.emplace(*grad_r).batch;
  }
  call.q = q.data_ptr();
  call.r = r.data_ptr();
  Tensor grad_a = new_tensor(q, sizes_of(q));
  call.grad_a = grad_a.data_ptr();
  const int64_t count = product(leading);
  std::vector<int32_t> singular(count);
  call.singular = singular.data();
  const auto& run = kernels(op);
  if (count > 0) {
    parallel_ranges(0, count, grain({6, call.rows, call.columns, call.columns}),
                    [&](int64_t begin, int64_t end) { run.backward(call, begin, end); });
  }
  const auto bad = std::find(singular.begin(), singular.end(), 1);
  STD_TORCH_CHECK(bad == singular.end(), "qr: no gradient: the columns of matrix",
                  member_name(bad - singular.begin(), leading),
                  " of A are linearly dependent (R has a zero on its diagonal), so that Q is one of many");
  return grad_a;
}

Tensor qr_backward(std::optional<Tensor> grad_q, std::optional<Tensor> grad_r, Tensor q, Tensor r) {
  constexpr const char* op = "qr_backward";
  return with_memory_for(op, [&] { return differentiate(op, grad_q, grad_r, q, r); });
}

}  // namespace
}  // namespace overtone

STABLE_TORCH_LIBRARY_IMPL(overtone, CPU, m) {
  m.impl("qr", TORCH_BOX(&overtone::qr));
  m.impl("qr_backward", TORCH_BOX(&overtone::qr_backward));
}
