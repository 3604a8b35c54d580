// The frequency kernels, written once and compiled for every instruction set.
//
// Sums over tokens are carried in twice the tokens' precision, and the mean is kept as value + rest: HFC keeps its
// digits however far from zero the tokens lie, and ‖HFC‖² is never a difference of large numbers.
#pragma once

#include "cpu/frequency/channel_block.h"
#include "cpu/simd/scratch.h"

namespace overtone::OVERTONE_ISA {

// Σ_c n·mean_c² and Σ_c Σ_i (x_ic − mean_c)² of one block.
struct BlockSquares {
  double low;
  double high;
};

template <class A, class Rows>
OVERTONE_INLINE BlockSquares block_squares(const Rows& x, const ValidTokens& valid) {
  constexpr int kVectors = ChannelBlock<A>::kVectors;
  const BlockMean<A> mean(x, valid);

  // Squares do not cancel: a few rows are added up in A before they go to the wide sum, which is slower.
  constexpr int64_t kRows = 8;
  BlockSums<A> high;
  for (int64_t begin = 0; begin < valid.tokens; begin += kRows) {
    BlockVectors<A> few{};
    for (int64_t row = begin; row < std::min(begin + kRows, valid.tokens); ++row) {
      if (valid[row]) {
        for (int v = 0; v < kVectors; ++v) {
          const Vector<A> centered = mean.center(x.load(row, v), v);
          few[v] += centered * centered;
        }
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      high[v].add(few[v]);
    }
  }
  BlockSums<A> low;
  for (int v = 0; v < kVectors; ++v) {
    low[v].add(mean.value[v] * mean.value[v]);
  }
  return {reduce_add<A>(low) * static_cast<double>(mean.count), reduce_add<A>(high)};
}

// Whether a block's sum of squares in A has lost nothing: none of 2^30 terms overflowed, and those that vanished are
// beyond its last bit.
template <class A>
bool kept_squares(double sum) {
  constexpr int kMin = std::numeric_limits<A>::min_exponent + std::numeric_limits<A>::digits + 30;
  return std::isfinite(sum) && sum >= std::ldexp(1.0, kMin);
}

template <class T, bool kContiguous>
Accumulator<T> largest_of_block(const BlockRows<T, kContiguous>& x, const ValidTokens& valid) {
  using A = Accumulator<T>;
  Vector<A> largest{};
  for (int64_t row = 0; row < valid.tokens; ++row) {
    for (int v = 0; v < ChannelBlock<A>::kVectors && valid[row]; ++v) {
      largest = max<A>(largest, abs<A>(x.load(row, v)));
    }
  }
  return reduce_max<A>(largest);
}

template <class T, bool kContiguous>
void norms_forward_block(const NormsForward& call, const ChannelBlock<Accumulator<T>>& block) {
  using A = Accumulator<T>;
  const BlockRows<T, kContiguous> x(call.x, block);
  const ValidTokens valid(call.mask, call.shape, block.sample);
  BlockSquares squares = block_squares<A>(x, valid);
  int exponent = 0;
  if (!kept_squares<A>(squares.low) || !kept_squares<A>(squares.high)) {
    constexpr int kNear = std::numeric_limits<A>::max_exponent / 4;  // squares of these are kept
    exponent = tokens_exponent(largest_of_block(x, valid), std::is_same_v<A, double>);
    exponent = std::abs(exponent) <= kNear ? 0 : exponent;
    if (exponent != 0) {
      squares = block_squares<A>(ScaledRows<T>(call.x, block, exponent), valid);
    }
  }
  const int64_t slot = block.sample * call.shape.blocks() + block.index;
  call.low_squared[slot] = squares.low;
  call.high_squared[slot] = squares.high;
  call.exponents[slot] = exponent;
}

// y = constant + high ⊙ (x − mean) with one value per channel: what every filter by the mean over all tokens comes to.
template <class A>
class RowMap {
 public:
  explicit RowMap(int64_t channels) : memory_(3 * Scratch<A>::padded(padded_to(channels, kChannelBlock))) {
    for (A** part : {&values_.mean, &values_.constant, &values_.high}) {
      *part = memory_.take(padded_to(channels, kChannelBlock));
    }
  }

  // Fills in one block: low(v) ⊙ mean + high(v) ⊙ (x − mean). The constant has the mean's rest, beyond A's precision.
  template <class Low, class High>
  OVERTONE_INLINE void set(const ChannelBlock<A>& block, const BlockMean<A>& block_mean, Low low, High high) {
    for (int v = 0; v < ChannelBlock<A>::kVectors; ++v) {
      const int64_t channel = block.begin + v * kLanes<A>;
      store_full(block_mean.value[v], values_.mean + channel);
      store_full<A>(low(v) * block_mean.value[v] - high(v) * block_mean.rest[v], values_.constant + channel);
      store_full<A>(high(v), values_.high + channel);
    }
  }

  // Tokens are multiplied by this power of two before they are mapped.
  void scale_tokens(A factor) { token_factor_ = factor; }

  // Channels [begin, end) of a sample; adds `addend`, laid out as `out`, where it is given.
  template <class T>
  void apply(const StridedTokens& x, int64_t sample, const ValidTokens& valid, int64_t begin, int64_t end,
             int64_t channels, const T* addend, T* out) const {
    const T* tokens = static_cast<const T*>(x.data) + x.sample_offsets[sample];
    out += sample * valid.tokens * channels;
    addend = addend == nullptr ? nullptr : addend + sample * valid.tokens * channels;
    for (int64_t row = 0; row < valid.tokens;) {
      const Rows<T> rows{tokens + row * x.token_stride,
                         x.token_stride,
                         x.channel_stride,
                         addend == nullptr ? nullptr : addend + row * channels,
                         out + row * channels,
                         channels};
      const int64_t count = valid.are_all(row, kRows) ? kRows : 1;
      for (int64_t ahead = row + kRowsAhead; ahead < std::min(row + kRowsAhead + count, valid.tokens); ++ahead) {
        prefetch(out + ahead * channels + begin, end - begin);
      }
      if (count == kRows) {
        map<kRows>(rows, begin, end);
      } else if (valid[row]) {
        map<1>(rows, begin, end);
      } else {
        std::memset(static_cast<void*>(rows.out + begin), 0, (end - begin) * sizeof(T));
      }
      row += count;
    }
  }

 private:
  static constexpr int kRows = 4;  // that share the loads of the channels' values
  // Lines to be written are asked for so many rows ahead: as much was waited for them as all else took.
  static constexpr int64_t kRowsAhead = 16;

  template <class T>
  struct Rows {
    const T* token;
    int64_t token_stride;
    int64_t channel_stride;
    const T* addend;
    T* out;
    int64_t channels;
  };

  template <int kCount, class T>
  OVERTONE_INLINE void map(const Rows<T>& rows, int64_t begin, int64_t end) const {
    const bool is_direct = rows.channel_stride == 1 && token_factor_ == 1;
    const int64_t whole = is_direct ? begin + (end - begin) / kLanes<A> * kLanes<A> : begin;
    rows.addend == nullptr ? map_whole<kCount, false>(rows, begin, whole) : map_whole<kCount, true>(rows, begin, whole);
    for (int row = 0; row < kCount; ++row) {
      for (int64_t channel = whole; channel < end; channel += kLanes<A>) {
        const int lanes = static_cast<int>(std::min<int64_t>(kLanes<A>, end - channel));
        const T* token = rows.token + row * rows.token_stride + channel * rows.channel_stride;
        Vector<A> value = values_.at(channel).map(load(token, rows.channel_stride, lanes) * token_factor_);
        if (rows.addend != nullptr) {
          value += load(rows.addend + row * rows.channels + channel, 1, lanes);
        }
        store(value, rows.out + row * rows.channels + channel, lanes);
      }
    }
  }

  // Channels [begin, end) in full vectors of consecutive channels. Works on copies: a vector's store might change any
  // member, for all the compiler knows, and it would read them again for every vector.
  template <int kCount, bool kAdds, class T>
  void map_whole(Rows<T> rows, int64_t begin, int64_t end) const {
    const ChannelValues values = values_;
    for (int64_t channel = begin; channel < end; channel += kLanes<A>) {
      const ChannelMap channel_map = values.at(channel);
      OVERTONE_UNROLL
      for (int row = 0; row < kCount; ++row) {
        Vector<A> value = channel_map.map(load_full(rows.token + row * rows.token_stride + channel));
        if constexpr (kAdds) {
          value += load_full(rows.addend + row * rows.channels + channel);
        }
        store_full(value, rows.out + row * rows.channels + channel);
      }
    }
  }

  struct ChannelMap {
    Vector<A> mean;
    Vector<A> constant;
    Vector<A> high;

    OVERTONE_INLINE Vector<A> map(Vector<A> x) const { return constant + high * (x - mean); }
  };

  struct ChannelValues {
    A* mean;
    A* constant;
    A* high;

    OVERTONE_INLINE ChannelMap at(int64_t channel) const {
      return {load_full(mean + channel), load_full(constant + channel), load_full(high + channel)};
    }
  };

  Scratch<A> memory_;
  ChannelValues values_;
  A token_factor_ = 1;
};

template <class T, bool kContiguous>
void norms_backward_block(const NormsBackward& call, const ChannelBlock<Accumulator<T>>& block,
                          RowMap<Accumulator<T>>& map) {
  using A = Accumulator<T>;
  const ValidTokens valid(call.mask, call.shape, block.sample);
  const int exponent = call.exponents[block.sample];
  const BlockMean<A> mean = exponent == 0 ? BlockMean<A>(BlockRows<T, kContiguous>(call.x, block), valid)
                                          : BlockMean<A>(ScaledRows<T>(call.x, block, exponent), valid);
  map.scale_tokens(std::ldexp(A{1}, -exponent));
  const A low_scale = static_cast<A>(call.low_scale[block.sample]);
  const A high_scale = static_cast<A>(call.high_scale[block.sample]);
  map.set(block, mean, [&](int) { return broadcast(low_scale); }, [&](int) { return broadcast(high_scale); });
}

// The filter with the mean over all valid tokens is its own adjoint, so backward uses it too.
template <class A>
OVERTONE_INLINE void set_filter(RowMap<A>& map, const ChannelBlock<A>& block, const BlockMean<A>& mean,
                                const BlockGain<A>& low, const BlockGain<A>& high) {
  map.set(block, mean, [&](int v) { return low.value[v]; }, [&](int v) { return high.value[v]; });
}

// Visits the valid tokens in order: visit(row, v, LFC, HFC) with the running mean. Masked rows go to skip(row).
template <class T, bool kContiguous, class Visit, class Skip>
OVERTONE_INLINE void for_running_mean(const BlockRows<T, kContiguous>& x, const ValidTokens& valid, Visit visit,
                                      Skip skip) {
  using A = Accumulator<T>;
  constexpr int kVectors = ChannelBlock<A>::kVectors;
  BlockSums<A> sums;
  int64_t count = 0;
  for (int64_t row = 0; row < valid.tokens; ++row) {
    if (!valid[row]) {
      skip(row);
      continue;
    }
    const double inverse = 1.0 / static_cast<double>(++count);
    for (int v = 0; v < kVectors; ++v) {
      const Vector<A> token = x.load(row, v);
      Vector<A> mean;
      Vector<A> rest;
      sums[v].add(token);
      sums[v].scaled(inverse, mean, rest);
      visit(row, v, mean, (token - mean) - rest);
    }
  }
}

template <class T, bool kContiguous>
void filter_forward_block(const FilterForward& call, const ChannelBlock<Accumulator<T>>& block,
                          RowMap<Accumulator<T>>& map) {
  using A = Accumulator<T>;
  const BlockRows<T, kContiguous> x(call.x, block);
  const ValidTokens valid(call.mask, call.shape, block.sample);
  const BlockGain<A> low(call.low, block);
  const BlockGain<A> high(call.high, block);
  if (!call.causal) {
    set_filter(map, block, BlockMean<A>(x, valid), low, high);
    return;
  }
  const BlockOutput<T, kContiguous> y(call.y, call.shape, block);
  for_running_mean(
      x, valid,
      [&](int64_t row, int v, Vector<A> low_part, Vector<A> high_part) {
        y.store(low.value[v] * low_part + high.value[v] * high_part, row, v);
      },
      [&](int64_t row) { y.zero_row(row); });
}

// ∂L/∂x_j = high ⊙ G_j + (low − high) ⊙ Σ_{i ≥ j} G_i / count_i, from the last token to the first.
template <class T, bool kContiguous>
OVERTONE_INLINE void causal_adjoint(const BlockRows<T, kContiguous>& grad_y, const ValidTokens& valid,
                                    const BlockGain<Accumulator<T>>& low, const BlockGain<Accumulator<T>>& high,
                                    const BlockOutput<T, kContiguous>& grad_x) {
  using A = Accumulator<T>;
  constexpr int kVectors = ChannelBlock<A>::kVectors;
  BlockSums<A> sums;
  int64_t count = valid.count();
  for (int64_t row = valid.tokens - 1; row >= 0; --row) {
    if (!valid[row]) {
      grad_x.zero_row(row);
      continue;
    }
    const A inverse = 1 / static_cast<A>(count--);
    for (int v = 0; v < kVectors; ++v) {
      const Vector<A> g = grad_y.load(row, v);
      Vector<A> later;
      Vector<A> rest;
      sums[v].add(g * inverse);
      sums[v].scaled(1.0, later, rest);
      grad_x.store(high.value[v] * g + (low.value[v] - high.value[v]) * later, row, v);
    }
  }
}

// Σ_i LFC[x]_i ⊙ G_i and Σ_i HFC[x]_i ⊙ G_i with the running mean.
template <class T, bool kContiguous>
OVERTONE_INLINE void causal_gain_gradients(const BlockRows<T, kContiguous>& x, const BlockRows<T, kContiguous>& grad_y,
                                           const ValidTokens& valid, BlockSums<Accumulator<T>>& low,
                                           BlockSums<Accumulator<T>>& high) {
  using A = Accumulator<T>;
  for_running_mean(
      x, valid,
      [&](int64_t row, int v, Vector<A> low_part, Vector<A> high_part) {
        const Vector<A> g = grad_y.load(row, v);
        low[v].add(low_part * g);
        high[v].add(high_part * g);
      },
      [](int64_t) {});
}

// With the mean over all tokens the sums factor: n · mean(x) · mean(G), and the covariance of x and G.
template <class T, bool kContiguous>
OVERTONE_INLINE void mean_gain_gradients(const BlockRows<T, kContiguous>& x, const BlockRows<T, kContiguous>& grad_y,
                                         const BlockMean<Accumulator<T>>& grad_mean, const ValidTokens& valid,
                                         BlockSums<Accumulator<T>>& low, BlockSums<Accumulator<T>>& high) {
  using A = Accumulator<T>;
  constexpr int kVectors = ChannelBlock<A>::kVectors;
  const BlockMean<A> x_mean(x, valid);
  for (int64_t row = 0; row < valid.tokens; ++row) {
    if (valid[row]) {
      for (int v = 0; v < kVectors; ++v) {
        high[v].add(x_mean.center(x.load(row, v), v) * grad_mean.center(grad_y.load(row, v), v));
      }
    }
  }
  for (int v = 0; v < kVectors; ++v) {
    low[v].add(static_cast<A>(x_mean.count) * x_mean.value[v] * grad_mean.value[v]);
  }
}

template <class T, bool kContiguous>
void filter_backward_block(const FilterBackward& call, const ChannelBlock<Accumulator<T>>& block,
                           RowMap<Accumulator<T>>& map) {
  using A = Accumulator<T>;
  const BlockRows<T, kContiguous> grad_y(call.grad_y, block);
  const BlockRows<T, kContiguous> x(call.grad_low == nullptr ? call.grad_y : call.x, block);
  const ValidTokens valid(call.mask, call.shape, block.sample);
  const BlockGain<A> low(call.low, block);
  const BlockGain<A> high(call.high, block);
  BlockSums<A> grad_low;
  BlockSums<A> grad_high;
  if (call.causal) {
    if (call.grad_x != nullptr) {
      causal_adjoint(grad_y, valid, low, high, BlockOutput<T, kContiguous>(call.grad_x, call.shape, block));
    }
    if (call.grad_low != nullptr) {
      causal_gain_gradients(x, grad_y, valid, grad_low, grad_high);
    }
  } else {
    const BlockMean<A> grad_mean(grad_y, valid);
    set_filter(map, block, grad_mean, low, high);
    if (call.grad_low != nullptr) {
      mean_gain_gradients(x, grad_y, grad_mean, valid, grad_low, grad_high);
    }
  }
  if (call.grad_low != nullptr) {
    const int64_t slot = block.sample * call.shape.channels + block.begin;
    write_channels<A>(grad_low, block, call.grad_low + slot);
    write_channels<A>(grad_high, block, call.grad_high + slot);
  }
}

// Calls block(sample, first block, last block, …) for the blocks of work items [begin, end).
template <class Body>
OVERTONE_INLINE void for_item_blocks(const FrequencyShape& shape, int64_t begin, int64_t end, const Body& body) {
  for (int64_t item = begin; item < end; ++item) {
    const int64_t first = item % shape.items_per_sample() * shape.blocks_per_item();
    body(item / shape.items_per_sample(), first, std::min(first + shape.blocks_per_item(), shape.blocks()));
  }
}

// Whether a block can be read in whole vectors of consecutive channels.
template <class A>
bool is_contiguous(const ChannelBlock<A>& block, const StridedTokens& tokens) {
  return block.width == kChannelBlock && tokens.channel_stride == 1;
}

template <class T>
void norms_forward_items(const NormsForward& call, int64_t begin, int64_t end) {
  for_item_blocks(call.shape, begin, end, [&](int64_t sample, int64_t first, int64_t last) {
    for (int64_t index = first; index < last; ++index) {
      const ChannelBlock<Accumulator<T>> block(call.shape, sample, index);
      is_contiguous(block, call.x) ? norms_forward_block<T, true>(call, block)
                                   : norms_forward_block<T, false>(call, block);
    }
  });
}

// First every block's sums, then one pass over whole rows, which by then are in the second-level cache.
template <class T, class Call, class Block>
OVERTONE_INLINE void map_items(const Call& call, const StridedTokens& tokens, const void* addend, void* out,
                               int64_t begin, int64_t end, const Block& run_block) {
  RowMap<Accumulator<T>> map(call.shape.channels);
  for_item_blocks(call.shape, begin, end, [&](int64_t sample, int64_t first, int64_t last) {
    for (int64_t index = first; index < last; ++index) {
      run_block(ChannelBlock<Accumulator<T>>(call.shape, sample, index), map);
    }
    if (out != nullptr) {
      map.template apply<T>(tokens, sample, ValidTokens(call.mask, call.shape, sample), first * kChannelBlock,
                            std::min(last * kChannelBlock, call.shape.channels), call.shape.channels,
                            static_cast<const T*>(addend), static_cast<T*>(out));
    }
  });
}

template <class T>
void norms_backward_items(const NormsBackward& call, int64_t begin, int64_t end) {
  map_items<T>(call, call.x, call.addend, call.grad_x, begin, end, [&](const auto& block, auto& map) {
    is_contiguous(block, call.x) ? norms_backward_block<T, true>(call, block, map)
                                 : norms_backward_block<T, false>(call, block, map);
  });
}

template <class T>
void filter_forward_items(const FilterForward& call, int64_t begin, int64_t end) {
  map_items<T>(call, call.x, nullptr, call.causal ? nullptr : call.y, begin, end, [&](const auto& block, auto& map) {
    is_contiguous(block, call.x) ? filter_forward_block<T, true>(call, block, map)
                                 : filter_forward_block<T, false>(call, block, map);
  });
}

template <class T>
void filter_backward_items(const FilterBackward& call, int64_t begin, int64_t end) {
  map_items<T>(call, call.grad_y, nullptr, call.causal ? nullptr : call.grad_x, begin, end,
               [&](const auto& block, auto& map) {
                 const bool contiguous =
                     is_contiguous(block, call.grad_y) && (call.grad_low == nullptr || is_contiguous(block, call.x));
                 contiguous ? filter_backward_block<T, true>(call, block, map)
                            : filter_backward_block<T, false>(call, block, map);
               });
}

#define OVERTONE_FOR_TYPES(function, Call)                             \
  inline void function(const Call& call, int64_t begin, int64_t end) { \
    switch (call.type) {                                               \
      case Dtype::float32:                                             \
        return function##_items<float>(call, begin, end);              \
      case Dtype::float64:                                             \
        return function##_items<double>(call, begin, end);             \
      case Dtype::bfloat16:                                            \
        return function##_items<BFloat16>(call, begin, end);           \
      case Dtype::float16:                                             \
        return function##_items<Half>(call, begin, end);               \
    }                                                                  \
  }

OVERTONE_FOR_TYPES(norms_forward, NormsForward)
OVERTONE_FOR_TYPES(norms_backward, NormsBackward)
OVERTONE_FOR_TYPES(filter_forward, FilterForward)
OVERTONE_FOR_TYPES(filter_backward, FilterBackward)
#undef OVERTONE_FOR_TYPES

extern const FrequencyKernels frequency_kernels = {
    OVERTONE_ISA_NAME, &norms_forward, &norms_backward, &filter_forward, &filter_backward,
};

}  // namespace overtone::OVERTONE_ISA
