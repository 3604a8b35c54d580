// The frequency kernels, written once and compiled for every ISA level.
//
// The mean is taken of (token − first valid token) and kept as the pair (first token, mean shift). The difference of
// tokens that are nearly equal is exact, so HFC keeps its digits however far from zero the tokens lie; and because the
// first token is one of the tokens, its own distance from the mean is at most ‖HFC‖: the shift never costs accuracy.
#pragma once

#include "cpu/frequency.h"
#include "cpu/simd.h"

namespace overtone::OVERTONE_LEVEL {

#define OVERTONE_STRINGIFY_(x) #x
#define OVERTONE_STRINGIFY(x) OVERTONE_STRINGIFY_(x)

// Rows summed before a partial sum is moved to its total: the rounding error grows as N/256 + 256, not as N.
constexpr int64_t kRowsPerPartialSum = 256;

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

  int64_t first() const {
    int64_t row = 0;
    while (row < tokens && !(*this)[row]) {
      ++row;
    }
    return row;
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

// Calls body(begin, end) for consecutive groups of rows, so that body can sum a group in registers.
template <class Body>
OVERTONE_INLINE void for_row_groups(int64_t rows, Body body) {
  for (int64_t begin = 0; begin < rows; begin += kRowsPerPartialSum) {
    body(begin, std::min(rows, begin + kRowsPerPartialSum));
  }
}

// The mean over a block's valid tokens as first token + shift.
template <class A>
struct BlockMean {
  static constexpr int kVectors = ChannelBlock<A>::kVectors;
  BlockVectors<A> first;
  BlockVectors<A> shift;
  A count = 0;

  template <class Rows>
  OVERTONE_INLINE BlockMean(const Rows& x, const ValidTokens& valid) {
    const int64_t first_row = valid.first();
    const bool any = first_row < valid.tokens;
    for (int v = 0; v < kVectors; ++v) {
      first[v] = any ? x.load(first_row, v) : Vector<A>{};
      shift[v] = Vector<A>{};
    }
    if (!any) {
      return;
    }
    count = static_cast<A>(valid.count());
    for_row_groups(valid.tokens, [&](int64_t begin, int64_t end) {
      BlockVectors<A> partial{};
      for (int64_t row = begin; row < end; ++row) {
        if (valid[row]) {
          for (int v = 0; v < kVectors; ++v) {
            partial[v] += x.load(row, v) - first[v];
          }
        }
      }
      for (int v = 0; v < kVectors; ++v) {
        shift[v] += partial[v];
      }
    });
    const A inverse = 1 / count;
    for (int v = 0; v < kVectors; ++v) {
      shift[v] *= inverse;
    }
  }

  OVERTONE_INLINE Vector<A> value(int v) const { return first[v] + shift[v]; }
  OVERTONE_INLINE Vector<A> centre(Vector<A> x, int v) const { return (x - first[v]) - shift[v]; }
};

// Lanes past the block's width hold zeros in every sum, so they may be added up with the rest.
template <class A>
double sum_of_lanes(const BlockVectors<A>& sums) {
  double total = 0;
  for (int v = 0; v < ChannelBlock<A>::kVectors; ++v) {
    for (int lane = 0; lane < kLanes<A>; ++lane) {
      total += static_cast<double>(sums[v][lane]);
    }
  }
  return total;
}

template <class A>
void write_channels(const BlockVectors<A>& sums, const ChannelBlock<A>& block, double* out) {
  for (int channel = 0; channel < block.width; ++channel) {
    out[channel] = static_cast<double>(sums[channel / kLanes<A>][channel % kLanes<A>]);
  }
}

template <class T, bool kPacked>
void norms_forward_block(const NormsForward& call, const ChannelBlock<Accumulator<T>>& block) {
  using A = Accumulator<T>;
  constexpr int kVectors = ChannelBlock<A>::kVectors;
  const BlockRows<T, kPacked> x(call.x, block);
  const ValidTokens valid(call.mask, call.shape, block.sample);
  const BlockMean<A> mean(x, valid);

  BlockVectors<A> high{};
  for_row_groups(valid.tokens, [&](int64_t begin, int64_t end) {
    BlockVectors<A> partial{};
    for (int64_t row = begin; row < end; ++row) {
      if (valid[row]) {
        for (int v = 0; v < kVectors; ++v) {
          const Vector<A> centred = mean.centre(x.load(row, v), v);
          partial[v] += centred * centred;
        }
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      high[v] += partial[v];
    }
  });
  BlockVectors<A> low;
  for (int v = 0; v < kVectors; ++v) {
    low[v] = mean.value(v) * mean.value(v);
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
      grad_x.store(low_scale * mean.value(v) + high_scale * mean.centre(x.load(row, v), v), row, v);
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
    low_part[v] = low.value[v] * mean.value(v);
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

// Visits the valid tokens in order with their running mean, as first token + shift.
// visit(row, x − first, running shift): arrays of vectors. Masked rows go to skip(row).
template <class T, bool kPacked, class Visit, class Skip>
OVERTONE_INLINE void for_running_mean(const BlockRows<T, kPacked>& x, const ValidTokens& valid,
                                      const BlockVectors<Accumulator<T>>& first, Visit visit, Skip skip) {
  using A = Accumulator<T>;
  constexpr int kVectors = ChannelBlock<A>::kVectors;
  BlockVectors<A> total{};
  int64_t count = 0;
  for_row_groups(valid.tokens, [&](int64_t begin, int64_t end) {
    BlockVectors<A> partial{};
    for (int64_t row = begin; row < end; ++row) {
      if (!valid[row]) {
        skip(row);
        continue;
      }
      const A inverse = 1 / static_cast<A>(++count);
      for (int v = 0; v < kVectors; ++v) {
        const Vector<A> shifted = x.load(row, v) - first[v];
        partial[v] += shifted;
        visit(row, v, shifted, (total[v] + partial[v]) * inverse);
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      total[v] += partial[v];
    }
  });
}

template <class T, bool kPacked>
OVERTONE_INLINE void load_first_token(const BlockRows<T, kPacked>& x, const ValidTokens& valid,
                                      BlockVectors<Accumulator<T>>& first) {
  const int64_t row = valid.first();
  for (int v = 0; v < ChannelBlock<Accumulator<T>>::kVectors; ++v) {
    first[v] = row < valid.tokens ? x.load(row, v) : Vector<Accumulator<T>>{};
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
  BlockVectors<A> first;
  load_first_token(x, valid, first);
  for_running_mean(
      x, valid, first,
      [&](int64_t row, int v, Vector<A> shifted, Vector<A> shift) {
        y.store(low.value[v] * (first[v] + shift) + high.value[v] * (shifted - shift), row, v);
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
  BlockVectors<A> total{};
  int64_t count = valid.count();
  for_row_groups(valid.tokens, [&](int64_t begin, int64_t end) {
    BlockVectors<A> partial{};
    for (int64_t row = valid.tokens - 1 - begin; row >= valid.tokens - end; --row) {
      if (!valid[row]) {
        grad_x.zero_row(row);
        continue;
      }
      const A inverse = 1 / static_cast<A>(count--);
      for (int v = 0; v < kVectors; ++v) {
        const Vector<A> g = grad_y.load(row, v);
        partial[v] += g * inverse;
        grad_x.store(high.value[v] * g + (low.value[v] - high.value[v]) * (total[v] + partial[v]), row, v);
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      total[v] += partial[v];
    }
  });
}

template <class A>
struct GainGradients {
  BlockVectors<A> low{};
  BlockVectors<A> high{};

  void write(const FilterBackward& call, const ChannelBlock<A>& block) const {
    const int64_t slot = block.sample * call.shape.channels + block.begin;
    write_channels<A>(low, block, call.grad_low + slot);
    write_channels<A>(high, block, call.grad_high + slot);
  }
};

// Σ_i LFC[x]_i ⊙ G_i and Σ_i HFC[x]_i ⊙ G_i with the running mean.
template <class T, bool kPacked>
OVERTONE_INLINE GainGradients<Accumulator<T>> causal_gain_gradients(const BlockRows<T, kPacked>& x,
                                                                    const BlockRows<T, kPacked>& grad_y,
                                                                    const ValidTokens& valid) {
  using A = Accumulator<T>;
  GainGradients<A> sums;
  BlockVectors<A> first;
  load_first_token(x, valid, first);
  for_running_mean(
      x, valid, first,
      [&](int64_t row, int v, Vector<A> shifted, Vector<A> shift) {
        const Vector<A> g = grad_y.load(row, v);
        sums.low[v] += (first[v] + shift) * g;
        sums.high[v] += (shifted - shift) * g;
      },
      [](int64_t) {});
  return sums;
}

// With the mean over all tokens the sums factor: n · mean(x) · mean(G), and the covariance of x and G.
template <class T, bool kPacked>
OVERTONE_INLINE GainGradients<Accumulator<T>> mean_gain_gradients(const BlockRows<T, kPacked>& x,
                                                                  const BlockRows<T, kPacked>& grad_y,
                                                                  const BlockMean<Accumulator<T>>& grad_mean,
                                                                  const ValidTokens& valid) {
  using A = Accumulator<T>;
  constexpr int kVectors = ChannelBlock<A>::kVectors;
  const BlockMean<A> x_mean(x, valid);
  GainGradients<A> sums;
  for_row_groups(valid.tokens, [&](int64_t begin, int64_t end) {
    BlockVectors<A> partial{};
    for (int64_t row = begin; row < end; ++row) {
      if (valid[row]) {
        for (int v = 0; v < kVectors; ++v) {
          partial[v] += x_mean.centre(x.load(row, v), v) * grad_mean.centre(grad_y.load(row, v), v);
        }
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      sums.high[v] += partial[v];
    }
  });
  for (int v = 0; v < kVectors; ++v) {
    sums.low[v] = x_mean.count * x_mean.value(v) * grad_mean.value(v);
  }
  return sums;
}

template <class T, bool kPacked>
void filter_backward_block(const FilterBackward& call, const ChannelBlock<Accumulator<T>>& block) {
  using A = Accumulator<T>;
  const BlockRows<T, kPacked> grad_y(call.grad_y, block);
  const ValidTokens valid(call.mask, call.shape, block.sample);
  const BlockGain<A> low(call.low, block);
  const BlockGain<A> high(call.high, block);
  const bool wants_gains = call.grad_low != nullptr;
  if (call.causal) {
    if (call.grad_x != nullptr) {
      causal_adjoint(grad_y, valid, low, high, BlockOutput<T, kPacked>(call.grad_x, call.shape, block));
    }
    if (wants_gains) {
      causal_gain_gradients(BlockRows<T, kPacked>(call.x, block), grad_y, valid).write(call, block);
    }
    return;
  }
  const BlockMean<A> grad_mean(grad_y, valid);
  if (call.grad_x != nullptr) {
    filter_by_mean(grad_y, grad_mean, valid, low, high, BlockOutput<T, kPacked>(call.grad_x, call.shape, block));
  }
  if (wants_gains) {
    mean_gain_gradients(BlockRows<T, kPacked>(call.x, block), grad_y, grad_mean, valid).write(call, block);
  }
}

// Chooses the packed form where every tensor read has consecutive channels and the block is full.
#define OVERTONE_FOR_BLOCKS(function, channels_are_consecutive)                          \
  template <class T, class Call>                                                         \
  void function##_items(const Call& call, int64_t begin, int64_t end) {                  \
    for (int64_t item = begin; item < end; ++item) {                                     \
      const ChannelBlock<Accumulator<T>> block(call.shape, item);                        \
      if (block.width == kChannelBlock && (channels_are_consecutive)) {                  \
        function##_block<T, true>(call, block);                                          \
      } else {                                                                           \
        function##_block<T, false>(call, block);                                         \
      }                                                                                  \
    }                                                                                    \
  }                                                                                      \
  template <class Call>                                                                  \
  void function(const Call& call, int64_t begin, int64_t end) {                          \
    switch (call.type) {                                                                 \
      case ElementType::float32:                                                         \
        return function##_items<float>(call, begin, end);                                \
      case ElementType::float64:                                                         \
        return function##_items<double>(call, begin, end);                               \
      case ElementType::bfloat16:                                                        \
        return function##_items<BFloat16>(call, begin, end);                             \
      case ElementType::float16:                                                         \
        return function##_items<Half>(call, begin, end);                                 \
    }                                                                                    \
  }

OVERTONE_FOR_BLOCKS(norms_forward, call.x.channel_stride == 1)
OVERTONE_FOR_BLOCKS(norms_backward, call.x.channel_stride == 1)
OVERTONE_FOR_BLOCKS(filter_forward, call.x.channel_stride == 1)
OVERTONE_FOR_BLOCKS(filter_backward,
                    call.grad_y.channel_stride == 1 && (call.grad_low == nullptr || call.x.channel_stride == 1))
#undef OVERTONE_FOR_BLOCKS

extern const FrequencyKernels frequency_kernels = {
    OVERTONE_STRINGIFY(OVERTONE_LEVEL),
    &norms_forward<NormsForward>,
    &norms_backward<NormsBackward>,
    &filter_forward<FilterForward>,
    &filter_backward<FilterBackward>,
};

}  // namespace overtone::OVERTONE_LEVEL
