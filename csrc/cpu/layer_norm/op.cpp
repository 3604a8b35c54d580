// LayerNorm from float32 to bfloat16 on CPU tensors. Shapes and types were validated by python/overtone/ops; what is
// checked here again is what memory safety needs.
#include <tuple>

#include "cpu/layer_norm/params.h"
#include "cpu/tensor.h"

namespace overtone {
namespace {

// What threads are worth waking for: a few operations per element.
Cost cost_of(const LayerNormTokens& call) { return {10.0 * kNormTokens * static_cast<double>(call.channels)}; }

void read_tokens(const Tensor& x, const Tensor& weight, LayerNormTokens& call, const char* op) {
  check_dims(x, 2, false, "x", op);
  call.tokens = x.size(0);
  call.channels = x.size(1);
  check_tensor(x, {{call.tokens, call.channels}, ScalarType::Float, true}, "x", op);
  check_tensor(weight, {{call.channels}, ScalarType::Float, true}, "weight", op);
  call.x = static_cast<const float*>(x.data_ptr());
  call.weight = static_cast<const float*>(weight.data_ptr());
}

// -> (y, rows)
std::tuple<Tensor, Tensor> rounded_layer_norm(Tensor x, Tensor weight, Tensor bias, double eps) {
  constexpr const char* op = "rounded_layer_norm";
  LayerNormForward call;
  read_tokens(x, weight, call, op);
  check_tensor(bias, {{call.channels}, ScalarType::Float, true}, "bias", op);
  Tensor y = allocated(x, sizes_of(x), ScalarType::BFloat16);
  Tensor rows = allocated(x, {call.tokens, 2});
  call.bias = static_cast<const float*>(bias.data_ptr());
  call.eps = static_cast<float>(eps);
  call.y = y.data_ptr();
  call.rows = static_cast<float*>(rows.data_ptr());
  const LayerNormKernels& run = layer_norm_kernels_table.get(op);
  parallel_items(call.items(), cost_of(call), [&](WorkQueue& queue) { run.forward(call, queue); });
  return {y, rows};
}

// Adds up what the items found, in their order.
void add_items(const float* sums, int64_t items, int64_t stride, Tensor& out) {
  float* total = static_cast<float*>(out.data_ptr());
  const int64_t size = out.numel();
  std::fill(total, total + size, 0.0F);
  for (int64_t item = 0; item < items; ++item) {
    for (int64_t j = 0; j < size; ++j) {
      total[j] += sums[item * stride + j];
    }
  }
}

std::tuple<Tensor, Tensor, Tensor> rounded_layer_norm_backward(Tensor grad_y, Tensor x, Tensor weight, Tensor rows,
                                                               bool need_x, bool need_weight) {
  constexpr const char* op = "rounded_layer_norm_backward";
  LayerNormBackward call;
  read_tokens(x, weight, call, op);
  call.is_bf16 = grad_y.scalar_type() == ScalarType::BFloat16;
  check_tensor(grad_y, {sizes_of(x), call.is_bf16 ? ScalarType::BFloat16 : ScalarType::Float, true}, "grad_y", op);
  check_tensor(rows, {{call.tokens, 2}, ScalarType::Float, true}, "rows", op);
  const auto allocate = [&](bool wanted, const std::vector<int64_t>& size) {
    return allocated(x, wanted ? size : std::vector<int64_t>{0});
  };
  Tensor grad_x = allocate(need_x, sizes_of(x));
  Tensor grad_weight = allocate(need_weight, {call.channels});
  Tensor grad_bias = allocate(need_weight, {call.channels});
  const Tensor sums = allocate(need_weight, {call.items(), 2, call.channels});
  call.grad_y = grad_y.data_ptr();
  call.rows = static_cast<const float*>(rows.data_ptr());
  call.grad_x = need_x ? static_cast<float*>(grad_x.data_ptr()) : nullptr;
  call.sums = need_weight ? static_cast<float*>(sums.data_ptr()) : nullptr;
  const LayerNormKernels& run = layer_norm_kernels_table.get(op);
  parallel_items(call.items(), cost_of(call), [&](WorkQueue& queue) { run.backward(call, queue); });
  if (need_weight) {
    add_items(call.sums, call.items(), 2 * call.channels, grad_weight);
    add_items(call.sums + call.channels, call.items(), 2 * call.channels, grad_bias);
  }
  return {grad_x, grad_weight, grad_bias};
}

}  // namespace
}  // namespace overtone

STABLE_TORCH_LIBRARY_IMPL(overtone, CPU, m) {
  OVERTONE_IMPL(m, rounded_layer_norm);
  OVERTONE_IMPL(m, rounded_layer_norm_backward);
}
