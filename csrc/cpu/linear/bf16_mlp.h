// The fused MLP in bfloat16: a block of tokens goes through both layers, a group of hidden channels at a time.
#pragma once

#include "cpu/linear/bf16_blocks.h"
#include "cpu/simd/gelu.h"

namespace overtone::OVERTONE_ISA {

// Of rows of a group.
constexpr int64_t kBf16GroupLd = padded_stride<BFloat16>(kBf16Group);

class Bf16MlpForwardBlocks {
 public:
  explicit Bf16MlpForwardBlocks(const Bf16MlpForward& call)
      : call_(call),
        shape_(call.shape),
        w1_(call.w1, shape_.inputs, shape_.hidden),
        w2_(call.w2, shape_.hidden, shape_.outputs),
        y_ld_(padded_stride<float>(padded_to(shape_.outputs, kTileSize))),
        bf16_scratch_(Scratch<BFloat16>::padded(Bf16Operand::size(kLinearTokens, shape_.inputs)) +
                      kLinearTokens * kBf16GroupLd),
        memory_(kStripSums + kLinearTokens * y_ld_ + Scratch<float>::padded(shape_.hidden)),
        x_(bf16_scratch_.take(Bf16Operand::size(kLinearTokens, shape_.inputs))),
        active_(bf16_scratch_.take(kLinearTokens * kBf16GroupLd)),
        sums_(memory_.take(kStripSums)),
        y_(memory_.take(kLinearTokens * y_ld_)),
        b1_(memory_.take(shape_.hidden)) {
    bf16_scratch_.clear();  // what fills a group up to whole tiles
    std::fill(b1_, b1_ + Scratch<float>::padded(shape_.hidden), 0.0F);
    std::copy(call.b1, call.b1 + shape_.hidden, b1_);
  }

  void run(int64_t block) {
    const int64_t token = block * kLinearTokens;
    const int64_t rows = std::min(kLinearTokens, shape_.tokens - token);
    const Bf16Operand x(call_.x.from(token, 0), rows, shape_.inputs, x_);
    for (int64_t group = 0; group < shape_.hidden; group += kBf16Group) {
      const int64_t channels = std::min(kBf16Group, shape_.hidden - group);
      for (int64_t part = 0; part < channels; part += kBf16Width) {
        const int64_t width = padded_to(std::min(kBf16Width, channels - part), kTileSize);
        multiply_strips(w1_, group + part, width, rows, x, sums_, [&](int64_t row, int64_t count, const float* sums) {
          activate(token, row, count, group, part, width, sums);
        });
      }
      multiply_bf16(rows, shape_.outputs, channels, active_, kBf16GroupLd, w2_.from(group, 0), y_, y_ld_, group > 0);
    }
    with_type<float>(call_.y.type, [&](auto element) { store_result<decltype(element)>(token, rows); });
  }

 private:
  // h and GELU(h) of a strip of rows and a part of a group.
  void activate(int64_t token, int64_t row, int64_t count, int64_t group, int64_t part, int64_t width,
                const float* sums) {
    for (int64_t i = 0; i < count; ++i) {
      BFloat16* pre = call_.pre == nullptr
                          ? nullptr
                          : static_cast<BFloat16*>(call_.pre) + (token + row + i) * shape_.stride + group + part;
      for (int64_t j = 0; j < width; j += kLanes<float>) {
        const Vector<float> h = load_full(sums + i * kBf16Width + j) + load_full(b1_ + group + part + j);
        store_full(coarse_gelu_and_slope(h).value, active_ + (row + i) * kBf16GroupLd + part + j);
        if (pre != nullptr) {
          store_full(h, pre + j);
        }
      }
    }
  }

  template <class T>
  void store_result(int64_t token, int64_t rows) const {
    with_type<float>(call_.residual.type, [&](auto element) {
      using R = decltype(element);
      for (int64_t i = 0; i < rows; ++i) {
        for_vectors(shape_.outputs, [&](int64_t j, int lanes) {
          Vector<float> sum = load_full(y_ + i * y_ld_ + j) + load(call_.b2 + j, 1, lanes);
          if (call_.residual.data != nullptr) {
            sum += load(static_cast<const R*>(call_.residual.at<R>(token + i, j)), call_.residual.column_stride, lanes);
          }
          store(sum, call_.y.at<T>(token + i, j), lanes);
        });
      }
    });
  }

  const Bf16MlpForward& call_;
  const MlpShape& shape_;
  Bf16Weight w1_;
  Bf16Weight w2_;
  int64_t y_ld_;
  Scratch<BFloat16> bf16_scratch_;
  Scratch<float> memory_;
  Bf16Session session_;
  BFloat16* x_;
  BFloat16* active_;  // [tokens][kBf16GroupLd]
  float* sums_;
  float* y_;  // [tokens][y_ld]
  float* b1_;
};

class Bf16MlpBackwardBlocks {
 public:
  explicit Bf16MlpBackwardBlocks(const Bf16MlpBackward& call)
      : call_(call),
        shape_(call.shape),
        w1_(call.w1, shape_.hidden, shape_.inputs),
        w2_(call.w2, shape_.outputs, shape_.hidden),
        grad_x_ld_(padded_stride<float>(padded_to(shape_.inputs, kTileSize))),
        bf16_scratch_(Scratch<BFloat16>::padded(Bf16Operand::size(kLinearTokens, shape_.outputs)) +
                      kLinearTokens * kBf16GroupLd),
        memory_(kStripSums + kLinearTokens * grad_x_ld_),
        grad_(bf16_scratch_.take(Bf16Operand::size(kLinearTokens, shape_.outputs))),
        grad_pre_(bf16_scratch_.take(kLinearTokens * kBf16GroupLd)),
        sums_(memory_.take(kStripSums)),
        grad_x_(memory_.take(kLinearTokens * grad_x_ld_)) {
    bf16_scratch_.clear();
  }

  void run(int64_t block) {
    const int64_t token = block * kLinearTokens;
    const int64_t rows = std::min(kLinearTokens, shape_.tokens - token);
    const StridedMatrix grads = call_.grad_y.from(token, 0);
    const Bf16Operand grad(grads, rows, shape_.outputs, grad_);
    for (int64_t group = 0; group < shape_.hidden; group += kBf16Group) {
      const int64_t channels = std::min(kBf16Group, shape_.hidden - group);
      for (int64_t part = 0; part < channels; part += kBf16Width) {
        const int64_t width = padded_to(std::min(kBf16Width, channels - part), kTileSize);
        multiply_strips(w2_, group + part, width, rows, grad, sums_,
                        [&](int64_t row, int64_t count, float const* sums) {
                          for (int64_t i = 0; i < count; i += 2) {
                            differentiate(token, row + i, rows, group, part, width, sums + i * kBf16Width);
                          }
                        });
      }
      if (call_.grad_x != nullptr) {
        multiply_bf16(rows, shape_.inputs, channels, grad_pre_, kBf16GroupLd, w1_.from(group, 0), grad_x_, grad_x_ld_,
                      group > 0);
      }
    }
    if (call_.grad_x != nullptr) {
      BFloat16* out = static_cast<BFloat16*>(call_.grad_x) + token * shape_.inputs;
      unpack_rows(grad_x_, grad_x_ld_, rows, shape_.inputs, 1.0F, {Dtype::bfloat16, out, shape_.inputs, 1});
    }
    if (call_.x_columns != nullptr) {
      pack_gradient_operands(token, rows, grads);
    }
  }

 private:
  // Of rows `row` and `row` + 1, a part of a group: from G W₂ to ∂h, and the pairs of ∂h and of GELU(h).
  void differentiate(int64_t token, int64_t row, int64_t rows, int64_t group, int64_t part, int64_t width,
                     const float* sums) {
    const bool is_pair = row + 1 < rows;
    const int64_t channel = group + part;
    const BFloat16* pre = static_cast<const BFloat16*>(call_.pre) + (token + row) * shape_.stride + channel;
    for (int64_t j = 0; j < width; j += kLanes<float>) {
      Vector<float> value[2] = {};
      Vector<float> grad[2] = {};
      OVERTONE_UNROLL
      for (int i = 0; i < 2; ++i) {
        if (i == 0 || is_pair) {
          const auto at = coarse_gelu_and_slope(load_full(pre + i * shape_.stride + j));
          value[i] = at.value;
          grad[i] = load_full(sums + i * kBf16Width + j) * at.slope;
          store_full(grad[i], grad_pre_ + (row + i) * kBf16GroupLd + part + j);
        }
      }
      if (call_.x_columns != nullptr) {
        const int64_t place = (channel + j) / kTileSize * call_.layout.panel_stride + (token + row) * kTileSize +
                              (channel + j) % kTileSize * 2;
        store_pair(value[0], value[1], static_cast<BFloat16*>(call_.active_pairs) + place);
        store_pair(grad[0], grad[1], static_cast<BFloat16*>(call_.grad_pre_pairs) + place);
      }
    }
  }

  void pack_gradient_operands(int64_t token, int64_t rows, const StridedMatrix& grads) const {
    pack_tile_columns(call_.x.from(token, 0), rows, shape_.inputs, static_cast<BFloat16*>(call_.x_columns) + token,
                      call_.layout.token_stride);
    pack_tile_columns(grads, rows, shape_.outputs, static_cast<BFloat16*>(call_.grad_columns) + token,
                      call_.layout.token_stride);
    for (void* pairs : {call_.active_pairs, call_.grad_pre_pairs}) {
      clear_last_pairs(static_cast<BFloat16*>(pairs), shape_.hidden, call_.layout.panel_stride, token, rows);
    }
  }

  const Bf16MlpBackward& call_;
  const MlpShape& shape_;
  Bf16Weight w1_;
  Bf16Weight w2_;
  int64_t grad_x_ld_;
  Scratch<BFloat16> bf16_scratch_;
  Scratch<float> memory_;
  Bf16Session session_;
  BFloat16* grad_;
  BFloat16* grad_pre_;  // [tokens][kBf16GroupLd]
  float* sums_;
  float* grad_x_;  // [tokens][grad_x_ld]
};

}  // namespace overtone::OVERTONE_ISA
