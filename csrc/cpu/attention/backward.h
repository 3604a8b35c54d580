// Backward. With G = ∂L/∂y:   ∂weight = outᵀ G,   ∂out = G weightᵀ,   and from that, P being made again from the saved
// maxima and sums, and ∂P = ∂out Vᵀ:   ∂logits = gain · P ⊙ (∂P − δ) with δ = Σ P ⊙ ∂P,   ∂V = gain · Pᵀ ∂out,   ∂gain
// = Σ δ.
#pragma once

#include "cpu/attention/forward.h"

namespace overtone::OVERTONE_ISA {

// out[row] = a's row · b's row, summed as gemm() sums: where softmax is one-hot, ∂P − dot is then exactly zero.
template <class A>
void row_dots(const StridedMatrix& a, const StridedMatrix& b, int64_t rows, int64_t width, A* out) {
  constexpr int kSize = kLanes<A>;
  for (int64_t i = 0; i < rows; i += kSize) {
    const int square_rows = static_cast<int>(std::min<int64_t>(kSize, rows - i));
    Vector<A> dots{};
    for (int64_t j = 0; j < width; j += kSize) {
      const int columns = static_cast<int>(std::min<int64_t>(kSize, width - j));
      Vector<A> a_square[kSize];
      Vector<A> b_square[kSize];
      load_transposed<A>(a.at<A>(i, j), a.row_stride, 1, square_rows, columns, a_square);
      load_transposed<A>(b.at<A>(i, j), b.row_stride, 1, square_rows, columns, b_square);
      OVERTONE_UNROLL
      for (int column = 0; column < kSize; ++column) {
        dots += a_square[column] * b_square[column];
      }
    }
    store(dots, out + i, square_rows);
  }
}

// c = (sum + partial sums) · scale: a gradient's last part, straight to where it belongs.
template <class A>
struct StoreGradient {
  A* c;
  int64_t ldc;
  const A* scale;    // a pointer: GCC would keep the value itself in a register that the products need
  const A* partial;  // or null
  int64_t partial_ld;

  OVERTONE_INLINE void operator()(int64_t row, int v, Vector<A> sum) const {
    if (partial != nullptr) {
      sum += load_full(partial + row * partial_ld + v * kLanes<A>);
    }
    store_full(sum * *scale, c + row * ldc + v * kLanes<A>);
  }
};

// Scratch and steps of one thread's (batch, head) items: keys block by block, each meeting the queries many rows at a
// time, whose P and ∂logits stay in the second-level cache as the depth of the products for ∂K and ∂V.
template <class A>
class BackwardWorker {
 public:
  explicit BackwardWorker(const AttentionBackward& call)
      : call_(call),
        shape_(call.shape),
        padded_width_(padded_to(shape_.head_dim, kLanes<A>)),
        block_(key_block<A>(shape_.kv_len, kMaxKeys)),
        query_rows_(even_rows(shape_.q_len)),
        memory_(2 * Scratch<A>::padded(KeyPanels<A>::size(block_, shape_.head_dim)) +
                3 * Scratch<A>::padded(block_ * padded_width_) + 2 * Scratch<A>::padded(query_rows_ * block_) +
                2 * Scratch<A>::padded(query_rows_ * padded_width_) + Scratch<A>::padded(shape_.q_len * padded_width_) +
                Scratch<A>::padded(shape_.q_len)) {
    keys_t_ = memory_.take(KeyPanels<A>::size(block_, shape_.head_dim));
    values_t_ = memory_.take(KeyPanels<A>::size(block_, shape_.head_dim));
    keys_ = memory_.take(block_ * padded_width_);
    grad_keys_ = memory_.take(block_ * padded_width_);
    grad_values_ = memory_.take(block_ * padded_width_);
    weights_ = memory_.take(query_rows_ * block_);
    grad_logits_ = memory_.take(query_rows_ * block_);
    queries_ = memory_.take(query_rows_ * padded_width_);
    grads_ = memory_.take(query_rows_ * padded_width_);
    grad_queries_ = memory_.take(shape_.q_len * padded_width_);
    dots_ = memory_.take(shape_.q_len);
  }

  // `next_item` is what this thread does afterwards, or -1.
  void run(int64_t item, int64_t next_item) {
    expect(next_item);
    batch_ = item / shape_.num_heads;
    head_ = item % shape_.num_heads;
    if (!has_one_block()) {
      take_dots();
    }
    gain_ = head_gain<A>(call_, head_);
    grad_gain_ = 0;
    for (int64_t key = 0; key < shape_.kv_len; key += block_) {
      block_backward(key, std::min(block_, shape_.kv_len - key));
    }
    if (call_.grad_gain != nullptr) {
      call_.grad_gain[item] = grad_gain_;
    }
    if (call_.grad_query.data != nullptr && !(has_one_block() && is_direct(call_.grad_query))) {
      if (shape_.kv_len == 0) {
        std::fill(grad_queries_, grad_queries_ + shape_.q_len * padded_width_, A{0});
      }
      unpack_rows(grad_queries_, padded_width_, shape_.q_len, shape_.head_dim, static_cast<A>(call_.scale),
                  head_rows(call_.grad_query, call_.type, batch_, head_, 0));
    }
  }

 private:
  static constexpr int64_t kMaxKeys = 288;
  static constexpr int64_t kMaxQueryRows =
      120;  // at a time: with more, P and ∂logits would not stay in the second-level cache

  // Parts of nearly equal length, of whole tiles.
  static int64_t even_rows(int64_t queries) {
    const int64_t parts = std::max<int64_t>(1, (queries + kMaxQueryRows - 1) / kMaxQueryRows);
    return std::max<int64_t>(1, std::min(queries, padded_to((queries + parts - 1) / parts, kQueryRows)));
  }

  bool has_one_block() const { return shape_.kv_len > 0 && shape_.kv_len <= block_; }

  // The block at hand, of `count` keys.
  KeyPanels<A> key_panels(int64_t count) const { return {keys_t_, count, shape_.head_dim, has_one_block()}; }
  KeyPanels<A> value_panels(int64_t count) const { return {values_t_, count, shape_.head_dim, has_one_block()}; }

  // Whether products can write a gradient themselves.
  bool is_direct(const StridedHeads& out) const {
    constexpr Dtype kType = std::is_same_v<A, double> ? Dtype::float64 : Dtype::float32;
    return call_.type == kType && out.width_stride == 1 && shape_.head_dim == padded_width_;
  }

  StridedMatrix buffer_of(const void* buffer, int64_t batch, int64_t head, int64_t token) const {
    const int64_t inner_dim = shape_.inner_dim();
    const int64_t offset = (batch * shape_.q_len + token) * inner_dim + head * shape_.head_dim;
    return buffer_rows<A>(buffer, offset, inner_dim);
  }

  // gain · δ of every query, where its row of P comes in parts: ∂out · (out − addend).
  void take_dots() {
    for (int64_t first = 0; first < shape_.q_len; first += query_rows_) {
      const int64_t rows = std::min(query_rows_, shape_.q_len - first);
      StridedMatrix out = buffer_of(call_.attn_out, batch_, head_, first);
      if (call_.addend.data != nullptr) {
        pack_rows(out, rows, shape_.head_dim, A{1}, queries_, padded_width_);
        add_rows(addend_rows(call_, batch_, head_, first), rows, shape_.head_dim, A{-1}, queries_, padded_width_);
        out = buffer_rows<A>(queries_, 0, padded_width_);
      }
      row_dots(buffer_of(call_.grad_out, batch_, head_, first), out, rows, shape_.head_dim, dots_ + first);
    }
  }

  // While an item is worked on, the next one's rows come nearer.
  void expect(int64_t item) {
    prefetcher_.clear();
    if (item < 0) {
      return;
    }
    const int64_t batch = item / shape_.num_heads;
    const int64_t head = item % shape_.num_heads;
    prefetcher_.add(buffer_of(call_.grad_out, batch, head, 0), shape_.q_len, shape_.head_dim);
    if (!has_one_block()) {
      prefetcher_.add(buffer_of(call_.attn_out, batch, head, 0), shape_.q_len, shape_.head_dim);
    }
    prefetcher_.add(head_rows(call_.key, call_.type, batch, head, 0), shape_.kv_len, shape_.head_dim);
    prefetcher_.add(head_rows(call_.value, call_.type, batch, head, 0), shape_.kv_len, shape_.head_dim);
    prefetcher_.add(head_rows(call_.query, call_.type, batch, head, 0), shape_.q_len, shape_.head_dim);
  }

  void block_backward(int64_t key, int64_t count) {
    const StridedMatrix key_rows = head_rows(call_.key, call_.type, batch_, head_, key);
    const StridedMatrix value_rows = head_rows(call_.value, call_.type, batch_, head_, key);
    key_panels(count).pack(key_rows, static_cast<A>(call_.scale * kLog2E));
    value_panels(count).pack(value_rows, A{1});
    const GemmOperand<A> keys(key_rows, count, shape_.head_dim, keys_);
    const int64_t first_rows = call_.mask.causal ? key / query_rows_ * query_rows_ : 0;
    for (int64_t first = first_rows; first < shape_.q_len; first += query_rows_) {
      rows_backward(first, std::min(query_rows_, shape_.q_len - first), key, count, keys, first == first_rows);
    }
    const bool is_unseen = first_rows >= shape_.q_len;
    finish(call_.grad_key, grad_keys_, key, count, static_cast<A>(call_.scale), is_unseen);
    finish(call_.grad_value, grad_values_, key, count, gain_, is_unseen);
  }

  void finish(const StridedHeads& out, A* sums, int64_t key, int64_t count, A scale, bool is_unseen) const {
    if (out.data == nullptr || (is_direct(out) && !is_unseen)) {
      return;
    }
    if (is_unseen) {
      std::fill(sums, sums + count * padded_width_, A{0});
    }
    unpack_rows(sums, padded_width_, count, shape_.head_dim, scale, head_rows(out, call_.type, batch_, head_, key));
  }

  void rows_backward(int64_t first, int64_t rows, int64_t key, int64_t count, const GemmOperand<A>& keys,
                     bool is_first) {
    const GemmOperand<A> queries(head_rows(call_.query, call_.type, batch_, head_, first), rows, shape_.head_dim,
                                 queries_);
    const GemmOperand<A> grads(buffer_of(call_.grad_out, batch_, head_, first), rows, shape_.head_dim, grads_);
    for (int64_t row = 0; row < rows; row += kQueryRows) {
      logits_backward(first, row, std::min(kQueryRows, rows - row), key, count, queries, grads, keys);
    }
    const bool is_last = first + rows == shape_.q_len;
    if (call_.grad_value.data != nullptr) {
      add_product<Operand::col_major>(is_first, is_last, count, rows, weights_, block_, grads, grad_values_,
                                      call_.grad_value, key, gain_);
    }
    if (call_.grad_key.data != nullptr) {
      add_product<Operand::col_major>(is_first, is_last, count, rows, grad_logits_, block_, queries, grad_keys_,
                                      call_.grad_key, key, static_cast<A>(call_.scale));
    }
  }

  // P and ∂logits of a few of these rows, from `row` on, and their share of ∂Q.
  void logits_backward(int64_t first, int64_t row, int64_t rows, int64_t key, int64_t count,
                       const GemmOperand<A>& queries, const GemmOperand<A>& grads, const GemmOperand<A>& keys) {
    const int key_vectors = vectors_of<A>(count);
    const int64_t query = first + row;
    A* weights = weights_ + row * block_;
    A* grad_logits = grad_logits_ + row * block_;
    key_panels(count).multiply(rows, count, queries.data + row * queries.ld, queries.ld, weights, block_);
    mask_logits(call_, batch_, head_, query, rows, key, count, weights, block_);
    const A* softmax_stats =
        static_cast<const A*>(call_.softmax_stats) + 2 * ((batch_ * shape_.num_heads + head_) * shape_.q_len + query);
    value_panels(count).multiply(rows, count, grads.data + row * grads.ld, grads.ld, grad_logits, block_);
    for (int64_t i = 0; i < rows; ++i) {
      const A* dot = has_one_block() ? nullptr : dots_ + query + i;
      const A sum =
          softmax_backward(softmax_stats + 2 * i, dot, key_vectors, weights + i * block_, grad_logits + i * block_);
      if (call_.grad_gain != nullptr) {
        grad_gain_ += sum;
      }
      prefetcher_.prefetch_row();
    }
    if (call_.grad_logits != nullptr) {
      A* out = static_cast<A*>(call_.grad_logits) +
               ((batch_ * shape_.num_heads + head_) * shape_.q_len + query) * shape_.kv_len + key;
      for (int64_t i = 0; i < rows; ++i) {
        std::copy_n(grad_logits + i * block_, count, out + i * shape_.kv_len);
      }
    }
    if (call_.grad_query.data != nullptr) {
      add_product<Operand::row_major>(key == 0, has_one_block(), rows, count, grad_logits, block_, keys,
                                      grad_queries_ + query * padded_width_, call_.grad_query, query,
                                      static_cast<A>(call_.scale));
    }
  }

  // A row of logits to P, and its ∂P to ∂logits = P ⊙ (gain · ∂P − gain · δ), where δ = Σ P ⊙ ∂P over all keys. That
  // sum of these very numbers is the best there is: the row of ∂logits then adds up to zero, but for its own rounding,
  // while an error of δ would go to ∂Q times the mean key. Only if the row is in parts does gain · δ come from
  // elsewhere, as `dot`. Returns the sum over these keys where it is needed.
  A softmax_backward(const A* softmax_row, const A* dot, int vectors, A* weights, A* grads) const {
    const A maximum = softmax_row[0];
    const A inverse = softmax_row[1];
    Vector<A> sums{};
    for (int v = 0; v < vectors; ++v) {
      A* p = weights + v * kLanes<A>;
      const Vector<A> weight = exp2_nonpositive<A>(load_full(p) - maximum) * inverse;
      store_full(weight, p);
      sums += weight * load_full(grads + v * kLanes<A>);
    }
    const A sum = dot == nullptr || call_.grad_gain != nullptr ? reduce_add<A>(sums) : A{0};
    const A gain = gain_;
    const A mean = dot == nullptr ? gain * sum : *dot;
    for (int v = 0; v < vectors; ++v) {
      A* p = grads + v * kLanes<A>;
      store_full(load_full(weights + v * kLanes<A>) * (gain * load_full(p) - mean), p);
    }
    return sum;
  }

  // One part of a gradient, added to `sums`; the last part goes to rows of `out` from `token` on where it can.
  template <Operand kOperand>
  void add_product(bool is_first, bool is_last, int64_t rows, int64_t depth, const A* a, int64_t lda,
                   const GemmOperand<A>& b, A* sums, const StridedHeads& out, int64_t token, A scale) const {
    const int vectors = static_cast<int>(padded_width_ / kLanes<A>);
    if (is_last && is_direct(out)) {
      const StridedMatrix target = head_rows(out, call_.type, batch_, head_, token);
      gemm<A, kOperand>(
          rows, vectors, depth, a, lda, b.data, b.ld,
          StoreGradient<A>{target.at<A>(0, 0), target.row_stride, &scale, is_first ? nullptr : sums, padded_width_});
    } else if (is_first) {
      gemm<A, kOperand>(rows, vectors, depth, a, lda, b.data, b.ld, StoreTo<A>{sums, padded_width_});
    } else {
      gemm<A, kOperand>(rows, vectors, depth, a, lda, b.data, b.ld, AddTo<A>{sums, padded_width_});
    }
  }

  const AttentionBackward& call_;
  const AttentionShape& shape_;
  int64_t padded_width_;
  int64_t block_;       // keys at a time
  int64_t query_rows_;  // at a time
  int64_t batch_ = 0;
  int64_t head_ = 0;
  A gain_ = 1;
  double grad_gain_ = 0;
  Prefetcher prefetcher_;
  Scratch<A> memory_;
  A* keys_t_;        // Kᵀ times scale · log2(e), in panels
  A* values_t_;      // Vᵀ, in panels
  A* keys_;          // [block][padded_width], where K cannot be read in place
  A* grad_keys_;     // [block][padded_width]
  A* grad_values_;   // [block][padded_width]
  A* weights_;       // [query_rows][block]: P
  A* grad_logits_;   // [query_rows][block]
  A* queries_;       // [query_rows][padded_width], where Q cannot be read in place
  A* grads_;         // [query_rows][padded_width]: ∂out, likewise
  A* grad_queries_;  // [queries][padded_width]
  A* dots_;          // [queries]: gain · δ, where keys come in several blocks
};

// ∂out = G · weightᵀ, for a block of tokens.
template <class A>
void out_backward_items(const OutBackward& call, WorkQueue& queue) {
  const int64_t inner_dim = call.shape.inner_dim();
  const int vectors = vectors_of<A>(inner_dim);
  const int64_t tokens = call.shape.batch * call.shape.q_len;
  Scratch<A> memory(kTokenBlock * kPanelLd<A>);
  A* sums = memory.take(kTokenBlock * kPanelLd<A>);
  const auto is_direct = [&](int first_vector, int width) { return (first_vector + width) * kLanes<A> <= inner_dim; };
  for (int64_t item; (item = queue.pop()) >= 0;) {
    const int64_t token = item * kTokenBlock;
    const int64_t rows = std::min(kTokenBlock, tokens - token);
    const A* grad_y = static_cast<const A*>(call.grad_y) + token * call.shape.out_dim;
    A* out = static_cast<A*>(call.grad_out) + token * inner_dim;
    gemm_large_panels<A>(
        rows, vectors, call.shape.out_dim, grad_y, call.shape.out_dim, static_cast<const A*>(call.weight), sums,
        [&](int first_vector, int width) {
          return is_direct(first_vector, width) ? PanelTarget<A>{out + first_vector * kLanes<A>, inner_dim}
                                                : PanelTarget<A>{sums, kPanelLd<A>};
        },
        [&](int first_vector, int width) {
          if (!is_direct(first_vector, width)) {
            const int64_t feature = first_vector * kLanes<A>;
            unpack_rows(sums, kPanelLd<A>, rows, inner_dim - feature, A{1}, buffer_rows<A>(out, feature, inner_dim));
          }
        });
  }
}

// ∂weight = outᵀ G, for a block of the weight's rows.
template <class A>
void weight_backward_items(const WeightBackward& call, WorkQueue& queue) {
  constexpr int64_t kDepth = 192;  // tokens at a time: their gradients stay in the second-level cache
  const AttentionShape& shape = call.shape;
  const int64_t inner_dim = shape.inner_dim();
  const int64_t tokens = shape.batch * shape.q_len;
  const int64_t padded_channels = padded_to(shape.out_dim, kLanes<A>);
  Scratch<A> memory(Scratch<A>::padded(kDepth * kFeatureBlock) + Scratch<A>::padded(kDepth * padded_channels) +
                    Scratch<A>::padded(kFeatureBlock * padded_channels));
  A* out = memory.take(kDepth * kFeatureBlock);                 // [depth][features of this item]
  A* packed_gradients = memory.take(kDepth * padded_channels);  // [depth][padded_channels]
  A* sums = memory.take(kFeatureBlock * padded_channels);       // [features of this item][padded_channels]
  for (int64_t item; (item = queue.pop()) >= 0;) {
    const int64_t first = item * kFeatureBlock;
    const int64_t rows = std::min(kFeatureBlock, inner_dim - first);
    std::fill(sums, sums + kFeatureBlock * padded_channels, A{0});
    for (int64_t token = 0; token < tokens; token += kDepth) {
      const int64_t depth = std::min(kDepth, tokens - token);
      pack_rows(buffer_rows<A>(call.attn_out, token * inner_dim + first, inner_dim), depth, rows, A{1}, out,
                kFeatureBlock);
      const GemmOperand<A> gradients(buffer_rows<A>(call.grad_y, token * shape.out_dim, shape.out_dim), depth,
                                     shape.out_dim, packed_gradients);
      gemm<A, Operand::col_major>(rows, static_cast<int>(padded_channels / kLanes<A>), depth, out, kFeatureBlock,
                                  gradients.data, gradients.ld, AddTo<A>{sums, padded_channels});
    }
    unpack_rows(sums, padded_channels, rows, shape.out_dim, A{1},
                buffer_rows<A>(call.grad_weight, first * shape.out_dim, shape.out_dim));
  }
}

}  // namespace overtone::OVERTONE_ISA
