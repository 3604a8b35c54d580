// Forward: softmax attention of a block of queries, head by head, then its projection, then the norms of the image.
#pragma once

#include "cpu/attention/key_panels.h"
#include "cpu/attention/params.h"
#include "cpu/attention/softmax.h"
#include "cpu/gemm/microkernel.h"
#include "cpu/gemm/pack.h"
#include "cpu/simd/scratch.h"

namespace overtone::OVERTONE_ISA {

constexpr int64_t kStrip = 24;  // queries at a time: a strip of logits stays in the first-level cache

// Keys at a time, in blocks of equal size: one block at ViT sizes, so that the online softmax costs nothing there.
template <class A>
int64_t key_block(int64_t keys, int64_t most) {
  const int64_t blocks = std::max<int64_t>(1, (keys + most - 1) / most);
  return padded_to((keys + blocks - 1) / blocks, kLanes<A>);
}

// The rows of one image's head from `token` on.
inline MatrixRows head_rows(const StridedHeads& tensor, ElementType type, int64_t image, int64_t head, int64_t token) {
  const int64_t offset = image * tensor.batch_stride + head * tensor.head_stride + token * tensor.token_stride;
  return {type, static_cast<char*>(tensor.data) + offset * bytes_of(type), tensor.token_stride, tensor.width_stride};
}

// What backward needs to make the softmax of queries from `first` on again.
template <class A>
void save_softmax(const AttentionForward& call, int64_t image, int64_t head, int64_t first, int64_t rows,
                  const SoftmaxRow<A>* softmax) {
  if (call.softmax_rows == nullptr) {
    return;
  }
  const AttentionShape& shape = call.shape;
  A* saved = static_cast<A*>(call.softmax_rows) + 2 * ((image * shape.heads + head) * shape.queries + first);
  for (int64_t i = 0; i < rows; ++i) {
    saved[2 * i] = softmax[i].maximum == kMinusInfinity<A> ? A{0} : softmax[i].maximum;
    saved[2 * i + 1] = softmax[i].inverse();
  }
}

// y before it is rounded, of which the norms are taken: in the call's tensor, or, where only the norms want it and an
// item has all queries of its image, in a buffer that stays in the cache.
template <class A>
class WideResult {
 public:
  explicit WideResult(const AttentionForward& call)
      : call_(call), image_(call.has_wide_image ? call.shape.queries * call.shape.channels : 0) {
    buffer_ = image_.take(0);
  }

  // The row of a query, or null.
  A* row(int64_t image, int64_t query) const {
    if (call_.has_wide_image) {
      return buffer_ + query * call_.shape.channels;
    }
    return call_.wide_y == nullptr
               ? nullptr
               : static_cast<A*>(call_.wide_y) + (image * call_.shape.queries + query) * call_.shape.channels;
  }

  // After a block of queries: the one that finishes an image takes its norms.
  void finish_block(int64_t image) const {
    if (call_.norms != nullptr && __atomic_sub_fetch(call_.blocks_left + image, 1, __ATOMIC_ACQ_REL) == 0) {
      NormsForward norms = *call_.norms;
      if (call_.has_wide_image) {
        norms.x.data = buffer_;
      }
      const int64_t items = norms.shape.items_per_sample();
      call_.norms_kernel(norms, image * items, (image + 1) * items);
    }
  }

 private:
  const AttentionForward& call_;
  Scratch<A> image_;
  A* buffer_;
};

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
template <class T>
class ForwardWorker {
  using A = Accumulator<T>;

 public:
  explicit ForwardWorker(const AttentionForward& call)
      : call_(call),
        shape_(call.shape),
        padded_width_(padded_to(shape_.width, kLanes<A>)),
        block_(key_block<A>(shape_.keys, kMostKeys)),
        wide_(call),
        memory_(Scratch<A>::padded(KeyColumns<A>::size(shape_.keys, shape_.width)) +
                Scratch<A>::padded(shape_.keys * padded_width_) + Scratch<A>::padded(kStrip * block_) +
                2 * Scratch<A>::padded(kStrip * padded_width_) +
                (call.heads == nullptr ? Scratch<A>::padded(call.query_block * shape_.features()) : 0) +
                Scratch<A>::padded(call.query_block * kPanelLd<A>)) {
    keys_ = memory_.take(KeyColumns<A>::size(shape_.keys, shape_.width));
    values_ = memory_.take(shape_.keys * padded_width_);
    logits_ = memory_.take(kStrip * block_);
    queries_ = memory_.take(kStrip * padded_width_);
    outputs_ = memory_.take(kStrip * padded_width_);
    heads_ = call.heads == nullptr ? memory_.take(call.query_block * shape_.features()) : nullptr;
    sums_ = memory_.take(call.query_block * kPanelLd<A>);
  }

  // `next_item` is what this thread does afterwards, or -1.
  void run(int64_t item, int64_t next_item) {
    const auto [image, first, rows] = block_of(item);
    A* heads = call_.heads == nullptr
                   ? heads_
                   : static_cast<A*>(call_.heads) + (image * shape_.queries + first) * shape_.features();
    for (int64_t head = 0; head < shape_.heads; ++head) {
      const bool is_last = head + 1 == shape_.heads;
      expect(item, head, is_last ? next_item : item, is_last ? 0 : head + 1);
      attend(image, head, first, rows, heads + head * shape_.width);
    }
    project(image, first, rows, heads);
    wide_.finish_block(image);
  }

 private:
  static constexpr int64_t kMostKeys = 480;

  struct Block {
    int64_t image;
    int64_t first;  // query
    int64_t rows;
  };

  Block block_of(int64_t item) const {
    const int64_t first = item % call_.blocks() * call_.query_block;
    return {item / call_.blocks(), first, std::min(call_.query_block, shape_.queries - first)};
  }

  // While a head is attended to, the next one's rows come nearer, and a share of the residual.
  void expect(int64_t item, int64_t head, int64_t next_item, int64_t next_head) {
    coming_.clear();
    if (next_item >= 0) {
      const auto [image, first, rows] = block_of(next_item);
      coming_.add(head_rows(call_.key, call_.type, image, next_head, 0), shape_.keys, shape_.width);
      coming_.add(head_rows(call_.value, call_.type, image, next_head, 0), shape_.keys, shape_.width);
      coming_.add(head_rows(call_.query, call_.type, image, next_head, first), rows, shape_.width);
    }
    if (call_.residual != nullptr) {
      const auto [image, first, rows] = block_of(item);
      const int64_t begin = head * shape_.channels / shape_.heads;
      const int64_t end = (head + 1) * shape_.channels / shape_.heads;
      const int64_t* strides = call_.residual_strides;
      const T* corner = residual_at(image, first) + begin * strides[2];
      coming_.add({call_.type, const_cast<T*>(corner), strides[1], strides[2]}, rows, end - begin);
    }
  }

  const T* residual_at(int64_t image, int64_t query) const {
    const int64_t* strides = call_.residual_strides;
    return static_cast<const T*>(call_.residual) + image * strides[0] + query * strides[1];
  }

  // The block of keys from `key` on.
  KeyColumns<A> key_columns(int64_t key) const {
    return {keys_ + key * shape_.width, std::min(block_, shape_.keys - key), shape_.width, shape_.keys <= block_};
  }

  void attend(int64_t image, int64_t head, int64_t first_query, int64_t rows, A* heads) {
    const A scale = static_cast<A>(call_.scale * kLog2E);
    for (int64_t key = 0; key < shape_.keys; key += block_) {
      key_columns(key).pack(head_rows(call_.key, call_.type, image, head, key), scale);
    }
    const ProductRows<A> values(head_rows(call_.value, call_.type, image, head, 0), shape_.keys, shape_.width, values_);
    for (int64_t row = 0; row < rows; row += kStrip) {
      const int64_t first = first_query + row;
      const int64_t count = std::min(kStrip, rows - row);
      const ProductRows<A> queries(head_rows(call_.query, call_.type, image, head, first), count, shape_.width,
                                   queries_);
      SoftmaxRow<A> softmax[kStrip];
      attend_strip(image, head, first, count, queries, values, softmax, heads + row * shape_.features());
      save_softmax(call_, image, head, first, count, softmax);
    }
  }

  // One strip of queries against all keys it sees.
  void attend_strip(int64_t image, int64_t head, int64_t first, int64_t rows, const ProductRows<A>& queries,
                    const ProductRows<A>& values, SoftmaxRow<A>* softmax, A* heads) {
    const int64_t last_key = call_.mask.causal ? std::min(shape_.keys, first + rows) : shape_.keys;
    const int vectors = static_cast<int>(padded_width_ / kLanes<A>);
    // One block of keys, whole vectors: the products' results go straight to where they belong.
    const bool is_direct = last_key <= block_ && shape_.width == padded_width_ && last_key > 0;
    for (int64_t key = 0; key < last_key; key += block_) {
      const int64_t count = std::min(block_, last_key - key);
      const int key_vectors = vectors_of<A>(count);
      key_columns(key).multiply(rows, count, queries.data, queries.ld, logits_, block_);
      mask_logits(call_, image, head, first, rows, key, count, logits_, block_);
      absorb_strip(rows, key_vectors, softmax);
      const A* block_values = values.data + key * values.ld;
      if (is_direct) {
        A inverse[kStrip];
        for (int64_t row = 0; row < rows; ++row) {
          inverse[row] = softmax[row].inverse();
        }
        gemm<A, Operand::rows>(rows, vectors, count, logits_, block_, block_values, values.ld,
                               StoreScaled<A>{heads, shape_.features(), inverse});
      } else if (key == 0) {
        gemm<A, Operand::rows>(rows, vectors, count, logits_, block_, block_values, values.ld,
                               StoreTo<A>{outputs_, padded_width_});
      } else {
        gemm<A, Operand::rows>(rows, vectors, count, logits_, block_, block_values, values.ld,
                               AddRescaled<A>{outputs_, padded_width_, softmax});
      }
    }
    if (!is_direct) {
      for (int64_t row = 0; row < rows; ++row) {
        const A inverse = softmax[row].inverse();
        for (int64_t j = 0; j < shape_.width; ++j) {
          heads[row * shape_.features() + j] = last_key == 0 ? A{0} : outputs_[row * padded_width_ + j] * inverse;
        }
      }
    }
  }

  void absorb_strip(int64_t rows, int key_vectors, SoftmaxRow<A>* softmax) {
    constexpr int kRows = OVERTONE_VECTOR_BYTES == 64 ? 4 : 2;  // as many as the registers are for
    int64_t row = 0;
    for (; row + kRows <= rows; row += kRows) {
      absorb_rows<kRows>(softmax + row, logits_ + row * block_, block_, key_vectors);
      for (int i = 0; i < kRows; ++i) {
        coming_.fetch();
      }
    }
    for (; row < rows; ++row) {
      absorb_rows<1>(softmax + row, logits_ + row * block_, block_, key_vectors);
      coming_.fetch();
    }
  }

  // y = residual + heads · weight. The residual is added last: as the sum's start it would cost digits.
  void project(int64_t image, int64_t first, int64_t rows, const A* heads) {
    const int vectors = vectors_of<A>(shape_.channels);
    const int64_t token = image * shape_.queries + first;
    T* y = static_cast<T*>(call_.y) + token * shape_.channels;
    const int64_t* strides = call_.residual_strides;
    const T* residual = call_.residual == nullptr ? nullptr : residual_at(image, first);
    const auto is_direct = [&](int first_vector, int width) {
      return std::is_same_v<T, A> && (first_vector + width) * kLanes<A> <= shape_.channels &&
             (residual == nullptr || strides[2] == 1);
    };
    gemm_large_panels<A>(
        rows, vectors, shape_.features(), heads, shape_.features(), static_cast<const A*>(call_.weight), sums_,
        [&](int first_vector, int width) {
          PanelTarget<A> target{sums_, kPanelLd<A>, nullptr, 0};
          if constexpr (std::is_same_v<T, A>) {
            if (is_direct(first_vector, width)) {
              const int64_t channel = first_vector * kLanes<A>;
              target = {y + channel, shape_.channels, residual == nullptr ? nullptr : residual + channel, strides[1]};
            }
          }
          return target;
        },
        [&](int first_vector, int width) {
          if (!is_direct(first_vector, width)) {
            round_panel(image, first, rows, first_vector, width, residual, y);
          }
        });
  }

  // From sums_ to y, which has another type, or ends within a vector.
  void round_panel(int64_t image, int64_t first, int64_t rows, int first_vector, int width, const T* residual,
                   T* y) const {
    A* wide_y = wide_.row(image, first);
    const int64_t* strides = call_.residual_strides;
    for (int64_t row = 0; row < rows; ++row) {
      for (int v = 0; v < width; ++v) {
        const int64_t channel = (first_vector + v) * kLanes<A>;
        const int lanes = static_cast<int>(std::min<int64_t>(kLanes<A>, shape_.channels - channel));
        Vector<A> sum = load_full(sums_ + row * kPanelLd<A> + v * kLanes<A>);
        if (residual != nullptr) {
          sum += load(residual + row * strides[1] + channel * strides[2], strides[2], lanes);
        }
        store(sum, y + row * shape_.channels + channel, lanes);
        if (wide_y != nullptr) {
          store(sum, wide_y + row * shape_.channels + channel, lanes);
        }
      }
    }
  }

  const AttentionForward& call_;
  const AttentionShape& shape_;
  int64_t padded_width_;
  int64_t block_;  // keys at a time
  ComingRows coming_;
  WideResult<A> wide_;
  Scratch<A> memory_;
  A* keys_;     // Kᵀ times scale, in panels, block by block
  A* values_;   // [keys][padded_width], where V cannot be read in place
  A* logits_;   // [strip][block], then softmax weights
  A* queries_;  // [strip][padded_width], where Q cannot be read in place
  A* outputs_;  // [strip][padded_width], where the heads cannot be written at once
  A* heads_;    // [query_block][features], where backward does not need them
  A* sums_;     // [query_block][widest tile]
};

}  // namespace overtone::OVERTONE_ISA
