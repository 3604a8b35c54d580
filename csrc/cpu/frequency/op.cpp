// The frequency ops on CPU tensors: from the dispatcher to the kernels of the instruction set in use.
// Shapes and types were validated by python/overtone/ops; what is checked here again is what memory safety needs.
#include "cpu/frequency/params.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

#include "cpu/frequency/norms.h"
#include "cpu/isa/isa.h"
#include "cpu/tensor.h"

namespace overtone {

int tokens_exponent(double largest, bool is_float64) {
  const int most =
      (is_float64 ? std::numeric_limits<double>::max_exponent : std::numeric_limits<float>::max_exponent) - 2;
  int exponent = 0;
  if (std::isfinite(largest)) {
    std::frexp(largest, &exponent);
  }
  return std::clamp(exponent, -most, most);
}

namespace {

FrequencyShape shape_of(const Tensor& x) {
  FrequencyShape shape;
  shape.tokens = x.size(-2);
  shape.channels = x.size(-1);
  shape.samples = 1;
  for (int64_t dim = 0; dim < x.dim() - 2; ++dim) {
    shape.samples *= x.size(dim);
  }
  return shape;
}

// Keeps the offsets alive that the kernels' view points to.
struct TokensView {
  std::vector<int64_t> offsets;
  StridedTokens tokens;

  TokensView(const Tensor& x, const char* name, const char* op) {
    check_dims(x, 2, true, name, op);
    dtype_of(x, op, name);
    offsets = leading_offsets(x, x.dim() - 2);
    tokens.data = x.data_ptr();
    tokens.token_stride = x.stride(-2);
    tokens.channel_stride = x.stride(-1);
    tokens.sample_offsets = offsets.data();
  }
};

struct MaskView {
  std::vector<int64_t> offsets;
  TokenMask mask;

  MaskView(const std::optional<Tensor>& given, const Tensor& x, const char* op) {
    if (!given.has_value()) {
      return;
    }
    std::vector<int64_t> wanted = sizes_of(x);
    wanted.pop_back();
    check_tensor(*given, {wanted, ScalarType::Bool}, "mask", op);
    offsets = leading_offsets(*given, given->dim() - 1);
    mask.data = static_cast<const bool*>(given->data_ptr());
    mask.token_stride = given->stride(-1);
    mask.sample_offsets = offsets.data();
  }
};

ChannelGain gain_of(const Tensor& gain, const FrequencyShape& shape, Dtype type, const char* name, const char* op) {
  check_tensor(gain, {{shape.channels}, accumulate_type(type)}, name, op);
  return {gain.data_ptr(), gain.stride(0)};
}

template <class Store>
void store_statistics(Tensor& out, int64_t count, const Store& value) {
  if (out.scalar_type() == ScalarType::Double) {
    double* p = static_cast<double*>(out.data_ptr());
    for (int64_t i = 0; i < count; ++i) {
      p[i] = value(i);
    }
  } else {
    float* p = static_cast<float*>(out.data_ptr());
    for (int64_t i = 0; i < count; ++i) {
      p[i] = static_cast<float>(value(i));
    }
  }
}

// A number per sample of x.
std::vector<double> load_statistics(const Tensor& statistics, const Tensor& x, const char* name, const char* op) {
  std::vector<int64_t> leading = sizes_of(x);
  leading.resize(leading.size() - 2);
  check_tensor(statistics, {leading, accumulate_type(dtype_of(x, op, "x")), /*contiguous=*/true}, name, op);
  const int64_t count = statistics.numel();
  std::vector<double> values = buffer<double>(count);
  for (int64_t i = 0; i < count; ++i) {
    values[i] = statistics.scalar_type() == ScalarType::Double
                    ? static_cast<const double*>(statistics.data_ptr())[i]
                    : static_cast<double>(static_cast<const float*>(statistics.data_ptr())[i]);
  }
  return values;
}

}  // namespace

NormSums::NormSums(NormsForward& call)
    : shape_(call.shape),
      low_squared_(buffer<double>(count_or_fail(shape_.samples, shape_.blocks()))),
      high_squared_(buffer<double>(low_squared_.size())),
      exponents_(buffer<int>(low_squared_.size())) {
  call.low_squared = low_squared_.data();
  call.high_squared = high_squared_.data();
  call.exponents = exponents_.data();
}

void NormSums::store(Tensor& low, Tensor& high) const {
  // Up to this share of ‖LFC‖, ‖HFC‖ is rounding (MATH §1): `rounding_share` of the reference.
  const double share = 2.5 * (low.scalar_type() == ScalarType::Double ? std::numeric_limits<double>::epsilon()
                                                                      : std::numeric_limits<float>::epsilon());
  std::vector<double> low_norms = buffer<double>(shape_.samples);
  for (int64_t sample = 0; sample < shape_.samples; ++sample) {
    low_norms[sample] = norm(low_squared_, sample);
  }
  store_statistics(low, shape_.samples, [&](int64_t sample) { return low_norms[sample]; });
  store_statistics(high, shape_.samples, [&](int64_t sample) {
    const double low_norm = low_norms[sample];
    const double high_norm = norm(high_squared_, sample);
    return high_norm <= share * low_norm && std::isfinite(low_norm) ? 0.0 : high_norm;
  });
}

// The root of a sample's sum over blocks, in units of the largest block's.
double NormSums::norm(const std::vector<double>& squared, int64_t sample) const {
  const int64_t first = sample * shape_.blocks();
  const int64_t last = first + shape_.blocks();
  int unit = std::numeric_limits<int>::min();
  for (int64_t block = first; block < last; ++block) {
    unit = squared[block] == 0 ? unit : std::max(unit, exponents_[block]);
  }
  double sum = 0;
  for (int64_t block = first; block < last; ++block) {
    const int shift = squared[block] == 0 ? 0 : 2 * (exponents_[block] - unit);
    sum += shift == 0 ? squared[block] : std::ldexp(squared[block], shift);
  }
  return unit == 0 || sum == 0 ? std::sqrt(sum) : std::ldexp(std::sqrt(sum), unit);
}

NormScales::NormScales(const Tensor& grad_low, const Tensor& grad_high, const Tensor& low, const Tensor& high,
                       const Tensor& x, NormsBackward& call, const char* op)
    : low_(load_statistics(grad_low, x, "grad_low", op)),
      high_(load_statistics(grad_high, x, "grad_high", op)),
      exponents_(low_.size()) {
  const std::vector<double> low_norms = load_statistics(low, x, "low", op);
  const std::vector<double> high_norms = load_statistics(high, x, "high", op);
  const bool is_wide = call.type == Dtype::float64;
  const double least = is_wide ? std::numeric_limits<double>::min() : std::numeric_limits<float>::min();
  const double most = is_wide ? std::numeric_limits<double>::max() : std::numeric_limits<float>::max();
  const auto scale = [](double grad, double norm) { return norm == 0 ? 0 : grad / norm; };
  const auto fits = [&](double grad, double norm) {
    const double value = std::abs(scale(grad, norm));
    return grad == 0 || norm == 0 || (value >= least && value <= most);
  };
  for (size_t i = 0; i < low_.size(); ++i) {
    if (!fits(low_[i], low_norms[i]) || !fits(high_[i], high_norms[i])) {
      exponents_[i] = tokens_exponent(std::max(low_norms[i], high_norms[i]), is_wide);
    }
    low_[i] = scale(low_[i], std::ldexp(low_norms[i], -exponents_[i]));
    high_[i] = scale(high_[i], std::ldexp(high_norms[i], -exponents_[i]));
  }
  call.low_scale = low_.data();
  call.high_scale = high_.data();
  call.exponents = exponents_.data();
}

namespace {

std::tuple<Tensor, Tensor> frequency_norms(Tensor x, std::optional<Tensor> mask) {
  constexpr const char* op = "frequency_norms";
  const TokensView tokens(x, "x", op);
  const MaskView valid(mask, x, op);
  NormsForward call;
  call.shape = shape_of(x);
  call.type = dtype_of(x, op, "x");
  call.x = tokens.tokens;
  call.mask = valid.mask;
  const NormSums sums(call);
  const auto& run = frequency_kernels_table.get(op);
  for_frequency_items(call.shape, [&](int64_t begin, int64_t end) { run.norms_forward(call, begin, end); });

  std::vector<int64_t> leading = sizes_of(x);
  leading.resize(leading.size() - 2);
  Tensor low = allocated(x, leading, accumulate_type(call.type));
  Tensor high = allocated(x, leading, accumulate_type(call.type));
  sums.store(low, high);
  return {low, high};
}

Tensor frequency_norms_backward(Tensor grad_low, Tensor grad_high, Tensor x, Tensor low, Tensor high,
                                std::optional<Tensor> mask, std::optional<Tensor> addend) {
  constexpr const char* op = "frequency_norms_backward";
  const TokensView tokens(x, "x", op);
  const MaskView valid(mask, x, op);
  NormsBackward call;
  call.shape = shape_of(x);
  call.type = dtype_of(x, op, "x");
  call.x = tokens.tokens;
  call.mask = valid.mask;
  check_tensor(addend, {sizes_of(x), x.scalar_type(), true}, "addend", op);
  call.addend = addend.has_value() ? addend->data_ptr() : nullptr;
  const NormScales scales(grad_low, grad_high, low, high, x, call, op);
  Tensor grad_x = allocated(x, sizes_of(x));
  call.grad_x = grad_x.data_ptr();
  const auto& run = frequency_kernels_table.get(op);
  for_frequency_items(call.shape, [&](int64_t begin, int64_t end) { run.norms_backward(call, begin, end); });
  return grad_x;
}

Tensor frequency_filter(Tensor x, Tensor low, Tensor high, std::optional<Tensor> mask, bool is_causal) {
  constexpr const char* op = "frequency_filter";
  const TokensView tokens(x, "x", op);
  const MaskView valid(mask, x, op);
  FilterForward call;
  call.shape = shape_of(x);
  call.type = dtype_of(x, op, "x");
  call.causal = is_causal;
  call.x = tokens.tokens;
  call.mask = valid.mask;
  call.low = gain_of(low, call.shape, call.type, "low", op);
  call.high = gain_of(high, call.shape, call.type, "high", op);
  Tensor y = allocated(x, sizes_of(x));
  call.y = y.data_ptr();
  const auto& run = frequency_kernels_table.get(op);
  for_frequency_items(call.shape, [&](int64_t begin, int64_t end) { run.filter_forward(call, begin, end); });
  return y;
}

// Sums every channel over the samples, in order.
void sum_over_samples(const std::vector<double>& per_sample, const FrequencyShape& shape, Tensor& out) {
  std::vector<double> total(shape.channels, 0.0);
  for (int64_t sample = 0; sample < shape.samples; ++sample) {
    for (int64_t channel = 0; channel < shape.channels; ++channel) {
      total[channel] += per_sample[sample * shape.channels + channel];
    }
  }
  store_statistics(out, shape.channels, [&](int64_t channel) { return total[channel]; });
}

// Without x the gains' gradients are not computed, without need_x grad_x is not; both are then empty.
std::tuple<Tensor, Tensor, Tensor> frequency_filter_backward(Tensor grad_y, std::optional<Tensor> x, Tensor low,
                                                             Tensor high, std::optional<Tensor> mask, bool is_causal,
                                                             bool need_x) {
  constexpr const char* op = "frequency_filter_backward";
  const TokensView grad_tokens(grad_y, "grad_y", op);
  const MaskView valid(mask, grad_y, op);
  FilterBackward call;
  call.shape = shape_of(grad_y);
  call.type = dtype_of(grad_y, op, "grad_y");
  call.causal = is_causal;
  call.grad_y = grad_tokens.tokens;
  call.mask = valid.mask;
  call.low = gain_of(low, call.shape, call.type, "low", op);
  call.high = gain_of(high, call.shape, call.type, "high", op);
  const std::vector<int64_t> nothing{0};
  Tensor grad_x = allocated(grad_y, need_x ? sizes_of(grad_y) : nothing);
  call.grad_x = need_x ? grad_x.data_ptr() : nullptr;

  const bool need_gains = x.has_value();
  const ScalarType gain_type = accumulate_type(call.type);
  const std::vector<int64_t> gain_shape = need_gains ? std::vector<int64_t>{call.shape.channels} : nothing;
  Tensor grad_low = allocated(grad_y, gain_shape, gain_type);
  Tensor grad_high = allocated(grad_y, gain_shape, gain_type);
  std::vector<double> low_sums;
  std::vector<double> high_sums;
  check_tensor(x, {sizes_of(grad_y), grad_y.scalar_type()}, "x", op);
  const TokensView x_tokens(need_gains ? *x : grad_y, "x", op);
  if (need_gains) {
    // One element more than needed: the pointers say "wanted", also when there are no channels.
    low_sums = buffer<double>(count_or_fail(call.shape.samples, call.shape.channels) + 1);
    high_sums = buffer<double>(low_sums.size());
    call.x = x_tokens.tokens;
    call.grad_low = low_sums.data();
    call.grad_high = high_sums.data();
  }
  const auto& run = frequency_kernels_table.get(op);
  for_frequency_items(call.shape, [&](int64_t begin, int64_t end) { run.filter_backward(call, begin, end); });
  if (need_gains) {
    sum_over_samples(low_sums, call.shape, grad_low);
    sum_over_samples(high_sums, call.shape, grad_high);
  }
  return {grad_x, grad_low, grad_high};
}

}  // namespace
}  // namespace overtone

STABLE_TORCH_LIBRARY_IMPL(overtone, CPU, m) {
  OVERTONE_IMPL(m, frequency_norms);
  OVERTONE_IMPL(m, frequency_norms_backward);
  OVERTONE_IMPL(m, frequency_filter);
  OVERTONE_IMPL(m, frequency_filter_backward);
}
