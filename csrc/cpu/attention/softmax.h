// Rows of logits (base 2) to rows of softmax weights: masks, and the online softmax over blocks of keys.
#pragma once

#include "cpu/attention/params.h"
#include "cpu/simd/exp2.h"

namespace overtone::OVERTONE_ISA {

constexpr double kLog2E = 1.4426950408889634074;

template <class A>
constexpr A kMinusInfinity = -std::numeric_limits<A>::infinity();

// The largest of `count` numbers, zero where there is none above −inf.
template <class A>
A largest_bias(const A* bias, int64_t stride, int64_t count) {
  A best = kMinusInfinity<A>;
  int64_t j = 0;
  if (stride == 1 && count >= kLanes<A>) {
    Vector<A> largest = load_full(bias);
    for (j = kLanes<A>; j + kLanes<A> <= count; j += kLanes<A>) {
      largest = max<A>(largest, load_full(bias + j));
    }
    best = reduce_max<A>(largest);
  }
  for (; j < count; ++j) {
    best = std::max(best, bias[j * stride]);
  }
  return best == kMinusInfinity<A> ? A{0} : best;
}

// What the mask does to one row of logits: adds the bias, and −inf where a key takes no part. The bias is lowered by
// its largest element, which softmax does not see: a large one times log2(e) would be rounded as coarsely as it is
// large.
template <class A>
struct MaskRow {
  const A* bias = nullptr;
  A largest = 0;
  const bool* flags = nullptr;
  int64_t key_stride = 0;
  int64_t visible;  // keys from here on are in the future

  MaskRow(const AttentionMask& mask, int64_t batch, int64_t head, int64_t query, int64_t keys)
      : key_stride(mask.key_stride), visible(mask.causal ? std::min(keys, query + 1) : keys) {
    const int64_t offset = batch * mask.batch_stride + head * mask.head_stride + query * mask.query_stride;
    bias = mask.bias == nullptr ? nullptr : static_cast<const A*>(mask.bias) + offset;
    flags = mask.flags == nullptr ? nullptr : mask.flags + offset;
    largest = bias == nullptr ? A{0} : largest_bias(bias, key_stride, visible);
  }

  void apply(A* logits, int64_t first_key, int64_t count) const {
    if (bias != nullptr) {
      for (int64_t j = 0; j < count; ++j) {
        logits[j] += (bias[(first_key + j) * key_stride] - largest) * static_cast<A>(kLog2E);
      }
    }
    if (flags != nullptr) {
      for (int64_t j = 0; j < count; ++j) {
        logits[j] = flags[(first_key + j) * key_stride] ? logits[j] : kMinusInfinity<A>;
      }
    }
    const int64_t seen = std::clamp<int64_t>(visible - first_key, 0, count);
    std::fill(logits + seen, logits + count, kMinusInfinity<A>);
  }
};

// Logits of rows [first, first + rows) and keys [key, key + count), `ld` apart: masked, and −inf up to a whole vector.
template <class A>
void mask_logits(const AttentionProblem& call, int64_t batch, int64_t head, int64_t first, int64_t rows, int64_t key,
                 int64_t count, A* logits, int64_t ld) {
  if (call.mask.is_used()) {
    for (int64_t row = 0; row < rows; ++row) {
      MaskRow<A>(call.mask, batch, head, first + row, call.shape.kv_len).apply(logits + row * ld, key, count);
    }
  }
  const int tail = static_cast<int>(count % kLanes<A>);
  if (tail != 0) {
    A* last = logits + count - tail;
    for (int64_t row = 0; row < rows; ++row) {
      store_full(mask_tail(load_full(last + row * ld), tail, kMinusInfinity<A>), last + row * ld);
    }
  }
}

// Online softmax of one row: the running maximum and sum, and what partial sums must be multiplied with.
template <class A>
struct SoftmaxRow {
  A maximum = kMinusInfinity<A>;
  A sum = 0;
  A rescale = 0;

  // Takes a block's maximum in; gives what the block's logits are to be lowered by.
  OVERTONE_INLINE A update_max(A block_maximum) {
    const A next = block_maximum > maximum ? block_maximum : maximum;
    // While every key so far is masked the maximum is −inf; any finite stand-in keeps −inf − −inf from arising.
    const A safe = next == kMinusInfinity<A> ? A{0} : next;
    if (maximum != kMinusInfinity<A>) {
      rescale = exp2_nonpositive<A>(broadcast<A>(maximum - safe))[0];
    }
    maximum = next;
    return safe;
  }

  // Takes the sum of the block's weights in.
  OVERTONE_INLINE void add(A block_sum) { sum = sum * rescale + block_sum; }

  // A row in which no key takes part has the sum 0, and an inverse of 0 makes it zero here and in backward.
  A inverse() const { return sum == 0 ? A{0} : 1 / sum; }
};

// Turns a block of logits (whole vectors, rows `ld` apart) into unnormalised weights: several rows at once, as one
// alone waits for the sum of its lanes.
template <int kRows, class A>
OVERTONE_INLINE void online_softmax_update(SoftmaxRow<A>* rows, A* logits, int64_t ld, int vectors) {
  Vector<A> best[kRows];
  OVERTONE_UNROLL
  for (int i = 0; i < kRows; ++i) {
    best[i] = load_full(logits + i * ld);
  }
  for (int v = 1; v < vectors; ++v) {
    OVERTONE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      best[i] = max<A>(best[i], load_full(logits + i * ld + v * kLanes<A>));
    }
  }
  A safe[kRows];
  OVERTONE_UNROLL
  for (int i = 0; i < kRows; ++i) {
    safe[i] = rows[i].update_max(reduce_max<A>(best[i]));
  }
  Vector<A> totals[kRows] = {};
  for (int v = 0; v < vectors; ++v) {
    OVERTONE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      A* p = logits + i * ld + v * kLanes<A>;
      const Vector<A> weights = exp2_nonpositive<A>(load_full(p) - safe[i]);
      store_full(weights, p);
      totals[i] += weights;
    }
  }
  OVERTONE_UNROLL
  for (int i = 0; i < kRows; ++i) {
    rows[i].add(reduce_add<A>(totals[i]));
  }
}

}  // namespace overtone::OVERTONE_ISA
