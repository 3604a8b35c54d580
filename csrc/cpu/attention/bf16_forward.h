// Forward of bfloat16 attention: logits, heads and projection are products of bfloat16 with float32 sums, the
// softmax between them is float32. Its weights and the heads are rounded to bfloat16, as PyTorch rounds them.
#pragma once

#include "cpu/attention/forward.h"
#include "cpu/gemm/bf16.h"

namespace overtone::OVERTONE_ISA {

// Queries, or keys, at a time: the rows of two tiles, or as many as make whole blocks of vdpbf16ps' registers.
constexpr int64_t kBf16Rows = OVERTONE_USES_AMX ? 2 * kTileSize : 48;

// Tokens at a time, in blocks of nearly equal size, of whole tiles: one block at ViT sizes.
inline int64_t tile_block(int64_t tokens) {
  constexpr int64_t kMax = 512;
  const int64_t blocks = std::max<int64_t>(1, tiles_of(tokens, kMax));
  return std::max(kTileDepth, padded_to(tiles_of(tokens, blocks), kTileDepth));
}

// Turns a block of logits (whole vectors), times `factor` > 0, into unnormalized weights.
OVERTONE_INLINE void online_softmax_update_bf16(SoftmaxRow<float>& row, const float* logits, int vectors, float factor,
                                                BFloat16* weights) {
  constexpr int kSize = kLanes<float>;
  Vector<float> best[2] = {load_full(logits), load_full(logits + (vectors - 1) * kSize)};
  for (int v = 1; v + 1 < vectors; v += 2) {
    best[0] = max<float>(best[0], load_full(logits + v * kSize));
    best[1] = max<float>(best[1], load_full(logits + (v + 1) * kSize));
  }
  const float lowered = row.update_max(reduce_max<float>(max<float>(best[0], best[1])) * factor);
  Vector<float> totals[2] = {};
  for (int v = 0; v < vectors; v += 2) {  // blocks are whole tiles: an even number of vectors
    OVERTONE_UNROLL
    for (int part = 0; part < 2; ++part) {
      const int64_t at = (v + part) * kSize;
      const Vector<float> weight = exp2_nonpositive<float, CoarseSeries>(load_full(logits + at) * factor - lowered);
      totals[part] += weight;
      store_full(weight, weights + at);
    }
  }
  row.add(reduce_add<float>(totals[0] + totals[1]));
}

// Scratch and steps of one thread's forward items.
class Bf16ForwardWorker {
 public:
  explicit Bf16ForwardWorker(const AttentionForward& call)
      : call_(call),
        shape_(call.shape),
        width_(padded_to(shape_.head_dim, kTileDepth)),
        width_ld_(padded_stride<BFloat16>(width_)),
        output_ld_(padded_to(shape_.head_dim, kTileSize)),
        keys_depth_(padded_to(shape_.kv_len, kTileDepth)),
        block_(tile_block(shape_.kv_len)),
        weights_ld_(padded_stride<BFloat16>(block_)),
        logits_ld_(padded_stride<float>(block_)),
        features_ld_(padded_stride<BFloat16>(padded_to(shape_.inner_dim(), kTileDepth))),
        unrounded_(call),
        bf16_scratch_(
            Scratch<BFloat16>::padded(keys_depth_ * width_) + Scratch<BFloat16>::padded(keys_depth_ * output_ld_) +
            Scratch<BFloat16>::padded(kBf16Rows * width_ld_) + Scratch<BFloat16>::padded(kBf16Rows * weights_ld_) +
            Scratch<BFloat16>::padded(padded_to(call.query_block, kBf16Rows) * features_ld_)),
        accum_(kBf16Rows * (logits_ld_ + 2 * output_ld_ + kBf16Rows)) {
    bf16_scratch_.clear();  // what fills tiles up is never written again
    keys_ = bf16_scratch_.take(keys_depth_ * width_);
    values_ = bf16_scratch_.take(keys_depth_ * output_ld_);
    queries_ = bf16_scratch_.take(kBf16Rows * width_ld_);
    weights_ = bf16_scratch_.take(kBf16Rows * weights_ld_);
    heads_ = bf16_scratch_.take(padded_to(call.query_block, kBf16Rows) * features_ld_);
    logits_ = accum_.take(kBf16Rows * logits_ld_);
    outputs_ = accum_.take(kBf16Rows * output_ld_);
    partial_ = accum_.take(kBf16Rows * output_ld_);
    sums_ = accum_.take(kBf16Rows * kBf16Rows);
  }

  void run(int64_t item) {
    const int64_t batch = item / call_.blocks();
    const int64_t first = item % call_.blocks() * call_.query_block;
    const int64_t rows = std::min(call_.query_block, shape_.q_len - first);
    for (int64_t head = 0; head < shape_.num_heads; ++head) {
      attend(batch, head, first, rows);
    }
    project(batch, first, rows);
    unrounded_.finish_block(batch);
  }

 private:
  void attend(int64_t batch, int64_t head, int64_t first_query, int64_t rows) {
    pack_column_pairs(head_rows(call_.key, call_.type, batch, head, 0), shape_.kv_len, shape_.head_dim, keys_);
    pack_row_pairs(head_rows(call_.value, call_.type, batch, head, 0), shape_.kv_len, shape_.head_dim, values_,
                   keys_depth_ / kTileDepth);
    for (int64_t row = 0; row < rows; row += kBf16Rows) {
      const int64_t first = first_query + row;
      const int64_t count = std::min(kBf16Rows, rows - row);
      pack_tile_rows(head_rows(call_.query, call_.type, batch, head, first), count, shape_.head_dim, queries_,
                     width_ld_);
      SoftmaxRow<float> softmax[kBf16Rows];
      attend_rows(batch, head, first, count, softmax);
      save_softmax(call_, batch, head, first, count, softmax);
      store_heads(batch, head, first, count, softmax, heads_ + row * features_ld_ + head * shape_.head_dim);
    }
  }

  // Rows of queries against all keys they see: unnormalized heads in outputs_.
  void attend_rows(int64_t batch, int64_t head, int64_t first, int64_t rows, SoftmaxRow<float>* softmax) {
    const int64_t last_key = call_.mask.causal ? std::min(shape_.kv_len, first + rows) : shape_.kv_len;
    if (last_key == 0) {
      std::fill(outputs_, outputs_ + kBf16Rows * output_ld_, 0.0F);
    }
    for (int64_t key = 0; key < last_key; key += block_) {
      const int64_t count = std::min(block_, last_key - key);
      const AmxPanels keys{keys_ + key * width_, kTileSize * width_};
      multiply_bf16(rows, count, shape_.head_dim, queries_, width_ld_, keys, logits_, logits_ld_, false);
      for (int64_t row = 0; row < rows; ++row) {
        softmax_row(batch, head, first + row, key, count, row, softmax[row]);
      }
      const AmxPanels values{values_ + key * kTileSize, kTileSize * keys_depth_};
      multiply_bf16(rows, shape_.head_dim, count, weights_, weights_ld_, values, key == 0 ? outputs_ : partial_,
                    output_ld_, false);
      if (key > 0) {
        add_rescaled(rows, softmax);
      }
    }
  }

  void softmax_row(int64_t batch, int64_t head, int64_t query, int64_t key, int64_t count, int64_t row,
                   SoftmaxRow<float>& softmax) {
    float* logits = logits_ + row * logits_ld_;
    float factor = static_cast<float>(call_.scale * kLog2E);
    // online_softmax_update_bf16() wants the largest logit to stay the largest; a mask works on scaled ones.
    if (call_.mask.is_used() || !(factor > 0)) {
      for (int64_t j = 0; j < count; ++j) {
        logits[j] *= factor;
      }
      MaskRow<float>(call_.mask, batch, head, query, shape_.kv_len).apply(logits, key, count);
      factor = 1;
    }
    const int64_t whole = padded_to(count, kTileDepth);
    std::fill(logits + count, logits + whole, kMinusInfinity<float>);
    online_softmax_update_bf16(softmax, logits, static_cast<int>(whole / kLanes<float>), factor,
                               weights_ + row * weights_ld_);
  }

  void add_rescaled(int64_t rows, const SoftmaxRow<float>* softmax) {
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t j = 0; j < output_ld_; j += kLanes<float>) {
        float* output = outputs_ + row * output_ld_ + j;
        store_full(load_full(output) * softmax[row].rescale + load_full(partial_ + row * output_ld_ + j), output);
      }
    }
  }

  // gain · outputs_, normalized, + addend: rounded into `heads`, and as it is where backward needs it.
  void store_heads(int64_t batch, int64_t head, int64_t first, int64_t rows, const SoftmaxRow<float>* softmax,
                   BFloat16* heads) {
    float* saved = call_.attn_out == nullptr
                       ? nullptr
                       : static_cast<float*>(call_.attn_out) + (batch * shape_.q_len + first) * shape_.inner_dim() +
                             head * shape_.head_dim;
    const float gain = head_gain<float>(call_, head);
    for (int64_t row = 0; row < rows; ++row) {
      const float inverse = softmax[row].inverse() * gain;
      for (int64_t j = 0; j < shape_.head_dim; j += kLanes<float>) {
        store_full(load_full(outputs_ + row * output_ld_ + j) * inverse, outputs_ + row * output_ld_ + j);
      }
    }
    if (call_.addend.data != nullptr) {
      add_rows(addend_rows(call_, batch, head, first), rows, shape_.head_dim, 1.0F, outputs_, output_ld_);
    }
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t j = 0; j < shape_.head_dim; j += kLanes<float>) {
        const int count = static_cast<int>(std::min<int64_t>(kLanes<float>, shape_.head_dim - j));
        const Vector<float> output = load_full(outputs_ + row * output_ld_ + j);
        store(output, heads + row * features_ld_ + j, count);
        if (saved != nullptr) {
          store(output, saved + row * shape_.inner_dim() + j, count);
        }
      }
    }
  }

  // y from heads · weight, two by two tiles at a time.
  void project(int64_t batch, int64_t first, int64_t rows) {
    const int64_t depth_tiles = tiles_of(shape_.inner_dim(), kTileDepth);
    const AmxPanels weight{static_cast<const BFloat16*>(call_.weight), depth_tiles * kTileElements};
    for (int64_t channel = 0; channel < shape_.out_dim; channel += kBf16Rows) {
      const int64_t columns = std::min(kBf16Rows, shape_.out_dim - channel);
      for (int64_t row = 0; row < rows; row += kBf16Rows) {
        const int64_t count = std::min(kBf16Rows, rows - row);
        multiply_bf16(count, columns, shape_.inner_dim(), heads_ + row * features_ld_, features_ld_,
                      weight.from(channel / kTileSize), sums_, kBf16Rows, false);
        store_projection(call_, unrounded_, batch, first + row, channel, count, columns, sums_, kBf16Rows);
      }
    }
  }

  const AttentionForward& call_;
  const AttentionShape& shape_;
  int64_t width_;        // of a head, in whole tiles of A
  int64_t width_ld_;     // elements between rows of queries_
  int64_t output_ld_;    // the width of a head in whole tiles of C
  int64_t keys_depth_;   // keys, in whole tiles of A
  int64_t block_;        // keys at a time
  int64_t weights_ld_;   // elements between rows of weights_
  int64_t logits_ld_;    // and of logits_
  int64_t features_ld_;  // and of heads_
  UnroundedOutput<float> unrounded_;
  Scratch<BFloat16> bf16_scratch_;
  Scratch<float> accum_;
  Bf16Session tiles_;
  BFloat16* keys_;     // Kᵀ, in column tiles
  BFloat16* values_;   // V, in column tiles
  BFloat16* queries_;  // [rows][width_ld]
  BFloat16* weights_;  // [rows][weights_ld]: softmax, unnormalized
  BFloat16* heads_;    // [query_block][features_ld]
  float* logits_;      // [rows][logits_ld]
  float* outputs_;     // [rows][output_ld]
  float* partial_;     // [rows][output_ld]: those of one block of keys
  float* sums_;        // [rows][rows]
};

}  // namespace overtone::OVERTONE_ISA
