// The MLP on CPU tensors: from the dispatcher to the kernels of the current ISA level.
// Shapes and types were validated by python/overtone/ops; what is checked here again is what memory safety needs.
#include "cpu/mlp.h"

#include <tuple>

#include "cpu/isa.h"
#include "cpu/tensor.h"

namespace overtone {
namespace {

const MlpKernels& kernels(const char* op) {
#if defined(__x86_64__)
  static const MlpKernels* const table[kVectorLevels] = {&baseline::mlp_kernels, &avx2::mlp_kernels,
                                                         &avx512::mlp_kernels};
#else
  static const MlpKernels* const table[kVectorLevels] = {&baseline::mlp_kernels, nullptr, nullptr};
#endif
  const MlpKernels& chosen = for_current_isa(table);
  note_kernel(op, chosen.level);
  return chosen;
}

// Every thread takes items until there are none left, whatever range it was given.
template <class Work>
void for_items(int64_t items, const Work& work) {
  WorkQueue queue{0, items};
  if (items > 0) {
    torch::stable::parallel_for(0, items, 1, [&](int64_t, int64_t) { work(queue); });
  }
}

MlpMatrix matrix(const Tensor& tensor) { return {tensor.data_ptr(), tensor.stride(0), tensor.stride(1)}; }

MlpMatrix transposed(const Tensor& tensor) { return {tensor.data_ptr(), tensor.stride(1), tensor.stride(0)}; }

void check_like(const Tensor& tensor, const std::vector<int64_t>& shape, const Tensor& x, const char* name,
                const char* op) {
  STD_TORCH_CHECK(tensor.is_cpu() && tensor.scalar_type() == x.scalar_type() && has_shape(tensor, shape), op, ": ",
                  name, " does not fit x's device, dtype or shape");
}

MlpShape checked_shape(const Tensor& x, const Tensor& w1, const Tensor& w2, const char* op) {
  STD_TORCH_CHECK(x.is_cpu() && x.dim() == 2 && w1.dim() == 2 && w2.dim() == 2 &&
                      (x.scalar_type() == ScalarType::Float || x.scalar_type() == ScalarType::Double),
                  op, ": x must be a float32 or float64 CPU tensor [tokens, inputs], weights must be matrices");
  MlpShape shape;
  shape.type = element_type(x, op, "x");
  shape.tokens = x.size(0);
  shape.inputs = x.size(1);
  shape.hidden = w1.size(0);
  shape.outputs = w2.size(0);
  check_like(w1, {shape.hidden, shape.inputs}, x, "w1", op);
  check_like(w2, {shape.outputs, shape.hidden}, x, "w2", op);
  STD_TORCH_CHECK(shape.inputs > 0 && shape.hidden > 0 && shape.outputs > 0, op, ": there must be channels");
  return shape;
}

// Rows of h are whole cache lines: whole vectors on every level.
int64_t pre_stride(const MlpShape& shape) {
  constexpr int64_t kMultiple = 16;
  return (shape.hidden + kMultiple - 1) / kMultiple * kMultiple;
}

Tensor packed(const MlpKernels& run, ElementType type, const MlpMatrix& weight, int64_t depth, int64_t columns,
              const Tensor& like) {
  Tensor panels = torch::stable::new_empty(like, {run.packed_size(depth, columns, type)});
  const MlpPacking packing{type, weight, depth, columns, panels.data_ptr()};
  for_items(run.packing_items(packing), [&](WorkQueue& queue) { run.pack(packing, queue); });
  return panels;
}

std::tuple<Tensor, Tensor> mlp(Tensor x, Tensor w1, Tensor b1, Tensor w2, Tensor b2, bool need_backward) {
  constexpr const char* op = "mlp";
  MlpForward call;
  call.shape = checked_shape(x, w1, w2, op);
  const MlpShape& shape = call.shape;
  check_like(b1, {shape.hidden}, x, "b1", op);
  check_like(b2, {shape.outputs}, x, "b2", op);
  STD_TORCH_CHECK(b1.is_contiguous() && b2.is_contiguous(), op, ": biases must be contiguous");
  const MlpKernels& run = kernels(op);
  call.pre_stride = pre_stride(shape);
  Tensor y = torch::stable::new_empty(x, {shape.tokens, shape.outputs});
  Tensor pre = torch::stable::new_empty(
      x, need_backward ? std::vector<int64_t>{shape.tokens, call.pre_stride} : std::vector<int64_t>{0});
  const Tensor w1_panels = packed(run, shape.type, transposed(w1), shape.inputs, shape.hidden, x);
  const Tensor w2_panels = packed(run, shape.type, transposed(w2), shape.hidden, shape.outputs, x);
  call.x = matrix(x);
  call.w1 = w1_panels.data_ptr();
  call.w2 = w2_panels.data_ptr();
  call.b1 = b1.data_ptr();
  call.b2 = b2.data_ptr();
  call.pre = need_backward ? pre.data_ptr() : nullptr;
  call.y = y.data_ptr();
  for_items(run.token_items(shape), [&](WorkQueue& queue) { run.forward(call, queue); });
  return {y, pre};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> mlp_backward(Tensor grad_y, Tensor x, Tensor w1, Tensor w2,
                                                                Tensor pre, bool need_x, bool need_weights) {
  constexpr const char* op = "mlp_backward";
  MlpBackward call;
  call.shape = checked_shape(x, w1, w2, op);
  const MlpShape& shape = call.shape;
  call.pre_stride = pre_stride(shape);
  check_like(grad_y, {shape.tokens, shape.outputs}, x, "grad_y", op);
  check_like(pre, {shape.tokens, call.pre_stride}, x, "pre", op);
  STD_TORCH_CHECK(pre.is_contiguous(), op, ": pre must be contiguous");
  const MlpKernels& run = kernels(op);
  const auto allocate = [&](bool wanted, const std::vector<int64_t>& size) {
    return torch::stable::new_empty(x, wanted ? size : std::vector<int64_t>{0});
  };
  Tensor grad_x = allocate(need_x, {shape.tokens, shape.inputs});
  Tensor grad_w1 = allocate(need_weights, {shape.hidden, shape.inputs});
  Tensor grad_b1 = allocate(need_weights, {shape.hidden});
  Tensor grad_w2 = allocate(need_weights, {shape.outputs, shape.hidden});
  Tensor grad_b2 = allocate(need_weights, {shape.outputs});
  const int64_t panels = run.packed_size(shape.tokens, shape.hidden, shape.type);
  const Tensor active = allocate(need_weights, {panels});
  const Tensor grad_pre = allocate(need_weights, {panels});
  const Tensor w1_panels = packed(run, shape.type, matrix(w1), shape.hidden, shape.inputs, x);
  const Tensor w2_panels = packed(run, shape.type, matrix(w2), shape.outputs, shape.hidden, x);
  call.x = matrix(x);
  call.grad_y = matrix(grad_y);
  call.w1 = w1_panels.data_ptr();
  call.w2 = w2_panels.data_ptr();
  call.pre = pre.data_ptr();
  call.active = need_weights ? active.data_ptr() : nullptr;
  call.grad_pre = need_weights ? grad_pre.data_ptr() : nullptr;
  call.grad_x = need_x ? grad_x.data_ptr() : nullptr;
  call.grad_w1 = grad_w1.data_ptr();
  call.grad_b1 = grad_b1.data_ptr();
  call.grad_w2 = grad_w2.data_ptr();
  call.grad_b2 = grad_b2.data_ptr();
  for_items(run.token_items(shape), [&](WorkQueue& queue) { run.backward_tokens(call, queue); });
  if (need_weights) {
    for_items(run.weight_items(shape), [&](WorkQueue& queue) { run.backward_weights(call, queue); });
  }
  return {grad_x, grad_w1, grad_b1, grad_w2, grad_b2};
}

}  // namespace
}  // namespace overtone

STABLE_TORCH_LIBRARY_IMPL(overtone, CPU, m) {
  m.impl("mlp", TORCH_BOX(&overtone::mlp));
  m.impl("mlp_backward", TORCH_BOX(&overtone::mlp_backward));
}
