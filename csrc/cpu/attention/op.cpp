// spectral_attention on CPU tensors: from the dispatcher to the kernels of the current ISA level.
// Shapes and types were validated by python/overtone/ops; what is checked here again is what memory safety needs.
#include "cpu/attention/params.h"

#include <algorithm>
#include <cmath>
#include <tuple>

#include "cpu/frequency/norms.h"
#include "cpu/gemm/packed.h"
#include "cpu/isa/isa.h"
#include "cpu/tensor.h"

namespace overtone {
namespace {

const AttentionKernels& kernels(const char* op, ElementType type) {
  return attention_kernels_table.get(op, type == ElementType::bfloat16);
}

// What forward and backward are both given.
struct Inputs : AttentionInputs {
  const char* op;
  ScalarType scalar_type;
  ScalarType statistics;

  Inputs(const char* op, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& eigenvalues,
         const Tensor& basis, const std::optional<Tensor>& attn_mask, bool is_causal, double logit_scale)
      : op(op), scalar_type(q.scalar_type()), statistics(statistics_type(element_type(q, op, "query"))) {
    type = element_type(q, op, "query");
    scale = logit_scale;
    check_dims(q, 4, false, "query", op);
    check_dims(k, 4, false, "key", op);
    check_dims(basis, 2, false, "basis", op);
    shape = {q.size(0), q.size(1), q.size(2), k.size(2), q.size(3), basis.size(1)};
    check_tensor(q, {{shape.batch, shape.heads, shape.queries, shape.width}, scalar_type}, "query", op);
    check_tensor(k, {{shape.batch, shape.heads, shape.keys, shape.width}, scalar_type}, "key", op);
    check_tensor(v, {{shape.batch, shape.heads, shape.keys, shape.width}, scalar_type}, "value", op);
    check_tensor(eigenvalues, {{shape.features()}, statistics, true}, "eigenvalues", op);
    check_tensor(basis, {{shape.features(), shape.channels}, scalar_type}, "basis", op);
    query = head_tensor(q);
    key = head_tensor(k);
    value = head_tensor(v);
    mask = mask_of(attn_mask, is_causal);
  }

  static StridedHeads head_tensor(const Tensor& x) {
    return {x.data_ptr(), x.stride(0), x.stride(1), x.stride(2), x.stride(3)};
  }

  AttentionMask mask_of(const std::optional<Tensor>& given, bool is_causal) const {
    AttentionMask result;
    result.causal = is_causal;
    if (!given.has_value()) {
      return result;
    }
    const bool is_bool = given->scalar_type() == ScalarType::Bool;
    check_tensor(*given,
                 {{shape.batch, shape.heads, shape.queries, shape.keys}, is_bool ? ScalarType::Bool : statistics},
                 "attn_mask", op);
    result.bias = is_bool ? nullptr : given->data_ptr();
    result.flags = is_bool ? static_cast<const bool*>(given->data_ptr()) : nullptr;
    result.batch_stride = given->stride(0);
    result.head_stride = given->stride(1);
    result.query_stride = given->stride(2);
    result.key_stride = given->stride(3);
    return result;
  }
};

// All tokens' gradients as the right operand of a product of tiles.
std::optional<Tensor> packed_gradient(const AttentionKernels& run, const AttentionShape& shape, const void* grad,
                                      const Tensor& like) {
  PanelPacking packing;
  packing.source = {ElementType::float32, const_cast<void*>(grad), shape.channels, 1};
  packing.depth = shape.batch * shape.queries;
  packing.columns = shape.channels;
  return packed(run.packing, packing, like, ScalarType::Float);
}

// Queries of one item: whole images where there are enough of them, else as few as give every thread two items.
int64_t query_block(const AttentionShape& shape, int64_t multiple) {
  constexpr int64_t kMost = 384;
  constexpr int64_t kLeast = 48;
  const int64_t items = 2 * static_cast<int64_t>(torch::stable::get_num_threads());
  const int64_t blocks = std::max((shape.queries + kMost - 1) / kMost, items / std::max<int64_t>(1, shape.batch));
  const int64_t even = (shape.queries + blocks - 1) / std::max<int64_t>(1, blocks);
  return std::max(kLeast, (even + multiple - 1) / multiple * multiple);
}

// The norms of y, taken image by image.
struct Norms {
  std::vector<int64_t> offsets;
  std::vector<int64_t> blocks_left;
  NormsForward call;
  std::optional<NormSums> sums;

  Norms(const AttentionForward& attention, ElementType type, const Tensor& y) {
    const AttentionShape& shape = attention.shape;
    call.shape = {shape.batch, shape.queries, shape.channels};
    call.type = type;
    for (int64_t image = 0; image < shape.batch; ++image) {
      offsets.push_back(attention.has_wide_image ? 0 : image * shape.queries * shape.channels);
    }
    call.x = {y.data_ptr(), shape.channels, 1, offsets.data()};
    sums.emplace(call);
    blocks_left.assign(shape.batch, attention.blocks());
  }
};

// heads [B, N, H·D] and softmax_rows [B, H, N, 2] are what backward needs; wide_y is y before rounding. What is not
// wanted, or would be the same as y, is empty.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> spectral_attention(
    Tensor query, Tensor key, Tensor value, Tensor eigenvalues, Tensor basis, std::optional<Tensor> residual,
    std::optional<Tensor> attn_mask, bool is_causal, double scale, bool need_norms, bool need_wide,
    bool need_backward) {
  constexpr const char* op = "spectral_attention";
  const Inputs in(op, query, key, value, eigenvalues, basis, attn_mask, is_causal, scale);
  const AttentionShape& shape = in.shape;
  const std::vector<int64_t> y_shape{shape.batch, shape.queries, shape.channels};
  check_tensor(residual, {y_shape, in.scalar_type}, "residual", op);
  const auto& run = kernels(op, in.type);
  const auto allocate = [&](bool wanted, const std::vector<int64_t>& size) {
    return allocated(query, wanted ? size : std::vector<int64_t>{0}, in.statistics);
  };
  Tensor y = allocated(query, y_shape);
  Tensor wide_y = allocate(need_wide && in.scalar_type != in.statistics, y_shape);
  Tensor low = allocate(need_norms, {shape.batch});
  Tensor high = allocate(need_norms, {shape.batch});
  Tensor heads = allocate(need_backward, {shape.batch, shape.queries, shape.features()});
  Tensor softmax_rows = allocate(need_backward, {shape.batch, shape.heads, shape.queries, 2});

  PanelPacking packing;  // diag(λ) U
  packing.source = {in.type, basis.data_ptr(), basis.stride(0), basis.stride(1)};
  packing.depth = shape.features();
  packing.columns = shape.channels;
  packing.row_scale = eigenvalues.data_ptr();
  const Tensor weight = packed(run.packing, packing, query, in.statistics);

  AttentionForward attention{in};
  attention.query_block = query_block(shape, run.uses_tiles ? 32 : 8);
  attention.weight = weight.data_ptr();
  if (residual.has_value()) {
    attention.residual = residual->data_ptr();
    for (int64_t dim = 0; dim < 3; ++dim) {
      attention.residual_strides[dim] = residual->stride(dim);
    }
  }
  attention.y = y.data_ptr();
  // The norms are those of y before it is rounded.
  const bool is_rounded = in.scalar_type != in.statistics;
  attention.has_wide_image = need_norms && is_rounded && !need_wide && attention.blocks() == 1;
  Tensor rounded_from = wide_y;
  if (need_norms && is_rounded && !need_wide && !attention.has_wide_image) {
    rounded_from = allocate(true, y_shape);
  }
  attention.wide_y = rounded_from.numel() > 0 ? rounded_from.data_ptr() : nullptr;
  attention.heads = need_backward ? heads.data_ptr() : nullptr;
  attention.softmax_rows = need_backward ? softmax_rows.data_ptr() : nullptr;
  Norms norms(attention, is_rounded ? ElementType::float32 : in.type, is_rounded ? rounded_from : y);
  if (need_norms) {
    attention.norms = &norms.call;
    attention.norms_kernel = frequency_kernels_table.find().norms_forward;
    attention.blocks_left = norms.blocks_left.data();
  }
  parallel_items(attention.items(), kLargeItems, [&](WorkQueue& queue) { run.attention_forward(attention, queue); });
  if (need_norms) {
    norms.sums->store(low, high);
  }
  return {y, low, high, wide_y, heads, softmax_rows};
}

// Bits of `needs`: which gradients are wanted. What is not comes back empty.
enum Need : int64_t { kQuery = 1, kKey = 2, kValue = 4, kEigenvalues = 8, kBasis = 16, kMask = 32 };

// ∂L/∂y of all outputs together: grad_y, and through the norms of y where they have a gradient.
Tensor total_gradient(const std::optional<Tensor>& grad_y, const Tensor& grad_low, const Tensor& grad_high,
                      const Tensor& y, const Tensor& low, const Tensor& high, const char* op) {
  NormsBackward call;
  call.shape = {y.size(0), y.size(1), y.size(2)};
  call.type = element_type(y, op, "y");
  const std::vector<int64_t> offsets = leading_offsets(y, 1);
  call.x = {y.data_ptr(), y.stride(1), y.stride(2), offsets.data()};
  const NormScales scales(grad_low, grad_high, low, high, y, call, op);
  call.addend = grad_y.has_value() ? grad_y->data_ptr() : nullptr;
  Tensor total = allocated(y, sizes_of(y));
  call.grad_x = total.data_ptr();
  const auto kernel = frequency_kernels_table.find().norms_backward;
  for_frequency_items(call.shape, [&](int64_t begin, int64_t end) { kernel(call, begin, end); });
  return total;
}

// Tensors of query's, key's and value's shapes, with any strides; empty where nothing is wanted.
struct HeadGradients {
  Tensor query, key, value;
};

// grad_y is contiguous and has the statistics' type. With grad_low and grad_high (both or neither) the norms' gradient
// is added to it, and the sum is returned as total_grad, which is otherwise empty. y, before it was rounded, is read
// only for that. The mask's gradient is that of the logits, not yet summed over what was broadcast.
// -> (eigenvalues, basis, logits, total_grad); the heads' gradients are written into `grads`.
std::tuple<Tensor, Tensor, Tensor, Tensor> backward_into(
    const HeadGradients& grads, const char* op, const std::optional<Tensor>& grad_y,
    const std::optional<Tensor>& grad_low, const std::optional<Tensor>& grad_high, const Tensor& y, const Tensor& low,
    const Tensor& high, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& eigenvalues,
    const Tensor& basis, const std::optional<Tensor>& attn_mask, bool is_causal, double scale, const Tensor& heads,
    const Tensor& softmax_rows, int64_t needs) {
  const Inputs in(op, query, key, value, eigenvalues, basis, attn_mask, is_causal, scale);
  const AttentionShape& shape = in.shape;
  const std::vector<int64_t> y_shape{shape.batch, shape.queries, shape.channels};
  const bool has_norms = grad_low.has_value() && grad_high.has_value();
  if (!has_norms && !grad_y.has_value()) {
    fail(op, "got neither grad_y nor grad_low and grad_high, wanted one or both");
  }
  check_tensor(grad_y, {y_shape, in.statistics, true}, "grad_y", op);
  check_tensor(heads, {{shape.batch, shape.queries, shape.features()}, in.statistics, true}, "heads", op);
  check_tensor(softmax_rows, {{shape.batch, shape.heads, shape.queries, 2}, in.statistics, true}, "softmax_rows", op);
  Tensor total_grad = allocated(query, std::vector<int64_t>{0}, in.statistics);
  if (has_norms) {
    check_tensor(y, {y_shape, in.statistics}, "y", op);
    total_grad = total_gradient(grad_y, *grad_low, *grad_high, y, low, high, op);
  }
  const void* grad = has_norms ? total_grad.data_ptr() : grad_y->data_ptr();
  const auto& run = kernels(op, in.type);
  const auto allocate = [&](int64_t need, const std::vector<int64_t>& size, ScalarType type) {
    return allocated(query, (needs & need) != 0 ? size : std::vector<int64_t>{0}, type);
  };
  Tensor grad_eigenvalues = allocate(kEigenvalues, {shape.features()}, in.statistics);
  Tensor grad_basis = allocate(kBasis, {shape.features(), shape.channels}, in.statistics);
  Tensor grad_logits = allocate(kMask, {shape.batch, shape.heads, shape.queries, shape.keys}, in.statistics);
  const auto wanted = [&](int64_t need, const Tensor& tensor) {
    return (needs & need) != 0 ? tensor.data_ptr() : nullptr;
  };

  if ((needs & (kBasis | kEigenvalues)) != 0) {
    const std::optional<Tensor> packed_grad = run.uses_tiles ? packed_gradient(run, shape, grad, query) : std::nullopt;
    BasisBackward backward;
    backward.shape = shape;
    backward.type = in.type;
    backward.feature_block = run.feature_block;
    backward.grad_y = grad;
    backward.packed_grad = packed_grad.has_value() ? packed_grad->data_ptr() : nullptr;
    backward.heads = heads.data_ptr();
    backward.eigenvalues = eigenvalues.data_ptr();
    backward.basis = basis.data_ptr();
    backward.basis_strides[0] = basis.stride(0);
    backward.basis_strides[1] = basis.stride(1);
    backward.grad_basis = wanted(kBasis, grad_basis);
    backward.grad_eigenvalues = wanted(kEigenvalues, grad_eigenvalues);
    parallel_items(backward.items(), kLargeItems, [&](WorkQueue& queue) { run.basis_backward(backward, queue); });
  }
  if ((needs & (kQuery | kKey | kValue | kMask)) != 0) {
    PanelPacking packing;  // Uᵀ diag(λ)
    packing.source = {in.type, basis.data_ptr(), basis.stride(1), basis.stride(0)};
    packing.depth = shape.channels;
    packing.columns = shape.features();
    packing.column_scale = eigenvalues.data_ptr();
    const Tensor weight = packed(run.packing, packing, query, in.statistics);
    Tensor grad_heads = allocated(query, sizes_of(heads), run.uses_tiles ? in.scalar_type : in.statistics);
    HeadsBackward projection;
    projection.shape = shape;
    projection.is_float64 = in.type == ElementType::float64;
    projection.grad_y = grad;
    projection.weight = weight.data_ptr();
    projection.grad_heads = grad_heads.data_ptr();
    parallel_items(projection.items(), kLargeItems, [&](WorkQueue& queue) { run.heads_backward(projection, queue); });

    AttentionBackward attention{in};
    attention.heads = heads.data_ptr();
    attention.softmax_rows = softmax_rows.data_ptr();
    attention.grad_heads = grad_heads.data_ptr();
    const auto gradient = [&](int64_t need, const Tensor& tensor) {
      return (needs & need) != 0 ? Inputs::head_tensor(tensor) : StridedHeads{};
    };
    attention.grad_query = gradient(kQuery, grads.query);
    attention.grad_key = gradient(kKey, grads.key);
    attention.grad_value = gradient(kValue, grads.value);
    attention.grad_logits = wanted(kMask, grad_logits);
    parallel_items(attention.items(), kLargeItems, [&](WorkQueue& queue) { run.attention_backward(attention, queue); });
  }
  return {grad_eigenvalues, grad_basis, grad_logits, total_grad};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> spectral_attention_backward(
    std::optional<Tensor> grad_y, std::optional<Tensor> grad_low, std::optional<Tensor> grad_high, Tensor y, Tensor low,
    Tensor high, Tensor query, Tensor key, Tensor value, Tensor eigenvalues, Tensor basis,
    std::optional<Tensor> attn_mask, bool is_causal, double scale, Tensor heads, Tensor softmax_rows, int64_t needs) {
  constexpr const char* op = "spectral_attention_backward";
  check_dims(query, 4, false, "query", op);
  check_dims(key, 4, false, "key", op);
  check_dims(value, 4, false, "value", op);
  // [B, H, N, D] as a view of [B, N, H, D], in which a model's projections take them without a copy.
  const auto like = [&](const Tensor& x, int64_t need) {
    if ((needs & need) == 0) {
      return allocated(x, std::vector<int64_t>{0});
    }
    const std::vector<int64_t> size{x.size(0), x.size(2), x.size(1), x.size(3)};
    return torch::stable::transpose(allocated(x, size), 1, 2);
  };
  const HeadGradients grads{like(query, kQuery), like(key, kKey), like(value, kValue)};
  const auto [grad_eigenvalues, grad_basis, grad_logits, total_grad] =
      backward_into(grads, op, grad_y, grad_low, grad_high, y, low, high, query, key, value, eigenvalues, basis,
                    attn_mask, is_causal, scale, heads, softmax_rows, needs);
  return {grads.query, grads.key, grads.value, grad_eigenvalues, grad_basis, grad_logits, total_grad};
}

// Query (0), key (1) or value (2) of a packed [B, N, 3, H, D], as [B, H, N, D].
Tensor heads_of(const Tensor& qkv, int64_t which) {
  return torch::stable::transpose(torch::stable::select(qkv, 2, which), 1, 2);
}

// The same for a packed qkv [B, N, 3, H, D]: its gradient is one tensor, written where it belongs.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> spectral_attention_packed_backward(
    std::optional<Tensor> grad_y, std::optional<Tensor> grad_low, std::optional<Tensor> grad_high, Tensor y, Tensor low,
    Tensor high, Tensor qkv, Tensor eigenvalues, Tensor basis, std::optional<Tensor> attn_mask, bool is_causal,
    double scale, Tensor heads, Tensor softmax_rows, int64_t needs) {
  constexpr const char* op = "spectral_attention_packed_backward";
  check_dims(qkv, 5, false, "qkv", op);
  if (qkv.size(2) != 3) {
    fail(op, "qkv: got ", shape_text(sizes_of(qkv)), ", wanted [B, N, 3, H, D]");
  }
  const bool is_wanted = (needs & (kQuery | kKey | kValue)) != 0;
  Tensor grad_qkv = allocated(qkv, is_wanted ? sizes_of(qkv) : std::vector<int64_t>{0});
  const auto part = [&](int64_t which) { return is_wanted ? heads_of(grad_qkv, which) : grad_qkv; };
  const auto [grad_eigenvalues, grad_basis, grad_logits, total_grad] = backward_into(
      {part(0), part(1), part(2)}, op, grad_y, grad_low, grad_high, y, low, high, heads_of(qkv, 0), heads_of(qkv, 1),
      heads_of(qkv, 2), eigenvalues, basis, attn_mask, is_causal, scale, heads, softmax_rows, needs);
  return {grad_qkv, grad_eigenvalues, grad_basis, grad_logits, total_grad};
}

}  // namespace
}  // namespace overtone

STABLE_TORCH_LIBRARY_IMPL(overtone, CPU, m) {
  OVERTONE_IMPL(m, spectral_attention);
  OVERTONE_IMPL(m, spectral_attention_backward);
  OVERTONE_IMPL(m, spectral_attention_packed_backward);
}
