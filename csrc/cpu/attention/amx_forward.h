// Forward of bfloat16 attention on tiles: logits, heads and projection are products of bfloat16 with float32 sums, the
// softmax between them is float32. Its weights and the heads are rounded to bfloat16, as PyTorch rounds them.
#pragma once

#include "cpu/attention/forward.h"
#include "cpu/gemm/pack_amx.h"

namespace overtone::OVERTONE_ISA {

constexpr int64_t kTileStrip = 2 * kTileSize;  // queries, or keys, at a time: the rows of two tiles

// Tokens at a time, in blocks of nearly equal size, of whole tiles: one block at ViT sizes.
inline int64_t tile_block(int64_t tokens) {
  constexpr int64_t kMost = 512;
  const int64_t blocks = std::max<int64_t>(1, tiles_of(tokens, kMost));
  return std::max(kTileDepth, padded_to(tiles_of(tokens, blocks), kTileDepth));
}

// Turns a block of logits (whole vectors), times `factor` > 0, into unnormalised weights.
OVERTONE_INLINE void absorb_rounded(SoftmaxRow<float>& row, const float* logits, int vectors, float factor,
                                    BFloat16* weights) {
  constexpr int kSize = kLanes<float>;
  Vector<float> best[2] = {load_full(logits), load_full(logits + (vectors - 1) * kSize)};
  for (int v = 1; v + 1 < vectors; v += 2) {
    best[0] = larger<float>(best[0], load_full(logits + v * kSize));
    best[1] = larger<float>(best[1], load_full(logits + (v + 1) * kSize));
  }
  const float lowered = row.raise(largest_lane<float>(larger<float>(best[0], best[1])) * factor);
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
  row.add(sum_of_lanes<float>(totals[0] + totals[1]));
}

// Scratch and steps of one thread's forward items.
class TileForwardWorker {
 public:
  explicit TileForwardWorker(const AttentionForward& call)
      : call_(call),
        shape_(call.shape),
        width_(padded_to(shape_.width, kTileDepth)),
        width_ld_(padded_stride<BFloat16>(width_)),
        output_ld_(padded_to(shape_.width, kTileSize)),
        keys_depth_(padded_to(shape_.keys, kTileDepth)),
        block_(tile_block(shape_.keys)),
        weights_ld_(padded_stride<BFloat16>(block_)),
        logits_ld_(padded_stride<float>(block_)),
        features_ld_(padded_stride<BFloat16>(padded_to(shape_.features(), kTileDepth))),
        wide_(call),
        numbers_(Scratch<BFloat16>::padded(keys_depth_ * width_) + Scratch<BFloat16>::padded(keys_depth_ * output_ld_) +
                 Scratch<BFloat16>::padded(kTileStrip * width_ld_) +
                 Scratch<BFloat16>::padded(kTileStrip * weights_ld_) +
                 Scratch<BFloat16>::padded(padded_to(call.query_block, kTileStrip) * features_ld_)),
        sums_memory_(kTileStrip * (logits_ld_ + 2 * output_ld_ + kTileStrip)) {
    numbers_.clear();  // what fills tiles up is never written again
    keys_ = numbers_.take(keys_depth_ * width_);
    values_ = numbers_.take(keys_depth_ * output_ld_);
    queries_ = numbers_.take(kTileStrip * width_ld_);
    weights_ = numbers_.take(kTileStrip * weights_ld_);
    heads_ = numbers_.take(padded_to(call.query_block, kTileStrip) * features_ld_);
    logits_ = sums_memory_.take(kTileStrip * logits_ld_);
    outputs_ = sums_memory_.take(kTileStrip * output_ld_);
    parts_ = sums_memory_.take(kTileStrip * output_ld_);
    sums_ = sums_memory_.take(kTileStrip * kTileStrip);
  }

  void run(int64_t item) {
    const int64_t image = item / call_.blocks();
    const int64_t first = item % call_.blocks() * call_.query_block;
    const int64_t rows = std::min(call_.query_block, shape_.queries - first);
    for (int64_t head = 0; head < shape_.heads; ++head) {
      attend(image, head, first, rows);
    }
    project(image, first, rows);
    wide_.finish_block(image);
  }

 private:
  void attend(int64_t image, int64_t head, int64_t first_query, int64_t rows) {
    pack_column_pairs(head_rows(call_.key, call_.type, image, head, 0), shape_.keys, shape_.width, keys_);
    pack_row_pairs(head_rows(call_.value, call_.type, image, head, 0), shape_.keys, shape_.width, {}, values_,
                   keys_depth_ / kTileDepth);
    for (int64_t row = 0; row < rows; row += kTileStrip) {
      const int64_t first = first_query + row;
      const int64_t count = std::min(kTileStrip, rows - row);
      pack_tile_rows(head_rows(call_.query, call_.type, image, head, first), count, shape_.width, queries_, width_ld_);
      SoftmaxRow<float> softmax[kTileStrip];
      attend_strip(image, head, first, count, softmax);
      save_softmax(call_, image, head, first, count, softmax);
      store_heads(image, head, first, count, softmax, heads_ + row * features_ld_ + head * shape_.width);
    }
  }

  // One strip of queries against all keys it sees: unnormalised heads in outputs_.
  void attend_strip(int64_t image, int64_t head, int64_t first, int64_t rows, SoftmaxRow<float>* softmax) {
    const int64_t last_key = call_.mask.causal ? std::min(shape_.keys, first + rows) : shape_.keys;
    const int64_t row_tiles = tiles_of(rows, kTileSize);
    const int64_t width_tiles = output_ld_ / kTileSize;
    if (last_key == 0) {
      std::fill(outputs_, outputs_ + kTileStrip * output_ld_, 0.0F);
    }
    for (int64_t key = 0; key < last_key; key += block_) {
      const int64_t count = std::min(block_, last_key - key);
      const TileColumns keys{keys_ + key * width_, kTileSize * width_};
      multiply_tiles(row_tiles, tiles_of(count, kTileSize), width_ / kTileDepth, queries_, width_ld_, keys, logits_,
                     logits_ld_, false);
      for (int64_t row = 0; row < rows; ++row) {
        absorb_row(image, head, first + row, key, count, row, softmax[row]);
      }
      const TileColumns values{values_ + key * kTileSize, kTileSize * keys_depth_};
      multiply_tiles(row_tiles, width_tiles, tiles_of(count, kTileDepth), weights_, weights_ld_, values,
                     key == 0 ? outputs_ : parts_, output_ld_, false);
      if (key > 0) {
        add_rescaled(rows, softmax);
      }
    }
  }

  void absorb_row(int64_t image, int64_t head, int64_t query, int64_t key, int64_t count, int64_t row,
                  SoftmaxRow<float>& softmax) {
    float* logits = logits_ + row * logits_ld_;
    float factor = static_cast<float>(call_.scale * kLog2E);
    // absorb_rounded() wants the largest logit to stay the largest; a mask works on scaled ones.
    if (call_.mask.is_used() || !(factor > 0)) {
      for (int64_t j = 0; j < count; ++j) {
        logits[j] *= factor;
      }
      MaskRow<float>(call_.mask, image, head, query, shape_.keys).apply(logits, key, count);
      factor = 1;
    }
    const int64_t whole = padded_to(count, kTileDepth);
    std::fill(logits + count, logits + whole, kMinusInfinity<float>);
    absorb_rounded(softmax, logits, static_cast<int>(whole / kLanes<float>), factor, weights_ + row * weights_ld_);
  }

  void add_rescaled(int64_t rows, const SoftmaxRow<float>* softmax) {
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t j = 0; j < output_ld_; j += kLanes<float>) {
        float* output = outputs_ + row * output_ld_ + j;
        store_full(load_full(output) * softmax[row].rescale + load_full(parts_ + row * output_ld_ + j), output);
      }
    }
  }

  // outputs_, normalised: rounded into `heads`, and as they are where backward needs them.
  void store_heads(int64_t image, int64_t head, int64_t first, int64_t rows, const SoftmaxRow<float>* softmax,
                   BFloat16* heads) {
    float* saved = call_.heads == nullptr
                       ? nullptr
                       : static_cast<float*>(call_.heads) + (image * shape_.queries + first) * shape_.features() +
                             head * shape_.width;
    for (int64_t row = 0; row < rows; ++row) {
      const float inverse = softmax[row].inverse();
      for (int64_t j = 0; j < shape_.width; j += kLanes<float>) {
        const int count = static_cast<int>(std::min<int64_t>(kLanes<float>, shape_.width - j));
        const Vector<float> output = load_full(outputs_ + row * output_ld_ + j) * inverse;
        store(output, heads + row * features_ld_ + j, count);
        if (saved != nullptr) {
          store(output, saved + row * shape_.features() + j, count);
        }
      }
    }
  }

  // y = residual + heads · weight, two by two tiles at a time.
  void project(int64_t image, int64_t first, int64_t rows) {
    const int64_t depth_tiles = tiles_of(shape_.features(), kTileDepth);
    const TileColumns weight{static_cast<const BFloat16*>(call_.weight), depth_tiles * kTileElements};
    for (int64_t channel = 0; channel < shape_.channels; channel += kTileStrip) {
      const int64_t columns = std::min(kTileStrip, shape_.channels - channel);
      for (int64_t row = 0; row < rows; row += kTileStrip) {
        const int64_t count = std::min(kTileStrip, rows - row);
        multiply_tiles(tiles_of(count, kTileSize), tiles_of(columns, kTileSize), depth_tiles,
                       heads_ + row * features_ld_, features_ld_, weight.from(channel / kTileSize), sums_, kTileStrip,
                       false);
        store_result(image, first + row, count, channel, columns);
      }
    }
  }

  void store_result(int64_t image, int64_t first, int64_t rows, int64_t channel, int64_t columns) const {
    const int64_t* strides = call_.residual_strides;
    for (int64_t row = 0; row < rows; ++row) {
      BFloat16* y = static_cast<BFloat16*>(call_.y) + (image * shape_.queries + first + row) * shape_.channels;
      float* wide_y = wide_.row(image, first + row);
      for (int64_t j = 0; j < columns; j += kLanes<float>) {
        const int count = static_cast<int>(std::min<int64_t>(kLanes<float>, columns - j));
        Vector<float> sum = load_full(sums_ + row * kTileStrip + j);
        if (call_.residual != nullptr) {
          const BFloat16* residual = static_cast<const BFloat16*>(call_.residual) + image * strides[0] +
                                     (first + row) * strides[1] + (channel + j) * strides[2];
          sum += load(residual, strides[2], count);
        }
        store(sum, y + channel + j, count);
        if (wide_y != nullptr) {
          store(sum, wide_y + channel + j, count);
        }
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
  WideResult<float> wide_;
  Scratch<BFloat16> numbers_;
  Scratch<float> sums_memory_;
  TileSession tiles_;
  BFloat16* keys_;     // Kᵀ, in column tiles
  BFloat16* values_;   // V, in column tiles
  BFloat16* queries_;  // [strip][width_ld]
  BFloat16* weights_;  // [strip][weights_ld]: softmax, unnormalised
  BFloat16* heads_;    // [query_block][features_ld]
  float* logits_;      // [strip][logits_ld]
  float* outputs_;     // [strip][output_ld]
  float* parts_;       // [strip][output_ld]: those of one block of keys
  float* sums_;        // [strip][strip]
};

}  // namespace overtone::OVERTONE_ISA
