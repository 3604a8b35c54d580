// spectral_attention on CPU tensors: from the dispatcher to the kernels of the current ISA level.
// Shapes and types were validated by python/overtone/ops; what is checked here again is what memory safety needs.
#include "cpu/attention.h"

#include <algorithm>
#include <cmath>
#include <tuple>

#include "cpu/isa.h"
#include "cpu/tensor.h"

namespace overtone {
namespace {

const AttentionKernels& kernels(const char* op) {
#if defined(__x86_64__)
  static const AttentionKernels* const table[kIsaCount] = {&baseline::attention_kernels, &avx2::attention_kernels,
                                                           &avx512::attention_kernels};
#else
  static const AttentionKernels* const table[kIsaCount] = {&baseline::attention_kernels, nullptr, nullptr};
#endif
  const AttentionKernels& chosen = for_current_isa(table);
  note_kernel(op, chosen.level);
  return chosen;
}

template <class Call>
void for_items(const Call& call, void (*kernel)(const Call&, int64_t, int64_t)) {
  if (call.items() > 0) {
    torch::stable::parallel_for(0, call.items(), 1, [&](int64_t begin, int64_t end) { kernel(call, begin, end); });
  }
}

void check_like(const Tensor& tensor, const char* name, const std::vector<int64_t>& shape, ScalarType type,
                const char* op) {
  STD_TORCH_CHECK(tensor.is_cpu() && tensor.scalar_type() == type && has_shape(tensor, shape), op, ": ", name,
                  " does not fit query's device, dtype or shape");
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
    STD_TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && basis.dim() == 2, op,
                    ": query and key must be [B, H, N, D], basis [H·D, E]");
    shape = {q.size(0), q.size(1), q.size(2), k.size(2), q.size(3), basis.size(1)};
    check_like(q, "query", {shape.batch, shape.heads, shape.queries, shape.width}, scalar_type, op);
    check_like(k, "key", {shape.batch, shape.heads, shape.keys, shape.width}, scalar_type, op);
    check_like(v, "value", {shape.batch, shape.heads, shape.keys, shape.width}, scalar_type, op);
    check_like(eigenvalues, "eigenvalues", {shape.features()}, statistics, op);
    STD_TORCH_CHECK(eigenvalues.is_contiguous(), op, ": eigenvalues must be contiguous");
    check_like(basis, "basis", {shape.features(), shape.channels}, scalar_type, op);
    query = head_tensor(q);
    key = head_tensor(k);
    value = head_tensor(v);
    mask = mask_of(attn_mask, is_causal);
  }

  static HeadTensor head_tensor(const Tensor& x) {
    return {x.data_ptr(), x.stride(0), x.stride(1), x.stride(2), x.stride(3)};
  }

  AttentionMask mask_of(const std::optional<Tensor>& given, bool is_causal) const {
    AttentionMask result;
    result.causal = is_causal;
    if (!given.has_value()) {
      return result;
    }
    const bool is_bool = given->scalar_type() == ScalarType::Bool;
    check_like(*given, "attn_mask", {shape.batch, shape.heads, shape.queries, shape.keys},
               is_bool ? ScalarType::Bool : statistics, op);
    result.bias = is_bool ? nullptr : given->data_ptr();
    result.flags = is_bool ? static_cast<const bool*>(given->data_ptr()) : nullptr;
    result.batch_stride = given->stride(0);
    result.head_stride = given->stride(1);
    result.query_stride = given->stride(2);
    result.key_stride = given->stride(3);
    return result;
  }
};

Tensor packed_weight(const AttentionKernels& run, WeightPacking packing, const Tensor& like, ScalarType statistics) {
  const std::vector<int64_t> size{run.packed_size(packing)};
  Tensor packed = torch::stable::new_empty(like, size, statistics);
  packing.packed = packed.data_ptr();
  run.pack_weight(packing);
  return packed;
}

// All tokens of the batch as those of one image: blocks of tokens then have no remainder but the last.
AttentionShape flattened(AttentionShape shape) {
  shape.queries *= shape.batch;
  shape.batch = 1;
  return shape;
}

// heads [B, N, H·D] and softmax_rows [B, H, N, 2] are what backward needs; wide_y, y before rounding, is empty where y
// has the statistics' type or it is not wanted (the norms are taken of it).
std::tuple<Tensor, Tensor, Tensor, Tensor> spectral_attention(Tensor query, Tensor key, Tensor value,
                                                              Tensor eigenvalues, Tensor basis,
                                                              std::optional<Tensor> residual,
                                                              std::optional<Tensor> attn_mask, bool is_causal,
                                                              double scale, bool need_wide) {
  constexpr const char* op = "spectral_attention";
  const Inputs in(op, query, key, value, eigenvalues, basis, attn_mask, is_causal, scale);
  const AttentionShape& shape = in.shape;
  const auto& run = kernels(op);
  Tensor heads = torch::stable::new_empty(query, std::vector<int64_t>{shape.batch, shape.queries, shape.features()},
                                          in.statistics);
  Tensor softmax_rows =
      torch::stable::new_empty(query, std::vector<int64_t>{shape.batch, shape.heads, shape.queries, 2}, in.statistics);
  const std::vector<int64_t> y_shape{shape.batch, shape.queries, shape.channels};
  Tensor y = torch::stable::new_empty(query, y_shape);
  const bool writes_wide = need_wide && in.scalar_type != in.statistics;
  Tensor wide_y = torch::stable::new_empty(query, writes_wide ? y_shape : std::vector<int64_t>{0}, in.statistics);

  AttentionForward attention{in};
  attention.heads = heads.data_ptr();
  attention.softmax_rows = softmax_rows.data_ptr();
  for_items(attention, run.attention_forward);

  WeightPacking packing;
  packing.rows = shape.features();
  packing.columns = shape.channels;
  packing.data = basis.data_ptr();
  packing.type = in.type;
  packing.row_stride = basis.stride(0);
  packing.column_stride = basis.stride(1);
  packing.row_scale = eigenvalues.data_ptr();
  const Tensor weight = packed_weight(run, packing, query, in.statistics);

  ProjectionForward projection;
  projection.shape = flattened(shape);
  projection.type = in.type;
  projection.heads = heads.data_ptr();
  projection.weight = weight.data_ptr();
  if (residual.has_value()) {
    check_like(*residual, "residual", y_shape, in.scalar_type, op);
    projection.residual = residual->data_ptr();
    for (int64_t dim = 0; dim < 3; ++dim) {
      projection.residual_strides[dim] = residual->stride(dim);
    }
    if (residual->stride(0) != shape.queries * residual->stride(1)) {
      projection.shape = shape;
    }
  }
  projection.y = y.data_ptr();
  projection.wide_y = writes_wide ? wide_y.data_ptr() : nullptr;
  for_items(projection, run.projection_forward);
  return {y, wide_y, heads, softmax_rows};
}

// Adds up [items][size] in order.
void sum_items(const std::vector<double>& parts, int64_t items, int64_t size, Tensor& out) {
  for (int64_t i = 0; i < size; ++i) {
    double total = 0;
    for (int64_t item = 0; item < items; ++item) {
      total += parts[item * size + i];
    }
    if (out.scalar_type() == ScalarType::Double) {
      static_cast<double*>(out.data_ptr())[i] = total;
    } else {
      static_cast<float*>(out.data_ptr())[i] = static_cast<float>(total);
    }
  }
}

// Bits of `needs`: which gradients are wanted. What is not comes back empty.
enum Need : int64_t { kQuery = 1, kKey = 2, kValue = 4, kEigenvalues = 8, kBasis = 16, kMask = 32 };

// grad_y is contiguous and has the statistics' type. The mask's gradient is that of the logits, not yet summed over
// what was broadcast.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> spectral_attention_backward(
    Tensor grad_y, Tensor query, Tensor key, Tensor value, Tensor eigenvalues, Tensor basis,
    std::optional<Tensor> attn_mask, bool is_causal, double scale, Tensor heads, Tensor softmax_rows, int64_t needs) {
  constexpr const char* op = "spectral_attention_backward";
  const Inputs in(op, query, key, value, eigenvalues, basis, attn_mask, is_causal, scale);
  const AttentionShape& shape = in.shape;
  check_like(grad_y, "grad_y", {shape.batch, shape.queries, shape.channels}, in.statistics, op);
  check_like(heads, "heads", {shape.batch, shape.queries, shape.features()}, in.statistics, op);
  check_like(softmax_rows, "softmax_rows", {shape.batch, shape.heads, shape.queries, 2}, in.statistics, op);
  STD_TORCH_CHECK(grad_y.is_contiguous() && heads.is_contiguous() && softmax_rows.is_contiguous(), op,
                  ": grad_y, heads and softmax_rows must be contiguous");
  const auto& run = kernels(op);
  const std::vector<int64_t> nothing{0};
  const auto allocate = [&](int64_t need, const std::vector<int64_t>& size, ScalarType type) {
    return torch::stable::new_empty(query, (needs & need) != 0 ? size : nothing, type);
  };
  Tensor grad_query = allocate(kQuery, sizes_of(query), in.scalar_type);
  Tensor grad_key = allocate(kKey, sizes_of(key), in.scalar_type);
  Tensor grad_value = allocate(kValue, sizes_of(value), in.scalar_type);
  Tensor grad_eigenvalues = allocate(kEigenvalues, {shape.features()}, in.statistics);
  Tensor grad_basis = allocate(kBasis, {shape.features(), shape.channels}, in.statistics);
  Tensor grad_logits = allocate(kMask, {shape.batch, shape.heads, shape.queries, shape.keys}, in.statistics);
  const bool is_float64 = in.type == ElementType::float64;

  if ((needs & kBasis) != 0) {
    BasisBackward backward;
    backward.shape = shape;
    backward.is_float64 = is_float64;
    backward.grad_y = grad_y.data_ptr();
    backward.heads = heads.data_ptr();
    backward.eigenvalues = eigenvalues.data_ptr();
    backward.grad_basis = grad_basis.data_ptr();
    for_items(backward, run.basis_backward);
  }
  const bool needs_attention = (needs & (kQuery | kKey | kValue | kMask)) != 0;
  if (!needs_attention && (needs & kEigenvalues) == 0) {
    return {grad_query, grad_key, grad_value, grad_eigenvalues, grad_basis, grad_logits};
  }

  WeightPacking packing;  // Uᵀ
  packing.rows = shape.channels;
  packing.columns = shape.features();
  packing.data = basis.data_ptr();
  packing.type = in.type;
  packing.row_stride = basis.stride(1);
  packing.column_stride = basis.stride(0);
  const Tensor weight = packed_weight(run, packing, query, in.statistics);
  Tensor grad_heads = torch::stable::new_empty(query, sizes_of(heads), in.statistics);
  ProjectionBackward projection;
  projection.shape = flattened(shape);
  projection.is_float64 = is_float64;
  projection.grad_y = grad_y.data_ptr();
  projection.weight = weight.data_ptr();
  projection.heads = heads.data_ptr();
  projection.eigenvalues = eigenvalues.data_ptr();
  projection.grad_heads = grad_heads.data_ptr();
  std::vector<double> parts;
  if ((needs & kEigenvalues) != 0) {
    parts.resize(std::max<int64_t>(1, projection.items() * shape.features()));
    projection.grad_eigenvalues = parts.data();
  }
  for_items(projection, run.projection_backward);
  if ((needs & kEigenvalues) != 0) {
    sum_items(parts, projection.items(), shape.features(), grad_eigenvalues);
  }

  if (needs_attention) {
    AttentionBackward attention{in};
    attention.heads = heads.data_ptr();
    attention.softmax_rows = softmax_rows.data_ptr();
    attention.grad_heads = grad_heads.data_ptr();
    const auto wanted = [&](int64_t need, const Tensor& tensor) {
      return (needs & need) != 0 ? Inputs::head_tensor(tensor) : HeadTensor{};
    };
    attention.grad_query = wanted(kQuery, grad_query);
    attention.grad_key = wanted(kKey, grad_key);
    attention.grad_value = wanted(kValue, grad_value);
    attention.grad_logits = (needs & kMask) != 0 ? grad_logits.data_ptr() : nullptr;
    for_items(attention, run.attention_backward);
  }
  return {grad_query, grad_key, grad_value, grad_eigenvalues, grad_basis, grad_logits};
}

}  // namespace
}  // namespace overtone

STABLE_TORCH_LIBRARY_IMPL(overtone, CPU, m) {
  m.impl("spectral_attention", TORCH_BOX(&overtone::spectral_attention));
  m.impl("spectral_attention_backward", TORCH_BOX(&overtone::spectral_attention_backward));
}
