#include "cpu/linear/bf16_op.h"

#include "cpu/gemm/packed.h"

namespace overtone {
namespace {

constexpr int64_t kPanelColumns = 16;
constexpr int64_t kTileTokens = 32;

int64_t whole(int64_t size, int64_t multiple) { return (size + multiple - 1) / multiple * multiple; }

template <class Call>
void run_items(void (*kernel)(const Call&, WorkQueue&), const Call& call, int64_t items) {
  parallel_items(items, kLargeItems, [&](WorkQueue& queue) { kernel(call, queue); });
}

// A weight [outputs, inputs] in panels: for y, as the operand [inputs, outputs], or as it is for ∂x.
Tensor panels_of(const Bf16LinearKernels& run, const Tensor& weight, bool is_transposed, const char* op) {
  const StridedMatrix source = matrix(weight, op);
  const PanelPacking packing = is_transposed ? PanelPacking{source.transposed(), weight.size(1), weight.size(0)}
                                             : PanelPacking{source, weight.size(0), weight.size(1)};
  return packed(run.packing, packing, weight, ScalarType::Float);
}

// The operands of products over tokens (bf16_params.h).
int64_t token_stride(int64_t tokens) { return ((tokens + kTileTokens - 1) / kTileTokens | 1) * kTileTokens; }

Tensor columns_for(bool wanted, const Tensor& like, int64_t channels, int64_t tokens) {
  return allocated_if(wanted, like, {whole(channels, kPanelColumns), token_stride(tokens)});
}

Tensor pairs_for(bool wanted, const Tensor& like, int64_t channels, int64_t tokens) {
  return allocated_if(wanted, like, {whole(channels, kPanelColumns), whole(tokens, kTileTokens)});
}

void* data_if(bool wanted, const Tensor& tensor) { return wanted ? tensor.data_ptr() : nullptr; }

struct Product {
  const Tensor& left;  // columns
  const Tensor& right;  // pairs
  int64_t tokens, rows, columns;
};

// ∂W [rows, columns], or transposed, and ∂b: the sums of the left operand's rows, or of the right one's columns.
LayerGradients weight_gradient(const Bf16LinearKernels& run, bool wanted, const Product& product, bool is_transposed) {
  const int64_t rows = is_transposed ? product.columns : product.rows;
  const int64_t columns = is_transposed ? product.rows : product.columns;
  const auto allocate = [&](const std::vector<int64_t>& size) {
    return allocated(product.left, wanted ? size : std::vector<int64_t>{0}, ScalarType::Float);
  };
  LayerGradients grads{allocate({rows, columns}), allocate({rows})};
  if (!wanted) {
    return grads;
  }
  Bf16WeightGradient call;
  call.tokens = product.tokens;
  call.rows = product.rows;
  call.columns = product.columns;
  call.left = product.left.data_ptr();
  call.right = product.right.data_ptr();
  call.token_stride = token_stride(product.tokens);
  call.grad_weight = static_cast<float*>(grads.weight.data_ptr());
  call.is_transposed = is_transposed;
  (is_transposed ? call.column_sums : call.row_sums) = static_cast<float*>(grads.bias.data_ptr());
  run_items(run.weight_gradient, call, call.items());
  return grads;
}

}  // namespace

const Bf16LinearKernels* bf16_linear_kernels_for(const Tensor& x, const char* op) {
  const Bf16LinearKernels* run = bf16_linear_kernels_table.by_isa[static_cast<int>(current_isa())];
  if (x.scalar_type() != ScalarType::BFloat16 || run == nullptr) {
    return nullptr;
  }
  record_kernel(op, run->isa);
  return run;
}

Tensor bf16_linear(const Bf16LinearKernels& run, const Tensor& x, const Tensor& weight,
                   const std::optional<Tensor>& bias, const char* op) {
  Bf16LinearForward call;
  call.tokens = x.size(0);
  call.inputs = x.size(1);
  call.outputs = weight.size(0);
  Tensor y = allocated(x, {call.tokens, call.outputs});
  const Tensor panels = panels_of(run, weight, true, op);
  call.x = matrix(x, op);
  call.weight = panels.data_ptr();
  call.bias = bias.has_value() ? static_cast<const float*>(bias->data_ptr()) : nullptr;
  call.out = y.data_ptr();
  run_items(run.linear_forward, call, call.items());
  return y;
}

LinearGradients bf16_linear_backward(const Bf16LinearKernels& run, const Tensor& grad_y, const Tensor& x,
                                     const Tensor& weight, bool need_x, bool need_weight, const char* op) {
  const int64_t tokens = x.size(0);
  const int64_t inputs = x.size(1);
  const int64_t outputs = weight.size(0);
  Tensor grad_x = allocated_if(need_x, x, {tokens, inputs});
  const Tensor x_columns = columns_for(need_weight, x, inputs, tokens);
  const Tensor grad_pairs = pairs_for(need_weight, x, outputs, tokens);
  std::optional<Tensor> panels;
  Bf16LinearBackward call;
  call.grad.tokens = tokens;
  call.grad.inputs = outputs;
  call.grad.outputs = inputs;
  call.grad.x = matrix(grad_y, op);
  if (need_x) {
    panels = panels_of(run, weight, false, op);
    call.grad.weight = panels->data_ptr();
    call.grad.out = grad_x.data_ptr();
  }
  call.x = matrix(x, op);
  call.x_columns = data_if(need_weight, x_columns);
  call.grad_pairs = data_if(need_weight, grad_pairs);
  call.token_stride = token_stride(tokens);
  run_items(run.linear_backward, call, call.grad.items());
  const auto [grad_weight, grad_bias] =
      weight_gradient(run, need_weight, {x_columns, grad_pairs, tokens, inputs, outputs}, true);
  return {grad_x, grad_weight, grad_bias};
}

MlpResult bf16_mlp(const Bf16LinearKernels& run, const MlpShape& shape, const MlpInputs& in, const char* op) {
  const ScalarType type = in.residual.has_value() ? in.residual->scalar_type() : in.x.scalar_type();
  Tensor y = allocated(in.x, {shape.tokens, shape.outputs}, type);
  Tensor pre = allocated_if(in.need_backward, in.x, {shape.tokens, shape.stride});
  const Tensor w1 = panels_of(run, in.w1, true, op);
  const Tensor w2 = panels_of(run, in.w2, true, op);
  Bf16MlpForward call;
  call.shape = shape;
  call.x = matrix(in.x, op);
  call.w1 = w1.data_ptr();
  call.b1 = static_cast<const float*>(in.b1.data_ptr());
  call.w2 = w2.data_ptr();
  call.b2 = static_cast<const float*>(in.b2.data_ptr());
  call.pre = data_if(in.need_backward, pre);
  if (in.residual.has_value()) {
    call.residual = matrix(*in.residual, op);
  }
  call.y = matrix(y, op);
  run_items(run.mlp_forward, call, shape.items());
  return {y, pre};
}

MlpGradients bf16_mlp_backward(const Bf16LinearKernels& run, const MlpShape& shape, const Tensor& grad_y,
                               const Tensor& x, const Tensor& w1, const Tensor& w2, const Tensor& pre, bool need_x,
                               bool need_weights, const char* op) {
  const int64_t tokens = shape.tokens;
  Tensor grad_x = allocated_if(need_x, x, {tokens, shape.inputs});
  const Tensor x_columns = columns_for(need_weights, x, shape.inputs, tokens);
  const Tensor grad_columns = columns_for(need_weights, x, shape.outputs, tokens);
  const Tensor active = pairs_for(need_weights, x, shape.hidden, tokens);
  const Tensor grad_pre = pairs_for(need_weights, x, shape.hidden, tokens);
  const Tensor w1_panels = panels_of(run, w1, false, op);
  const Tensor w2_panels = panels_of(run, w2, false, op);
  Bf16MlpBackward call;
  call.shape = shape;
  call.grad_y = matrix(grad_y, op);
  call.x = matrix(x, op);
  call.w1 = w1_panels.data_ptr();
  call.w2 = w2_panels.data_ptr();
  call.pre = pre.data_ptr();
  call.grad_x = data_if(need_x, grad_x);
  call.x_columns = data_if(need_weights, x_columns);
  call.grad_columns = data_if(need_weights, grad_columns);
  call.active_pairs = data_if(need_weights, active);
  call.grad_pre_pairs = data_if(need_weights, grad_pre);
  call.token_stride = token_stride(tokens);
  run_items(run.mlp_backward, call, shape.items());
  return {grad_x, weight_gradient(run, need_weights, {x_columns, grad_pre, tokens, shape.inputs, shape.hidden}, true),
          weight_gradient(run, need_weights, {grad_columns, active, tokens, shape.outputs, shape.hidden}, false)};
}

}  // namespace overtone
