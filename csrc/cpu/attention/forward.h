// Forward: softmax attention of a block of queries, head by head, then its projection, then the norms.
#pragma once

#include "cpu/attention/key_panels.h"
#include "cpu/attention/params.h"
#include "cpu/attention/softmax.h"
#include "cpu/gemm/microkernel.h"
#include "cpu/gemm/pack.h"
#include "cpu/simd/scratch.h"

namespace overtone::OVERTONE_ISA {

constexpr int64_t kQueryRows = 24;  // at a time: their logits stay in the first-level cache

// Keys at a time, in blocks of equal size: one block at ViT sizes, so that the online softmax costs nothing there.
template <class A>
int64_t key_block(int64_t keys, int64_t most) {
  const int64_t blocks = std::max<int64_t>(1, (keys + most - 1) / most);
  return padded_to((keys + blocks - 1) / blocks, kLanes<A>);
}

// The rows of one head from `token` on.
inline StridedMatrix head_rows(const StridedHeads& tensor, Dtype type, int64_t batch, int64_t head, int64_t token) {
  const int64_t offset = batch * tensor.batch_stride + head * tensor.head_stride + token * tensor.token_stride;
  return {type, static_cast<char*>(tensor.data) + offset * bytes_of(type), tensor.token_stride, tensor.width_stride};
}

// What backward needs to make the softmax of queries from `first` on again.
template <class A>
void save_softmax(const AttentionForward& call, int64_t batch, int64_t head, int64_t first, int64_t rows,
                  const SoftmaxRow<A>* softmax) {
  if (call.softmax_stats == nullptr) {
    return;
  }
  const AttentionShape& shape = call.shape;
  A* saved = static_cast<A*>(call.softmax_stats) + 2 * ((batch * shape.num_heads + head) * shape.q_len + first);
  for (int64_t i = 0; i < rows; ++i) {
    saved[2 * i] = softmax[i].maximum == kMinusInfinity<A> ? A{0} : softmax[i].maximum;
    saved[2 * i + 1] = softmax[i].inverse();
  }
}

// What multiplies a head's output.
template <class A>
A head_gain(const AttentionProblem& call, int64_t head) {
  return call.gain == nullptr ? A{1} : static_cast<const A*>(call.gain)[head];
}

// out += factor · source, for rows × width.
template <class A>
void add_rows(const StridedMatrix& source, int64_t rows, int64_t width, A factor, A* out, int64_t ld) {
  with_type<A>(source.type, [=, stride = source.column_stride](auto element) {
    using T = decltype(element);
    for (int64_t i = 0; i < rows; ++i) {
      const T* row = source.at<T>(i, 0);
      A* out_row = out + i * ld;
      for (int64_t j = 0; j < width; j += kLanes<A>) {
        const int lanes = static_cast<int>(std::min<int64_t>(kLanes<A>, width - j));
        store(load(out_row + j, 1, lanes) + factor * load(row + j * stride, stride, lanes), out_row + j, lanes);
      }
    }
  });
}

// The addend of a head's rows from `query` on.
inline StridedMatrix addend_rows(const AttentionProblem& call, int64_t batch, int64_t head, int64_t query) {
  return head_rows(call.addend, call.addend_type, batch, head, query);
}

// y before it is rounded, of which the norms are taken: in the call's tensor, or in a buffer that stays in the cache.
template <class A>
class UnroundedOutput {
 public:
  explicit UnroundedOutput(const AttentionForward& call)
      : call_(call), scratch_(uses_scratch() ? call.shape.q_len * call.shape.out_dim : 0) {
    buffer_ = scratch_.take(0);
  }

  // The row of a query, or null.
  A* row(int64_t batch, int64_t query) const {
    if (uses_scratch()) {
      return buffer_ + query * call_.shape.out_dim;
    }
    return call_.unrounded == nullptr
               ? nullptr
               : static_cast<A*>(call_.unrounded) + (batch * call_.shape.q_len + query) * call_.shape.out_dim;
  }

  // After a block of queries: the one that finishes a batch element takes its norms.
  void finish_block(int64_t batch) const {
    if (call_.norms_source != NormsSource::none &&
        __atomic_sub_fetch(call_.blocks_left + batch, 1, __ATOMIC_ACQ_REL) == 0) {
      NormsForward norms = *call_.norms;
      if (uses_scratch()) {
        norms.x.data = buffer_;
      }
      const int64_t items = norms.shape.items_per_sample();
      call_.norms_kernel(norms, batch * items, (batch + 1) * items);
    }
  }

 private:
  bool uses_scratch() const { return call_.norms_source == NormsSource::scratch; }

  const AttentionForward& call_;
  Scratch<A> scratch_;
  A* buffer_;
};

// The rows of the residual from `query` on; no data where there is none.
inline StridedMatrix residual_rows(const AttentionForward& call, int64_t batch, int64_t query) {
  StridedMatrix first = call.residual;
  if (first.data != nullptr) {
    first.data = static_cast<char*>(first.data) + batch * call.residual_batch_stride * bytes_of(first.type);
    first = first.from(query, 0);
  }
  return first;
}

// Where a panel of y goes: residual + scale · (sum + partial sums + bias). The residual is added last: as the sum's
// start it would cost digits. Bias and scale are looked at only `kWithTerms`: that is 3 % of a forward pass.
template <class A, bool kWithTerms>
struct ProjectionTarget {
  A* c;
  int64_t ldc;
  const A* residual = nullptr;  // or null, as the others
  int64_t residual_ld = 0;
  const A* bias = nullptr;
  const A* scale = nullptr;
  const A* partial = nullptr;  // gemm_large_panels() sets it

  OVERTONE_INLINE void operator()(int64_t row, int v, Vector<A> sum) const {
    if (partial != nullptr) {
      sum += load_full(partial + (row * kWidestTile + v) * kLanes<A>);
    }
    if constexpr (kWithTerms) {
      if (bias != nullptr) {
        sum += load_full(bias + v * kLanes<A>);
      }
      if (scale != nullptr) {
        sum *= *scale;
      }
    }
    if (residual != nullptr) {
      sum += load_full(residual + row * residual_ld + v * kLanes<A>);
    }
    store_full(sum, c + row * ldc + v * kLanes<A>);
  }
};

// The same for rows × columns of sums in scratch, from (query, channel) of y on.
template <class A>
void store_projection(const AttentionForward& call, const UnroundedOutput<A>& unrounded, int64_t batch, int64_t query,
                      int64_t channel, int64_t rows, int64_t columns, const A* sums, int64_t ld) {
  const A* bias = call.bias == nullptr ? nullptr : static_cast<const A*>(call.bias) + channel;
  const A* scale = call.sample_scale == nullptr ? nullptr : static_cast<const A*>(call.sample_scale) + batch;
  const StridedMatrix residual = residual_rows(call, batch, query);
  const StridedMatrix y = call.y.from(batch * call.shape.q_len + query, channel);
  with_type<A>(y.type, [&](auto y_element) {
    with_type<A>(residual.type, [&, stride = residual.column_stride](auto residual_element) {
      using R = decltype(residual_element);
      for (int64_t row = 0; row < rows; ++row) {
        auto* out = y.at<decltype(y_element)>(row, 0);
        const R* addend = residual.data == nullptr ? nullptr : residual.at<R>(row, channel);
        A* wide = unrounded.row(batch, query + row);
        for (int64_t j = 0; j < columns; j += kLanes<A>) {
          const int lanes = static_cast<int>(std::min<int64_t>(kLanes<A>, columns - j));
          Vector<A> sum = load_full(sums + row * ld + j);
          sum = bias == nullptr ? sum : sum + load(bias + j, 1, lanes);
          sum = scale == nullptr ? sum : sum * *scale;
          sum = addend == nullptr ? sum : sum + load(addend + j * stride, stride, lanes);
          store(sum, out + j, lanes);
          if (wide != nullptr) {
            store(sum, wide + channel + j, lanes);
          }
        }
      }
    });
  });
}

// c = sum · scale[row], the last step of a softmax.
template <class A>
struct StoreScaled {
  A* c;
  int64_t ldc;
  const A* scale;

  OVERTONE_INLINE void operator()(int64_t row, int v, Vector<A> sum) const {
    store_full(sum * scale[row], c + row * ldc + v * kLanes<A>);
  }
};

// c = c · rescale + sum, when the maximum of the rows has moved.
template <class A>
struct AddRescaled {
  A* c;
  int64_t ldc;
  const SoftmaxRow<A>* rows;

  OVERTONE_INLINE void operator()(int64_t row, int v, Vector<A> sum) const {
    A* p = c + row * ldc + v * kLanes<A>;
    store_full(load_full(p) * rows[row].rescale + sum, p);
  }
};

// Scratch and steps of one thread's forward items.
template <class A>
class ForwardWorker {
 public:
  explicit ForwardWorker(const AttentionForward& call)
      : call_(call),
        shape_(call.shape),
        padded_width_(padded_to(shape_.head_dim, kLanes<A>)),
        block_(key_block<A>(shape_.kv_len, kMaxKeys)),
        unrounded_(call),
        memory_(Scratch<A>::padded(KeyPanels<A>::size(shape_.kv_len, shape_.head_dim)) +
                Scratch<A>::padded(shape_.kv_len * padded_width_) + Scratch<A>::padded(kQueryRows * block_) +
                2 * Scratch<A>::padded(kQueryRows * padded_width_) +
                (call.attn_out == nullptr ? Scratch<A>::padded(call.query_block * shape_.inner_dim()) : 0) +
                Scratch<A>::padded(call.query_block * kPanelLd<A>)) {
    keys_ = memory_.take(KeyPanels<A>::size(shape_.kv_len, shape_.head_dim));
    values_ = memory_.take(shape_.kv_len * padded_width_);
    logits_ = memory_.take(kQueryRows * block_);
    queries_ = memory_.take(kQueryRows * padded_width_);
    outputs_ = memory_.take(kQueryRows * padded_width_);
    heads_ = call.attn_out == nullptr ? memory_.take(call.query_block * shape_.inner_dim()) : nullptr;
    sums_ = memory_.take(call.query_block * kPanelLd<A>);
  }

  // `next_item` is what this thread does afterwards, or -1.
  void run(int64_t item, int64_t next_item) {
    const auto [batch, first, rows] = block_of(item);
    A* heads = call_.attn_out == nullptr
                   ? heads_
                   : static_cast<A*>(call_.attn_out) + (batch * shape_.q_len + first) * shape_.inner_dim();
    for (int64_t head = 0; head < shape_.num_heads; ++head) {
      const bool is_last = head + 1 == shape_.num_heads;
      expect(item, head, is_last ? next_item : item, is_last ? 0 : head + 1);
      attend(batch, head, first, rows, heads + head * shape_.head_dim);
    }
    if (call_.bias == nullptr && call_.sample_scale == nullptr) {
      project<false>(batch, first, rows, heads);
    } else {
      project<true>(batch, first, rows, heads);
    }
    unrounded_.finish_block(batch);
  }

 private:
  static constexpr int64_t kMaxKeys = 480;

  struct Block {
    int64_t batch;
    int64_t first;  // query
    int64_t rows;
  };

  Block block_of(int64_t item) const {
    const int64_t first = item % call_.blocks() * call_.query_block;
    return {item / call_.blocks(), first, std::min(call_.query_block, shape_.q_len - first)};
  }

  // While a head is attended to, the next one's rows come nearer, and its addend and a share of the residual.
  void expect(int64_t item, int64_t head, int64_t next_item, int64_t next_head) {
    prefetcher_.clear();
    if (next_item >= 0) {
      const auto [batch, first, rows] = block_of(next_item);
      prefetcher_.add(head_rows(call_.key, call_.type, batch, next_head, 0), shape_.kv_len, shape_.head_dim);
      prefetcher_.add(head_rows(call_.value, call_.type, batch, next_head, 0), shape_.kv_len, shape_.head_dim);
      prefetcher_.add(head_rows(call_.query, call_.type, batch, next_head, first), rows, shape_.head_dim);
    }
    const auto [batch, first, rows] = block_of(item);
    if (const StridedMatrix residual = residual_rows(call_, batch, first); residual.data != nullptr) {
      const int64_t begin = head * shape_.out_dim / shape_.num_heads;
      const int64_t end = (head + 1) * shape_.out_dim / shape_.num_heads;
      prefetcher_.add(residual.from(0, begin), rows, end - begin);
    }
    if (call_.addend.data != nullptr && call_.addend.token_stride != 0) {
      prefetcher_.add(addend_rows(call_, batch, head, first), rows, shape_.head_dim);
    }
  }

  // The block of keys from `key` on.
  KeyPanels<A> key_panels(int64_t key) const {
    return {keys_ + key * shape_.head_dim, std::min(block_, shape_.kv_len - key), shape_.head_dim,
            shape_.kv_len <= block_};
  }

  void attend(int64_t batch, int64_t head, int64_t first_query, int64_t rows, A* heads) {
    const A scale = static_cast<A>(call_.scale * kLog2E);
    for (int64_t key = 0; key < shape_.kv_len; key += block_) {
      key_panels(key).pack(head_rows(call_.key, call_.type, batch, head, key), scale);
    }
    const GemmOperand<A> values(head_rows(call_.value, call_.type, batch, head, 0), shape_.kv_len, shape_.head_dim,
                                values_);
    for (int64_t row = 0; row < rows; row += kQueryRows) {
      const int64_t first = first_query + row;
      const int64_t count = std::min(kQueryRows, rows - row);
      const GemmOperand<A> queries(head_rows(call_.query, call_.type, batch, head, first), count, shape_.head_dim,
                                   queries_);
      SoftmaxRow<A> softmax[kQueryRows];
      attend_rows(batch, head, first, count, queries, values, softmax, heads + row * shape_.inner_dim());
      if (call_.addend.data != nullptr) {
        add_rows(addend_rows(call_, batch, head, first), count, shape_.head_dim, A{1}, heads + row * shape_.inner_dim(),
                 shape_.inner_dim());
      }
      save_softmax(call_, batch, head, first, count, softmax);
    }
  }

  // Rows of queries against all keys they see.
  void attend_rows(int64_t batch, int64_t head, int64_t first, int64_t rows, const GemmOperand<A>& queries,
                   const GemmOperand<A>& values, SoftmaxRow<A>* softmax, A* heads) {
    const int64_t last_key = call_.mask.causal ? std::min(shape_.kv_len, first + rows) : shape_.kv_len;
    const int vectors = static_cast<int>(padded_width_ / kLanes<A>);
    const A gain = head_gain<A>(call_, head);
    // One block of keys, whole vectors: the products' results go straight to where they belong.
    const bool is_direct = last_key <= block_ && shape_.head_dim == padded_width_ && last_key > 0;
    for (int64_t key = 0; key < last_key; key += block_) {
      const int64_t count = std::min(block_, last_key - key);
      const int key_vectors = vectors_of<A>(count);
      key_panels(key).multiply(rows, count, queries.data, queries.ld, logits_, block_);
      mask_logits(call_, batch, head, first, rows, key, count, logits_, block_);
      softmax_rows(rows, key_vectors, softmax);
      const A* block_values = values.data + key * values.ld;
      if (is_direct) {
        A inverse[kQueryRows];
        for (int64_t row = 0; row < rows; ++row) {
          inverse[row] = softmax[row].inverse() * gain;
        }
        gemm<A, Operand::row_major>(rows, vectors, count, logits_, block_, block_values, values.ld,
                                    StoreScaled<A>{heads, shape_.inner_dim(), inverse});
      } else if (key == 0) {
        gemm<A, Operand::row_major>(rows, vectors, count, logits_, block_, block_values, values.ld,
                                    StoreTo<A>{outputs_, padded_width_});
      } else {
        gemm<A, Operand::row_major>(rows, vectors, count, logits_, block_, block_values, values.ld,
                                    AddRescaled<A>{outputs_, padded_width_, softmax});
      }
    }
    if (!is_direct) {
      for (int64_t row = 0; row < rows; ++row) {
        const A inverse = softmax[row].inverse() * gain;
        for (int64_t j = 0; j < shape_.head_dim; ++j) {
          heads[row * shape_.inner_dim() + j] = last_key == 0 ? A{0} : outputs_[row * padded_width_ + j] * inverse;
        }
      }
    }
  }

  void softmax_rows(int64_t rows, int key_vectors, SoftmaxRow<A>* softmax) {
    constexpr int kRows = OVERTONE_VECTOR_BYTES == 64 ? 4 : 2;  // as many as the registers are for
    int64_t row = 0;
    for (; row + kRows <= rows; row += kRows) {
      online_softmax_update<kRows>(softmax + row, logits_ + row * block_, block_, key_vectors);
      for (int i = 0; i < kRows; ++i) {
        prefetcher_.prefetch_row();
      }
    }
    for (; row < rows; ++row) {
      online_softmax_update<1>(softmax + row, logits_ + row * block_, block_, key_vectors);
      prefetcher_.prefetch_row();
    }
  }

  template <bool kWithTerms>
  void project(int64_t batch, int64_t first, int64_t rows, const A* heads) {
    using Target = ProjectionTarget<A, kWithTerms>;
    const int vectors = vectors_of<A>(shape_.out_dim);
    const StridedMatrix residual = residual_rows(call_, batch, first);
    const bool is_readable = residual.data == nullptr || (residual.type == kDtype<A> && residual.column_stride == 1);
    const bool can_be_direct = call_.y.type == kDtype<A> && is_readable;
    const auto is_direct = [&](int first_vector, int width) {
      return can_be_direct && (first_vector + width) * kLanes<A> <= shape_.out_dim;
    };
    gemm_large_panels<A>(
        rows, vectors, shape_.inner_dim(), heads, shape_.inner_dim(), static_cast<const A*>(call_.weight), sums_,
        [&](int first_vector, int width) {
          return is_direct(first_vector, width)
                     ? direct_target<Target>(batch, first, first_vector * kLanes<A>, residual)
                     : Target{sums_, kPanelLd<A>};
        },
        [&](int first_vector, int width) {
          if (!is_direct(first_vector, width)) {
            round_panel(batch, first, rows, first_vector * kLanes<A>, width * kLanes<A>);
          }
        });
  }

  template <class Target>
  Target direct_target(int64_t batch, int64_t first, int64_t channel, const StridedMatrix& residual) const {
    Target target{call_.y.at<A>(batch * shape_.q_len + first, channel), shape_.out_dim};
    if (residual.data != nullptr) {
      target.residual = residual.at<A>(0, channel);
      target.residual_ld = residual.row_stride;
    }
    target.bias = call_.bias == nullptr ? nullptr : static_cast<const A*>(call_.bias) + channel;
    target.scale = call_.sample_scale == nullptr ? nullptr : static_cast<const A*>(call_.sample_scale) + batch;
    return target;
  }

  // From sums_ to y, which has another type, or ends within a vector: as many rows at a time as stay in the cache.
  void round_panel(int64_t batch, int64_t first, int64_t rows, int64_t channel, int64_t columns) {
    const int64_t wanted = std::min(columns, shape_.out_dim - channel);
    for (int64_t row = 0; row < rows; row += kQueryRows) {
      store_projection(call_, unrounded_, batch, first + row, channel, std::min(kQueryRows, rows - row), wanted,
                       sums_ + row * kPanelLd<A>, kPanelLd<A>);
    }
  }

  const AttentionForward& call_;
  const AttentionShape& shape_;
  int64_t padded_width_;
  int64_t block_;  // keys at a time
  Prefetcher prefetcher_;
  UnroundedOutput<A> unrounded_;
  Scratch<A> memory_;
  A* keys_;     // Kᵀ times scale, in panels, block by block
  A* values_;   // [keys][padded_width], where V cannot be read in place
  A* logits_;   // [rows][block], then softmax weights
  A* queries_;  // [rows][padded_width], where Q cannot be read in place
  A* outputs_;  // [rows][padded_width], where the heads cannot be written at once
  A* heads_;    // [query_block][features], where backward does not need them
  A* sums_;     // [query_block][widest tile]
};

}  // namespace overtone::OVERTONE_ISA
