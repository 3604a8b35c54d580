// The linear layers' kernels, written once and compiled for every instruction set.
#pragma once

#include "cpu/linear/mlp.h"
#include "cpu/linear/token_block.h"

namespace overtone::OVERTONE_ISA {

// The tokens over which a product runs before its sum meets the partial ones, as kLinearDepth.
#if OVERTONE_VECTOR_BYTES == 16
constexpr int64_t kGradientTokens = 64;
#else
constexpr int64_t kGradientTokens = 112;
#endif
static_assert(kGradientTokens <= kNearRows, "rows are read where they lie");

template <class A>
class LinearBlocks {
 public:
  explicit LinearBlocks(const LinearForward& call)
      : call_(call),
        weight_(call.weight, call.inputs, call.outputs),
        scratch_(Scratch<A>::padded(kLinearTokens * padded(call.inputs)) + (kLinearTokens + 1) * padded(call.outputs)),
        x_(scratch_.take(kLinearTokens * padded(call.inputs))),
        sums_(scratch_.take(kLinearTokens * padded(call.outputs))),
        bias_(padded_bias<A>(call.bias, call.outputs, scratch_.take(call.outputs))) {}

  void run(int64_t block) {
    const int64_t token = block * kLinearTokens;
    const int64_t rows = std::min(kLinearTokens, call_.tokens - token);
    const GemmOperand<A> x(call_.x.from(token, 0), rows, call_.inputs, x_);
    const ResultRows<A> out(call_.out, token, call_.outputs, sums_);
    weight_.multiply(weight_.all(), rows, x.data, x.ld, bias_, out.sums, weight_.ld());
    out.finish(rows);
  }

 private:
  static constexpr int64_t padded(int64_t size) { return Scratch<A>::padded(size); }

  const LinearForward& call_;
  WeightPanels<A> weight_;
  Scratch<A> scratch_;
  A* x_;
  A* sums_;
  const A* bias_;
};

// An item is a block of ∂W, summed over all tokens; the blocks of the first inputs make ∂b too.
template <class A>
class WeightGradientBlocks {
 public:
  explicit WeightGradientBlocks(const WeightGradient& call)
      : call_(call),
        scratch_(2 * kGradientTokens * kLinearBlock + kLinearBlock * kGradientInputs + 2 * kLinearBlock),
        grad_(scratch_.take(kGradientTokens * kLinearBlock)),
        x_(scratch_.take(kGradientTokens * kLinearBlock)),
        sums_(scratch_.take(kLinearBlock * kGradientInputs)),
        total_(scratch_.take(kLinearBlock)),
        partial_(scratch_.take(kLinearBlock)) {}

  void run(int64_t item) {
    const int64_t output = item / call_.input_blocks() * kLinearBlock;
    const int64_t outputs = std::min(kLinearBlock, call_.outputs - output);
    const int64_t input = item % call_.input_blocks() * kGradientInputs;
    const int64_t inputs = std::min(kGradientInputs, call_.inputs - input);
    const bool with_bias = input == 0;
    std::fill(sums_, sums_ + outputs * kGradientInputs, A{0});
    std::fill(total_, total_ + kLinearBlock, A{0});
    for (int64_t token = 0; token < call_.tokens; token += kGradientTokens) {
      const int64_t depth = std::min(kGradientTokens, call_.tokens - token);
      const GemmOperand<A> grad(call_.grad.from(token, output), depth, outputs, grad_);
      for (int64_t part = 0; part < inputs; part += kLinearBlock) {
        const int64_t width = std::min(kLinearBlock, inputs - part);
        const GemmOperand<A> x(call_.x.from(token, input + part), depth, width, x_);
        gemm<A, Operand::col_major>(outputs, vectors_of<A>(width), depth, grad.data, grad.ld, x.data, x.ld,
                                    AddTo<A>{sums_ + part, kGradientInputs});
      }
      if (with_bias) {
        sum_rows(grad, depth, outputs);
      }
    }
    A* out = static_cast<A*>(call_.grad_weight) + output * call_.inputs + input;
    unpack_rows(sums_, kGradientInputs, outputs, inputs, A{1}, buffer_rows<A>(out, 0, call_.inputs));
    if (with_bias) {
      std::copy(total_, total_ + outputs, static_cast<A*>(call_.grad_bias) + output);
    }
  }

 private:
  // Rows of the gradient are added up in parts as long as the products'.
  void sum_rows(const GemmOperand<A>& grad, int64_t depth, int64_t outputs) {
    std::fill(partial_, partial_ + kLinearBlock, A{0});
    for (int64_t i = 0; i < depth; ++i) {
      for (int64_t j = 0; j < outputs; j += kLanes<A>) {
        store_full(load_full(partial_ + j) + load_full(grad.data + i * grad.ld + j), partial_ + j);
      }
    }
    for (int64_t j = 0; j < outputs; j += kLanes<A>) {
      store_full(load_full(total_ + j) + load_full(partial_ + j), total_ + j);
    }
  }

  const WeightGradient& call_;
  Scratch<A> scratch_;
  A* grad_;
  A* x_;
  A* sums_;
  A* total_;
  A* partial_;
};

template <template <class> class Worker, class Call>
void run_items(Dtype type, const Call& call, WorkQueue& queue) {
  const auto run = [&](auto element) {
    Worker<decltype(element)> worker(call);
    for (int64_t item; (item = queue.pop()) >= 0;) {
      worker.run(item);
    }
  };
  type == Dtype::float64 ? run(double{}) : run(float{});
}

inline void linear_forward(const LinearForward& call, WorkQueue& queue) {
  run_items<LinearBlocks>(call.x.type, call, queue);
}

inline void mlp_forward(const MlpForward& call, WorkQueue& queue) {
  run_items<MlpForwardBlocks>(call.x.type, call, queue);
}

inline void mlp_backward(const MlpBackward& call, WorkQueue& queue) {
  run_items<MlpBackwardBlocks>(call.grad_y.type, call, queue);
}

inline void weight_gradient(const WeightGradient& call, WorkQueue& queue) {
  run_items<WeightGradientBlocks>(call.x.type, call, queue);
}

extern const LinearKernels linear_kernels = {
    .isa = OVERTONE_ISA_NAME,
    .packing = panel_packing,
    .linear_forward = &linear_forward,
    .mlp_forward = &mlp_forward,
    .mlp_backward = &mlp_backward,
    .weight_gradient = &weight_gradient,
};

}  // namespace overtone::OVERTONE_ISA
