// What the frequency kernels of every instruction set compute, and how the ops in op.cpp call them.
//
// All work is per channel: a sample's tokens are summed in blocks of kChannelBlock channels, and a work item is a range
// of blocks of one sample. A channel's sums never meet another channel's, so the result is the same bit for bit however
// the work is cut into items and the items are spread over threads.
#pragma once

#include <cstdint>

#include "cpu/isa/dispatch.h"
#include "cpu/strided.h"

namespace overtone {

constexpr int64_t kChannelBlock = 64;

// mask[..., N]: true = valid token. No data: every token is.
struct TokenMask {
  const bool* data = nullptr;
  int64_t token_stride = 0;
  const int64_t* sample_offsets = nullptr;
};

// A vector over channels, or one scalar repeated (stride 0). Has the statistics' type.
struct ChannelGain {
  const void* data = nullptr;
  int64_t stride = 0;
};

struct FrequencyShape {
  int64_t samples = 0;  // the leading dimensions' elements
  int64_t tokens = 0;
  int64_t channels = 0;

  int64_t blocks() const { return (channels + kChannelBlock - 1) / kChannelBlock; }

  // Whole rows are read and written fastest; a few samples are cut into blocks, so that there is work for every thread.
  int64_t blocks_per_item() const { return samples >= 8 ? blocks() : 1; }
  int64_t items_per_sample() const {
    return channels == 0 ? 0 : (blocks() + blocks_per_item() - 1) / blocks_per_item();
  }
  int64_t items() const { return samples * items_per_sample(); }
};

// Partial sums of the norms: [samples][blocks] of Σ_c n·mean_c² and Σ_c Σ_i (x_ic − mean_c)². Where squares of the
// tokens would overflow or vanish they are those of tokens · 2^-exponent.
struct NormsForward {
  FrequencyShape shape;
  Dtype type;
  StridedTokens x;
  TokenMask mask;
  double* low_squared = nullptr;
  double* high_squared = nullptr;
  int* exponents = nullptr;
};

// grad_x = addend + low_scale · LFC[x] + high_scale · HFC[x], the scales being grad_norm / norm of each sample, or
// zero. They are for tokens · 2^-exponent.
struct NormsBackward {
  FrequencyShape shape;
  Dtype type;
  StridedTokens x;
  TokenMask mask;
  const double* low_scale = nullptr;   // [samples]
  const double* high_scale = nullptr;  // [samples]
  const int* exponents = nullptr;      // [samples]
  const void* addend = nullptr;        // contiguous, of x's type; null adds nothing
  void* grad_x = nullptr;              // contiguous, of x's type
};

// y = low ⊙ LFC[x] + high ⊙ HFC[x]; with `causal` the mean over tokens is the running mean.
struct FilterForward {
  FrequencyShape shape;
  Dtype type;
  bool causal = false;
  StridedTokens x;
  TokenMask mask;
  ChannelGain low;
  ChannelGain high;
  void* y = nullptr;  // contiguous, of x's type
};

// The adjoint of the filter applied to grad_y, and the gains' gradients of every sample. What is not wanted is null.
struct FilterBackward {
  FrequencyShape shape;
  Dtype type;
  bool causal = false;
  StridedTokens grad_y;
  StridedTokens x;  // read only for the gains' gradients
  TokenMask mask;
  ChannelGain low;
  ChannelGain high;
  void* grad_x = nullptr;      // contiguous, of grad_y's type
  double* grad_low = nullptr;  // [samples][channels]
  double* grad_high = nullptr;
};

// The exponent e for which tokens · 2^-e, of which `largest` is the largest (or their norm), are near one; 2^±e is a
// normal number of their type. Zero where `largest` is zero or not finite.
int tokens_exponent(double largest, bool is_float64);

// One level's kernels. Each does the work items [begin, end) of its call.
struct FrequencyKernels {
  const char* isa;
  void (*norms_forward)(const NormsForward&, int64_t begin, int64_t end);
  void (*norms_backward)(const NormsBackward&, int64_t begin, int64_t end);
  void (*filter_forward)(const FilterForward&, int64_t begin, int64_t end);
  void (*filter_backward)(const FilterBackward&, int64_t begin, int64_t end);
};

OVERTONE_KERNELS(FrequencyKernels, frequency_kernels);

}  // namespace overtone
