// Backward. With G = ∂L/∂y and M = headsᵀ G:   ∂U = diag(λ) M,   ∂λ = rows of U · rows of M,   ∂heads = G Uᵀ diag(λ),
// and from that attention's own gradients, P being made again from the saved maxima and sums.
#pragma once

#include "cpu/attention/forward.h"

namespace overtone::OVERTONE_ISA {

// out[row] = a's row · b's row, summed as gemm() sums: where softmax is one-hot, ∂P − dot is then exactly zero.
template <class A>
void row_dots(const MatrixRows& a, const MatrixRows& b, int64_t rows, int64_t width, A* out) {
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

// c = (sum + earlier sums) · scale: a gradient's last part, straight to where it belongs.
template <class A>
struct StoreGradient {
  A* c;
  int64_t ldc;
  const A* scale;    // a pointer: GCC would keep the value itself in a register that the products need
  const A* earlier;  // or null
  int64_t earlier_ld;

  OVERTONE_INLINE void operator()(int64_t row, int v, Vector<A> sum) const {
    if (earlier != nullptr) {
      sum += load_full(earlier + row * earlier_ld + v * kLanes<A>);
    }
    store_full(sum * *scale, c + row * ldc + v * kLanes<A>);
  }
};

// Scratch and steps of one thread's (image, head) items: keys block by block, each meeting the queries in long strips,
// whose P and ∂logits stay in the second-level cache as the depth of the products for ∂K and ∂V.
template <class A>
class BackwardWorker {
 public:
  explicit BackwardWorker(const AttentionBackward& call)
      : call_(call),
        shape_(call.shape),
        padded_width_(padded_to(shape_.width, kLanes<A>)),
        block_(key_block<A>(shape_.keys, kMostKeys)),
        long_strip_(even_strip(shape_.queries)),
        memory_(2 * Scratch<A>::padded(KeyColumns<A>::size(block_, shape_.width)) +
                3 * Scratch<A>::padded(block_ * padded_width_) + 2 * Scratch<A>::padded(long_strip_ * block_) +
                2 * Scratch<A>::padded(long_strip_ * padded_width_) +
                Scratch<A>::padded(shape_.queries * padded_width_) + Scratch<A>::padded(shape_.queries)) {
    keys_across_ = memory_.take(KeyColumns<A>::size(block_, shape_.width));
    values_across_ = memory_.take(KeyColumns<A>::size(block_, shape_.width));
    keys_ = memory_.take(block_ * padded_width_);
    grad_keys_ = memory_.take(block_ * padded_width_);
    grad_values_ = memory_.take(block_ * padded_width_);
    weights_ = memory_.take(long_strip_ * block_);
    grad_logits_ = memory_.take(long_strip_ * block_);
    queries_ = memory_.take(long_strip_ * padded_width_);
    grads_ = memory_.take(long_strip_ * padded_width_);
    grad_queries_ = memory_.take(shape_.queries * padded_width_);
    dots_ = memory_.take(shape_.queries);
  }

  // `next_item` is what this thread does afterwards, or -1.
  void run(int64_t item, int64_t next_item) {
    expect(next_item);
    image_ = item / shape_.heads;
    head_ = item % shape_.heads;
    if (!has_one_block()) {
      row_dots(buffer_of(call_.grad_heads, image_, head_, 0), buffer_of(call_.heads, image_, head_, 0), shape_.queries,
               shape_.width, dots_);
    }
    for (int64_t key = 0; key < shape_.keys; key += block_) {
      block_backward(key, std::min(block_, shape_.keys - key));
    }
    if (call_.grad_query.data != nullptr && !(has_one_block() && is_direct(call_.grad_query))) {
      if (shape_.keys == 0) {
        std::fill(grad_queries_, grad_queries_ + shape_.queries * padded_width_, A{0});
      }
      unpack_rows(grad_queries_, padded_width_, shape_.queries, shape_.width, static_cast<A>(call_.scale),
                  head_rows(call_.grad_query, call_.type, image_, head_, 0));
    }
  }

 private:
  static constexpr int64_t kMostKeys = 288;
  static constexpr int64_t kLongStrip = 120;  // with more, P and ∂logits would not stay in the second-level cache

  // Strips of nearly equal length, of whole tiles.
  static int64_t even_strip(int64_t queries) {
    const int64_t strips = std::max<int64_t>(1, (queries + kLongStrip - 1) / kLongStrip);
    return std::max<int64_t>(1, std::min(queries, padded_to((queries + strips - 1) / strips, kStrip)));
  }

  bool has_one_block() const { return shape_.keys > 0 && shape_.keys <= block_; }

  // The block at hand, of `count` keys.
  KeyColumns<A> key_columns(int64_t count) const { return {keys_across_, count, shape_.width, has_one_block()}; }
  KeyColumns<A> value_columns(int64_t count) const { return {values_across_, count, shape_.width, has_one_block()}; }

  // Whether products can write a gradient themselves.
  bool is_direct(const StridedHeads& out) const {
    constexpr ElementType kType = std::is_same_v<A, double> ? ElementType::float64 : ElementType::float32;
    return call_.type == kType && out.width_stride == 1 && shape_.width == padded_width_;
  }

  MatrixRows buffer_of(const void* buffer, int64_t image, int64_t head, int64_t token) const {
    const int64_t features = shape_.features();
    const int64_t offset = (image * shape_.queries + token) * features + head * shape_.width;
    return buffer_rows<A>(buffer, offset, features);
  }

  // While an item is worked on, the next one's rows come nearer.
  void expect(int64_t item) {
    coming_.clear();
    if (item < 0) {
      return;
    }
    const int64_t image = item / shape_.heads;
    const int64_t head = item % shape_.heads;
    coming_.add(buffer_of(call_.grad_heads, image, head, 0), shape_.queries, shape_.width);
    if (!has_one_block()) {
      coming_.add(buffer_of(call_.heads, image, head, 0), shape_.queries, shape_.width);
    }
    coming_.add(head_rows(call_.key, call_.type, image, head, 0), shape_.keys, shape_.width);
    coming_.add(head_rows(call_.value, call_.type, image, head, 0), shape_.keys, shape_.width);
    coming_.add(head_rows(call_.query, call_.type, image, head, 0), shape_.queries, shape_.width);
  }

  void block_backward(int64_t key, int64_t count) {
    const MatrixRows key_rows = head_rows(call_.key, call_.type, image_, head_, key);
    const MatrixRows value_rows = head_rows(call_.value, call_.type, image_, head_, key);
    key_columns(count).pack(key_rows, static_cast<A>(call_.scale * kLog2E));
    value_columns(count).pack(value_rows, A{1});
    const ProductRows<A> keys(key_rows, count, shape_.width, keys_);
    const int64_t first_strip = call_.mask.causal ? key / long_strip_ * long_strip_ : 0;
    for (int64_t first = first_strip; first < shape_.queries; first += long_strip_) {
      strip_backward(first, std::min(long_strip_, shape_.queries - first), key, count, keys, first == first_strip);
    }
    const bool is_unseen = first_strip >= shape_.queries;
    finish(call_.grad_key, grad_keys_, key, count, static_cast<A>(call_.scale), is_unseen);
    finish(call_.grad_value, grad_values_, key, count, A{1}, is_unseen);
  }

  void finish(const StridedHeads& out, A* sums, int64_t key, int64_t count, A scale, bool is_unseen) const {
    if (out.data == nullptr || (is_direct(out) && !is_unseen)) {
      return;
    }
    if (is_unseen) {
      std::fill(sums, sums + count * padded_width_, A{0});
    }
    unpack_rows(sums, padded_width_, count, shape_.width, scale, head_rows(out, call_.type, image_, head_, key));
  }

  void strip_backward(int64_t first, int64_t rows, int64_t key, int64_t count, const ProductRows<A>& keys,
                      bool is_first_strip) {
    const ProductRows<A> queries(head_rows(call_.query, call_.type, image_, head_, first), rows, shape_.width,
                                 queries_);
    const ProductRows<A> grads(buffer_of(call_.grad_heads, image_, head_, first), rows, shape_.width, grads_);
    for (int64_t row = 0; row < rows; row += kStrip) {
      logits_backward(first, row, std::min(kStrip, rows - row), key, count, queries, grads, keys);
    }
    const bool is_last_strip = first + rows == shape_.queries;
    if (call_.grad_value.data != nullptr) {
      add_product<Operand::columns>(is_first_strip, is_last_strip, count, rows, weights_, block_, grads, grad_values_,
                                    call_.grad_value, key, A{1});
    }
    if (call_.grad_key.data != nullptr) {
      add_product<Operand::columns>(is_first_strip, is_last_strip, count, rows, grad_logits_, block_, queries,
                                    grad_keys_, call_.grad_key, key, static_cast<A>(call_.scale));
    }
  }

  // P and ∂logits of a few rows of the strip, from `row` on, and their share of ∂Q.
  void logits_backward(int64_t first, int64_t row, int64_t rows, int64_t key, int64_t count,
                       const ProductRows<A>& queries, const ProductRows<A>& grads, const ProductRows<A>& keys) {
    const int key_vectors = vectors_of<A>(count);
    const int64_t query = first + row;
    A* weights = weights_ + row * block_;
    A* grad_logits = grad_logits_ + row * block_;
    key_columns(count).multiply(rows, count, queries.data + row * queries.ld, queries.ld, weights, block_);
    mask_logits(call_, image_, head_, query, rows, key, count, weights, block_);
    const A* softmax_rows =
        static_cast<const A*>(call_.softmax_rows) + 2 * ((image_ * shape_.heads + head_) * shape_.queries + query);
    value_columns(count).multiply(rows, count, grads.data + row * grads.ld, grads.ld, grad_logits, block_);
    for (int64_t i = 0; i < rows; ++i) {
      const A* dot = has_one_block() ? nullptr : dots_ + query + i;
      softmax_backward(softmax_rows + 2 * i, dot, key_vectors, weights + i * block_, grad_logits + i * block_);
      coming_.fetch();
    }
    if (call_.grad_logits != nullptr) {
      A* out = static_cast<A*>(call_.grad_logits) +
               ((image_ * shape_.heads + head_) * shape_.queries + query) * shape_.keys + key;
      for (int64_t i = 0; i < rows; ++i) {
        std::copy_n(grad_logits + i * block_, count, out + i * shape_.keys);
      }
    }
    if (call_.grad_query.data != nullptr) {
      add_product<Operand::rows>(key == 0, has_one_block(), rows, count, grad_logits, block_, keys,
                                 grad_queries_ + query * padded_width_, call_.grad_query, query,
                                 static_cast<A>(call_.scale));
    }
  }

  // A row of logits to P, and its ∂P to ∂logits = P ⊙ (∂P − dot), where dot = Σ P ⊙ ∂P over all keys. That sum of these
  // very numbers is the best there is: the row of ∂logits then adds up to zero, but for its own rounding, while an
  // error of the dot would go to ∂Q times the mean key. Only if the row is in parts does the dot come from elsewhere.
  static void softmax_backward(const A* softmax_row, const A* dot, int vectors, A* weights, A* grads) {
    const A maximum = softmax_row[0];
    const A inverse = softmax_row[1];
    Vector<A> sums{};
    for (int v = 0; v < vectors; ++v) {
      A* p = weights + v * kLanes<A>;
      const Vector<A> weight = exp2_nonpositive<A>(load_full(p) - maximum) * inverse;
      store_full(weight, p);
      sums += weight * load_full(grads + v * kLanes<A>);
    }
    const A mean = dot == nullptr ? sum_of_lanes<A>(sums) : *dot;
    for (int v = 0; v < vectors; ++v) {
      A* p = grads + v * kLanes<A>;
      store_full(load_full(weights + v * kLanes<A>) * (load_full(p) - mean), p);
    }
  }

  // One part of a gradient, added to `sums`; the last part goes to rows of `out` from `token` on where it can.
  template <Operand kOperand>
  void add_product(bool is_first, bool is_last, int64_t rows, int64_t depth, const A* a, int64_t lda,
                   const ProductRows<A>& b, A* sums, const StridedHeads& out, int64_t token, A scale) const {
    const int vectors = static_cast<int>(padded_width_ / kLanes<A>);
    if (is_last && is_direct(out)) {
      const MatrixRows target = head_rows(out, call_.type, image_, head_, token);
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
  int64_t long_strip_;  // queries at a time
  int64_t image_ = 0;
  int64_t head_ = 0;
  ComingRows coming_;
  Scratch<A> memory_;
  A* keys_across_;    // Kᵀ times scale · log2(e), in panels
  A* values_across_;  // Vᵀ, in panels
  A* keys_;           // [block][padded_width], where K cannot be read in place
  A* grad_keys_;      // [block][padded_width]
  A* grad_values_;    // [block][padded_width]
  A* weights_;        // [long_strip][block]: P
  A* grad_logits_;    // [long_strip][block]
  A* queries_;        // [long_strip][padded_width], where Q cannot be read in place
  A* grads_;          // [long_strip][padded_width]: ∂heads, likewise
  A* grad_queries_;   // [queries][padded_width]
  A* dots_;           // [queries]: rows of ∂heads · rows of heads, where keys come in several blocks
};

// ∂heads = G · weight, for a block of tokens.
template <class A>
void heads_backward_items(const HeadsBackward& call, WorkQueue& queue) {
  const int64_t features = call.shape.features();
  const int vectors = vectors_of<A>(features);
  const int64_t tokens = call.shape.batch * call.shape.queries;
  Scratch<A> memory(kTokenBlock * kPanelLd<A>);
  A* sums = memory.take(kTokenBlock * kPanelLd<A>);
  const auto is_direct = [&](int first_vector, int width) { return (first_vector + width) * kLanes<A> <= features; };
  for (int64_t item; (item = queue.pop()) >= 0;) {
    const int64_t token = item * kTokenBlock;
    const int64_t rows = std::min(kTokenBlock, tokens - token);
    const A* grad_y = static_cast<const A*>(call.grad_y) + token * call.shape.channels;
    A* out = static_cast<A*>(call.grad_heads) + token * features;
    gemm_large_panels<A>(
        rows, vectors, call.shape.channels, grad_y, call.shape.channels, static_cast<const A*>(call.weight), sums,
        [&](int first_vector, int width) {
          return is_direct(first_vector, width) ? PanelTarget<A>{out + first_vector * kLanes<A>, features, nullptr, 0}
                                                : PanelTarget<A>{sums, kPanelLd<A>, nullptr, 0};
        },
        [&](int first_vector, int width) {
          if (!is_direct(first_vector, width)) {
            const int64_t feature = first_vector * kLanes<A>;
            unpack_rows(sums, kPanelLd<A>, rows, features - feature, A{1}, buffer_rows<A>(out, feature, features));
          }
        });
  }
}

// ∂U and ∂λ from rows of M, `ld` apart, of features from `first` on.
template <class T>
void store_basis_gradient(const BasisBackward& call, int64_t first, int64_t rows, const Accumulator<T>* sums,
                          int64_t ld) {
  using A = Accumulator<T>;
  const int64_t channels = call.shape.channels;
  const A* eigenvalues = static_cast<const A*>(call.eigenvalues);
  for (int64_t row = 0; row < rows; ++row) {
    const A* sum = sums + row * ld;
    const int64_t feature = first + row;
    if (call.grad_eigenvalues != nullptr) {
      const T* basis = static_cast<const T*>(call.basis) + feature * call.basis_strides[0];
      constexpr int64_t kSums = 8;  // so that a sum need not wait for the one before
      double dots[kSums] = {};
      for (int64_t channel = 0; channel < channels; ++channel) {
        dots[channel % kSums] += static_cast<double>(sum[channel]) * widen(basis[channel * call.basis_strides[1]]);
      }
      double dot = 0;
      for (const double part : dots) {
        dot += part;
      }
      static_cast<A*>(call.grad_eigenvalues)[feature] = static_cast<A>(dot);
    }
    if (call.grad_basis != nullptr) {
      A* grad_basis = static_cast<A*>(call.grad_basis) + feature * channels;
      for (int64_t channel = 0; channel < channels; ++channel) {
        grad_basis[channel] = sum[channel] * eigenvalues[feature];
      }
    }
  }
}

// M = headsᵀ G for a block of features, and from it ∂U and ∂λ.
template <class T>
void basis_backward_items(const BasisBackward& call, WorkQueue& queue) {
  using A = Accumulator<T>;
  constexpr int64_t kDepth = 192;  // tokens at a time: their gradients stay in the second-level cache
  const AttentionShape& shape = call.shape;
  const int64_t features = shape.features();
  const int64_t tokens = shape.batch * shape.queries;
  const int64_t padded_channels = padded_to(shape.channels, kLanes<A>);
  Scratch<A> memory(Scratch<A>::padded(kDepth * kFeatureBlock) + Scratch<A>::padded(kDepth * padded_channels) +
                    Scratch<A>::padded(kFeatureBlock * padded_channels));
  A* heads = memory.take(kDepth * kFeatureBlock);               // [depth][features of this item]
  A* packed_gradients = memory.take(kDepth * padded_channels);  // [depth][padded_channels]
  A* sums = memory.take(kFeatureBlock * padded_channels);       // [features of this item][padded_channels]
  for (int64_t item; (item = queue.pop()) >= 0;) {
    const int64_t first = item * kFeatureBlock;
    const int64_t rows = std::min(kFeatureBlock, features - first);
    std::fill(sums, sums + kFeatureBlock * padded_channels, A{0});
    for (int64_t token = 0; token < tokens; token += kDepth) {
      const int64_t depth = std::min(kDepth, tokens - token);
      pack_rows(buffer_rows<A>(call.heads, token * features + first, features), depth, rows, A{1}, heads,
                kFeatureBlock);
      const ProductRows<A> gradients(buffer_rows<A>(call.grad_y, token * shape.channels, shape.channels), depth,
                                     shape.channels, packed_gradients);
      gemm<A, Operand::columns>(rows, static_cast<int>(padded_channels / kLanes<A>), depth, heads, kFeatureBlock,
                                gradients.data, gradients.ld, AddTo<A>{sums, padded_channels});
    }
    store_basis_gradient<T>(call, first, rows, sums, padded_channels);
  }
}

}  // namespace overtone::OVERTONE_ISA
