// The fused MLP: a block of tokens goes through both layers, a group of hidden channels at a time.
#pragma once

#include "cpu/linear/token_block.h"
#include "cpu/simd/gelu.h"

namespace overtone::OVERTONE_ISA {

// Hidden channels at a time: a block of tokens' operands and results then stay in the second-level cache.
constexpr int64_t kHiddenGroup = 192;

// Of rows that hold a group.
template <class A>
inline constexpr int64_t kGroupLd = padded_stride<A>(kHiddenGroup + kWidestTile * kLanes<A>);

// The end of the panels that begin with vector `first` and hold about `columns` columns: at most a panel more.
template <class A>
OVERTONE_INLINE int panels_end(int first, int vectors, int64_t columns) {
  int end = first;
  do {
    end += next_tile_width(vectors - end);
  } while (end < vectors && (end - first) * kLanes<A> < columns);
  return end;
}

template <class A>
class MlpForwardBlocks {
 public:
  explicit MlpForwardBlocks(const MlpForward& call)
      : call_(call),
        shape_(call.shape),
        w1_(call.w1, shape_.inputs, shape_.hidden),
        w2_(call.w2, shape_.hidden, shape_.outputs),
        scratch_(kLinearTokens * (padded(shape_.inputs) + 2 * kGroupLd<A> + padded(shape_.outputs)) +
                 padded(shape_.hidden) + padded(shape_.outputs)),
        x_(scratch_.take(kLinearTokens * padded(shape_.inputs))),
        pre_(scratch_.take(kLinearTokens * kGroupLd<A>)),
        active_(scratch_.take(kLinearTokens * kGroupLd<A>)),
        sums_(scratch_.take(kLinearTokens * padded(shape_.outputs))),
        b1_(padded_bias<A>(call.b1, shape_.hidden, scratch_.take(shape_.hidden))),
        b2_(padded_bias<A>(call.b2, shape_.outputs, scratch_.take(shape_.outputs))) {}

  void run(int64_t block) {
    const int64_t token = block * kLinearTokens;
    const int64_t rows = std::min(kLinearTokens, shape_.tokens - token);
    const GemmOperand<A> x(call_.x.from(token, 0), rows, shape_.inputs, x_);
    const ResultRows<A> y(call_.y, token, shape_.outputs, sums_);
    for (int first = 0, last; first < w1_.vectors; first = last) {
      last = panels_end<A>(first, w1_.vectors, kHiddenGroup);
      const int64_t channel = first * kLanes<A>;
      A* pre = call_.pre == nullptr ? pre_ : static_cast<A*>(call_.pre) + token * shape_.stride + channel;
      const int64_t pre_ld = call_.pre == nullptr ? kGroupLd<A> : shape_.stride;
      w1_.multiply({first, last, 0, shape_.inputs}, rows, x.data, x.ld, b1_ + channel, pre, pre_ld);
      activate(pre, pre_ld, rows, last - first);
      const int64_t depth = std::min<int64_t>((last - first) * kLanes<A>, shape_.hidden - channel);
      w2_.multiply({0, w2_.vectors, channel, depth}, rows, active_, kGroupLd<A>, channel == 0 ? b2_ : nullptr, y.sums,
                   w2_.ld());
    }
    if (call_.residual.data != nullptr) {
      add_residual(y.sums, token, rows);
    }
    y.finish(rows);
    fill_up(token, rows);
  }

 private:
  static constexpr int64_t padded(int64_t size) { return Scratch<A>::padded(size); }

  // h behind its last vector: nobody reads it, but results have no undefined elements.
  void fill_up(int64_t token, int64_t rows) {
    for (int64_t i = token; call_.pre != nullptr && i < token + rows; ++i) {
      A* row = static_cast<A*>(call_.pre) + i * shape_.stride;
      std::fill(row + w1_.ld(), row + shape_.stride, A{0});
    }
  }

  void add_residual(A* sums, int64_t token, int64_t rows) const {
    const int64_t stride = call_.residual.column_stride;
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < shape_.outputs; j += kLanes<A>) {
        const int lanes = static_cast<int>(std::min<int64_t>(kLanes<A>, shape_.outputs - j));
        A* sum = sums + i * w2_.ld() + j;
        const A* residual = call_.residual.at<A>(token + i, j);
        store(load(static_cast<const A*>(sum), 1, lanes) + load(residual, stride, lanes), sum, lanes);
      }
    }
  }

  void activate(const A* pre, int64_t pre_ld, int64_t rows, int vectors) {
    for (int64_t i = 0; i < rows; ++i) {
      for (int v = 0; v < vectors; ++v) {
        store_full(gelu<A>(load_full(pre + i * pre_ld + v * kLanes<A>)), active_ + i * kGroupLd<A> + v * kLanes<A>);
      }
    }
  }

  const MlpForward& call_;
  const MlpShape& shape_;
  WeightPanels<A> w1_;
  WeightPanels<A> w2_;
  Scratch<A> scratch_;
  A* x_;
  A* pre_;
  A* active_;
  A* sums_;
  const A* b1_;
  const A* b2_;
};

template <class A>
class MlpBackwardBlocks {
 public:
  explicit MlpBackwardBlocks(const MlpBackward& call)
      : call_(call),
        shape_(call.shape),
        w1_(call.w1, shape_.hidden, shape_.inputs),
        w2_(call.w2, shape_.outputs, shape_.hidden),
        scratch_(kLinearTokens * (padded(shape_.outputs) + kGroupLd<A> + padded(shape_.inputs)) + padded(zeros())),
        grad_(scratch_.take(kLinearTokens * padded(shape_.outputs))),
        grad_pre_(scratch_.take(kLinearTokens * kGroupLd<A>)),
        sums_(scratch_.take(kLinearTokens * padded(shape_.inputs))),
        zeros_(padded_bias<A>(nullptr, zeros(), scratch_.take(zeros()))) {}

  void run(int64_t block) {
    const int64_t token = block * kLinearTokens;
    const int64_t rows = std::min(kLinearTokens, shape_.tokens - token);
    const GemmOperand<A> grad(call_.grad_y.from(token, 0), rows, shape_.outputs, grad_);
    const ResultRows<A> grad_x(call_.grad_x, token, shape_.inputs, sums_);
    for (int first = 0, last; first < w2_.vectors; first = last) {
      last = panels_end<A>(first, w2_.vectors, kHiddenGroup);
      const int64_t channel = first * kLanes<A>;
      w2_.multiply({first, last, 0, shape_.outputs}, rows, grad.data, grad.ld, zeros_, grad_pre_, kGroupLd<A>);
      differentiate(token, channel, rows, last - first);
      if (call_.grad_x != nullptr) {
        const int64_t depth = std::min<int64_t>((last - first) * kLanes<A>, shape_.hidden - channel);
        w1_.multiply({0, w1_.vectors, channel, depth}, rows, grad_pre_, kGroupLd<A>, channel == 0 ? zeros_ : nullptr,
                     grad_x.sums, w1_.ld());
      }
    }
    if (call_.grad_x != nullptr) {
      grad_x.finish(rows);
    }
  }

 private:
  static constexpr int64_t padded(int64_t size) { return Scratch<A>::padded(size); }

  int64_t zeros() const { return std::max(shape_.inputs, kGroupLd<A>); }

  // From G W₂ to ∂h, in place; that and GELU(h) go to their blocks, too.
  void differentiate(int64_t token, int64_t channel, int64_t rows, int vectors) {
    const A* pre = static_cast<const A*>(call_.pre) + token * shape_.stride + channel;
    const int64_t end = vectors * kLanes<A>;
    for (int64_t first = 0, last; first < end; first = last) {
      const int64_t block = (channel + first) / kLinearBlock;
      last = std::min(end, (block + 1) * kLinearBlock - channel);
      const int64_t place = (block * (shape_.tokens - 1) + token) * kLinearBlock + channel;
      A* active = call_.active == nullptr ? nullptr : static_cast<A*>(call_.active) + place;
      A* kept = call_.active == nullptr ? nullptr : static_cast<A*>(call_.grad_pre) + place;
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t j = first; j < last; j += kLanes<A>) {
          const auto [value, slope] = gelu_and_slope<A>(load_full(pre + i * shape_.stride + j));
          A* grad = grad_pre_ + i * kGroupLd<A> + j;
          const Vector<A> product = load_full(grad) * slope;
          store_full(product, grad);
          if (active != nullptr) {
            store_full(value, active + i * kLinearBlock + j);
            store_full(product, kept + i * kLinearBlock + j);
          }
        }
      }
    }
  }

  const MlpBackward& call_;
  const MlpShape& shape_;
  WeightPanels<A> w1_;
  WeightPanels<A> w2_;
  Scratch<A> scratch_;
  A* grad_;
  A* grad_pre_;
  A* sums_;
  const A* zeros_;
};

}  // namespace overtone::OVERTONE_ISA
