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

// Tokens between which the phases of backward take turns (bf16_params.h): enough for all threads, few enough for L2.
int64_t tokens_of_part(int64_t tokens) {
  const int64_t threads = static_cast<int64_t>(torch::stable::get_num_threads());
  const int64_t wanted = whole(std::max<int64_t>(8, 2 * threads) * kLinearTokens, kGradientSum);
  return std::clamp<int64_t>(tokens, 1, wanted);
}

GradientLayout layout_of(int64_t part) {
  return {(whole(part, kTileTokens) / kTileTokens | 1) * kTileTokens, whole(part, kTileTokens) * kPanelColumns};
}

Tensor columns_for(bool wanted, const Tensor& like, int64_t channels, const GradientLayout& layout) {
  return allocated_if(wanted, like, {whole(channels, kPanelColumns), layout.token_stride});
}

Tensor pairs_for(bool wanted, const Tensor& like, int64_t channels, const GradientLayout& layout) {
  return allocated_if(wanted, like, {whole(channels, kPanelColumns) / kPanelColumns, layout.panel_stride});
}

void* data_if(bool wanted, const Tensor& tensor) { return wanted ? tensor.data_ptr() : nullptr; }

// ∂W [rows, columns], or transposed, and ∂b, part by part: the sums of the left operand's rows, or of the
// right one's columns.
class WeightGradientSum {
 public:
  WeightGradientSum(const Bf16LinearKernels& run, bool is_wanted, const Tensor& left, const Tensor& right,
                    const GradientLayout& layout, int64_t rows, int64_t columns, bool is_transposed)
      : run_(run), is_wanted_(is_wanted) {
    call_.rows = rows;
    call_.columns = columns;
    call_.layout = layout;
    call_.is_transposed = is_transposed;
    const int64_t outputs = is_transposed ? columns : rows;
    const auto allocate = [&](const std::vector<int64_t>& size) {
      return allocated(left, is_wanted ? size : std::vector<int64_t>{0}, ScalarType::Float);
    };
    grads_ = {allocate({outputs, is_transposed ? rows : columns}), allocate({outputs})};
    sums_ = allocate({call_.items(), kGradientRows, kGradientColumns});
    if (is_wanted) {
      call_.left = left.data_ptr();
      call_.right = right.data_ptr();
      call_.sums = static_cast<float*>(sums_->data_ptr());
      call_.grad_weight = static_cast<float*>(grads_->weight.data_ptr());
      (is_transposed ? call_.column_sums : call_.row_sums) = static_cast<float*>(grads_->bias.data_ptr());
    }
  }

  void add(int64_t tokens, bool is_first, bool is_last) {
    if (is_wanted_) {
      call_.tokens = tokens;
      call_.is_first = is_first;
      call_.is_last = is_last;
      run_items(run_.weight_gradient, call_, call_.items());
    }
  }

  const LayerGradients& gradients() const { return *grads_; }

 private:
  const Bf16LinearKernels& run_;
  bool is_wanted_;
  Bf16WeightGradient call_;
  std::optional<LayerGradients> grads_;
  std::optional<Tensor> sums_;
};

// body(token, tokens, is_first, is_last) for the parts; once if there is no token.
template <class Body>
void for_parts(int64_t tokens, int64_t part, const Body& body) {
  int64_t token = 0;
  do {
    body(token, std::min(part, tokens - token), token == 0, token + part >= tokens);
    token += part;
  } while (token < tokens);
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
  const int64_t part = tokens_of_part(tokens);
  const GradientLayout layout = layout_of(part);
  const Tensor x_columns = columns_for(need_weight, x, inputs, layout);
  const Tensor grad_pairs = pairs_for(need_weight, x, outputs, layout);
  WeightGradientSum sum(run, need_weight, x_columns, grad_pairs, layout, inputs, outputs, true);
  std::optional<Tensor> panels;
  Bf16LinearBackward call;
  call.grad.inputs = outputs;
  call.grad.outputs = inputs;
  if (need_x) {
    panels = panels_of(run, weight, false, op);
    call.grad.weight = panels->data_ptr();
  }
  call.x_columns = data_if(need_weight, x_columns);
  call.grad_pairs = data_if(need_weight, grad_pairs);
  call.layout = layout;
  for_parts(tokens, part, [&](int64_t token, int64_t count, bool is_first, bool is_last) {
    call.grad.tokens = count;
    call.grad.x = matrix(grad_y, op).from(token, 0);
    call.x = matrix(x, op).from(token, 0);
    call.grad.out = need_x ? static_cast<uint16_t*>(grad_x.data_ptr()) + token * inputs : nullptr;
    run_items(run.linear_backward, call, call.grad.items());
    sum.add(count, is_first, is_last);
  });
  return {grad_x, sum.gradients().weight, sum.gradients().bias};
}

MlpResult bf16_mlp(const Bf16LinearKernels& run, const MlpShape& shape, const MlpInputs& in, const char* op) {
  const ScalarType type = in.residual.has_value() ? in.residual->scalar_type() : in.x.scalar_type();
  Tensor y = allocated(in.x, {shape.tokens, shape.outputs}, type);
  Tensor pre = allocated_if(in.save_for_backward, in.x, {shape.tokens, shape.stride});
  const Tensor w1 = panels_of(run, in.w1, true, op);
  const Tensor w2 = panels_of(run, in.w2, true, op);
  Bf16MlpForward call;
  call.shape = shape;
  call.x = matrix(in.x, op);
  call.w1 = w1.data_ptr();
  call.b1 = static_cast<const float*>(in.b1.data_ptr());
  call.w2 = w2.data_ptr();
  call.b2 = static_cast<const float*>(in.b2.data_ptr());
  call.pre = data_if(in.save_for_backward, pre);
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
  Tensor grad_x = allocated_if(need_x, x, {shape.tokens, shape.inputs});
  const int64_t part = tokens_of_part(shape.tokens);
  const GradientLayout layout = layout_of(part);
  const Tensor x_columns = columns_for(need_weights, x, shape.inputs, layout);
  const Tensor grad_columns = columns_for(need_weights, x, shape.outputs, layout);
  const Tensor active = pairs_for(need_weights, x, shape.hidden, layout);
  const Tensor grad_pre = pairs_for(need_weights, x, shape.hidden, layout);
  WeightGradientSum first(run, need_weights, x_columns, grad_pre, layout, shape.inputs, shape.hidden, true);
  WeightGradientSum second(run, need_weights, grad_columns, active, layout, shape.outputs, shape.hidden, false);
  const Tensor w1_panels = panels_of(run, w1, false, op);
  const Tensor w2_panels = panels_of(run, w2, false, op);
  Bf16MlpBackward call;
  call.shape = shape;
  call.w1 = w1_panels.data_ptr();
  call.w2 = w2_panels.data_ptr();
  call.x_columns = data_if(need_weights, x_columns);
  call.grad_columns = data_if(need_weights, grad_columns);
  call.active_pairs = data_if(need_weights, active);
  call.grad_pre_pairs = data_if(need_weights, grad_pre);
  call.layout = layout;
  for_parts(shape.tokens, part, [&](int64_t token, int64_t count, bool is_first, bool is_last) {
    call.shape.tokens = count;
    call.grad_y = matrix(grad_y, op).from(token, 0);
    call.x = matrix(x, op).from(token, 0);
    call.pre = static_cast<const uint16_t*>(pre.data_ptr()) + token * shape.stride;
    call.grad_x = need_x ? static_cast<uint16_t*>(grad_x.data_ptr()) + token * shape.inputs : nullptr;
    run_items(run.mlp_backward, call, call.shape.items());
    first.add(count, is_first, is_last);
    second.add(count, is_first, is_last);
  });
  return {grad_x, first.gradients(), second.gradients()};
}

}  // namespace overtone
