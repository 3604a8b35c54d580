// The linear layers' kernels, written once and compiled for every ISA level.
#pragma once

#include "cpu/gemm/microkernel.h"
#include "cpu/gemm/pack.h"
#include "cpu/linear/params.h"
#include "cpu/simd/gelu.h"
#include "cpu/simd/scratch.h"

namespace overtone::OVERTONE_ISA {

// Tokens whose operands and results, a group of hidden channels at a time, stay in the second-level cache.
constexpr int64_t kLinearTokens = 128;
constexpr int64_t kLinearGroup = 192;
// Inputs of a work item of the weights' gradients: blocks, which share their part of the outputs' gradient.
constexpr int64_t kGradientInputs = 2 * kLinearBlock;
// The depth over which a product runs before its sum meets the earlier ones, for exactness and so that a panel stays in
// the first-level cache. Without fused multiplication and addition every term is rounded twice.
#if OVERTONE_VECTOR_BYTES == 16
constexpr int64_t kLinearDepth = 64;
constexpr int64_t kGradientTokens = 64;
#else
constexpr int64_t kLinearDepth = 192;
constexpr int64_t kGradientTokens = 112;
#endif
static_assert(kGradientTokens <= kNearRows, "rows are read where they lie");

// The end of the panels that begin with vector `first` and hold about `columns` columns: at most a panel more.
template <class A>
OVERTONE_INLINE int panels_end(int first, int vectors, int64_t columns) {
  int end = first;
  do {
    end += next_tile_width(vectors - end);
  } while (end < vectors && (end - first) * kLanes<A> < columns);
  return end;
}

// The first vector of the n-th panel, and how many panels there are.
inline int panel_begin(int64_t n, int vectors) {
  int first = 0;
  for (int64_t i = 0; i < n; ++i) {
    first += next_tile_width(vectors - first);
  }
  return first;
}

inline int64_t panel_count(int vectors) {
  int64_t count = 0;
  for (int first = 0; first < vectors; first += next_tile_width(vectors - first)) {
    ++count;
  }
  return count;
}

// Of rows that hold a group.
template <class A>
inline constexpr int64_t kGroupLd = padded_stride<A>(kLinearGroup + kWidestTile * kLanes<A>);

template <class A>
MatrixRows linear_rows(const LinearMatrix& matrix, int64_t row, int64_t column = 0) {
  const int64_t blocks = matrix.block_stride == 0 ? 0 : column / kLinearBlock;
  const int64_t offset =
      row * matrix.row_stride + blocks * matrix.block_stride + (column - blocks * kLinearBlock) * matrix.column_stride;
  MatrixRows rows = buffer_rows<A>(matrix.data, offset, matrix.row_stride);
  rows.column_stride = matrix.column_stride;
  return rows;
}

// c = sum + bias.
template <class A>
struct AddBias {
  A* c;
  int64_t ldc;
  const A* bias;

  OVERTONE_INLINE void operator()(int64_t row, int v, Vector<A> sum) const {
    store_full(sum + load_full(bias + v * kLanes<A>), c + row * ldc + v * kLanes<A>);
  }
};

// A weight [depth, columns] in panels.
template <class A>
struct WeightPanels {
  const A* data;
  int64_t depth;
  int vectors;

  WeightPanels(const void* panels, int64_t depth, int64_t columns)
      : data(static_cast<const A*>(panels)), depth(depth), vectors(vectors_of<A>(columns)) {}

  // c = bias + A · B, or c += A · B without a bias: vectors [first, last) of B, which c and bias count from 0; A's
  // columns are rows [begin, begin + count) of B.
  void multiply(int first, int last, int64_t begin, int64_t count, const A* a, int64_t lda, int64_t rows, const A* bias,
                A* c, int64_t ldc) const {
    for (int panel = first; panel < last;) {
      const int width = next_tile_width(vectors - panel);
      const int64_t ldb = width * kLanes<A>;
      const A* b = data + panel * kLanes<A> * depth + begin * ldb;
      for (int64_t k = 0; k < count; k += kLinearDepth) {
        const int64_t part = std::min(kLinearDepth, count - k);
        if (k == 0 && bias != nullptr) {
          tile_column_of<A, Operand::rows>(width, rows, panel - first, part, a, lda, b, ldb, AddBias<A>{c, ldc, bias});
        } else {
          tile_column_of<A, Operand::rows>(width, rows, panel - first, part, a + k, lda, b + k * ldb, ldb,
                                           AddTo<A>{c, ldc});
        }
      }
      panel += width;
    }
  }

  int64_t ld() const { return vectors * kLanes<A>; }
};

// Rows of a result: summed where they go, or in scratch where they do not end with a whole vector.
template <class A>
struct ResultRows {
  A* sums;
  A* out;
  int64_t width;

  ResultRows(void* result, int64_t row, int64_t width, A* scratch)
      : sums(scratch), out(static_cast<A*>(result) + row * width), width(width) {
    if (width % kLanes<A> == 0) {
      sums = out;
    }
  }

  void finish(int64_t rows) const {
    if (sums != out) {
      unpack_rows(sums, padded_to(width, kLanes<A>), rows, width, A{1}, buffer_rows<A>(out, 0, width));
    }
  }
};

// A bias filled up with zeros; zeros if there is none.
template <class A>
const A* padded_bias(const void* bias, int64_t size, A* out) {
  pack_rows(buffer_rows<A>(bias, 0, size), 1, bias == nullptr ? 0 : size, A{1}, out, Scratch<A>::padded(size));
  return out;
}

template <class A>
class LinearBlocks {
 public:
  explicit LinearBlocks(const LinearTokens& call)
      : call_(call),
        weight_(call.weight, call.inputs, call.outputs),
        scratch_(Scratch<A>::padded(kLinearTokens * padded(call.inputs)) + (kLinearTokens + 1) * padded(call.outputs)),
        x_(scratch_.take(kLinearTokens * padded(call.inputs))),
        sums_(scratch_.take(kLinearTokens * padded(call.outputs))),
        bias_(padded_bias<A>(call.bias, call.outputs, scratch_.take(call.outputs))) {}

  void run(int64_t block) {
    const int64_t token = block * kLinearTokens;
    const int64_t rows = std::min(kLinearTokens, call_.tokens - token);
    const ProductRows<A> x(linear_rows<A>(call_.x, token), rows, call_.inputs, x_);
    const ResultRows<A> out(call_.out, token, call_.outputs, sums_);
    weight_.multiply(0, weight_.vectors, 0, call_.inputs, x.data, x.ld, rows, bias_, out.sums, weight_.ld());
    out.finish(rows);
  }

 private:
  static constexpr int64_t padded(int64_t size) { return Scratch<A>::padded(size); }

  const LinearTokens& call_;
  WeightPanels<A> weight_;
  Scratch<A> scratch_;
  A* x_;
  A* sums_;
  const A* bias_;
};

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
    const ProductRows<A> x(linear_rows<A>(call_.x, token), rows, shape_.inputs, x_);
    const ResultRows<A> y(call_.y, token, shape_.outputs, sums_);
    for (int first = 0, last; first < w1_.vectors; first = last) {
      last = panels_end<A>(first, w1_.vectors, kLinearGroup);
      const int64_t channel = first * kLanes<A>;
      A* pre = call_.pre == nullptr ? pre_ : static_cast<A*>(call_.pre) + token * shape_.stride + channel;
      const int64_t pre_ld = call_.pre == nullptr ? kGroupLd<A> : shape_.stride;
      w1_.multiply(first, last, 0, shape_.inputs, x.data, x.ld, rows, b1_ + channel, pre, pre_ld);
      activate(pre, pre_ld, rows, last - first);
      const int64_t depth = std::min<int64_t>((last - first) * kLanes<A>, shape_.hidden - channel);
      w2_.multiply(0, w2_.vectors, channel, depth, active_, kGroupLd<A>, rows, channel == 0 ? b2_ : nullptr, y.sums,
                   w2_.ld());
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
    const ProductRows<A> grad(linear_rows<A>(call_.grad_y, token), rows, shape_.outputs, grad_);
    const ResultRows<A> grad_x(call_.grad_x, token, shape_.inputs, sums_);
    for (int first = 0, last; first < w2_.vectors; first = last) {
      last = panels_end<A>(first, w2_.vectors, kLinearGroup);
      const int64_t channel = first * kLanes<A>;
      w2_.multiply(first, last, 0, shape_.outputs, grad.data, grad.ld, rows, zeros_, grad_pre_, kGroupLd<A>);
      differentiate(token, channel, rows, last - first);
      if (call_.grad_x != nullptr) {
        const int64_t depth = std::min<int64_t>((last - first) * kLanes<A>, shape_.hidden - channel);
        w1_.multiply(0, w1_.vectors, channel, depth, grad_pre_, kGroupLd<A>, rows, channel == 0 ? zeros_ : nullptr,
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

// An item is a block of ∂W, summed over all tokens; the blocks of the first inputs make ∂b too.
template <class A>
class WeightGradientBlocks {
 public:
  explicit WeightGradientBlocks(const LinearWeightGradient& call)
      : call_(call),
        scratch_(2 * kGradientTokens * kLinearBlock + kLinearBlock * kGradientInputs + 2 * kLinearBlock),
        grad_(scratch_.take(kGradientTokens * kLinearBlock)),
        x_(scratch_.take(kGradientTokens * kLinearBlock)),
        sums_(scratch_.take(kLinearBlock * kGradientInputs)),
        total_(scratch_.take(kLinearBlock)),
        part_(scratch_.take(kLinearBlock)) {}

  static int64_t items(const LinearWeightGradient& call) {
    return (call.outputs + kLinearBlock - 1) / kLinearBlock * input_blocks(call);
  }

  void run(int64_t item) {
    const int64_t output = item / input_blocks(call_) * kLinearBlock;
    const int64_t outputs = std::min(kLinearBlock, call_.outputs - output);
    const int64_t input = item % input_blocks(call_) * kGradientInputs;
    const int64_t inputs = std::min(kGradientInputs, call_.inputs - input);
    const bool with_bias = input == 0;
    std::fill(sums_, sums_ + outputs * kGradientInputs, A{0});
    std::fill(total_, total_ + kLinearBlock, A{0});
    for (int64_t token = 0; token < call_.tokens; token += kGradientTokens) {
      const int64_t depth = std::min(kGradientTokens, call_.tokens - token);
      const ProductRows<A> grad(linear_rows<A>(call_.grad, token, output), depth, outputs, grad_);
      for (int64_t part = 0; part < inputs; part += kLinearBlock) {
        const int64_t width = std::min(kLinearBlock, inputs - part);
        const ProductRows<A> x(linear_rows<A>(call_.x, token, input + part), depth, width, x_);
        gemm<A, Operand::columns>(outputs, vectors_of<A>(width), depth, grad.data, grad.ld, x.data, x.ld,
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
  static int64_t input_blocks(const LinearWeightGradient& call) {
    return (call.inputs + kGradientInputs - 1) / kGradientInputs;
  }

  // Rows of the gradient are added up in parts as long as the products'.
  void sum_rows(const ProductRows<A>& grad, int64_t depth, int64_t outputs) {
    std::fill(part_, part_ + kLinearBlock, A{0});
    for (int64_t i = 0; i < depth; ++i) {
      for (int64_t j = 0; j < outputs; j += kLanes<A>) {
        store_full(load_full(part_ + j) + load_full(grad.data + i * grad.ld + j), part_ + j);
      }
    }
    for (int64_t j = 0; j < outputs; j += kLanes<A>) {
      store_full(load_full(total_ + j) + load_full(part_ + j), total_ + j);
    }
  }

  const LinearWeightGradient& call_;
  Scratch<A> scratch_;
  A* grad_;
  A* x_;
  A* sums_;
  A* total_;
  A* part_;
};

template <class A>
class WeightPacking {
 public:
  explicit WeightPacking(const LinearPacking& call) : call_(call), vectors_(vectors_of<A>(call.columns)) {}

  void run(int64_t item) {
    const int first = panel_begin(item, vectors_);
    const int width = next_tile_width(vectors_ - first);
    const int64_t column = first * kLanes<A>;
    const int64_t columns = std::min<int64_t>(width * kLanes<A>, call_.columns - column);
    pack_panel<A>(linear_rows<A>(call_.weight, 0), call_.depth, column, columns, nullptr, nullptr, width,
                  static_cast<A*>(call_.panels) + column * call_.depth);
  }

 private:
  const LinearPacking& call_;
  int vectors_;
};

template <template <class> class Worker, class Call>
void run_linear_items(ElementType type, const Call& call, WorkQueue& queue) {
  const auto run = [&](auto element) {
    Worker<decltype(element)> worker(call);
    for (int64_t item; (item = queue.pop()) >= 0;) {
      worker.run(item);
    }
  };
  type == ElementType::float64 ? run(double{}) : run(float{});
}

inline int64_t packed_size(const LinearPacking& call) {
  const int64_t lanes = call.type == ElementType::float64 ? kLanes<double> : kLanes<float>;
  return call.depth * padded_to(call.columns, lanes);
}

inline int64_t packing_items(const LinearPacking& call) {
  return panel_count(call.type == ElementType::float64 ? vectors_of<double>(call.columns)
                                                       : vectors_of<float>(call.columns));
}

inline void pack_linear(const LinearPacking& call, WorkQueue& queue) {
  run_linear_items<WeightPacking>(call.type, call, queue);
}

inline int64_t token_items(int64_t tokens) { return (tokens + kLinearTokens - 1) / kLinearTokens; }

inline void linear_tokens(const LinearTokens& call, WorkQueue& queue) {
  run_linear_items<LinearBlocks>(call.type, call, queue);
}

inline void mlp_forward(const MlpForward& call, WorkQueue& queue) {
  run_linear_items<MlpForwardBlocks>(call.shape.type, call, queue);
}

inline void mlp_backward(const MlpBackward& call, WorkQueue& queue) {
  run_linear_items<MlpBackwardBlocks>(call.shape.type, call, queue);
}

inline int64_t weight_items(const LinearWeightGradient& call) {
  return call.type == ElementType::float64 ? WeightGradientBlocks<double>::items(call)
                                           : WeightGradientBlocks<float>::items(call);
}

inline void linear_weight(const LinearWeightGradient& call, WorkQueue& queue) {
  run_linear_items<WeightGradientBlocks>(call.type, call, queue);
}

extern const LinearKernels linear_kernels = {OVERTONE_ISA_NAME, &packed_size,   &packing_items, &pack_linear,
                                             &token_items,      &linear_tokens, &mlp_forward,   &mlp_backward,
                                             &weight_items,     &linear_weight};

}  // namespace overtone::OVERTONE_ISA
