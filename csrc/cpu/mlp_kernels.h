// The MLP's kernels, written once and compiled for every ISA level.
#pragma once

#include "cpu/gelu.h"
#include "cpu/gemm.h"
#include "cpu/mlp.h"
#include "cpu/packing.h"
#include "cpu/scratch.h"

namespace overtone::OVERTONE_LEVEL {

// Tokens whose operands and results, a group of hidden channels at a time, stay in the second-level cache.
constexpr int64_t kMlpTokens = 128;
// Hidden channels of a group: the depth over which one product runs before its sums meet the earlier ones.
constexpr int64_t kMlpGroup = 192;
// Tokens over which a weight's gradient is summed before it meets the earlier ones.
constexpr int64_t kMlpDepth = 128;
// Hidden channels of a work item of the weights' gradients, about.
constexpr int64_t kMlpColumns = 96;

// The end of the panels that begin with vector `first` and hold about `columns` columns.
template <class A>
OVERTONE_INLINE int panels_end(int first, int vectors, int64_t columns) {
  int end = first;
  do {
    end += next_tile_width(vectors - end);
  } while (end < vectors && (end - first) * kLanes<A> < columns);
  return end;
}

template <class A>
MatrixRows mlp_rows(const MlpMatrix& matrix, int64_t first) {
  MatrixRows rows = buffer_rows<A>(matrix.data, first * matrix.row_stride, matrix.row_stride);
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
struct MlpPanels {
  const A* data;
  int64_t depth;
  int vectors;

  MlpPanels(const void* panels, int64_t depth, int64_t columns)
      : data(static_cast<const A*>(panels)), depth(depth), vectors(vectors_of<A>(columns)) {}

  // Vectors [first, last) of A · B, where A's columns are rows [begin, begin + count) of B. `finish` counts them from 0.
  template <class Finish>
  void multiply(int first, int last, int64_t begin, int64_t count, const A* a, int64_t lda, int64_t rows,
                const Finish& finish) const {
    for (int panel = first; panel < last;) {
      const int width = next_tile_width(vectors - panel);
      const int64_t ldb = width * kLanes<A>;
      const A* b = data + panel * kLanes<A> * depth + begin * ldb;
      tile_column_of<A, Operand::rows>(width, rows, panel - first, count, a, lda, b, ldb, finish);
      panel += width;
    }
  }
};

template <class A>
const A* padded_bias(const void* bias, int64_t size, A* out) {
  pack_rows(buffer_rows<A>(bias, 0, size), 1, size, A{1}, out, padded_to(size, kLanes<A>));
  return out;
}

template <class A>
class MlpForwardBlocks {
 public:
  explicit MlpForwardBlocks(const MlpForward& call)
      : call_(call),
        shape_(call.shape),
        w1_(call.w1, shape_.inputs, shape_.hidden),
        w2_(call.w2, shape_.hidden, shape_.outputs),
        scratch_(Scratch<A>::padded(kMlpTokens * padded(shape_.inputs)) + 2 * Scratch<A>::padded(kMlpTokens * kGroupLd) +
                 Scratch<A>::padded(kMlpTokens * padded(shape_.outputs)) + 2 * padded(shape_.hidden) +
                 2 * padded(shape_.outputs)),
        x_(scratch_.take(kMlpTokens * padded(shape_.inputs))),
        pre_(scratch_.take(kMlpTokens * kGroupLd)),
        active_(scratch_.take(kMlpTokens * kGroupLd)),
        sums_(scratch_.take(kMlpTokens * padded(shape_.outputs))),
        b1_(padded_bias<A>(call.b1, shape_.hidden, scratch_.take(padded(shape_.hidden)))),
        b2_(padded_bias<A>(call.b2, shape_.outputs, scratch_.take(padded(shape_.outputs)))) {}

  void run(int64_t block) {
    const int64_t token = block * kMlpTokens;
    const int64_t rows = std::min(kMlpTokens, shape_.tokens - token);
    const ProductRows<A> x(mlp_rows<A>(call_.x, token), rows, shape_.inputs, x_);
    const int64_t sums_ld = w2_.vectors * kLanes<A>;
    for (int first = 0, last; first < w1_.vectors; first = last) {
      last = panels_end<A>(first, w1_.vectors, kMlpGroup);
      const int64_t channel = first * kLanes<A>;
      A* pre = call_.pre == nullptr ? pre_ : static_cast<A*>(call_.pre) + token * call_.pre_stride + channel;
      const int64_t pre_ld = call_.pre == nullptr ? kGroupLd : call_.pre_stride;
      w1_.multiply(first, last, 0, shape_.inputs, x.data, x.ld, rows, AddBias<A>{pre, pre_ld, b1_ + channel});
      activate(pre, pre_ld, rows, last - first);
      const int64_t depth = std::min<int64_t>((last - first) * kLanes<A>, shape_.hidden - channel);
      if (first == 0) {
        w2_.multiply(0, w2_.vectors, 0, depth, active_, kGroupLd, rows, AddBias<A>{sums_, sums_ld, b2_});
      } else {
        w2_.multiply(0, w2_.vectors, channel, depth, active_, kGroupLd, rows, AddTo<A>{sums_, sums_ld});
      }
    }
    A* y = static_cast<A*>(call_.y) + token * shape_.outputs;
    unpack_rows(sums_, sums_ld, rows, shape_.outputs, A{1}, buffer_rows<A>(y, 0, shape_.outputs));
  }

 private:
  // A group is at most one panel wider than kMlpGroup; an odd number of lines, so that rows share no cache sets.
  static constexpr int64_t kGroupLd = padded_stride<A>(kMlpGroup + kWidestTile * kLanes<A>);

  static constexpr int64_t padded(int64_t size) { return Scratch<A>::padded(size); }

  void activate(const A* pre, int64_t pre_ld, int64_t rows, int vectors) {
    for (int64_t i = 0; i < rows; ++i) {
      for (int v = 0; v < vectors; ++v) {
        store_full(gelu<A>(load_full(pre + i * pre_ld + v * kLanes<A>)), active_ + i * kGroupLd + v * kLanes<A>);
      }
    }
  }

  const MlpForward& call_;
  const MlpShape& shape_;
  MlpPanels<A> w1_;
  MlpPanels<A> w2_;
  Scratch<A> scratch_;
  A* x_;
  A* pre_;
  A* active_;
  A* sums_;
  const A* b1_;
  const A* b2_;
};

// ∂h = (G W₂) ⊙ GELU'(h) and ∂x = ∂h W₁ of a block of tokens; ∂h and GELU(h) are left for the weights' gradients.
template <class A>
class MlpBackwardBlocks {
 public:
  explicit MlpBackwardBlocks(const MlpBackward& call)
      : call_(call),
        shape_(call.shape),
        w1_(call.w1, shape_.hidden, shape_.inputs),
        w2_(call.w2, shape_.outputs, shape_.hidden),
        scratch_(Scratch<A>::padded(kMlpTokens * padded(shape_.outputs)) +
                 Scratch<A>::padded(kMlpTokens * kGroupLd) + Scratch<A>::padded(kMlpTokens * padded(shape_.inputs))),
        grad_(scratch_.take(kMlpTokens * padded(shape_.outputs))),
        grad_pre_(scratch_.take(kMlpTokens * kGroupLd)),
        sums_(scratch_.take(kMlpTokens * padded(shape_.inputs))) {}

  void run(int64_t block) {
    const int64_t token = block * kMlpTokens;
    const int64_t rows = std::min(kMlpTokens, shape_.tokens - token);
    const ProductRows<A> grad(mlp_rows<A>(call_.grad_y, token), rows, shape_.outputs, grad_);
    const int64_t sums_ld = w1_.vectors * kLanes<A>;
    for (int first = 0, last; first < w2_.vectors; first = last) {
      last = panels_end<A>(first, w2_.vectors, kMlpGroup);
      const int64_t channel = first * kLanes<A>;
      w2_.multiply(first, last, 0, shape_.outputs, grad.data, grad.ld, rows,
                   StoreTo<A>{grad_pre_, kGroupLd});
      differentiate(token, rows, first, last);
      if (call_.grad_x == nullptr) {
        continue;
      }
      const int64_t depth = std::min<int64_t>((last - first) * kLanes<A>, shape_.hidden - channel);
      if (first == 0) {
        w1_.multiply(0, w1_.vectors, 0, depth, grad_pre_, kGroupLd, rows, StoreTo<A>{sums_, sums_ld});
      } else {
        w1_.multiply(0, w1_.vectors, channel, depth, grad_pre_, kGroupLd, rows, AddTo<A>{sums_, sums_ld});
      }
    }
    if (call_.grad_x != nullptr) {
      A* grad_x = static_cast<A*>(call_.grad_x) + token * shape_.inputs;
      unpack_rows(sums_, sums_ld, rows, shape_.inputs, A{1}, buffer_rows<A>(grad_x, 0, shape_.inputs));
    }
  }

 private:
  static constexpr int64_t kGroupLd = padded_stride<A>(kMlpGroup + kWidestTile * kLanes<A>);

  static constexpr int64_t padded(int64_t size) { return Scratch<A>::padded(size); }

  // grad_pre_ becomes ∂h; panels get it too, and GELU(h).
  void differentiate(int64_t token, int64_t rows, int first, int last) {
    const A* pre = static_cast<const A*>(call_.pre) + token * call_.pre_stride;
    for (int panel = first; panel < last;) {
      const int width = next_tile_width(w2_.vectors - panel);
      const int64_t ld = width * kLanes<A>;
      const int64_t place = panel * kLanes<A> * shape_.tokens + token * ld;
      A* active = call_.active == nullptr ? nullptr : static_cast<A*>(call_.active) + place;
      A* grad_pre = call_.active == nullptr ? nullptr : static_cast<A*>(call_.grad_pre) + place;
      for (int64_t i = 0; i < rows; ++i) {
        for (int v = 0; v < width; ++v) {
          const int64_t lane = v * kLanes<A>;
          const auto [value, slope] = gelu_and_slope<A>(load_full(pre + i * call_.pre_stride + panel * kLanes<A> + lane));
          A* grad = grad_pre_ + i * kGroupLd + (panel - first) * kLanes<A> + lane;
          const Vector<A> product = load_full(grad) * slope;
          store_full(product, grad);
          if (active != nullptr) {
            store_full(value, active + i * ld + lane);
            store_full(product, grad_pre + i * ld + lane);
          }
        }
      }
      panel += width;
    }
  }

  const MlpBackward& call_;
  const MlpShape& shape_;
  MlpPanels<A> w1_;
  MlpPanels<A> w2_;
  Scratch<A> scratch_;
  A* grad_;
  A* grad_pre_;
  A* sums_;
};

// ∂W₂ = Gᵀ GELU(h) and ∂W₁ = ∂hᵀ x for some hidden channels, ∂b₁ with the latter; the last item is ∂b₂.
template <class A>
class MlpWeightGradients {
 public:
  explicit MlpWeightGradients(const MlpBackward& call)
      : call_(call),
        shape_(call.shape),
        vectors_(vectors_of<A>(shape_.hidden)),
        widest_(padded(std::max(shape_.inputs, shape_.outputs))),
        scratch_(Scratch<A>::padded(kMlpDepth * widest_) + 2 * Scratch<A>::padded(widest_ * kColumns) +
                 2 * Scratch<A>::padded(std::max(kColumns, widest_))),
        rows_(scratch_.take(kMlpDepth * widest_)),
        sums_(scratch_.take(widest_ * kColumns)),
        turned_(scratch_.take(widest_ * kColumns)),
        total_(scratch_.take(std::max(kColumns, widest_))),
        part_(scratch_.take(std::max(kColumns, widest_))) {}

  static int64_t items(const MlpShape& shape) { return 2 * chunks(vectors_of<A>(shape.hidden)) + 1; }

  void run(int64_t item) {
    const int64_t count = chunks(vectors_);
    if (item == 2 * count) {
      return sum_outputs();
    }
    int first = 0;
    for (int64_t i = 0; i < item % count; ++i) {
      first = panels_end<A>(first, vectors_, kMlpColumns);
    }
    const int last = panels_end<A>(first, vectors_, kMlpColumns);
    const int64_t columns = std::min<int64_t>((last - first) * kLanes<A>, shape_.hidden - first * kLanes<A>);
    if (item < count) {
      multiply(call_.grad_y, shape_.outputs, call_.active, first, last);
      A* out = static_cast<A*>(call_.grad_w2) + first * kLanes<A>;
      unpack_rows(sums_, kColumns, shape_.outputs, columns, A{1}, buffer_rows<A>(out, 0, shape_.hidden));
    } else {
      multiply(call_.x, shape_.inputs, call_.grad_pre, first, last);
      const int64_t ld = padded(shape_.inputs);
      pack_columns(buffer_rows<A>(sums_, 0, kColumns), shape_.inputs, columns, A{1}, turned_, ld);
      A* out = static_cast<A*>(call_.grad_w1) + first * kLanes<A> * shape_.inputs;
      unpack_rows(turned_, ld, columns, shape_.inputs, A{1}, buffer_rows<A>(out, 0, shape_.inputs));
      sum_hidden(first, last);
    }
  }

 private:
  static constexpr int64_t kColumns = kMlpColumns + kWidestTile * kLanes<A>;

  static constexpr int64_t padded(int64_t size) { return Scratch<A>::padded(size); }

  static int64_t chunks(int vectors) {
    int64_t count = 0;
    for (int first = 0; first < vectors; first = panels_end<A>(first, vectors, kMlpColumns)) {
      ++count;
    }
    return count;
  }

  // sums_ = Σ over tokens of left[token][i] · panels[token][j], i < width.
  void multiply(const MlpMatrix& left, int64_t width, const void* panels, int first, int last) {
    if (shape_.tokens == 0) {
      std::fill(sums_, sums_ + width * kColumns, A{0});
    }
    for (int64_t token = 0; token < shape_.tokens; token += kMlpDepth) {
      const int64_t depth = std::min(kMlpDepth, shape_.tokens - token);
      const ProductRows<A> rows(mlp_rows<A>(left, token), depth, width, rows_);
      for (int panel = first; panel < last;) {
        const int tile = next_tile_width(vectors_ - panel);
        const int64_t ld = tile * kLanes<A>;
        const A* right = static_cast<const A*>(panels) + panel * kLanes<A> * shape_.tokens + token * ld;
        if (token == 0) {
          tile_column_of<A, Operand::columns>(tile, width, panel - first, depth, rows.data, rows.ld, right, ld,
                                              StoreTo<A>{sums_, kColumns});
        } else {
          tile_column_of<A, Operand::columns>(tile, width, panel - first, depth, rows.data, rows.ld, right, ld,
                                              AddTo<A>{sums_, kColumns});
        }
        panel += tile;
      }
    }
  }

  // Adds up rows of whole vectors, in parts as long as the products'.
  void sum_rows(const A* rows, int64_t ld, int64_t count, int64_t size) {
    std::fill(part_, part_ + size, A{0});
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t j = 0; j < size; j += kLanes<A>) {
        store_full(load_full(part_ + j) + load_full(rows + i * ld + j), part_ + j);
      }
    }
    for (int64_t j = 0; j < size; j += kLanes<A>) {
      store_full(load_full(total_ + j) + load_full(part_ + j), total_ + j);
    }
  }

  void sum_hidden(int first, int last) {
    for (int panel = first; panel < last;) {
      const int tile = next_tile_width(vectors_ - panel);
      const int64_t ld = tile * kLanes<A>;
      std::fill(total_, total_ + ld, A{0});
      const A* rows = static_cast<const A*>(call_.grad_pre) + panel * kLanes<A> * shape_.tokens;
      for (int64_t token = 0; token < shape_.tokens; token += kMlpDepth) {
        sum_rows(rows + token * ld, ld, std::min(kMlpDepth, shape_.tokens - token), ld);
      }
      const int64_t channel = panel * kLanes<A>;
      std::copy(total_, total_ + std::min(ld, shape_.hidden - channel), static_cast<A*>(call_.grad_b1) + channel);
      panel += tile;
    }
  }

  void sum_outputs() {
    const int64_t ld = padded(shape_.outputs);
    std::fill(total_, total_ + ld, A{0});
    for (int64_t token = 0; token < shape_.tokens; token += kMlpDepth) {
      const int64_t depth = std::min(kMlpDepth, shape_.tokens - token);
      pack_rows(mlp_rows<A>(call_.grad_y, token), depth, shape_.outputs, A{1}, rows_, ld);
      sum_rows(rows_, ld, depth, ld);
    }
    std::copy(total_, total_ + shape_.outputs, static_cast<A*>(call_.grad_b2));
  }

  const MlpBackward& call_;
  const MlpShape& shape_;
  int vectors_;
  int64_t widest_;
  Scratch<A> scratch_;
  A* rows_;
  A* sums_;
  A* turned_;
  A* total_;
  A* part_;
};

template <class A>
void pack_items(const MlpPacking& call, WorkQueue& queue) {
  const int vectors = vectors_of<A>(call.columns);
  for (int64_t item; (item = take_item(queue)) >= 0;) {
    int first = 0;
    for (int64_t i = 0; i < item; ++i) {
      first += next_tile_width(vectors - first);
    }
    const int width = next_tile_width(vectors - first);
    const int64_t column = first * kLanes<A>;
    const int64_t columns = std::min<int64_t>(width * kLanes<A>, call.columns - column);
    pack_panel<A>(mlp_rows<A>(call.weight, 0), call.depth, column, columns, nullptr, nullptr, width,
                  static_cast<A*>(call.panels) + column * call.depth);
  }
}

template <class Worker, class Call>
void run_items(const Call& call, WorkQueue& queue) {
  Worker worker(call);
  for (int64_t item; (item = take_item(queue)) >= 0;) {
    worker.run(item);
  }
}

// Calls f with a value of the type that is computed in.
template <class F>
OVERTONE_INLINE auto with_mlp_type(ElementType type, const F& f) {
  return type == ElementType::float64 ? f(double{}) : f(float{});
}

inline int64_t mlp_packed_size(int64_t depth, int64_t columns, ElementType type) {
  return with_mlp_type(type, [&](auto element) { return depth * padded_to(columns, kLanes<decltype(element)>); });
}

inline int64_t mlp_packing_items(const MlpPacking& call) {
  return with_mlp_type(call.type, [&](auto element) {
    const int vectors = vectors_of<decltype(element)>(call.columns);
    int64_t items = 0;
    for (int first = 0; first < vectors; first += next_tile_width(vectors - first)) {
      ++items;
    }
    return items;
  });
}

inline void mlp_pack(const MlpPacking& call, WorkQueue& queue) {
  with_mlp_type(call.type, [&](auto element) { pack_items<decltype(element)>(call, queue); });
}

inline int64_t mlp_token_items(const MlpShape& shape) { return (shape.tokens + kMlpTokens - 1) / kMlpTokens; }

inline void mlp_forward(const MlpForward& call, WorkQueue& queue) {
  with_mlp_type(call.shape.type, [&](auto element) { run_items<MlpForwardBlocks<decltype(element)>>(call, queue); });
}

inline void mlp_backward_tokens(const MlpBackward& call, WorkQueue& queue) {
  with_mlp_type(call.shape.type, [&](auto element) { run_items<MlpBackwardBlocks<decltype(element)>>(call, queue); });
}

inline int64_t mlp_weight_items(const MlpShape& shape) {
  return with_mlp_type(shape.type, [&](auto element) { return MlpWeightGradients<decltype(element)>::items(shape); });
}

inline void mlp_backward_weights(const MlpBackward& call, WorkQueue& queue) {
  with_mlp_type(call.shape.type, [&](auto element) { run_items<MlpWeightGradients<decltype(element)>>(call, queue); });
}

extern const MlpKernels mlp_kernels{OVERTONE_LEVEL_NAME, mlp_packed_size,     mlp_packing_items,
                                    mlp_pack,            mlp_token_items,     mlp_forward,
                                    mlp_backward_tokens, mlp_weight_items,    mlp_backward_weights};

}  // namespace overtone::OVERTONE_LEVEL
