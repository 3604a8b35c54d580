// qr on CPU tensors: from the dispatcher to the kernels of the current ISA level.
// Shapes and types were validated by python/overtone/ops; what is checked here again is what memory safety needs.
#include "cpu/linalg/qr/params.h"

#include <algorithm>
#include <tuple>

#include "cpu/isa/isa.h"
#include "cpu/tensor.h"

namespace overtone {
namespace {

// Of an item of `matrices` products of these sizes, `passes` of them.
Cost cost_of(int passes, int64_t rows, int64_t columns, int64_t inner, int64_t matrices = 1) {
  const auto count = [](int64_t n) { return static_cast<double>(n); };
  return {passes * count(rows) * count(columns) * count(inner) * count(matrices)};
}

std::tuple<Tensor, Tensor, Tensor> qr_ex(Tensor a, bool complete, bool need_q) {
  constexpr const char* op = "qr";
  check_matrices(a, /*square=*/false, "A", op);
  check_fits(complete ? a.size(-2) : 0, a.size(-2));
  const MatricesView matrices(a);
  QrForward call;
  call.type = dtype_of(a, op, "A");
  call.rows = a.size(-2);
  call.columns = a.size(-1);
  call.r_rows = complete ? call.rows : std::min(call.rows, call.columns);
  call.q_columns = need_q ? call.r_rows : 0;
  call.a = matrices.batch;

  std::vector<int64_t> sizes = sizes_of(a);
  sizes.resize(sizes.size() - 2);
  Tensor info = allocated(a, sizes, ScalarType::Int);
  sizes.insert(sizes.end(), {call.r_rows, call.columns});
  Tensor r = allocated(a, sizes);
  sizes[sizes.size() - 2] = call.rows;
  sizes.back() = call.q_columns;
  Tensor q = allocated(a, need_q ? sizes : std::vector<int64_t>{0});
  call.q = q.data_ptr();
  call.r = r.data_ptr();
  call.info = static_cast<int32_t*>(info.data_ptr());
  const auto& run = qr_kernels_table.get(op);
  if (call.items() > 0) {
    const int64_t matrices_per_item = call.is_small() ? kQrGroup : 1;
    parallel_ranges(call.items(), cost_of(4, call.rows, call.columns, call.r_rows, matrices_per_item),
                    [&](int64_t begin, int64_t end) { run.forward(call, begin, end); });
  }
  return {q, r, info};
}

Tensor qr_backward(std::optional<Tensor> grad_q, std::optional<Tensor> grad_r, Tensor q, Tensor r) {
  constexpr const char* op = "qr_backward";
  check_matrices(q, /*square=*/false, "Q", op);
  QrBackward call;
  call.type = dtype_of(q, op, "Q");
  call.rows = q.size(-2);
  call.columns = q.size(-1);
  std::vector<int64_t> leading = sizes_of(q);
  leading.resize(leading.size() - 2);
  std::vector<int64_t> square = leading;
  square.insert(square.end(), {call.columns, call.columns});
  if (call.rows < call.columns) {
    fail(op, "Q: got ", shape_text(sizes_of(q)), ", wanted at least as many rows as columns");
  }
  check_tensor(q, {sizes_of(q), q.scalar_type(), true}, "Q", op);
  check_tensor(r, {square, q.scalar_type(), true}, "R", op);
  check_tensor(grad_q, {sizes_of(q), q.scalar_type()}, "grad_Q", op);
  check_tensor(grad_r, {square, q.scalar_type()}, "grad_R", op);
  std::optional<MatricesView> q_view;
  std::optional<MatricesView> r_view;
  if (grad_q.has_value()) {
    call.grad_q = q_view.emplace(*grad_q).batch;
  }
  if (grad_r.has_value()) {
    call.grad_r = r_view.emplace(*grad_r).batch;
  }
  call.q = q.data_ptr();
  call.r = r.data_ptr();
  Tensor grad_a = allocated(q, sizes_of(q));
  call.grad_a = grad_a.data_ptr();
  const int64_t count = product(leading);
  std::vector<int32_t> singular = buffer<int32_t>(count);
  call.singular = singular.data();
  const auto& run = qr_kernels_table.get(op);
  parallel_ranges(count, cost_of(6, call.rows, call.columns, call.columns),
                  [&](int64_t begin, int64_t end) { run.backward(call, begin, end); });
  const auto bad = std::find(singular.begin(), singular.end(), 1);
  if (bad != singular.end()) {
    fail("qr", "no gradient: the columns of matrix", batch_index_name(bad - singular.begin(), leading),
         " of A are linearly dependent (R has a zero on its diagonal), so that Q is one of many");
  }
  return grad_a;
}

}  // namespace
}  // namespace overtone

STABLE_TORCH_LIBRARY_IMPL(overtone, CPU, m) {
  OVERTONE_IMPL_AS(m, qr_ex, "qr");
  OVERTONE_IMPL(m, qr_backward);
}
