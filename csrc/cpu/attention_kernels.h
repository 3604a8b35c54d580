// The attention kernels, written once and compiled for every ISA level.
//
// Everything is computed in A: float for float32 and half inputs, double for float64. Inputs of any type and stride are
// widened while they are packed. A strip of queries meets the keys block by block (one block at ViT sizes), with the
// online softmax, so that memory grows as N and never as N².
#pragma once

#include "cpu/attention.h"
#include "cpu/exp2.h"
#include "cpu/gemm.h"
#include "cpu/packing.h"
#include "cpu/scratch.h"

namespace overtone::OVERTONE_LEVEL {

constexpr int64_t kStrip = 24;      // queries at a time: a strip of scores stays in the first-level cache
constexpr int64_t kWideStrip = 96;  // in backward, where the strip is the depth of the products for ∂K and ∂V
constexpr int64_t kKeyBlock = 480;  // keys at a time, a multiple of kRowPadding

constexpr double kLog2E = 1.4426950408889634074;

template <class A>
constexpr A kMinusInfinity = -std::numeric_limits<A>::infinity();

// The rows of one image's head from `token` on.
inline MatrixRows head_rows(const HeadTensor& tensor, ElementType type, int64_t image, int64_t head, int64_t token) {
  const int64_t offset = image * tensor.batch_stride + head * tensor.head_stride + token * tensor.token_stride;
  return {type, static_cast<char*>(tensor.data) + offset * bytes_of(type), tensor.token_stride, tensor.width_stride};
}

// What the mask does to one row of logits (base 2): adds the bias, and −inf where a key takes no part.
template <class A>
struct MaskRow {
  const A* bias = nullptr;
  const bool* flags = nullptr;
  int64_t key_stride = 0;
  int64_t visible;  // keys from here on are in the future

  MaskRow(const AttentionMask& mask, int64_t image, int64_t head, int64_t query, int64_t keys)
      : key_stride(mask.key_stride), visible(mask.causal ? std::min(keys, query + 1) : keys) {
    const int64_t offset = image * mask.batch_stride + head * mask.head_stride + query * mask.query_stride;
    bias = mask.bias == nullptr ? nullptr : static_cast<const A*>(mask.bias) + offset;
    flags = mask.flags == nullptr ? nullptr : mask.flags + offset;
  }

  void apply(A* logits, int64_t first_key, int64_t count, int64_t padded) const {
    if (bias != nullptr) {
      for (int64_t j = 0; j < count; ++j) {
        logits[j] += bias[(first_key + j) * key_stride] * static_cast<A>(kLog2E);
      }
    }
    if (flags != nullptr) {
      for (int64_t j = 0; j < count; ++j) {
        logits[j] = flags[(first_key + j) * key_stride] ? logits[j] : kMinusInfinity<A>;
      }
    }
    const int64_t seen = std::clamp<int64_t>(visible - first_key, 0, count);
    std::fill(logits + seen, logits + padded, kMinusInfinity<A>);
  }
};

// Online softmax of one row: the running maximum and sum, and what earlier sums must be multiplied with.
template <class A>
struct SoftmaxRow {
  A maximum = kMinusInfinity<A>;
  A sum = 0;
  A rescale = 1;

  // Turns a block of logits into unnormalised weights.
  OVERTONE_INLINE void absorb(A* logits, int64_t padded) {
    Vector<A> best = load_full(logits);
    for (int64_t j = kLanes<A>; j < padded; j += kLanes<A>) {
      const Vector<A> v = load_full(logits + j);
      best = v > best ? v : best;
    }
    const A block_maximum = largest_lane<A>(best);
    const A next = block_maximum > maximum ? block_maximum : maximum;
    // While every key so far is masked the maximum is −inf; any finite stand-in keeps −inf − −inf from arising.
    const A safe = next == kMinusInfinity<A> ? A{0} : next;
    rescale = maximum == kMinusInfinity<A> ? A{0} : exp2_nonpositive<A>(broadcast<A>(maximum - safe))[0];
    Vector<A> total{};
    for (int64_t j = 0; j < padded; j += kLanes<A>) {
      const Vector<A> weight = exp2_nonpositive<A>(load_full(logits + j) - safe);
      store_full(weight, logits + j);
      total += weight;
    }
    sum = sum * rescale + sum_of_lanes<A>(total);
    maximum = next;
  }
};

template <class A>
void attention_forward_item(const AttentionForward& call, int64_t image, int64_t head, int64_t first_query,
                            int64_t last_query) {
  const AttentionShape& shape = call.shape;
  const int64_t width = shape.width;
  const int64_t padded_keys = padded_to(shape.keys, kLanes<A>);
  const int64_t padded_width = padded_to(width, kLanes<A>);
  const int64_t block = std::min(padded_keys, kKeyBlock);
  const int vectors = static_cast<int>(padded_width / kLanes<A>);
  Scratch<A> scratch(Scratch<A>::padded(width * padded_keys) + Scratch<A>::padded(shape.keys * padded_width) +
                     Scratch<A>::padded(kStrip * block) + 2 * Scratch<A>::padded(kStrip * padded_width));
  A* keys = scratch.take(width * padded_keys);                 // [width][padded_keys]
  A* packed_values = scratch.take(shape.keys * padded_width);  // [keys][padded_width]
  A* scores = scratch.take(kStrip * block);                    // [strip][block]
  A* packed_queries = scratch.take(kStrip * padded_width);     // [strip][padded_width]
  A* outputs = scratch.take(kStrip * padded_width);            // [strip][padded_width]
  pack_columns(head_rows(call.key, call.type, image, head, 0), shape.keys, width, keys, padded_keys);
  const ProductRows<A> values(head_rows(call.value, call.type, image, head, 0), shape.keys, width, packed_values);

  const A scale = static_cast<A>(call.scale * kLog2E);
  for (int64_t first = first_query; first < last_query; first += kStrip) {
    const int64_t rows = std::min(kStrip, last_query - first);
    const ProductRows<A> queries(head_rows(call.query, call.type, image, head, first), rows, width, packed_queries);
    const int64_t last_key = call.mask.causal ? std::min(shape.keys, first + rows) : shape.keys;
    SoftmaxRow<A> softmax[kStrip];
    for (int64_t key = 0; key < last_key; key += kKeyBlock) {
      const int64_t count = std::min(kKeyBlock, last_key - key);
      const int64_t padded = padded_to(count, kLanes<A>);
      gemm<A, Operand::rows, Layout::row_major, Finishing::in_registers>(
          rows, static_cast<int>(padded / kLanes<A>), width, queries.data, queries.ld, keys + key, padded_keys,
          [&](int64_t row, int v, Vector<A> sum) { store_full(sum * scale, scores + row * block + v * kLanes<A>); });
      for (int64_t row = 0; row < rows; ++row) {
        MaskRow<A>(call.mask, image, head, first + row, shape.keys).apply(scores + row * block, key, count, padded);
        softmax[row].absorb(scores + row * block, padded);
      }
      gemm<A, Operand::rows, Layout::row_major, Finishing::in_registers>(
          rows, vectors, count, scores, block, values.data + key * values.ld, values.ld,
          [&](int64_t row, int v, Vector<A> sum) {
            A* out = outputs + row * padded_width + v * kLanes<A>;
            if (key > 0) {
              sum += load_full(out) * softmax[row].rescale;
            }
            store_full(sum, out);
          });
    }
    for (int64_t row = 0; row < rows; ++row) {
      const SoftmaxRow<A>& state = softmax[row];
      const int64_t token = first + row;
      A* heads = static_cast<A*>(call.heads) + (image * shape.queries + token) * shape.features() + head * width;
      // A row in which no key takes part has the sum 0, and an inverse of 0 makes it zero here and in backward.
      const A inverse = state.sum == 0 ? A{0} : 1 / state.sum;
      for (int64_t j = 0; j < width; ++j) {
        heads[j] = last_key == 0 ? A{0} : outputs[row * padded_width + j] * inverse;
      }
      A* saved = static_cast<A*>(call.softmax_rows) + 2 * ((image * shape.heads + head) * shape.queries + token);
      saved[0] = state.maximum == kMinusInfinity<A> ? A{0} : state.maximum;
      saved[1] = inverse;
    }
  }
}

template <class A>
void attention_forward_items(const AttentionForward& call, int64_t begin, int64_t end) {
  for (int64_t item = begin; item < end; ++item) {
    const int64_t first = item % call.blocks() * kQueryBlock;
    const int64_t image_head = item / call.blocks();
    attention_forward_item<A>(call, image_head / call.shape.heads, image_head % call.shape.heads, first,
                              std::min(first + kQueryBlock, call.shape.queries));
  }
}

template <class T>
OVERTONE_INLINE void project_block(const ProjectionForward& call, int64_t image, int64_t first, int64_t rows) {
  using A = Accumulator<T>;
  const AttentionShape& shape = call.shape;
  const int64_t features = shape.features();
  const int vectors = static_cast<int>(padded_to(shape.channels, kLanes<A>) / kLanes<A>);
  const int64_t token = image * shape.queries + first;
  const A* heads = static_cast<const A*>(call.heads) + token * features;
  T* y = static_cast<T*>(call.y) + token * shape.channels;
  A* wide_y = call.wide_y == nullptr ? nullptr : static_cast<A*>(call.wide_y) + token * shape.channels;
  const T* residual =
      call.residual == nullptr
          ? nullptr
          : static_cast<const T*>(call.residual) + image * call.residual_strides[0] + first * call.residual_strides[1];
  const int64_t residual_stride = call.residual_strides[2];
  gemm<A, Operand::rows, Layout::panels, Finishing::through_memory>(
      rows, vectors, features, heads, features, static_cast<const A*>(call.weight), 0,
      [&](int64_t row, int v, Vector<A> sum) {
        const int64_t channel = v * kLanes<A>;
        const int lanes = static_cast<int>(std::min<int64_t>(kLanes<A>, shape.channels - channel));
        if (residual != nullptr) {
          sum += load(residual + row * call.residual_strides[1] + channel * residual_stride, residual_stride, lanes);
        }
        store(sum, y + row * shape.channels + channel, lanes);
        if (wide_y != nullptr) {
          store(sum, wide_y + row * shape.channels + channel, lanes);
        }
      });
}

template <class T>
void projection_forward_items(const ProjectionForward& call, int64_t begin, int64_t end) {
  for (int64_t item = begin; item < end; ++item) {
    const int64_t first = item % call.blocks() * kTokenBlock;
    project_block<T>(call, item / call.blocks(), first, std::min(kTokenBlock, call.shape.queries - first));
  }
}

template <class A>
void projection_backward_items(const ProjectionBackward& call, int64_t begin, int64_t end) {
  const AttentionShape& shape = call.shape;
  const int64_t features = shape.features();
  const int vectors = static_cast<int>(padded_to(features, kLanes<A>) / kLanes<A>);
  const A* eigenvalues = static_cast<const A*>(call.eigenvalues);
  Scratch<A> scratch(Scratch<A>::padded(padded_to(features, kLanes<A>)));
  A* shares = scratch.take(padded_to(features, kLanes<A>));  // of ∂λ, summed over this item's tokens
  for (int64_t item = begin; item < end; ++item) {
    std::fill(shares, shares + padded_to(features, kLanes<A>), A{0});
    const int64_t first = item % call.blocks() * kTokenBlock;
    const int64_t rows = std::min(kTokenBlock, shape.queries - first);
    const int64_t token = item / call.blocks() * shape.queries + first;
    const A* heads = static_cast<const A*>(call.heads) + token * features;
    A* grad_heads = static_cast<A*>(call.grad_heads) + token * features;
    gemm<A, Operand::rows, Layout::panels, Finishing::through_memory>(
        rows, vectors, shape.channels, static_cast<const A*>(call.grad_y) + token * shape.channels, shape.channels,
        static_cast<const A*>(call.weight), 0, [&](int64_t row, int v, Vector<A> sum) {
          const int64_t feature = v * kLanes<A>;
          const int lanes = static_cast<int>(std::min<int64_t>(kLanes<A>, features - feature));
          store(sum * load(eigenvalues + feature, 1, lanes), grad_heads + row * features + feature, lanes);
          const Vector<A> share = sum * load(heads + row * features + feature, 1, lanes);
          store_full(load_full(shares + feature) + share, shares + feature);
        });
    if (call.grad_eigenvalues != nullptr) {
      std::copy_n(shares, features, call.grad_eigenvalues + item * features);
    }
  }
}

template <class A>
void basis_backward_items(const BasisBackward& call, int64_t begin, int64_t end) {
  constexpr int64_t kDepth = 192;  // tokens at a time: their gradients stay in the second-level cache
  const AttentionShape& shape = call.shape;
  const int64_t features = shape.features();
  const int64_t tokens = shape.batch * shape.queries;
  const int64_t padded_channels = padded_to(shape.channels, kLanes<A>);
  Scratch<A> scratch(Scratch<A>::padded(kDepth * kTokenBlock) + Scratch<A>::padded(kDepth * padded_channels) +
                     Scratch<A>::padded(kTokenBlock * padded_channels));
  A* block = scratch.take(kDepth * kTokenBlock);                 // [depth][features of this item]
  A* packed_gradients = scratch.take(kDepth * padded_channels);  // [depth][padded_channels]
  A* sums = scratch.take(kTokenBlock * padded_channels);         // [features of this item][padded_channels]
  for (int64_t item = begin; item < end; ++item) {
    const int64_t first = item * kTokenBlock;
    const int64_t rows = std::min(kTokenBlock, features - first);
    std::fill(sums, sums + kTokenBlock * padded_channels, A{0});
    for (int64_t token = 0; token < tokens; token += kDepth) {
      const int64_t depth = std::min(kDepth, tokens - token);
      pack_rows(buffer_rows<A>(call.heads, token * features + first, features), depth, rows, block, kTokenBlock);
      const ProductRows<A> gradients(buffer_rows<A>(call.grad_y, token * shape.channels, shape.channels), depth,
                                     shape.channels, packed_gradients);
      gemm<A, Operand::columns, Layout::row_major, Finishing::in_registers>(
          rows, static_cast<int>(padded_channels / kLanes<A>), depth, block, kTokenBlock, gradients.data, gradients.ld,
          [&](int64_t row, int v, Vector<A> sum) {
            A* out = sums + row * padded_channels + v * kLanes<A>;
            store_full(load_full(out) + sum, out);
          });
    }
    const A* eigenvalues = static_cast<const A*>(call.eigenvalues);
    A* grad_basis = static_cast<A*>(call.grad_basis);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t channel = 0; channel < shape.channels; ++channel) {
        grad_basis[(first + row) * shape.channels + channel] =
            sums[row * padded_channels + channel] * eigenvalues[first + row];
      }
    }
  }
}

// Keys block by block, each meeting every strip of queries: the block's ∂K and ∂V stay in cache, and ∂Q collects one
// product per block. P is recomputed from the saved maxima and sums; a row in which no key took part has no gradient.
template <class A>
void attention_backward_item(const AttentionBackward& call, int64_t image, int64_t head) {
  const AttentionShape& shape = call.shape;
  const int64_t width = shape.width;
  const int64_t features = shape.features();
  const int64_t padded_keys = padded_to(shape.keys, kRowPadding);
  const int64_t padded_width = padded_to(width, kLanes<A>);
  const int64_t block = std::min(padded_keys, kKeyBlock);
  const int vectors = static_cast<int>(padded_width / kLanes<A>);
  const auto padded = [](int64_t size) { return Scratch<A>::padded(size); };
  Scratch<A> scratch(2 * padded(width * block) + 3 * padded(block * padded_width) + 2 * padded(kWideStrip * block) +
                     3 * padded(kWideStrip * padded_width) + padded(shape.queries * padded_width));
  A* keys_across = scratch.take(width * block);         // [width][block]
  A* values_across = scratch.take(width * block);       // [width][block]
  A* packed_keys = scratch.take(block * padded_width);  // [block][padded_width]
  A* grad_keys = scratch.take(block * padded_width);    // [block][padded_width]
  A* grad_values = scratch.take(block * padded_width);  // [block][padded_width]
  A* weights = scratch.take(kWideStrip * block);        // [strip][block]: P
  A* grad_logits = scratch.take(kWideStrip * block);    // [strip][block]: ∂L/∂logits
  A* packed_queries = scratch.take(kWideStrip * padded_width);
  A* packed_grads = scratch.take(kWideStrip * padded_width);    // ∂L/∂O of the strip
  A* packed_outputs = scratch.take(kWideStrip * padded_width);  // O of the strip
  A* grad_queries = scratch.take(shape.queries * padded_width);
  std::fill(grad_queries, grad_queries + shape.queries * padded_width, A{0});

  const A scale = static_cast<A>(call.scale);
  const A logit_scale = static_cast<A>(call.scale * kLog2E);
  const A* softmax_rows = static_cast<const A*>(call.softmax_rows) + 2 * (image * shape.heads + head) * shape.queries;
  const int64_t corner = image * shape.queries * features + head * width;
  for (int64_t key = 0; key < shape.keys; key += kKeyBlock) {
    const int64_t count = std::min(kKeyBlock, shape.keys - key);
    const int64_t row_padded = padded_to(count, kRowPadding);
    const MatrixRows key_rows = head_rows(call.key, call.type, image, head, key);
    pack_columns(key_rows, count, width, keys_across, block);
    pack_columns(head_rows(call.value, call.type, image, head, key), count, width, values_across, block);
    const ProductRows<A> keys(key_rows, count, width, packed_keys);
    std::fill(grad_keys, grad_keys + block * padded_width, A{0});
    std::fill(grad_values, grad_values + block * padded_width, A{0});
    const int score_vectors = static_cast<int>(row_padded / kLanes<A>);
    const int64_t first_strip = call.mask.causal ? key / kWideStrip * kWideStrip : 0;
    for (int64_t first = first_strip; first < shape.queries; first += kWideStrip) {
      const int64_t rows = std::min(kWideStrip, shape.queries - first);
      const MatrixRows strip = head_rows(call.query, call.type, image, head, first);
      const int64_t offset = corner + first * features;
      const ProductRows<A> queries(strip, rows, width, packed_queries);
      const ProductRows<A> grads(buffer_rows<A>(call.grad_heads, offset, features), rows, width, packed_grads);
      const ProductRows<A> outputs(buffer_rows<A>(call.heads, offset, features), rows, width, packed_outputs);
      gemm<A, Operand::rows, Layout::row_major, Finishing::in_registers>(
          rows, score_vectors, width, queries.data, queries.ld, keys_across, block,
          [&](int64_t row, int v, Vector<A> sum) {
            store_full(sum * logit_scale, weights + row * block + v * kLanes<A>);
          });
      for (int64_t row = 0; row < rows; ++row) {
        A* logits = weights + row * block;
        MaskRow<A>(call.mask, image, head, first + row, shape.keys).apply(logits, key, count, row_padded);
        const A maximum = softmax_rows[2 * (first + row)];
        const A inverse = softmax_rows[2 * (first + row) + 1];
        for (int64_t j = 0; j < row_padded; j += kLanes<A>) {
          store_full(exp2_nonpositive<A>(load_full(logits + j) - maximum) * inverse, logits + j);
        }
      }
      // In the order of the product below: where softmax is one-hot, ∂P − dot is then exactly zero.
      A row_dots[kWideStrip] = {};
      for (int64_t j = 0; j < width; ++j) {
        for (int64_t row = 0; row < rows; ++row) {
          row_dots[row] += grads.data[row * grads.ld + j] * outputs.data[row * outputs.ld + j];
        }
      }
      gemm<A, Operand::rows, Layout::row_major, Finishing::in_registers>(
          rows, score_vectors, width, grads.data, grads.ld, values_across, block,
          [&](int64_t row, int v, Vector<A> sum) {
            const int64_t j = row * block + v * kLanes<A>;
            store_full(load_full(weights + j) * (sum - row_dots[row]), grad_logits + j);
          });
      if (call.grad_logits != nullptr) {
        for (int64_t row = 0; row < rows; ++row) {
          std::copy_n(grad_logits + row * block, count,
                      static_cast<A*>(call.grad_logits) +
                          ((image * shape.heads + head) * shape.queries + first + row) * shape.keys + key);
        }
      }
      const auto add_to = [&](A* out) {
        return [out, padded_width](int64_t row, int v, Vector<A> sum) {
          A* p = out + row * padded_width + v * kLanes<A>;
          store_full(load_full(p) + sum, p);
        };
      };
      if (call.grad_value.data != nullptr) {
        gemm<A, Operand::columns, Layout::row_major, Finishing::in_registers>(
            count, vectors, rows, weights, block, grads.data, grads.ld, add_to(grad_values));
      }
      if (call.grad_key.data != nullptr) {
        gemm<A, Operand::columns, Layout::row_major, Finishing::in_registers>(
            count, vectors, rows, grad_logits, block, queries.data, queries.ld, add_to(grad_keys));
      }
      if (call.grad_query.data != nullptr) {
        gemm<A, Operand::rows, Layout::row_major, Finishing::in_registers>(
            rows, vectors, count, grad_logits, block, keys.data, keys.ld, add_to(grad_queries + first * padded_width));
      }
    }
    if (call.grad_key.data != nullptr) {
      unpack_rows(grad_keys, padded_width, count, width, scale, head_rows(call.grad_key, call.type, image, head, key));
    }
    if (call.grad_value.data != nullptr) {
      unpack_rows(grad_values, padded_width, count, width, A{1},
                  head_rows(call.grad_value, call.type, image, head, key));
    }
  }
  if (call.grad_query.data != nullptr) {
    unpack_rows(grad_queries, padded_width, shape.queries, width, scale,
                head_rows(call.grad_query, call.type, image, head, 0));
  }
}

template <class A>
void attention_backward_items(const AttentionBackward& call, int64_t begin, int64_t end) {
  for (int64_t item = begin; item < end; ++item) {
    attention_backward_item<A>(call, item / call.shape.heads, item % call.shape.heads);
  }
}

template <class A>
void pack_weight_as(const WeightPacking& call) {
  const int vectors = static_cast<int>(padded_to(call.columns, kLanes<A>) / kLanes<A>);
  const PanelIndex<A> index{call.rows, vectors};
  A* packed = static_cast<A*>(call.packed);
  const MatrixRows source{call.type, const_cast<void*>(call.data), call.row_stride, call.column_stride};
  with_type<A>(call.type, [&](auto element) {
    using T = decltype(element);
    for (int64_t row = 0; row < call.rows; ++row) {
      const A scale = call.row_scale == nullptr ? A{1} : static_cast<const A*>(call.row_scale)[row];
      for (int v = 0; v < vectors; ++v) {
        const int64_t column = v * kLanes<A>;
        const int lanes = static_cast<int>(std::min<int64_t>(kLanes<A>, call.columns - column));
        store_full(load(source.at<T>(row, column), call.column_stride, lanes) * scale, packed + index(row, v));
      }
    }
  });
}

inline int64_t packed_size(const WeightPacking& call) {
  return call.rows * padded_to(call.columns, call.type == ElementType::float64 ? kLanes<double> : kLanes<float>);
}

inline void pack_weight(const WeightPacking& call) {
  call.type == ElementType::float64 ? pack_weight_as<double>(call) : pack_weight_as<float>(call);
}

inline void attention_forward(const AttentionForward& call, int64_t begin, int64_t end) {
  call.type == ElementType::float64 ? attention_forward_items<double>(call, begin, end)
                                    : attention_forward_items<float>(call, begin, end);
}

inline void projection_forward(const ProjectionForward& call, int64_t begin, int64_t end) {
  switch (call.type) {
    case ElementType::float32:
      return projection_forward_items<float>(call, begin, end);
    case ElementType::float64:
      return projection_forward_items<double>(call, begin, end);
    case ElementType::bfloat16:
      return projection_forward_items<BFloat16>(call, begin, end);
    case ElementType::float16:
      return projection_forward_items<Half>(call, begin, end);
  }
}

inline void projection_backward(const ProjectionBackward& call, int64_t begin, int64_t end) {
  call.is_float64 ? projection_backward_items<double>(call, begin, end)
                  : projection_backward_items<float>(call, begin, end);
}

inline void basis_backward(const BasisBackward& call, int64_t begin, int64_t end) {
  call.is_float64 ? basis_backward_items<double>(call, begin, end) : basis_backward_items<float>(call, begin, end);
}

inline void attention_backward(const AttentionBackward& call, int64_t begin, int64_t end) {
  call.type == ElementType::float64 ? attention_backward_items<double>(call, begin, end)
                                    : attention_backward_items<float>(call, begin, end);
}

extern const AttentionKernels attention_kernels = {
    OVERTONE_LEVEL_NAME, &packed_size,         &pack_weight,    &attention_forward,
    &projection_forward, &projection_backward, &basis_backward, &attention_backward,
};

}  // namespace overtone::OVERTONE_LEVEL
