// Backward of bfloat16 attention by products of bfloat16 (cpu/gemm/bf16.h). Logits are made transposed, a row per key:
// as they are rounded they are then the left operand of ∂V = Pᵀ ∂out and ∂K = ∂logitsᵀ Q, and in pairs of rows the
// right one of ∂Qᵀ = Kᵀ ∂logitsᵀ. What belongs to a query (its maximum, its sum, its dot) lies along the vectors.
#pragma once

#include "cpu/attention/backward.h"
#include "cpu/attention/bf16_forward.h"

namespace overtone::OVERTONE_ISA {

// Scratch and steps of one thread's (batch, head) items: blocks of queries, each meeting the keys some rows at a time.
class Bf16BackwardWorker {
 public:
  explicit Bf16BackwardWorker(const AttentionBackward& call)
      : call_(call),
        shape_(call.shape),
        width_(padded_to(shape_.head_dim, kTileDepth)),
        width_ld_(padded_stride<BFloat16>(width_)),
        output_ld_(padded_to(shape_.head_dim, kTileSize)),
        keys_(padded_to(shape_.kv_len, kTileDepth)),
        keys_ld_(padded_stride<BFloat16>(keys_)),
        key_block_(tile_block(shape_.kv_len)),
        query_block_(tile_block(shape_.q_len)),
        rows_ld_(padded_stride<BFloat16>(query_block_)),
        sums_ld_(padded_stride<float>(query_block_)),
        needs_logits_(call.grad_query.data != nullptr || call.grad_key.data != nullptr || call.grad_logits != nullptr),
        bf16_scratch_(
            2 * Scratch<BFloat16>::padded(keys_ * width_ld_) + Scratch<BFloat16>::padded(output_ld_ * keys_ld_) +
            2 * Scratch<BFloat16>::padded(query_block_ * width_) +
            2 * Scratch<BFloat16>::padded(query_block_ * output_ld_) +
            2 * Scratch<BFloat16>::padded(kBf16Rows * rows_ld_) + Scratch<BFloat16>::padded(query_block_ * key_block_)),
        accum_(2 * Scratch<float>::padded(keys_ * output_ld_) + 2 * Scratch<float>::padded(kBf16Rows * sums_ld_) +
               Scratch<float>::padded(output_ld_ * sums_ld_) + Scratch<float>::padded(query_block_ * output_ld_) +
               4 * Scratch<float>::padded(query_block_) + Scratch<float>::padded(output_ld_)) {
    bf16_scratch_.clear();
    key_rows_ = bf16_scratch_.take(keys_ * width_ld_);
    value_rows_ = bf16_scratch_.take(keys_ * width_ld_);
    key_columns_ = bf16_scratch_.take(output_ld_ * keys_ld_);
    query_columns_ = bf16_scratch_.take(query_block_ * width_);
    grad_columns_ = bf16_scratch_.take(query_block_ * width_);
    query_pairs_ = bf16_scratch_.take(query_block_ * output_ld_);
    grad_pairs_ = bf16_scratch_.take(query_block_ * output_ld_);
    weights_ = bf16_scratch_.take(kBf16Rows * rows_ld_);
    grad_logits_ = bf16_scratch_.take(kBf16Rows * rows_ld_);
    grad_logit_pairs_ = bf16_scratch_.take(query_block_ * key_block_);
    grad_keys_ = accum_.take(keys_ * output_ld_);
    grad_values_ = accum_.take(keys_ * output_ld_);
    logits_ = accum_.take(kBf16Rows * sums_ld_);
    grad_weights_ = accum_.take(kBf16Rows * sums_ld_);
    grad_queries_t_ = accum_.take(output_ld_ * sums_ld_);
    grad_queries_ = accum_.take(query_block_ * output_ld_);
    maxima_ = accum_.take(query_block_);
    inverses_ = accum_.take(query_block_);
    dots_ = accum_.take(query_block_);
    biases_ = accum_.take(query_block_);
    without_addend_ = accum_.take(output_ld_);
  }

  void run(int64_t item) {
    batch_ = item / shape_.num_heads;
    head_ = item % shape_.num_heads;
    const StridedMatrix keys = head_rows(call_.key, call_.type, batch_, head_, 0);
    pack_tile_rows(keys, shape_.kv_len, shape_.head_dim, key_rows_, width_ld_);
    pack_tile_columns(keys, shape_.kv_len, shape_.head_dim, key_columns_, keys_ld_);
    pack_tile_rows(head_rows(call_.value, call_.type, batch_, head_, 0), shape_.kv_len, shape_.head_dim, value_rows_,
                   width_ld_);
    if (shape_.q_len == 0) {
      std::fill(grad_keys_, grad_keys_ + keys_ * output_ld_, 0.0F);
      std::fill(grad_values_, grad_values_ + keys_ * output_ld_, 0.0F);
    }
    gain_ = head_gain<float>(call_, head_);
    grad_gain_ = 0;
    for (int64_t query = 0; query < shape_.q_len; query += query_block_) {
      queries_backward(query, std::min(query_block_, shape_.q_len - query));
    }
    store_gradient(call_.grad_key, grad_keys_, 0, shape_.kv_len, call_.scale);
    store_gradient(call_.grad_value, grad_values_, 0, shape_.kv_len, gain_);
    if (call_.grad_gain != nullptr) {
      call_.grad_gain[item] = grad_gain_;
    }
  }

 private:
  void store_gradient(const StridedHeads& out, const float* sums, int64_t token, int64_t count, double scale) const {
    if (out.data != nullptr) {
      unpack_rows(sums, output_ld_, count, shape_.head_dim, static_cast<float>(scale),
                  head_rows(out, call_.type, batch_, head_, token));
    }
  }

  void queries_backward(int64_t query, int64_t count) {
    pack_queries(query, count);
    if (shape_.kv_len == 0) {
      std::fill(grad_queries_t_, grad_queries_t_ + output_ld_ * sums_ld_, 0.0F);
    }
    for (int64_t block = 0; block < shape_.kv_len; block += key_block_) {
      const int64_t block_end = std::min(shape_.kv_len, block + key_block_);
      for (int64_t key = block; key < block_end; key += kBf16Rows) {
        rows_backward(query, count, key, std::min(kBf16Rows, block_end - key), key - block);
      }
      if (call_.grad_query.data != nullptr) {
        const AmxPanels pairs{grad_logit_pairs_, kTileSize * key_block_};
        multiply_bf16(shape_.head_dim, count, block_end - block, key_columns_ + block, keys_ld_, pairs, grad_queries_t_,
                      sums_ld_, block > 0);
      }
    }
    if (call_.grad_query.data != nullptr) {
      pack_columns(buffer_rows<float>(grad_queries_t_, 0, sums_ld_), shape_.head_dim, count, 1.0F, grad_queries_,
                   output_ld_);
      store_gradient(call_.grad_query, grad_queries_, query, count, call_.scale);
    }
  }

  // The operands of a block of queries, and what their softmax was.
  void pack_queries(int64_t query, int64_t count) {
    const int64_t inner_dim = shape_.inner_dim();
    const int64_t offset = (batch_ * shape_.q_len + query) * inner_dim + head_ * shape_.head_dim;
    const StridedMatrix queries = head_rows(call_.query, call_.type, batch_, head_, query);
    BFloat16* first_grad = static_cast<BFloat16*>(const_cast<void*>(call_.grad_out)) + offset;
    const StridedMatrix grads{Dtype::bfloat16, first_grad, inner_dim, 1};
    pack_column_pairs(queries, count, shape_.head_dim, query_columns_);
    pack_column_pairs(grads, count, shape_.head_dim, grad_columns_);
    pack_row_pairs(queries, count, shape_.head_dim, query_pairs_, query_block_ / kTileDepth);
    pack_row_pairs(grads, count, shape_.head_dim, grad_pairs_, query_block_ / kTileDepth);
    const float* heads = static_cast<const float*>(call_.attn_out) + offset;
    const float* softmax = static_cast<const float*>(call_.softmax_stats) +
                           2 * ((batch_ * shape_.num_heads + head_) * shape_.q_len + query);
    for (int64_t i = 0; i < query_block_; ++i) {  // queries that only fill tiles up get weights of zero
      maxima_[i] = i < count ? softmax[2 * i] : 0.0F;
      inverses_[i] = i < count ? softmax[2 * i + 1] : 0.0F;
      dots_[i] = i < count ? row_dot(query + i, first_grad + i * inner_dim, heads + i * inner_dim) : 0.0F;
      biases_[i] = i < count ? MaskRow<float>(call_.mask, batch_, head_, query + i, shape_.kv_len).largest : 0.0F;
    }
  }

  // gain · δ of a query: ∂out · (out − addend).
  float row_dot(int64_t query, const BFloat16* grad, const float* out) const {
    if (call_.addend.data != nullptr) {
      std::copy_n(out, shape_.head_dim, without_addend_);
      add_rows(addend_rows(call_, batch_, head_, query), 1, shape_.head_dim, -1.0F, without_addend_, output_ld_);
      out = without_addend_;
    }
    Vector<float> dot{};
    for (int64_t j = 0; j < shape_.head_dim; j += kLanes<float>) {
      const int count = static_cast<int>(std::min<int64_t>(kLanes<float>, shape_.head_dim - j));
      dot += load(grad + j, 1, count) * load(out + j, 1, count);
    }
    return reduce_add<float>(dot);
  }

  // Rows of keys, from the `in_block`-th of their block on, against the block of queries.
  void rows_backward(int64_t query, int64_t queries, int64_t key, int64_t rows, int64_t in_block) {
    multiply_bf16(rows, queries, shape_.head_dim, key_rows_ + key * width_ld_, width_ld_,
                  {query_columns_, kTileSize * width_}, logits_, sums_ld_, false);
    if (needs_logits_) {
      multiply_bf16(rows, queries, shape_.head_dim, value_rows_ + key * width_ld_, width_ld_,
                    {grad_columns_, kTileSize * width_}, grad_weights_, sums_ld_, false);
    }
    // Rows that products read without there being a key: up to a whole tile in the ones below, and in ∂Q's sum over
    // keys.
    const int64_t read_rows = padded_to(rows, std::max<int64_t>(kWholeRows, 2));
    for (int64_t row = 0; row < padded_to(read_rows, kWholeDepth); row += 2) {
      for (int64_t i = row; i < row + 2; ++i) {
        logits_row(query, queries, key + i, i, i < rows);
      }
      store_logit_pairs(row, queries, in_block);
    }
    const bool is_sum = query > 0;
    if (call_.grad_value.data != nullptr) {
      multiply_bf16(rows, shape_.head_dim, queries, weights_, rows_ld_, {grad_pairs_, kTileSize * query_block_},
                    grad_values_ + key * output_ld_, output_ld_, is_sum);
    }
    if (call_.grad_key.data != nullptr) {
      multiply_bf16(rows, shape_.head_dim, queries, grad_logits_, rows_ld_, {query_pairs_, kTileSize * query_block_},
                    grad_keys_ + key * output_ld_, output_ld_, is_sum);
    }
  }

  void clear_row(int64_t row, int64_t queries) {
    const int64_t whole = padded_to(queries, kTileDepth);
    std::memset(static_cast<void*>(weights_ + row * rows_ld_), 0, whole * sizeof(BFloat16));
    std::memset(static_cast<void*>(grad_logits_ + row * rows_ld_), 0, whole * sizeof(BFloat16));
  }

  // P and ∂logits of one key, rounded; zeros where there is none.
  void logits_row(int64_t query, int64_t queries, int64_t key, int64_t row, bool is_key) {
    if (!is_key) {
      clear_row(row, queries);
      return;
    }
    float* logits = logits_ + row * sums_ld_;
    float factor = static_cast<float>(call_.scale * kLog2E);
    if (call_.mask.is_used()) {
      mask_key(query, queries, key, factor, logits);
      factor = 1;
    }
    const float* grad_weights = grad_weights_ + row * sums_ld_;
    const int64_t whole = padded_to(queries, kTileDepth);
    const int64_t computed = padded_to(queries, kTileSize);
    const float gain = gain_;
    Vector<float> sums{};  // of P ⊙ ∂P
    for (int64_t j = 0; j < whole; j += kLanes<float>) {
      Vector<float> weight{};
      Vector<float> grad{};
      if (j < computed) {
        const Vector<float> lowered = load_full(logits + j) * factor - load_full(maxima_ + j);
        weight = exp2_nonpositive<float, CoarseSeries>(lowered) * load_full(inverses_ + j);
        if (needs_logits_) {
          const Vector<float> grad_weight = load_full(grad_weights + j);
          sums += weight * grad_weight;
          grad = weight * (gain * grad_weight - load_full(dots_ + j));
        }
      }
      store_full(weight, weights_ + row * rows_ld_ + j);
      store_full(grad, grad_logits_ + row * rows_ld_ + j);
      if (call_.grad_logits != nullptr) {
        store_bias_gradient(query + j, std::min<int64_t>(kLanes<float>, queries - j), key, grad);
      }
    }
    if (call_.grad_gain != nullptr) {
      grad_gain_ += reduce_add<float>(sums);
    }
  }

  // The logits of one key, scaled and masked.
  void mask_key(int64_t query, int64_t queries, int64_t key, float factor, float* logits) const {
    const AttentionMask& mask = call_.mask;
    for (int64_t i = 0; i < queries; ++i) {
      const int64_t offset = batch_ * mask.batch_stride + head_ * mask.head_stride + (query + i) * mask.query_stride +
                             key * mask.key_stride;
      logits[i] *= factor;
      if (mask.bias != nullptr) {
        logits[i] += (static_cast<const float*>(mask.bias)[offset] - biases_[i]) * static_cast<float>(kLog2E);
      }
      if ((mask.flags != nullptr && !mask.flags[offset]) || (mask.causal && key > query + i)) {
        logits[i] = kMinusInfinity<float>;
      }
    }
  }

  void store_bias_gradient(int64_t query, int64_t count, int64_t key, Vector<float> grad) const {
    float values[kLanes<float>];
    store_full(grad, values);
    float* out = static_cast<float*>(call_.grad_logits) +
                 ((batch_ * shape_.num_heads + head_) * shape_.q_len + query) * shape_.kv_len + key;
    for (int64_t i = 0; i < count; ++i) {
      out[i * shape_.kv_len] = values[i];
    }
  }

  // Rows `row` and `row` + 1 of ∂logitsᵀ as a pair of the operand of ∂Qᵀ.
  void store_logit_pairs(int64_t row, int64_t queries, int64_t in_block) {
    const BFloat16* first = grad_logits_ + row * rows_ld_;
    const int64_t tile = (in_block + row) / kTileDepth * kTileElements + (in_block + row) % kTileDepth * kTileSize;
    for (int64_t j = 0; j < padded_to(queries, kTileSize); j += kLanes<float>) {
      BFloat16* out = grad_logit_pairs_ + j / kTileSize * kTileSize * key_block_ + tile + j % kTileSize * 2;
      store_pair(load_full(first + j), load_full(first + rows_ld_ + j), out);
    }
  }

  const AttentionBackward& call_;
  const AttentionShape& shape_;
  int64_t width_;        // of a head, in whole tiles of A
  int64_t width_ld_;     // elements between rows of key_rows_
  int64_t output_ld_;    // the width of a head in whole tiles of C
  int64_t keys_;         // all of them, in whole tiles of A
  int64_t keys_ld_;      // elements between rows of key_columns_
  int64_t key_block_;    // keys at a time
  int64_t query_block_;  // queries at a time
  int64_t rows_ld_;      // elements between rows of weights_
  int64_t sums_ld_;      // and of logits_
  bool needs_logits_;    // more than ∂V is wanted
  int64_t batch_ = 0;
  int64_t head_ = 0;
  float gain_ = 1;
  double grad_gain_ = 0;
  Scratch<BFloat16> bf16_scratch_;
  Scratch<float> accum_;
  Bf16Session tiles_;
  BFloat16* key_rows_;          // [keys][width_ld]
  BFloat16* value_rows_;        // [keys][width_ld]
  BFloat16* key_columns_;       // Kᵀ: [output_ld][keys_ld]
  BFloat16* query_columns_;     // Qᵀ, in column tiles
  BFloat16* grad_columns_;      // ∂outᵀ, in column tiles
  BFloat16* query_pairs_;       // Q, in column tiles
  BFloat16* grad_pairs_;        // ∂out, in column tiles
  BFloat16* weights_;           // [rows][rows_ld]: Pᵀ
  BFloat16* grad_logits_;       // [rows][rows_ld]: ∂logitsᵀ
  BFloat16* grad_logit_pairs_;  // ∂logitsᵀ of a block of keys, in column tiles
  float* grad_keys_;            // [keys][output_ld]
  float* grad_values_;          // [keys][output_ld]
  float* logits_;               // [rows][sums_ld]
  float* grad_weights_;         // [rows][sums_ld]: ∂Pᵀ
  float* grad_queries_t_;       // ∂Qᵀ: [output_ld][sums_ld]
  float* grad_queries_;         // [queries][output_ld]
  float* maxima_;               // [queries]
  float* inverses_;             // [queries]
  float* dots_;                 // [queries]: gain · δ
  float* biases_;               // [queries]: what rows of the bias are lowered by
  float* without_addend_;       // [output_ld]: a row of out
};

// ∂out = G · weightᵀ, rounded to bfloat16, for a block of tokens.
inline void out_backward_bf16(const OutBackward& call, WorkQueue& queue) {
  const int64_t inner_dim = call.shape.inner_dim();
  const int64_t out_dim = call.shape.out_dim;
  const int64_t tokens = call.shape.batch * call.shape.q_len;
  const int64_t depth_tiles = tiles_of(out_dim, kTileDepth);
  const int64_t ld = padded_stride<BFloat16>(depth_tiles * kTileDepth);
  const AmxPanels weight{static_cast<const BFloat16*>(call.weight), depth_tiles * kTileElements};
  Scratch<BFloat16> numbers(kTokenBlock * ld);
  numbers.clear();
  BFloat16* grads = numbers.take(kTokenBlock * ld);
  Scratch<float> memory(kBf16Rows * kBf16Rows);
  float* sums = memory.take(kBf16Rows * kBf16Rows);
  const Bf16Session session;
  for (int64_t item; (item = queue.pop()) >= 0;) {
    const int64_t token = item * kTokenBlock;
    const int64_t rows = std::min(kTokenBlock, tokens - token);
    pack_tile_rows(buffer_rows<float>(call.grad_y, token * out_dim, out_dim), rows, out_dim, grads, ld);
    for (int64_t feature = 0; feature < inner_dim; feature += kBf16Rows) {
      const int64_t columns = std::min(kBf16Rows, inner_dim - feature);
      for (int64_t row = 0; row < rows; row += kBf16Rows) {
        const int64_t count = std::min(kBf16Rows, rows - row);
        multiply_bf16(count, columns, out_dim, grads + row * ld, ld, weight.from(feature / kTileSize), sums, kBf16Rows,
                      false);
        BFloat16* out = static_cast<BFloat16*>(call.grad_out) + (token + row) * inner_dim + feature;
        unpack_rows(sums, kBf16Rows, count, columns, 1.0F, {Dtype::bfloat16, out, inner_dim, 1});
        if (call.grad_addend != nullptr) {
          unpack_rows(sums, kBf16Rows, count, columns, 1.0F,
                      buffer_rows<float>(call.grad_addend, (token + row) * inner_dim + feature, inner_dim));
        }
      }
    }
  }
}

// ∂weight = outᵀ G, for a block of the weight's rows. G comes packed: [channel tiles][token tiles].
inline void weight_backward_bf16(const WeightBackward& call, WorkQueue& queue) {
  // At a time: G's panels stay in the first-level cache for all rows, where products read them row by row.
  constexpr int64_t kTokens = OVERTONE_USES_AMX ? 2048 : 256;
  const AttentionShape& shape = call.shape;
  const int64_t inner_dim = shape.inner_dim();
  const int64_t tokens = shape.batch * shape.q_len;
  const int64_t token_tiles = tiles_of(tokens, kTileDepth);
  const int64_t padded_channels = padded_to(shape.out_dim, kTileSize);
  const int64_t ld = padded_stride<BFloat16>(std::min(kTokens, token_tiles * kTileDepth));
  Scratch<BFloat16> numbers(kBf16FeatureBlock * ld);
  BFloat16* heads = numbers.take(kBf16FeatureBlock * ld);
  Scratch<float> memory(kBf16FeatureBlock * padded_channels);
  float* sums = memory.take(kBf16FeatureBlock * padded_channels);
  const Bf16Session session;
  for (int64_t item; (item = queue.pop()) >= 0;) {
    const int64_t first = item * kBf16FeatureBlock;
    const int64_t rows = std::min(kBf16FeatureBlock, inner_dim - first);
    std::fill(sums, sums + kBf16FeatureBlock * padded_channels, 0.0F);
    for (int64_t token = 0; token < tokens; token += kTokens) {
      const int64_t depth = std::min(kTokens, tokens - token);
      pack_tile_columns(buffer_rows<float>(call.attn_out, token * inner_dim + first, inner_dim), depth, rows, heads,
                        ld);
      const AmxPanels grads{static_cast<const BFloat16*>(call.packed_grad) + token / kTileDepth * kTileElements,
                            token_tiles * kTileElements};
      multiply_bf16(rows, shape.out_dim, depth, heads, ld, grads, sums, padded_channels, token > 0);
    }
    unpack_rows(sums, padded_channels, rows, shape.out_dim, 1.0F,
                buffer_rows<float>(call.grad_weight, first * shape.out_dim, shape.out_dim));
  }
}

}  // namespace overtone::OVERTONE_ISA
