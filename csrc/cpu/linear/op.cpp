// Linear layers and the MLP on CPU tensors: from the dispatcher to the kernels of the instruction set in use.
// Shapes and types were validated by python/overtone/ops; what is checked here again is what memory safety needs.
//
// Products of bfloat16 go to kernels of their own where the instruction set has them; other halves are widened to
// float32, multiplied and rounded: right, not fast.
#include <tuple>

#include "cpu/gemm/packed.h"
#include "cpu/linear/bf16_op.h"
#include "cpu/linear/params.h"
#include "cpu/tensor.h"

namespace overtone {
namespace {

using MaybeTensor = std::optional<Tensor>;

void check_tokens(const Tensor& x, const char* op) {
  check_dims(x, 2, false, "x", op);
  dtype_of(x, op, "x");
  if (x.size(1) == 0) {
    fail(op, "x: got ", shape_text(sizes_of(x)), ", wanted [tokens, channels] with channels");
  }
}

ScalarType wide_type(const Tensor& x) {
  return x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// x's type, or the wider one of its sums.
void check_either(const Tensor& tensor, std::vector<int64_t> shape, const Tensor& x, bool contiguous, const char* name,
                  const char* op) {
  const ScalarType type = tensor.scalar_type() == wide_type(x) ? wide_type(x) : x.scalar_type();
  check_tensor(tensor, {std::move(shape), type, contiguous}, name, op);
}

void check_weight(const Tensor& weight, int64_t inputs, const Tensor& x, const char* name, const char* op) {
  check_dims(weight, 2, false, name, op);
  if (weight.size(0) == 0) {
    fail(op, name, ": got ", shape_text(sizes_of(weight)), ", wanted a matrix with rows");
  }
  check_either(weight, {weight.size(0), inputs}, x, false, name, op);
}

void check_bias(const Tensor& bias, int64_t outputs, const Tensor& x, const char* name, const char* op) {
  check_either(bias, {outputs}, x, true, name, op);
}

// A layer's weight [outputs, inputs] in panels: for y, as the operand [inputs, outputs], or as it is for ∂x.
Tensor packed_transposed(const LinearKernels& run, const Tensor& weight, const char* op) {
  return packed(run.packing, {matrix(weight, op).transposed(), weight.size(1), weight.size(0)}, weight,
                weight.scalar_type());
}

Tensor packed_as_is(const LinearKernels& run, const Tensor& weight, const char* op) {
  return packed(run.packing, {matrix(weight, op), weight.size(0), weight.size(1)}, weight, weight.scalar_type());
}

void multiply_tokens(const LinearKernels& run, const LinearForward& call) {
  parallel_items(call.items(), kLargeItems, [&](WorkQueue& queue) { run.linear_forward(call, queue); });
}

// ∂W and ∂b of one layer; empty where they are not wanted.
LayerGradients layer_gradients(const LinearKernels& run, bool wanted, WeightGradient call, const Tensor& like) {
  LayerGradients grads{allocated_if(wanted, like, {call.outputs, call.inputs}),
                       allocated_if(wanted, like, {call.outputs})};
  if (wanted) {
    call.grad_weight = grads.weight.data_ptr();
    call.grad_bias = grads.bias.data_ptr();
    parallel_items(call.items(), kLargeItems, [&](WorkQueue& queue) { run.weight_gradient(call, queue); });
  }
  return grads;
}

Tensor float_linear(const Tensor& x, const Tensor& weight, const MaybeTensor& bias, const char* op) {
  LinearForward call;
  call.tokens = x.size(0);
  call.inputs = x.size(1);
  call.outputs = weight.size(0);
  if (bias.has_value()) {
    call.bias = bias->data_ptr();
  }
  const LinearKernels& run = linear_kernels_table.get(op);
  Tensor y = allocated(x, {call.tokens, call.outputs});
  const Tensor panels = packed_transposed(run, weight, op);
  call.x = matrix(x, op);
  call.weight = panels.data_ptr();
  call.out = y.data_ptr();
  multiply_tokens(run, call);
  return y;
}

LinearGradients float_linear_backward(const Tensor& grad_y, const Tensor& x, const Tensor& weight, bool need_x,
                                      bool need_weight, const char* op) {
  const int64_t tokens = x.size(0);
  const int64_t inputs = x.size(1);
  const int64_t outputs = weight.size(0);
  const LinearKernels& run = linear_kernels_table.get(op);
  Tensor grad_x = allocated_if(need_x, x, {tokens, inputs});
  if (need_x) {
    const Tensor panels = packed_as_is(run, weight, op);
    multiply_tokens(run, {tokens, outputs, inputs, matrix(grad_y, op), panels.data_ptr(), nullptr, grad_x.data_ptr()});
  }
  const auto [grad_weight, grad_bias] =
      layer_gradients(run, need_weight, {tokens, inputs, outputs, {matrix(grad_y, op)}, {matrix(x, op)}}, x);
  return {grad_x, grad_weight, grad_bias};
}

MlpShape mlp_shape(const Tensor& x, const Tensor& w1, const Tensor& w2, const char* op) {
  check_tokens(x, op);
  check_weight(w1, x.size(1), x, "w1", op);
  check_weight(w2, w1.size(0), x, "w2", op);
  constexpr int64_t kLine = 16;  // a cache line, whole vectors for every instruction set
  MlpShape shape;
  shape.tokens = x.size(0);
  shape.inputs = x.size(1);
  shape.hidden = w1.size(0);
  shape.outputs = w2.size(0);
  shape.stride = (shape.hidden + kLine - 1) / kLine * kLine;
  return shape;
}

MlpResult float_mlp(const MlpInputs& in, const char* op) {
  const auto& [x, w1, b1, w2, b2, residual, save_for_backward] = in;
  MlpForward call;
  call.shape = mlp_shape(x, w1, w2, op);
  const MlpShape& shape = call.shape;
  const LinearKernels& run = linear_kernels_table.get(op);
  Tensor y = allocated(x, {shape.tokens, shape.outputs});
  Tensor pre = allocated_if(save_for_backward, x, {shape.tokens, shape.stride});
  const Tensor w1_panels = packed_transposed(run, w1, op);
  const Tensor w2_panels = packed_transposed(run, w2, op);
  call.x = matrix(x, op);
  call.w1 = w1_panels.data_ptr();
  call.b1 = b1.data_ptr();
  call.w2 = w2_panels.data_ptr();
  call.b2 = b2.data_ptr();
  call.pre = save_for_backward ? pre.data_ptr() : nullptr;
  if (residual.has_value()) {
    call.residual = matrix(*residual, op);
  }
  call.y = y.data_ptr();
  parallel_items(shape.items(), kLargeItems, [&](WorkQueue& queue) { run.mlp_forward(call, queue); });
  return {y, pre};
}

MlpGradients float_mlp_backward(const Tensor& grad_y, const Tensor& x, const Tensor& w1, const Tensor& w2,
                                const Tensor& pre, bool need_x, bool need_weights, const char* op) {
  MlpBackward call;
  call.shape = mlp_shape(x, w1, w2, op);
  const MlpShape& shape = call.shape;
  const LinearKernels& run = linear_kernels_table.get(op);
  Tensor grad_x = allocated_if(need_x, x, {shape.tokens, shape.inputs});
  const std::vector<int64_t> blocked{shape.blocks(), shape.tokens, kLinearBlock};
  const Tensor active = allocated_if(need_weights, x, blocked);
  const Tensor grad_pre = allocated_if(need_weights, x, blocked);
  const Tensor w1_panels = packed_as_is(run, w1, op);
  const Tensor w2_panels = packed_as_is(run, w2, op);
  call.grad_y = matrix(grad_y, op);
  call.w1 = w1_panels.data_ptr();
  call.w2 = w2_panels.data_ptr();
  call.pre = pre.data_ptr();
  call.active = need_weights ? active.data_ptr() : nullptr;
  call.grad_pre = need_weights ? grad_pre.data_ptr() : nullptr;
  call.grad_x = need_x ? grad_x.data_ptr() : nullptr;
  parallel_items(shape.items(), kLargeItems, [&](WorkQueue& queue) { run.mlp_backward(call, queue); });

  const auto blocks = [&](void* data) {
    return BlockedMatrix{{call.grad_y.type, data, kLinearBlock, 1}, shape.tokens * kLinearBlock};
  };
  const LayerGradients first = layer_gradients(
      run, need_weights, {shape.tokens, shape.inputs, shape.hidden, blocks(call.grad_pre), {matrix(x, op)}}, x);
  const LayerGradients second = layer_gradients(
      run, need_weights, {shape.tokens, shape.hidden, shape.outputs, {call.grad_y}, blocks(call.active)}, x);
  return {grad_x, first, second};
}

bool is_half(const Tensor& x) { return x.scalar_type() == ScalarType::BFloat16 || x.scalar_type() == ScalarType::Half; }

Tensor converted(const Tensor& tensor, ScalarType type) {
  if (tensor.scalar_type() == type) {
    return tensor;
  }
  Tensor result = allocated(tensor, sizes_of(tensor), type);
  return torch::stable::copy_(result, tensor);
}

Tensor wide(const Tensor& tensor) { return converted(tensor, ScalarType::Float); }

MaybeTensor wide(const MaybeTensor& tensor) { return tensor.has_value() ? MaybeTensor(wide(*tensor)) : std::nullopt; }

Tensor linear(Tensor x, Tensor weight, MaybeTensor bias) {
  constexpr const char* op = "linear";
  check_tokens(x, op);
  check_weight(weight, x.size(1), x, "weight", op);
  if (bias.has_value()) {
    check_bias(*bias, weight.size(0), x, "bias", op);
  }
  if (const Bf16LinearKernels* run = bf16_linear_kernels_for(x, op)) {
    return bf16_linear(*run, x, weight, wide(bias), op);
  }
  return is_half(x) ? converted(float_linear(wide(x), wide(weight), wide(bias), op), x.scalar_type())
                    : float_linear(x, weight, bias, op);
}

std::tuple<Tensor, Tensor, Tensor> linear_backward(Tensor grad_y, Tensor x, Tensor weight, bool need_x,
                                                   bool need_weight) {
  constexpr const char* op = "linear_backward";
  check_tokens(x, op);
  check_weight(weight, x.size(1), x, "weight", op);
  check_either(grad_y, {x.size(0), weight.size(0)}, x, false, "grad_y", op);
  const Bf16LinearKernels* run = bf16_linear_kernels_for(x, op);
  LinearGradients grads = run != nullptr ? bf16_linear_backward(*run, grad_y, x, weight, need_x, need_weight, op)
                          : is_half(x)
                              ? float_linear_backward(wide(grad_y), wide(x), wide(weight), need_x, need_weight, op)
                              : float_linear_backward(grad_y, x, weight, need_x, need_weight, op);
  const ScalarType type = weight.scalar_type();
  return {converted(grads.x, x.scalar_type()), converted(grads.weight, type), converted(grads.bias, type)};
}

std::tuple<Tensor, Tensor> mlp(Tensor x, Tensor w1, Tensor b1, Tensor w2, Tensor b2, MaybeTensor residual,
                               bool save_for_backward) {
  constexpr const char* op = "mlp";
  const MlpShape shape = mlp_shape(x, w1, w2, op);
  check_bias(b1, shape.hidden, x, "b1", op);
  check_bias(b2, shape.outputs, x, "b2", op);
  if (residual.has_value()) {
    check_either(*residual, {shape.tokens, shape.outputs}, x, false, "residual", op);
  }
  if (const Bf16LinearKernels* run = bf16_linear_kernels_for(x, op)) {
    const MlpResult result = bf16_mlp(*run, shape, {x, w1, wide(b1), w2, wide(b2), residual, save_for_backward}, op);
    return {result.y, result.pre};
  }
  if (!is_half(x)) {
    const MlpResult result = float_mlp({x, w1, b1, w2, b2, residual, save_for_backward}, op);
    return {result.y, result.pre};
  }
  const MlpResult result =
      float_mlp({wide(x), wide(w1), wide(b1), wide(w2), wide(b2), wide(residual), save_for_backward}, op);
  return {converted(result.y, residual.has_value() ? residual->scalar_type() : x.scalar_type()),
          converted(result.pre, x.scalar_type())};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> mlp_backward(Tensor grad_y, Tensor x, Tensor w1, Tensor w2,
                                                                Tensor pre, bool need_x, bool need_weights) {
  constexpr const char* op = "mlp_backward";
  const MlpShape shape = mlp_shape(x, w1, w2, op);
  check_either(grad_y, {shape.tokens, shape.outputs}, x, false, "grad_y", op);
  check_tensor(pre, {{shape.tokens, shape.stride}, x.scalar_type(), true}, "pre", op);
  const Bf16LinearKernels* run = bf16_linear_kernels_for(x, op);
  MlpGradients grads =
      run != nullptr ? bf16_mlp_backward(*run, shape, grad_y, x, w1, w2, pre, need_x, need_weights, op)
      : is_half(x) ? float_mlp_backward(wide(grad_y), wide(x), wide(w1), wide(w2), wide(pre), need_x, need_weights, op)
                   : float_mlp_backward(grad_y, x, w1, w2, pre, need_x, need_weights, op);
  return {converted(grads.x, x.scalar_type()), converted(grads.first.weight, w1.scalar_type()),
          converted(grads.first.bias, w1.scalar_type()), converted(grads.second.weight, w2.scalar_type()),
          converted(grads.second.bias, w2.scalar_type())};
}

}  // namespace
}  // namespace overtone

STABLE_TORCH_LIBRARY_IMPL(overtone, CPU, m) {
  OVERTONE_IMPL(m, linear);
  OVERTONE_IMPL(m, linear_backward);
  OVERTONE_IMPL(m, mlp);
  OVERTONE_IMPL(m, mlp_backward);
}
