// spectral_attention on CPU tensors: from the dispatcher to the kernels of the current instruction set.
// Shapes and types were validated by python/overtone/ops; what is checked here again is what memory safety needs.
#include <algorithm>
#include <cmath>
#include <tuple>

#include "cpu/attention/params.h"
#include "cpu/frequency/norms.h"
#include "cpu/gemm/packed.h"
#include "cpu/isa/isa.h"
#include "cpu/tensor.h"

namespace overtone {
namespace {

const std::vector<int64_t> kEmpty{0};

// What forward and backward are both given, as the dispatcher gives it.
struct Args {
  const char* op;
  Tensor query, key, value, weight;
  std::optional<Tensor> attn_mask, gain, addend;
  bool is_causal;
  double scale;
};

// The same, checked.
struct Problem : AttentionProblem {
  const char* op;
  ScalarType dtype;
  ScalarType accumulate;

  explicit Problem(const Args& args)
      : op(args.op), dtype(args.query.scalar_type()), accumulate(accumulate_type(dtype_of(args.query, op, "query"))) {
    type = dtype_of(args.query, op, "query");
    scale = args.scale;
    check_dims(args.query, 4, false, "query", op);
    check_dims(args.key, 4, false, "key", op);
    check_dims(args.weight, 2, false, "weight", op);
    const Tensor& q = args.query;
    shape = {q.size(0), q.size(1), q.size(2), args.key.size(2), q.size(3), args.weight.size(1)};
    const std::vector<int64_t> kv_sizes{shape.batch, shape.num_heads, shape.kv_len, shape.head_dim};
    check_tensor(args.key, {kv_sizes, dtype}, "key", op);
    check_tensor(args.value, {kv_sizes, dtype}, "value", op);
    check_either(args.weight, {shape.inner_dim(), shape.out_dim}, "weight");
    check_tensor(args.gain, {{shape.num_heads}, accumulate, true}, "gain", op);
    check_either(args.addend, {shape.batch, shape.num_heads, shape.q_len, shape.head_dim}, "addend");
    query = heads_view(args.query);
    key = heads_view(args.key);
    value = heads_view(args.value);
    set_mask(args.attn_mask, args.is_causal);
    gain = args.gain.has_value() ? args.gain->data_ptr() : nullptr;
    if (args.addend.has_value()) {
      addend = heads_view(*args.addend);
      addend_type = dtype_of(*args.addend, op, "addend");
    }
  }

  static StridedHeads heads_view(const Tensor& x) {
    return {x.data_ptr(), x.stride(0), x.stride(1), x.stride(2), x.stride(3)};
  }

  std::vector<int64_t> y_sizes() const { return {shape.batch, shape.q_len, shape.out_dim}; }

  // A tensor of query's or the accumulate type.
  void check_either(const std::optional<Tensor>& x, const std::vector<int64_t>& sizes, const char* name) const {
    check_tensor(x, {sizes, x.has_value() && x->scalar_type() == dtype ? dtype : accumulate}, name, op);
  }

  const AttentionKernels& kernels() const { return attention_kernels_table.get(op, type == Dtype::bfloat16); }

 private:
  void set_mask(const std::optional<Tensor>& given, bool is_causal) {
    mask.causal = is_causal;
    if (!given.has_value()) {
      return;
    }
    const bool is_bool = given->scalar_type() == ScalarType::Bool;
    check_tensor(*given,
                 {{shape.batch, shape.num_heads, shape.q_len, shape.kv_len}, is_bool ? ScalarType::Bool : accumulate},
                 "attn_mask", op);
    mask.bias = is_bool ? nullptr : given->data_ptr();
    mask.flags = is_bool ? static_cast<const bool*>(given->data_ptr()) : nullptr;
    mask.batch_stride = given->stride(0);
    mask.head_stride = given->stride(1);
    mask.query_stride = given->stride(2);
    mask.key_stride = given->stride(3);
  }
};

// The weight, or its transpose, as the right operand of a product.
Tensor packed_weight(const AttentionKernels& run, const Problem& problem, const Args& args, bool transposed) {
  PanelPacking packing;
  packing.source = {dtype_of(args.weight, args.op, "weight"), args.weight.data_ptr(), args.weight.stride(0),
                    args.weight.stride(1)};
  packing.depth = problem.shape.inner_dim();
  packing.columns = problem.shape.out_dim;
  if (transposed) {
    packing.source = packing.source.transposed();
    std::swap(packing.depth, packing.columns);
  }
  return packed(run.packing, packing, args.query, problem.accumulate);
}

// Queries of one item: all of a batch element's where there are enough elements, else as few as give every thread two
// items.
int64_t query_block(const AttentionShape& shape, int64_t multiple) {
  constexpr int64_t kMax = 384;
  constexpr int64_t kMin = 48;
  const int64_t items = 2 * static_cast<int64_t>(torch::stable::get_num_threads());
  const int64_t blocks = std::max((shape.q_len + kMax - 1) / kMax, items / std::max<int64_t>(1, shape.batch));
  const int64_t even = (shape.q_len + blocks - 1) / std::max<int64_t>(1, blocks);
  return std::max(kMin, (even + multiple - 1) / multiple * multiple);
}

NormsSource norms_source(const Problem& problem, const AttentionForward& call, bool is_wanted) {
  if (!is_wanted) {
    return NormsSource::none;
  }
  const bool is_rounded = call.y.type == problem.type && problem.dtype != problem.accumulate;
  return !is_rounded ? NormsSource::y : call.blocks() == 1 ? NormsSource::scratch : NormsSource::unrounded;
}

// The norms of y, taken from one batch element after the other.
struct Norms {
  std::vector<int64_t> offsets;
  std::vector<int64_t> blocks_left;
  NormsForward call;
  std::optional<NormSums> sums;

  // `data`: what norms are taken of, or null where a kernel has it in its scratch.
  Norms(const AttentionForward& attention, const void* data) {
    const AttentionShape& shape = attention.shape;
    call.shape = {shape.batch, shape.q_len, shape.out_dim};
    call.type = attention.type == Dtype::float64 ? Dtype::float64 : Dtype::float32;
    for (int64_t batch = 0; batch < shape.batch; ++batch) {
      offsets.push_back(data == nullptr ? 0 : batch * shape.q_len * shape.out_dim);
    }
    call.x = {data, shape.out_dim, 1, offsets.data()};
    sums.emplace(call);
    blocks_left.assign(shape.batch, attention.blocks());
  }

  void attach_to(AttentionForward& attention) {
    attention.norms = &call;
    attention.norms_kernel = frequency_kernels_table.find().norms_forward;
    attention.blocks_left = blocks_left.data();
  }
};

// What forward is given beside Args.
struct ForwardArgs : Args {
  std::optional<Tensor> bias, residual, sample_scale;
  bool return_norms, return_unrounded, save_for_backward;
};

struct Outputs {
  Tensor y, low, high, attn_out, softmax_stats;
};

// What is not wanted is empty.
Outputs allocate_outputs(const Problem& problem, const ForwardArgs& args) {
  const AttentionShape& shape = problem.shape;
  const auto allocate = [&](bool wanted, const std::vector<int64_t>& sizes) {
    return allocated(args.query, wanted ? sizes : kEmpty, problem.accumulate);
  };
  return {allocated(args.query, problem.y_sizes(), args.return_unrounded ? problem.accumulate : problem.dtype),
          allocate(args.return_norms, {shape.batch}), allocate(args.return_norms, {shape.batch}),
          allocate(args.save_for_backward, {shape.batch, shape.q_len, shape.inner_dim()}),
          allocate(args.save_for_backward, {shape.batch, shape.num_heads, shape.q_len, 2})};
}

AttentionForward forward_call(const Problem& problem, const ForwardArgs& args, const Outputs& outputs) {
  const AttentionShape& shape = problem.shape;
  check_tensor(args.bias, {{shape.out_dim}, problem.accumulate, true}, "bias", args.op);
  check_tensor(args.sample_scale, {{shape.batch}, problem.accumulate, true}, "sample_scale", args.op);
  problem.check_either(args.residual, problem.y_sizes(), "residual");
  AttentionForward call{problem};
  call.bias = args.bias.has_value() ? args.bias->data_ptr() : nullptr;
  call.sample_scale = args.sample_scale.has_value() ? args.sample_scale->data_ptr() : nullptr;
  if (args.residual.has_value()) {
    const Tensor& residual = *args.residual;
    call.residual = {dtype_of(residual, args.op, "residual"), residual.data_ptr(), residual.stride(1),
                     residual.stride(2)};
    call.residual_batch_stride = residual.stride(0);
  }
  call.y = {dtype_of(outputs.y, args.op, "y"), outputs.y.data_ptr(), shape.out_dim, 1};
  if (args.save_for_backward) {
    call.attn_out = outputs.attn_out.data_ptr();
    call.softmax_stats = outputs.softmax_stats.data_ptr();
  }
  return call;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> spectral_attention(
    Tensor query, Tensor key, Tensor value, Tensor weight, std::optional<Tensor> bias, std::optional<Tensor> residual,
    std::optional<Tensor> sample_scale, std::optional<Tensor> attn_mask, std::optional<Tensor> gain,
    std::optional<Tensor> addend, bool is_causal, double scale, bool return_norms, bool return_unrounded,
    bool save_for_backward) {
  const ForwardArgs args{{"spectral_attention", query, key, value, weight, attn_mask, gain, addend, is_causal, scale},
                         bias,
                         residual,
                         sample_scale,
                         return_norms,
                         return_unrounded,
                         save_for_backward};
  const Problem problem(args);
  Outputs outputs = allocate_outputs(problem, args);
  AttentionForward call = forward_call(problem, args, outputs);
  const AttentionKernels& run = problem.kernels();
  const Tensor panels = packed_weight(run, problem, args, false);
  call.weight = panels.data_ptr();
  call.query_block = query_block(problem.shape, run.is_bf16 ? 32 : 8);
  call.norms_source = norms_source(problem, call, return_norms);
  // The norms are those of y before it is rounded.
  const bool keeps_unrounded = call.norms_source == NormsSource::unrounded;
  const Tensor unrounded = allocated(query, keeps_unrounded ? problem.y_sizes() : kEmpty, problem.accumulate);
  call.unrounded = keeps_unrounded ? unrounded.data_ptr() : nullptr;
  Norms norms(call, keeps_unrounded                             ? unrounded.data_ptr()
                    : call.norms_source == NormsSource::scratch ? nullptr
                                                                : outputs.y.data_ptr());
  if (return_norms) {
    norms.attach_to(call);
  }
  parallel_items(call.items(), kLargeItems, [&](WorkQueue& queue) { run.attention_forward(call, queue); });
  if (return_norms) {
    norms.sums->store(outputs.low, outputs.high);
  }
  return {outputs.y, outputs.low, outputs.high, outputs.attn_out, outputs.softmax_stats};
}

// Which gradients are wanted. What is not comes back empty.
class OutputMask {
 public:
  explicit OutputMask(int64_t bits) : bits_(bits) {}
  bool query() const { return has(0); }
  bool key() const { return has(1); }
  bool value() const { return has(2); }
  bool weight() const { return has(3); }
  bool attn_mask() const { return has(4); }
  bool gain() const { return has(5); }
  bool addend() const { return has(6); }
  bool attention() const { return query() || key() || value() || attn_mask() || gain(); }

 private:
  bool has(int bit) const { return (bits_ >> bit & 1) != 0; }
  int64_t bits_;
};

// What forward saved.
struct Saved {
  Tensor attn_out, softmax_stats;

  void check(const Problem& problem) const {
    const AttentionShape& shape = problem.shape;
    check_tensor(attn_out, {{shape.batch, shape.q_len, shape.inner_dim()}, problem.accumulate, true}, "attn_out",
                 problem.op);
    check_tensor(softmax_stats, {{shape.batch, shape.num_heads, shape.q_len, 2}, problem.accumulate, true},
                 "softmax_stats", problem.op);
  }
};

// query, key and value have any strides. The mask's gradient is that of the logits, not yet summed over what was
// broadcast, and so is the addend's.
struct Gradients {
  Tensor query, key, value, weight, attn_mask, gain, addend;
};

// All but those of query, key and value.
void allocate_gradients(const Problem& problem, const Tensor& like, OutputMask wanted, Gradients& grads) {
  const AttentionShape& shape = problem.shape;
  const auto allocate = [&](bool is_wanted, const std::vector<int64_t>& sizes) {
    return allocated(like, is_wanted ? sizes : kEmpty, problem.accumulate);
  };
  grads.weight = allocate(wanted.weight(), {shape.inner_dim(), shape.out_dim});
  grads.attn_mask = allocate(wanted.attn_mask(), {shape.batch, shape.num_heads, shape.q_len, shape.kv_len});
  grads.gain = allocate(wanted.gain(), {shape.num_heads});
  grads.addend = allocate(wanted.addend(), {shape.batch, shape.q_len, shape.num_heads, shape.head_dim});
}

// All tokens' gradients as the right operand of a product of bf16.
Tensor packed_gradient(const AttentionKernels& run, const Problem& problem, const Tensor& grad_y) {
  PanelPacking packing;
  packing.source = {Dtype::float32, grad_y.data_ptr(), problem.shape.out_dim, 1};
  packing.depth = problem.shape.batch * problem.shape.q_len;
  packing.columns = problem.shape.out_dim;
  return packed(run.packing, packing, grad_y, ScalarType::Float);
}

void weight_backward(const Problem& problem, const AttentionKernels& run, const Saved& saved, const Tensor& grad_y,
                     Gradients& grads) {
  const std::optional<Tensor> packed_grad =
      run.is_bf16 ? std::optional<Tensor>(packed_gradient(run, problem, grad_y)) : std::nullopt;
  WeightBackward call;
  call.shape = problem.shape;
  call.is_float64 = problem.type == Dtype::float64;
  call.feature_block = run.feature_block;
  call.grad_y = grad_y.data_ptr();
  call.packed_grad = packed_grad.has_value() ? packed_grad->data_ptr() : nullptr;
  call.attn_out = saved.attn_out.data_ptr();
  call.grad_weight = grads.weight.data_ptr();
  parallel_items(call.items(), kLargeItems, [&](WorkQueue& queue) { run.weight_backward(call, queue); });
}

// ∂out [B, N, H, D]: the addend's gradient where that is wanted and not of another type.
Tensor out_backward(const Problem& problem, const Args& args, const AttentionKernels& run, const Tensor& grad_y,
                    OutputMask wanted, Gradients& grads) {
  const AttentionShape& shape = problem.shape;
  const Tensor weight = packed_weight(run, problem, args, true);
  const ScalarType type = run.is_bf16 ? problem.dtype : problem.accumulate;
  const bool is_shared = wanted.addend() && type == problem.accumulate;
  Tensor grad_out = is_shared
                        ? grads.addend
                        : allocated(args.query, {shape.batch, shape.q_len, shape.num_heads, shape.head_dim}, type);
  OutBackward call;
  call.shape = shape;
  call.is_float64 = problem.type == Dtype::float64;
  call.grad_y = grad_y.data_ptr();
  call.weight = weight.data_ptr();
  call.grad_out = grad_out.data_ptr();
  call.grad_addend = wanted.addend() && !is_shared ? grads.addend.data_ptr() : nullptr;
  parallel_items(call.items(), kLargeItems, [&](WorkQueue& queue) { run.out_backward(call, queue); });
  return grad_out;
}

// The sum over the batch, in its order.
template <class A>
void sum_over_batch(const std::vector<double>& parts, Tensor& sums) {
  const int64_t count = sums.numel();
  for (int64_t i = 0; i < count; ++i) {
    double sum = 0;
    for (size_t part = static_cast<size_t>(i); part < parts.size(); part += static_cast<size_t>(count)) {
      sum += parts[part];
    }
    static_cast<A*>(sums.data_ptr())[i] = static_cast<A>(sum);
  }
}

void attend_backward(const Problem& problem, const AttentionKernels& run, const Saved& saved, const Tensor& grad_out,
                     OutputMask wanted, Gradients& grads) {
  AttentionBackward call{problem};
  call.attn_out = saved.attn_out.data_ptr();
  call.softmax_stats = saved.softmax_stats.data_ptr();
  call.grad_out = grad_out.data_ptr();
  const auto gradient = [](bool is_wanted, const Tensor& grad) {
    return is_wanted ? Problem::heads_view(grad) : StridedHeads{};
  };
  call.grad_query = gradient(wanted.query(), grads.query);
  call.grad_key = gradient(wanted.key(), grads.key);
  call.grad_value = gradient(wanted.value(), grads.value);
  call.grad_logits = wanted.attn_mask() ? grads.attn_mask.data_ptr() : nullptr;
  std::vector<double> grad_gain = buffer<double>(wanted.gain() ? call.items() : 0);
  call.grad_gain = wanted.gain() ? grad_gain.data() : nullptr;
  parallel_items(call.items(), kLargeItems, [&](WorkQueue& queue) { run.attention_backward(call, queue); });
  if (wanted.gain()) {
    problem.type == Dtype::float64 ? sum_over_batch<double>(grad_gain, grads.gain)
                                   : sum_over_batch<float>(grad_gain, grads.gain);
  }
}

// grad_y is contiguous and of the accumulate type.
void backward(const Problem& problem, const Args& args, const Saved& saved, const Tensor& grad_y, OutputMask wanted,
              Gradients& grads) {
  check_tensor(grad_y, {problem.y_sizes(), problem.accumulate, true}, "grad_y", args.op);
  saved.check(problem);
  allocate_gradients(problem, args.query, wanted, grads);
  const AttentionKernels& run = problem.kernels();
  if (wanted.weight()) {
    weight_backward(problem, run, saved, grad_y, grads);
  }
  if (wanted.attention() || wanted.addend()) {
    const Tensor grad_out = out_backward(problem, args, run, grad_y, wanted, grads);
    if (wanted.attention()) {
      attend_backward(problem, run, saved, grad_out, wanted, grads);
    }
  }
  if (wanted.addend()) {
    grads.addend = torch::stable::transpose(grads.addend, 1, 2);
  }
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> spectral_attention_backward(
    Tensor grad_y, Tensor query, Tensor key, Tensor value, Tensor weight, std::optional<Tensor> attn_mask,
    std::optional<Tensor> gain, std::optional<Tensor> addend, bool is_causal, double scale, Tensor attn_out,
    Tensor softmax_stats, int64_t output_mask) {
  const Args args{"spectral_attention_backward", query, key, value, weight, attn_mask, gain, addend, is_causal, scale};
  const Problem problem(args);
  const OutputMask wanted(output_mask);
  // [B, H, N, D] as a view of [B, N, H, D], in which a model's projections take them without a copy.
  const auto like = [&](const Tensor& x, bool is_wanted) {
    return is_wanted ? torch::stable::transpose(allocated(x, {x.size(0), x.size(2), x.size(1), x.size(3)}), 1, 2)
                     : allocated(x, kEmpty);
  };
  Gradients grads{like(query, wanted.query()), like(key, wanted.key()), like(value, wanted.value())};
  backward(problem, args, {attn_out, softmax_stats}, grad_y, wanted, grads);
  return {grads.query, grads.key, grads.value, grads.weight, grads.attn_mask, grads.gain, grads.addend};
}

// Query (0), key (1) or value (2) of a packed [B, N, 3, H, D], as [B, H, N, D].
Tensor unpack_qkv(const Tensor& qkv, int64_t which) {
  return torch::stable::transpose(torch::stable::select(qkv, 2, which), 1, 2);
}

// The same for a packed qkv [B, N, 3, H, D]: its gradient is one tensor, written where it belongs.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> spectral_attention_qkvpacked_backward(
    Tensor grad_y, Tensor qkv, Tensor weight, std::optional<Tensor> attn_mask, std::optional<Tensor> gain,
    std::optional<Tensor> addend, bool is_causal, double scale, Tensor attn_out, Tensor softmax_stats,
    int64_t output_mask) {
  constexpr const char* op = "spectral_attention_qkvpacked_backward";
  check_dims(qkv, 5, false, "qkv", op);
  if (qkv.size(2) != 3) {
    fail(op, "qkv: got ", shape_text(sizes_of(qkv)), ", wanted [B, N, 3, H, D]");
  }
  const Args args{
      op,   unpack_qkv(qkv, 0), unpack_qkv(qkv, 1), unpack_qkv(qkv, 2), weight, attn_mask, gain, addend, is_causal,
      scale};
  const Problem problem(args);
  // All of it or nothing.
  const bool is_wanted = (output_mask & 7) != 0;
  Tensor grad_qkv = allocated(qkv, is_wanted ? sizes_of(qkv) : kEmpty);
  const auto part = [&](int64_t which) { return is_wanted ? unpack_qkv(grad_qkv, which) : grad_qkv; };
  Gradients grads{part(0), part(1), part(2)};
  backward(problem, args, {attn_out, softmax_stats}, grad_y, OutputMask(is_wanted ? output_mask | 7 : output_mask),
           grads);
  return {grad_qkv, grads.weight, grads.attn_mask, grads.gain, grads.addend};
}

}  // namespace
}  // namespace overtone

STABLE_TORCH_LIBRARY_IMPL(overtone, CPU, m) {
  OVERTONE_IMPL(m, spectral_attention);
  OVERTONE_IMPL(m, spectral_attention_backward);
  OVERTONE_IMPL(m, spectral_attention_qkvpacked_backward);
}
