// What the frequency kernels are made of: blocks of channels, their rows, and sums over tokens.
#pragma once

#include "cpu/frequency/params.h"
#include "cpu/gemm/prefetch.h"
#include "cpu/simd/vector.h"

namespace overtone::OVERTONE_ISA {

// A sum carried in twice the precision of what is added: in float64 for float32, as a pair (sum, error) for float64.
// However many tokens there are, and however far from zero they lie, the sum is exact to the last bits of A.
template <class A>
struct WideSum;

template <>
struct WideSum<float> {
  Vector<double> lower{};
  Vector<double> upper{};

  OVERTONE_INLINE void add(Vector<float> v) {
    Vector<double> v_lower;
    Vector<double> v_upper;
    widen_halves(v, v_lower, v_upper);
    lower += v_lower;
    upper += v_upper;
  }

  // A full vector in memory. Each half is widened as it is loaded: a quarter faster than taking a vector apart.
  OVERTONE_INLINE void add_full(const float* p) {
    lower += widened(p);
    upper += widened(p + kLanes<double>);
  }
  template <class T>
  OVERTONE_INLINE void add_full(const T* p) {
    add(load_full(p));
  }

  OVERTONE_INLINE Vector<double> lanes() const { return lower + upper; }

  OVERTONE_INLINE double operator[](int lane) const {
    return lane < kLanes<double> ? lower[lane] : upper[lane - kLanes<double>];
  }

  // The mean of `count` terms as value + rest, both float32. A division, not a product with 1 / count: of equal terms
  // it gives just these.
  OVERTONE_INLINE void mean(double count, Vector<float>& value, Vector<float>& rest) const {
    split(lower / count, upper / count, value, rest);
  }

  // The sum times `factor` as value + rest, both float32.
  OVERTONE_INLINE void scaled(double factor, Vector<float>& value, Vector<float>& rest) const {
    split(lower * factor, upper * factor, value, rest);
  }

 private:
  OVERTONE_INLINE static void split(Vector<double> wide_lower, Vector<double> wide_upper, Vector<float>& value,
                                    Vector<float>& rest) {
    value = narrow_halves(wide_lower, wide_upper);
    Vector<double> value_lower;
    Vector<double> value_upper;
    widen_halves(value, value_lower, value_upper);
    rest = narrow_halves(wide_lower - value_lower, wide_upper - value_upper);
  }

  OVERTONE_INLINE static Vector<double> widened(const float* p) {
#if OVERTONE_VECTOR_BYTES == 64
    return _mm512_maskz_cvtps_pd(0xff, _mm256_loadu_ps(p));
#elif OVERTONE_VECTOR_BYTES == 32
    return _mm256_cvtps_pd(_mm_loadu_ps(p));
#else
    return Vector<double>{p[0], p[1]};
#endif
  }
};

template <>
struct WideSum<double> {
  Vector<double> sum{};
  Vector<double> error{};

  OVERTONE_INLINE void add(Vector<double> v) {  // Knuth's two-sum
    const Vector<double> total = sum + v;
    const Vector<double> taken = total - sum;
    error += (sum - (total - taken)) + (v - taken);
    sum = total;
  }

  OVERTONE_INLINE void add_full(const double* p) { add(load_full(p)); }

  OVERTONE_INLINE Vector<double> lanes() const { return sum + error; }

  OVERTONE_INLINE double operator[](int lane) const { return sum[lane] + error[lane]; }

  // The mean of `count` terms as value + rest, the rest from the division's exact remainder: equal terms give just
  // these.
  OVERTONE_INLINE void mean(double count, Vector<double>& value, Vector<double>& rest) const {
    value = (sum + error) / count;
    Vector<double> remainder;
    for (int lane = 0; lane < kLanes<double>; ++lane) {
      remainder[lane] = __builtin_fma(-value[lane], count, sum[lane]);
    }
    rest = (remainder + error) / count;
  }

  OVERTONE_INLINE void scaled(double factor, Vector<double>& value, Vector<double>& rest) const {
    value = (sum + error) * factor;
    // What the product rounded away is of the order of one bit of the value; only tokens equal to 15 digits notice.
    rest = error * factor - (value - sum * factor);
  }
};

// The channels [begin, begin + width) of one sample, in vectors.
template <class A>
struct ChannelBlock {
  static constexpr int kVectors = static_cast<int>(kChannelBlock) / kLanes<A>;

  int64_t sample;
  int64_t index;  // of the block within its sample
  int64_t begin;
  int width;
  int next_width;  // of the block behind it, if the same work item has one

  ChannelBlock(const FrequencyShape& shape, int64_t sample, int64_t index)
      : sample(sample),
        index(index),
        begin(index * kChannelBlock),
        width(static_cast<int>(std::min(kChannelBlock, shape.channels - begin))),
        next_width(
            (index + 1) % shape.blocks_per_item() == 0
                ? 0
                : static_cast<int>(std::clamp(shape.channels - begin - kChannelBlock, int64_t{0}, kChannelBlock))) {}

  // Lanes of vector v that hold channels.
  int lanes(int v) const { return std::clamp(width - v * kLanes<A>, 0, kLanes<A>); }
};

template <class A>
using BlockVectors = Vector<A>[ChannelBlock<A>::kVectors];

// Rows of one sample's block. kContiguous: a full block of consecutive channels, read without any lane counting.
template <class T, bool kContiguous>
struct BlockRows {
  using A = Accumulator<T>;
  const T* first;
  int64_t token_stride;
  int64_t channel_stride;
  ChannelBlock<A> block;

  BlockRows(const StridedTokens& tokens, const ChannelBlock<A>& block)
      : first(static_cast<const T*>(tokens.data) + tokens.sample_offsets[block.sample] +
              block.begin * tokens.channel_stride),
        token_stride(tokens.token_stride),
        channel_stride(tokens.channel_stride),
        block(block) {}

  OVERTONE_INLINE Vector<A> load(int64_t row, int v) const {
    if constexpr (kContiguous) {
      return load_full(first + row * token_stride + v * kLanes<A>);
    } else {
      const int lanes = block.lanes(v);
      if (lanes == 0) {
        return Vector<A>{};
      }
      return OVERTONE_ISA::load(first + row * token_stride + v * kLanes<A> * channel_stride, channel_stride, lanes);
    }
  }

  // A block's part of a row is a few lines, of rows far apart: nothing that the hardware would foresee.
  OVERTONE_INLINE void prefetch_next_block(int64_t row) const {
    if constexpr (kContiguous) {
      prefetch(first + row * token_stride + kChannelBlock, block.next_width);
    }
  }

  OVERTONE_INLINE void add_to(WideSum<A>& sum, int64_t row, int v) const {
    if constexpr (kContiguous) {
      sum.add_full(first + row * token_stride + v * kLanes<A>);
    } else {
      sum.add(load(row, v));
    }
  }
};

// The same rows times a power of two, of whatever layout: for tokens whose squares would overflow or vanish.
template <class T>
struct ScaledRows {
  using A = Accumulator<T>;
  BlockRows<T, false> rows;
  A factor;

  ScaledRows(const StridedTokens& tokens, const ChannelBlock<A>& block, int exponent)
      : rows(tokens, block), factor(std::ldexp(A{1}, -exponent)) {}

  OVERTONE_INLINE Vector<A> load(int64_t row, int v) const { return rows.load(row, v) * factor; }
  OVERTONE_INLINE void prefetch_next_block(int64_t) const {}
  OVERTONE_INLINE void add_to(WideSum<A>& sum, int64_t row, int v) const { sum.add(load(row, v)); }
};

// Rows of a contiguous [samples, N, C] output.
template <class T, bool kContiguous>
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
    if constexpr (kContiguous) {
      store_full(value, p);
    } else if (block.lanes(v) > 0) {
      OVERTONE_ISA::store(value, p, block.lanes(v));
    }
  }

  void zero_row(int64_t row) const {
    std::memset(static_cast<void*>(first + row * channels), 0, block.width * sizeof(T));
  }
};

// Which tokens of a sample are valid.
struct ValidTokens {
  const bool* flags;
  int64_t stride;
  int64_t tokens;

  ValidTokens(const TokenMask& mask, const FrequencyShape& shape, int64_t sample)
      : flags(mask.data == nullptr ? nullptr : mask.data + mask.sample_offsets[sample]),
        stride(mask.token_stride),
        tokens(shape.tokens) {}

  OVERTONE_INLINE bool operator[](int64_t row) const { return flags == nullptr || flags[row * stride]; }

  // Whether there are so many tokens from `row` on, and all of them are valid.
  OVERTONE_INLINE bool are_all(int64_t row, int64_t rows) const {
    if (row + rows > tokens) {
      return false;
    }
    while (rows > 0 && (*this)[row + rows - 1]) {
      --rows;
    }
    return rows == 0;
  }

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
      value[v] = block.lanes(v) == 0 ? Vector<A>{} : OVERTONE_ISA::load(p, gain.stride, block.lanes(v));
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
      x.prefetch_next_block(row);
      if (valid[row]) {
        for (int v = 0; v < kVectors; ++v) {
          x.add_to(sums[v], row, v);
        }
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      sums[v].mean(static_cast<double>(std::max<int64_t>(count, 1)), value[v], rest[v]);
    }
  }

  OVERTONE_INLINE Vector<A> center(Vector<A> x, int v) const { return (x - value[v]) - rest[v]; }
};

// Lanes past the block's width hold zeros in every sum, so they may be added up with the rest.
template <class A>
double reduce_add(const BlockSums<A>& sums) {
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

}  // namespace overtone::OVERTONE_ISA
