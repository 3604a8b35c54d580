// The linear layers' ops on bfloat16, below the checks of op.cpp: what they are given and return.
#pragma once

#include <optional>

#include "cpu/linear/bf16_params.h"
#include "cpu/tensor.h"

namespace overtone {

struct LayerGradients {
  Tensor weight, bias;
};

struct LinearGradients {
  Tensor x, weight, bias;
};

// residual: added to y, which has its type.
struct MlpInputs {
  Tensor x, w1, b1, w2, b2;
  std::optional<Tensor> residual;
  bool save_for_backward;
};

struct MlpResult {
  Tensor y, pre;
};

struct MlpGradients {
  Tensor x;
  LayerGradients first, second;
};

inline StridedMatrix matrix(const Tensor& tensor, const char* op) {
  return {dtype_of(tensor, op, "x"), tensor.data_ptr(), tensor.stride(0), tensor.stride(1)};
}

inline Tensor allocated_if(bool wanted, const Tensor& like, const std::vector<int64_t>& size) {
  return allocated(like, wanted ? size : std::vector<int64_t>{0});
}

// The kernels that multiply x, about to run for `op`; null where it is no bfloat16, or nothing multiplies that.
const Bf16LinearKernels* bf16_linear_kernels_for(const Tensor& x, const char* op);

// Weights have either type, biases float32. Gradients of either are float32, that of x has its type.
Tensor bf16_linear(const Bf16LinearKernels& run, const Tensor& x, const Tensor& weight,
                   const std::optional<Tensor>& bias, const char* op);
LinearGradients bf16_linear_backward(const Bf16LinearKernels& run, const Tensor& grad_y, const Tensor& x,
                                     const Tensor& weight, bool need_x, bool need_weight, const char* op);
MlpResult bf16_mlp(const Bf16LinearKernels& run, const MlpShape& shape, const MlpInputs& in, const char* op);
MlpGradients bf16_mlp_backward(const Bf16LinearKernels& run, const MlpShape& shape, const Tensor& grad_y,
                               const Tensor& x, const Tensor& w1, const Tensor& w2, const Tensor& pre, bool need_x,
                               bool need_weights, const char* op);

}  // namespace overtone
