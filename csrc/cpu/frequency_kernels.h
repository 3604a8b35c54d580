// The frequency kernels, written once and compiled for every ISA level.
//
// Sums over tokens are carried in twice the tokens' precision, and the mean is kept as value + rest: HFC keeps its
// digits however far from zero the tokens lie, and ‖HFC‖² is never a difference of large numbers.
#pragma once

#include "cpu/frequency.h"
#include "cpu/simd.h"

namespace overtone::OVERTONE_LEVEL {

// The channels [begin, begin + width) of one sample, in vectors.
template <class A>
struct ChannelBlock {
  static constexpr int kVectors = static_cast<int>(kChannelBlock) / kLanes<A>;

  int64_t sample;
  int64_t index;  // of the block within its sample
  int64_t begin;
  int width;

  ChannelBlock(const FrequencyShape& shape, int64_t item)
      : sample(item / shape.blocks()),
        index(item % shape.blocks()),
        begin(index * kChannelBlock),
        width(static_cast<int>(std::min(kChannelBlock, shape.channels - begin))) {}

  // Lanes of vector v that hold channels.
  int lanes(int v) const { return std::clamp(width - v * kLanes<A>, 0, kLanes<A>); }
};

template <class A>
using BlockVectors = Vector<A>[ChannelBlock<A>::kVectors];

// Rows of one sample's block. kPacked: a full block of consecutive channels, read without any lane counting.
template <class T, bool kPacked>
struct BlockRows {
  using A = Accumulator<T>;
  const T* first;
  int64_t token_stride;
  int64_t channel_stride;
  ChannelBlock<A> block;

  BlockRows(const Tokens& tokens, const ChannelBlock<A>& block)
      : first(static_cast<const T*>(tokens.data) + tokens.sample_offsets[block.sample] +
              block.begin * tokens.channel_stride),
        token_stride(tokens.token_stride),
        channel_stride(tokens.channel_stride),
        block(block) {}

  OVERTONE_INLINE Vector<A> load(int64_t row, int v) const {
    if constexpr (kPacked) {
      return load_full(first + row * token_stride + v * kLanes<A>);
    } else {
      const int lanes = block.lanes(v);
      if (lanes == 0) {
        return Vector<A>{};
      }
      return OVERTONE_LEVEL::load(first + row * token_stride + v * kLanes<A> * channel_stride, channel_stride, lanes);
    }
  }
};

// Rows of a contiguous [samples, N, C] output.
template <class T, bool kPacked>
struct BlockOutput {
  using A = Accumulator<T>;
  T* first;
  int64_t channels;
  ChannelBlock<A> block;

  BlockOutput(void* data, const FrequencyShape& shape, const ChannelBlock<A>& block)
      : first(static_cast<T*>(data) + block.sample * shape.tokens * shape.channels + block.begin),
        channels(shape.channels),
        block(block) {}

  OVERTONE_INLINE void store(Vector<A> value, int64_t row, int v) const {
    T* p = first + row * channels + v * kLanes<A>;
    if constexpr (kPacked) {
      store_full(value, p);
    } else if (block.lanes(v) > 0) {
      OVERTONE_LEVEL::store(value, p, block.lanes(v));
    }
  }

  void zero_row(int64_t row) const {
    std::memset(static_cast<void*>(first + row * channels), 0, block.width * sizeof(T));
  }
};

// Which tokens of a sample take part.
struct ValidTokens {
  const bool* flags;
  int64_t stride;
  int64_t tokens;

  ValidTokens(const TokenMask& mask, const FrequencyShape& shape, int64_t sample)
      : flags(mask.data == nullptr ? nullptr : mask.data + mask.sample_offsets[sample]),
        stride(mask.token_stride),
        tokens(shape.tokens) {}

  OVERTONE_INLINE bool operator[](int64_t row) const { return flags == nullptr || flags[row * stride]; }

  int64_t count() const {
    if (flags == nullptr) {
      return tokens;
    }
    int64_t valid = 0;
    for (int64_t row = 0; row < tokens; ++row) {
      valid += flags[row * stride] ? 1 : 0;
    }
    return valid;
  }
};

template <class A>
struct BlockGain {
  BlockVectors<A> value;

  BlockGain(const ChannelGain& gain, const ChannelBlock<A>& block) {
    for (int v = 0; v < ChannelBlock<A>::kVectors; ++v) {
      const A* p = static_cast<const A*>(gain.data) + (block.begin + v * kLanes<A>)*gain.stride;
      value[v] = block.lanes(v) == 0 ? Vector<A>{} : OVERTONE_LEVEL::load(p, gain.stride, block.lanes(v));
    }
  }
};

template <class A>
using BlockSums = WideSum<A>[ChannelBlock<A>::kVectors];

// The mean over a block's valid tokens as value + rest; zero where no token is valid.
template <class A>
struct BlockMean {
  static constexpr int kVectors = ChannelBlock<A>::kVectors;
  BlockVectors<A> value;
  BlockVectors<A> rest;
  int64_t count;

  template <class Rows>
  OVERTONE_INLINE BlockMean(const Rows& x, const ValidTokens& valid) : count(valid.count()) {
    BlockSums<A> sums;
    for (int64_t row = 0; row < valid.tokens; ++row) {
      if (valid[row]) {
        for (int v = 0; v < kVectors; ++v) {
          sums[v].add(x.load(row, v));
        }
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      sums[v].scaled(1.0 / static_cast<double>(std::max<int64_t>(count, 1)), value[v], rest[v]);
    }
  }

  OVERTONE_INLINE Vector<A> centre(Vector<A> x, int v) const { return (x - value[v]) - rest[v]; }
};

// Lanes past the block's width hold zeros in every sum, so they may be added up with the rest.
template <class A>
double sum_of_lanes(const BlockSums<A>& sums) {
  Vector<double> lanes{};
  for (int v = 0; v < ChannelBlock<A>::kVectors; ++v) {
    lanes += sums[v].lanes();
  }
  double total = 0;
  for (int lane = 0; lane < kLanes<double>; ++lane) {
    total += lanes[lane];
  }
  return total;
}

template <class A>
void write_channels(const BlockSums<A>& sums, const ChannelBlock<A>& block, double* out) {
  for (int channel = 0; channel < block.width; ++channel) {
    out[channel] = sums[channel / kLanes<A>][channel % kLanes<A>];
  }
}

template <class T, bool kPacked>
void norms_forward_block(const NormsForward& call, const ChannelBlock<Accumulator<T>>& block) {
  using A = Accumulator<T>;
  constexpr int kVectors = ChannelBlock<A>::kVectors;
  const BlockRows<T, kPacked> x(call.x, block);
  const ValidTokens valid(call.mask, call.shape, block.sample);
  const BlockMean<A> mean(x, valid);

  // Squares do not cancel: a few rows are added up in A before they go to the wide sum, which is slower.
  constexpr int64_t kRows = 8;
  BlockSums<A> high;
  for (int64_t begin = 0; begin < valid.tokens; begin += kRows) {
    BlockVectors<A> few{};
    for (int64_t row = begin; row < std::min(begin + kRows, valid.tokens); ++row) {
      if (valid[row]) {
        for (int v = 0; v < kVectors; ++v) {
          const Vector<A> centred = mean.centre(x.load(row, v), v);
          few[v] += centred * centred;
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
  const int64_t slot = block.sample * call.shape.blocks() + block.index;
  call.low_squared[slot] = sum_of_lanes<A>(low) * static_cast<double>(mean.count);
  call.high_squared[slot] = sum_of_lanes<A>(high);
}

template <class T, bool kPacked>
void norms_backward_block(const NormsBackward& call, const ChannelBlock<Accumulator<T>>& block) {
  using A = Accumulator<T>;
  const BlockRows<T, kPacked> x(call.x, block);
  const BlockOutput<T, kPacked> grad_x(call.grad_x, call.shape, block);
  const ValidTokens valid(call.mask, call.shape, block.sample);
  const BlockMean<A> mean(x, valid);
  const A low_scale = static_cast<A>(call.low_scale[block.sample]);
  const A high_scale = static_cast<A>(call.high_scale[block.sample]);

  for (int64_t row = 0; row < valid.tokens; ++row) {
    if (!valid[row]) {
      grad_x.zero_row(row);
      continue;
    }
    for (int v = 0; v < ChannelBlock<A>::kVectors; ++v) {
      grad_x.store(low_scale * mean.value[v] + high_scale * mean.centre(x.load(row, v), v), row, v);
    }
  }
}

// Applies the filter with the mean over all valid tokens. It is its own adjoint, so backward uses it too.
template <class T, bool kPacked>
OVERTONE_INLINE void filter_by_mean(const BlockRows<T, kPacked>& x, const BlockMean<Accumulator<T>>& mean,
                                    const ValidTokens& valid, const BlockGain<Accumulator<T>>& low,
                                    const BlockGain<Accumulator<T>>& high, const BlockOutput<T, kPacked>& y) {
  using A = Accumulator<T>;
  constexpr int kVectors = ChannelBlock<A>::kVectors;
  BlockVectors<A> low_part;
  for (int v = 0; v < kVectors; ++v) {
    low_part[v] = low.value[v] * mean.value[v];
  }
  for (int64_t row = 0; row < valid.tokens; ++row) {
    if (!valid[row]) {
      y.zero_row(row);
      continue;
    }
    for (int v = 0; v < kVectors; ++v) {
      y.store(low_part[v] + high.value[v] * mean.centre(x.load(row, v), v), row, v);
    }
  }
}

// Visits the valid tokens in order: visit(row, v, x, LFC, HFC) with the running mean. Masked rows go to skip(row).
template <class T, bool kPacked, class Visit, class Skip>
OVERTONE_INLINE void for_running_mean(const BlockRows<T, kPacked>& x, const ValidTokens& valid, Visit visit,
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

template <class T, bool kPacked>
void filter_forward_block(const FilterForward& call, const ChannelBlock<Accumulator<T>>& block) {
  using A = Accumulator<T>;
  const BlockRows<T, kPacked> x(call.x, block);
  const BlockOutput<T, kPacked> y(call.y, call.shape, block);
  const ValidTokens valid(call.mask, call.shape, block.sample);
  const BlockGain<A> low(call.low, block);
  const BlockGain<A> high(call.high, block);
  if (!call.causal) {
    filter_by_mean(x, BlockMean<A>(x, valid), valid, low, high, y);
    return;
  }
  for_running_mean(
      x, valid,
      [&](int64_t row, int v, Vector<A> low_part, Vector<A> high_part) {
        y.store(low.value[v] * low_part + high.value[v] * high_part, row, v);
      },
      [&](int64_t row) { y.zero_row(row); });
}

// ∂L/∂x_j = high ⊙ G_j + (low − high) ⊙ Σ_{i ≥ j} G_i / count_i, from the last token to the first.
template <class T, bool kPacked>
OVERTONE_INLINE void causal_adjoint(const BlockRows<T, kPacked>& grad_y, const ValidTokens& valid,
                                    const BlockGain<Accumulator<T>>& low, const BlockGain<Accumulator<T>>& high,
                                    const BlockOutput<T, kPacked>& grad_x) {
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
template <class T, bool kPacked>
OVERTONE_INLINE void causal_gain_gradients(const BlockRows<T, kPacked>& x, const BlockRows<T, kPacked>& grad_y,
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
template <class T, bool kPacked>
OVERTONE_INLINE void mean_gain_gradients(const BlockRows<T, kPacked>& x, const BlockRows<T, kPacked>& grad_y,
                                         const BlockMean<Accumulator<T>>& grad_mean, const ValidTokens& valid,
                                         BlockSums<Accumulator<T>>& low, BlockSums<Accumulator<T>>& high) {
  using A = Accumulator<T>;
  constexpr int kVectors = ChannelBlock<A>::kVectors;
  const BlockMean<A> x_mean(x, valid);
  for (int64_t row = 0; row < valid.tokens; ++row) {
    if (valid[row]) {
      for (int v = 0; v < kVectors; ++v) {
        high[v].add(x_mean.centre(x.load(row, v), v) * grad_mean.centre(grad_y.load(row, v), v));
      }
    }
  }
  for (int v = 0; v < kVectors; ++v) {
    low[v].add(static_cast<A>(x_mean.count) * x_mean.value[v] * grad_mean.value[v]);
  }
}

template <class T, bool kPacked>
void filter_backward_block(const FilterBackward& call, const ChannelBlock<Accumulator<T>>& block) {
  using A = Accumulator<T>;
  const BlockRows<T, kPacked> grad_y(call.grad_y, block);
  const BlockRows<T, kPacked> x(call.grad_low == nullptr ? call.grad_y : call.x, block);
  const ValidTokens valid(call.mask, call.shape, block.sample);
  const BlockGain<A> low(call.low, block);
  const BlockGain<A> high(call.high, block);
  const BlockOutput<T, kPacked> grad_x(call.grad_x, call.shape, block);
  BlockSums<A> grad_low;
  BlockSums<A> grad_high;
  if (call.causal) {
    if (call.grad_x != nullptr) {
      causal_adjoint(grad_y, valid, low, high, grad_x);
    }
    if (call.grad_low != nullptr) {
      causal_gain_gradients(x, grad_y, valid, grad_low, grad_high);
    }
  } else {
    const BlockMean<A> grad_mean(grad_y, valid);
    if (call.grad_x != nullptr) {
      filter_by_mean(grad_y, grad_mean, valid, low, high, grad_x);
    }
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

// Chooses the packed form where every tensor read has consecutive channels and the block is full.
#define OVERTONE_FOR_BLOCKS(function, channels_are_consecutive)         \
  template <class T, class Call>                                        \
  void function##_items(const Call& call, int64_t begin, int64_t end) { \
    for (int64_t item = begin; item < end; ++item) {                    \
      const ChannelBlock<Accumulator<T>> block(call.shape, item);       \
      if (block.width == kChannelBlock && (channels_are_consecutive)) { \
        function##_block<T, true>(call, block);                         \
      } else {                                                          \
        function##_block<T, false>(call, block);                        \
      }                                                                 \
    }                                                                   \
  }                                                                     \
  template <class Call>                                                 \
  void function(const Call& call, int64_t begin, int64_t end) {         \
    switch (call.type) {                                                \
      case ElementType::float32:                                        \
        return function##_items<float>(call, begin, end);               \
      case ElementType::float64:                                        \
        return function##_items<double>(call, begin, end);              \
      case ElementType::bfloat16:                                       \
        return function##_items<BFloat16>(call, begin, end);            \
      case ElementType::float16:                                        \
        return function##_items<Half>(call, begin, end);                \
    }                                                                   \
  }

OVERTONE_FOR_BLOCKS(norms_forward, call.x.channel_stride == 1)
OVERTONE_FOR_BLOCKS(norms_backward, call.x.channel_stride == 1)
OVERTONE_FOR_BLOCKS(filter_forward, call.x.channel_stride == 1)
OVERTONE_FOR_BLOCKS(filter_backward,
                    call.grad_y.channel_stride == 1 && (call.grad_low == nullptr || call.x.channel_stride == 1))
#undef OVERTONE_FOR_BLOCKS

extern const FrequencyKernels frequency_kernels = {
    OVERTONE_LEVEL_NAME,
    &norms_forward<NormsForward>,
    &norms_backward<NormsBackward>,
    &filter_forward<FilterForward>,
    &filter_backward<FilterBackward>,
};

}  // namespace overtone::OVERTONE_LEVEL
