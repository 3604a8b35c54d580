// From torch::stable::Tensor to what kernels take: element types, sample offsets, statistics' types, parallel loops.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "cpu/element_type.h"
#include "cpu/matrix_batch.h"
#include "cpu/work_queue.h"

namespace overtone {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline ElementType element_type(const Tensor& tensor, const char* op, const char* name) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return ElementType::float32;
    case ScalarType::Double:
      return ElementType::float64;
    case ScalarType::BFloat16:
      return ElementType::bfloat16;
    case ScalarType::Half:
      return ElementType::float16;
    default:
      STD_TORCH_CHECK(false, op, ": ", name, " must be float32, float64, bfloat16 or float16");
  }
}

// Sums over tokens are float32, or float64 for float64 tokens.
inline ScalarType statistics_type(ElementType type) {
  return type == ElementType::float64 ? ScalarType::Double : ScalarType::Float;
}

inline std::vector<int64_t> sizes_of(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  return {sizes.begin(), sizes.end()};
}

inline bool has_shape(const Tensor& tensor, const std::vector<int64_t>& shape) { return sizes_of(tensor) == shape; }

inline int64_t product(const std::vector<int64_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, [](int64_t a, int64_t b) { return a * b; });
}

// The element offset of every combination of the first `dims` indices, in row-major order.
inline std::vector<int64_t> leading_offsets(const Tensor& tensor, int64_t dims) {
  std::vector<int64_t> offsets{0};
  for (int64_t dim = 0; dim < dims; ++dim) {
    const int64_t size = tensor.size(dim);
    const int64_t stride = tensor.stride(dim);
    std::vector<int64_t> next;
    next.reserve(offsets.size() * static_cast<size_t>(size));
    for (const int64_t offset : offsets) {
      for (int64_t i = 0; i < size; ++i) {
        next.push_back(offset + i * stride);
      }
    }
    offsets = std::move(next);
  }
  return offsets;
}

// Every thread takes items until there are none left, whatever range it was given. `grain` of them are worth waking a
// thread for.
template <class Work>
void for_items(int64_t items, const Work& work, int64_t grain = 1) {
  WorkQueue queue{0, items};
  if (items > 0) {
    torch::stable::parallel_for(0, items, grain, [&](int64_t, int64_t) { work(queue); });
  }
}

// The matrices of a tensor [..., rows, columns]; keeps the offsets alive that the batch points to.
struct MatricesView {
  std::vector<int64_t> offsets;
  MatrixBatch batch;

  explicit MatricesView(const Tensor& tensor) : offsets(leading_offsets(tensor, tensor.dim() - 2)) {
    batch.data = tensor.data_ptr();
    batch.row_stride = tensor.stride(-2);
    batch.column_stride = tensor.stride(-1);
    batch.offsets = offsets.data();
    batch.count = static_cast<int64_t>(offsets.size());
  }
};

// "(1, 2)" for the flat index of a matrix in a batch of these sizes.
inline std::string member_name(int64_t member, const std::vector<int64_t>& sizes) {
  std::string name;
  for (auto size = sizes.rbegin(); size != sizes.rend(); ++size) {
    name = std::to_string(member % *size) + (name.empty() ? (sizes.size() == 1 ? "," : "") : ", ") + name;
    member /= *size;
  }
  return sizes.empty() ? "" : " (" + name + ")";
}

}  // namespace overtone
