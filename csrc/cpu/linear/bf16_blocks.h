// A block of tokens times a weight, in bfloat16: what linear layers and the MLP are made of.
#pragma once

#include "cpu/gemm/bf16.h"
#include "cpu/gemm/blocked.h"
#include "cpu/linear/bf16_params.h"
#include "cpu/simd/scratch.h"

namespace overtone::OVERTONE_ISA {

constexpr int64_t kBf16Strip = 48;   // rows, and
constexpr int64_t kBf16Width = 64;   // columns whose sums stay in the first-level cache until they are used
constexpr int64_t kBf16Sum = 256;    // the depth of so many columns of B that stays there for all rows
constexpr int64_t kBf16Group = 192;  // hidden channels at a time

// A weight [depth, columns] in panels.
struct Bf16Weight {
  const BFloat16* data;
  int64_t depth;
  int64_t columns;

  Bf16Weight(const void* panels, int64_t depth, int64_t columns)
      : data(static_cast<const BFloat16*>(panels)), depth(depth), columns(columns) {}

  // The panels from a column on, from a row on: whole panels, whole tiles.
  AmxPanels from(int64_t row, int64_t column) const {
    const int64_t stride = padded_to(depth, kTileDepth) * kTileSize;
    return {data + column / kTileSize * stride + row * kTileSize, stride};
  }
};

// Elements of the sums that multiply_strips() needs.
constexpr int64_t kStripSums = kLinearTokens * kBf16Width;

// A · weight[:, column : column + width], for at most kBf16Width columns; use(row, rows, sums) takes a strip of rows
// when it is there, kBf16Width apart.
template <class Use>
void multiply_strips(const Bf16Weight& weight, int64_t column, int64_t width, int64_t rows, const Bf16Operand& a,
                     float* sums, const Use& use) {
  const bool is_whole = weight.depth <= kBf16Sum;
  int64_t k = 0;
  do {
    const int64_t depth = std::min(kBf16Sum, weight.depth - k);
    for (int64_t row = 0; row < rows; row += kBf16Strip) {
      const int64_t count = std::min(kBf16Strip, rows - row);
      float* c = is_whole ? sums : sums + row * kBf16Width;
      multiply_bf16(count, width, depth, a.data + row * a.ld + k, a.ld, weight.from(k, column), c, kBf16Width, k > 0);
      if (k + depth == weight.depth) {
        use(row, count, static_cast<const float*>(c));
      }
    }
    k += depth;
  } while (k < weight.depth);
}

// f(column, lanes) for the vectors of `width` columns, the last of them with fewer lanes.
template <class F>
OVERTONE_INLINE void for_vectors(int64_t width, const F& f) {
  for (int64_t j = 0; j < width; j += kLanes<float>) {
    f(j, static_cast<int>(std::min<int64_t>(kLanes<float>, width - j)));
  }
}

// All tokens that `rows` ones from `token` on fill up, of a matrix in panels of `columns` channels: zeros for those
// that there are not.
inline void clear_last_pairs(BFloat16* pairs, int64_t columns, int64_t panel_stride, int64_t token, int64_t rows) {
  const int64_t first = padded_to(token + rows, 2);
  const int64_t end = padded_to(token + rows, kTileDepth);
  for (int64_t column = 0; column < columns && first < end; column += kTileSize) {
    BFloat16* panel = pairs + column / kTileSize * panel_stride;
    std::memset(static_cast<void*>(panel + first * kTileSize), 0, (end - first) * kTileSize * sizeof(BFloat16));
  }
}

// out = x · weight + bias for blocks of tokens.
class Bf16LinearBlocks {
 public:
  explicit Bf16LinearBlocks(const Bf16LinearForward& call)
      : call_(call),
        weight_(call.weight, call.inputs, call.outputs),
        bf16_scratch_(Scratch<BFloat16>::padded(Bf16Operand::size(kLinearTokens, call.inputs))),
        memory_(kStripSums + Scratch<float>::padded(call.outputs)),
        x_(bf16_scratch_.take(Bf16Operand::size(kLinearTokens, call.inputs))),
        sums_(memory_.take(kStripSums)) {
    float* bias = memory_.take(call.outputs);
    std::fill(bias, bias + Scratch<float>::padded(call.outputs), 0.0F);
    if (call.bias != nullptr) {
      std::copy(call.bias, call.bias + call.outputs, bias);
    }
    bias_ = bias;
  }

  void run(int64_t block) {
    const int64_t token = block * kLinearTokens;
    const int64_t rows = std::min(kLinearTokens, call_.tokens - token);
    const Bf16Operand x(call_.x.from(token, 0), rows, call_.inputs, x_);
    for (int64_t column = 0; column < call_.outputs; column += kBf16Width) {
      const int64_t width = std::min(kBf16Width, call_.outputs - column);
      BFloat16* out = static_cast<BFloat16*>(call_.out) + token * call_.outputs + column;
      multiply_strips(weight_, column, width, rows, x, sums_, [&](int64_t row, int64_t count, const float* sums) {
        for (int64_t i = 0; i < count; ++i) {
          for_vectors(width, [&](int64_t j, int lanes) {
            store(load_full(sums + i * kBf16Width + j) + load_full(bias_ + column + j),
                  out + (row + i) * call_.outputs + j, lanes);
          });
        }
      });
    }
  }

 private:
  const Bf16LinearForward& call_;
  Bf16Weight weight_;
  Scratch<BFloat16> bf16_scratch_;
  Scratch<float> memory_;
  Bf16Session session_;
  BFloat16* x_;
  float* sums_;
  const float* bias_;
};

class Bf16LinearBackwardBlocks {
 public:
  explicit Bf16LinearBackwardBlocks(const Bf16LinearBackward& call) : call_(call), grad_x_(call.grad) {}

  void run(int64_t block) {
    if (call_.grad.out != nullptr) {
      grad_x_.run(block);
    }
    if (call_.x_columns == nullptr) {
      return;
    }
    const int64_t token = block * kLinearTokens;
    const int64_t rows = std::min(kLinearTokens, call_.grad.tokens - token);
    pack_tile_columns(call_.x.from(token, 0), rows, call_.grad.outputs, static_cast<BFloat16*>(call_.x_columns) + token,
                      call_.layout.token_stride);
    pack_row_pairs(call_.grad.x.from(token, 0), rows, call_.grad.inputs,
                   static_cast<BFloat16*>(call_.grad_pairs) + token * kTileSize,
                   call_.layout.panel_stride / kTileElements, tiles_of(rows, kTileDepth));
  }

 private:
  const Bf16LinearBackward& call_;
  Bf16LinearBlocks grad_x_;
};

// An item is a block of a weight's gradient, summed over a part of the tokens.
class Bf16WeightGradientBlocks {
 public:
  explicit Bf16WeightGradientBlocks(const Bf16WeightGradient& call) : call_(call) {}

  void run(int64_t item) {
    const int64_t row = item % call_.row_blocks() * kGradientRows;
    const int64_t rows = std::min(kGradientRows, call_.rows - row);
    const int64_t column = item / call_.row_blocks() * kGradientColumns;
    const int64_t columns = std::min(kGradientColumns, call_.columns - column);
    const BFloat16* left = static_cast<const BFloat16*>(call_.left) + row * call_.layout.token_stride;
    const BFloat16* right = static_cast<const BFloat16*>(call_.right) + column / kTileSize * call_.layout.panel_stride;
    float* sums = call_.sums + item * kGradientRows * kGradientColumns;
    int64_t token = 0;
    do {
      multiply_bf16(rows, columns, std::min(kGradientSum, call_.tokens - token), left + token,
                    call_.layout.token_stride, {right + token * kTileSize, call_.layout.panel_stride}, sums,
                    kGradientColumns, token > 0 || !call_.is_first);
      token += kGradientSum;
    } while (token < call_.tokens);
    if (call_.is_last) {
      store_block(sums, row, rows, column, columns);
    }
    if (call_.row_sums != nullptr && column == 0) {
      for (int64_t i = 0; i < rows; ++i) {
        add_row(left + i * call_.layout.token_stride, call_.row_sums + row + i);
      }
    }
    if (call_.column_sums != nullptr && row == 0) {
      for_vectors(columns, [&](int64_t j, int lanes) {
        add_pairs(right + j / kTileSize * call_.layout.panel_stride + j % kTileSize * 2, call_.column_sums + column + j,
                  lanes);
      });
    }
  }

 private:
  void store_block(const float* sums, int64_t row, int64_t rows, int64_t column, int64_t columns) const {
    if (call_.is_transposed) {
      store_transposed(sums, kGradientColumns, rows, columns, call_.grad_weight + column * call_.rows + row, call_.rows,
                       [](int64_t, int64_t, Vector<float> v) { return v; });
    } else {
      float* out = call_.grad_weight + row * call_.columns + column;
      unpack_rows(sums, kGradientColumns, rows, columns, 1.0F, buffer_rows<float>(out, 0, call_.columns));
    }
  }

  // Rows end in zeros up to a whole tile.
  void add_row(const BFloat16* row, float* out) const {
    float total = call_.is_first ? 0 : *out;
    for (int64_t first = 0; first < call_.tokens; first += kGradientSum) {
      Vector<float> sums[2] = {};
      const int64_t end = std::min(call_.tokens, first + kGradientSum);
      for (int64_t token = first; token < end; token += 2 * kLanes<float>) {
        sums[0] += load_full(row + token);
        sums[1] += load_full(row + token + kLanes<float>);
      }
      total += reduce_add<float>(sums[0] + sums[1]);
    }
    *out = total;
  }

  // Of a vector's columns.
  void add_pairs(const BFloat16* pairs, float* out, int lanes) const {
    Vector<float> total = call_.is_first ? Vector<float>{} : load(static_cast<const float*>(out), 1, lanes);
    for (int64_t first = 0; first < call_.tokens; first += kGradientSum) {
      Vector<float> sums[2] = {};
      const int64_t end = std::min(call_.tokens, first + kGradientSum);
      for (int64_t token = first; token < end; token += 2) {
        Words words;
        std::memcpy(&words, static_cast<const void*>(pairs + token * kTileSize), sizeof words);
        sums[0] += (Vector<float>)(words << 16);
        sums[1] += (Vector<float>)(words & 0xffff0000u);
      }
      total += sums[0] + sums[1];
    }
    store(total, out, lanes);
  }

  const Bf16WeightGradient& call_;
  Bf16Session session_;
};

}  // namespace overtone::OVERTONE_ISA
