// LayerNorm's kernels, written once and compiled for every instruction set.
#pragma once

#include "cpu/layer_norm/params.h"
#include "cpu/simd/vector.h"

namespace overtone::OVERTONE_ISA {

// f(column, lanes) for the vectors of a row, the last of them with fewer lanes.
template <class F>
OVERTONE_INLINE void for_row(int64_t channels, const F& f) {
  int64_t j = 0;
  for (; j + kLanes<float> <= channels; j += kLanes<float>) {
    f(j, kLanes<float>);
  }
  if (j < channels) {
    f(j, static_cast<int>(channels - j));
  }
}

inline void normalize_row(const LayerNormForward& call, int64_t token) {
  const float* x = call.x + token * call.channels;
  const float count = static_cast<float>(call.channels);
  Vector<float> total{};
  for_row(call.channels, [&](int64_t j, int lanes) { total += load(x + j, 1, lanes); });
  const float mean = reduce_add<float>(total) / count;
  Vector<float> squares{};
  for_row(call.channels, [&](int64_t j, int lanes) {
    const Vector<float> centered = mask_tail(load(x + j, 1, lanes) - mean, lanes, 0.0F);
    squares += centered * centered;
  });
  const float rstd = 1 / std::sqrt(reduce_add<float>(squares) / count + call.eps);
  call.rows[2 * token] = mean;
  call.rows[2 * token + 1] = rstd;
  BFloat16* y = static_cast<BFloat16*>(call.y) + token * call.channels;
  for_row(call.channels, [&](int64_t j, int lanes) {
    const Vector<float> normalized = (load(x + j, 1, lanes) - mean) * rstd;
    store(normalized * load(call.weight + j, 1, lanes) + load(call.bias + j, 1, lanes), y + j, lanes);
  });
}

inline void layer_norm_forward(const LayerNormForward& call, WorkQueue& queue) {
  for (int64_t item; (item = queue.pop()) >= 0;) {
    const int64_t end = std::min(call.tokens, (item + 1) * kNormTokens);
    for (int64_t token = item * kNormTokens; token < end; ++token) {
      normalize_row(call, token);
    }
  }
}

// One row's ∂x, and what it adds to an item's sums.
template <class G>
void differentiate_row(const LayerNormBackward& call, int64_t token, const G* grad_y, float* sums) {
  const float* x = call.x + token * call.channels;
  const float mean = call.rows[2 * token];
  const float rstd = call.rows[2 * token + 1];
  Vector<float> total{};
  Vector<float> along{};
  for_row(call.channels, [&](int64_t j, int lanes) {
    const Vector<float> normalized = mask_tail((load(x + j, 1, lanes) - mean) * rstd, lanes, 0.0F);
    const Vector<float> grad = load(grad_y + j, 1, lanes);
    const Vector<float> product = grad * load(call.weight + j, 1, lanes);
    total += product;
    along += product * normalized;
    if (sums != nullptr) {
      store(load(sums + j, 1, lanes) + grad * normalized, sums + j, lanes);
      store(load(sums + call.channels + j, 1, lanes) + grad, sums + call.channels + j, lanes);
    }
  });
  if (call.grad_x == nullptr) {
    return;
  }
  const float count = static_cast<float>(call.channels);
  const float mean_total = reduce_add<float>(total) / count;
  const float mean_along = reduce_add<float>(along) / count;
  float* grad_x = call.grad_x + token * call.channels;
  for_row(call.channels, [&](int64_t j, int lanes) {
    const Vector<float> normalized = (load(x + j, 1, lanes) - mean) * rstd;
    const Vector<float> product = load(grad_y + j, 1, lanes) * load(call.weight + j, 1, lanes);
    store((product - mean_total - normalized * mean_along) * rstd, grad_x + j, lanes);
  });
}

inline void layer_norm_backward(const LayerNormBackward& call, WorkQueue& queue) {
  for (int64_t item; (item = queue.pop()) >= 0;) {
    float* sums = call.sums == nullptr ? nullptr : call.sums + item * 2 * call.channels;
    if (sums != nullptr) {
      std::fill(sums, sums + 2 * call.channels, 0.0F);
    }
    const int64_t end = std::min(call.tokens, (item + 1) * kNormTokens);
    for (int64_t token = item * kNormTokens; token < end; ++token) {
      const int64_t place = token * call.channels;
      if (call.is_bf16) {
        differentiate_row(call, token, static_cast<const BFloat16*>(call.grad_y) + place, sums);
      } else {
        differentiate_row(call, token, static_cast<const float*>(call.grad_y) + place, sums);
      }
    }
  }
}

extern const LayerNormKernels layer_norm_kernels = {
    .isa = OVERTONE_ISA_NAME,
    .forward = &layer_norm_forward,
    .backward = &layer_norm_backward,
};

}  // namespace overtone::OVERTONE_ISA
