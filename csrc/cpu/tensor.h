// From torch::stable::Tensor to what kernels take: checks, element types, offsets of samples, allocation.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <new>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/dtype.h"
#include "cpu/errors.h"
#include "cpu/matrix_batch.h"
#include "cpu/parallel.h"
#include "cpu/registration.h"

namespace overtone {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline Dtype dtype_of(const Tensor& tensor, const char* op, const char* name) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return Dtype::float32;
    case ScalarType::Double:
      return Dtype::float64;
    case ScalarType::BFloat16:
      return Dtype::bfloat16;
    case ScalarType::Half:
      return Dtype::float16;
    default:
      fail(op, name, ": got ", tensor.scalar_type(), ", wanted float32, float64, bfloat16 or float16");
  }
}

// Sums over tokens are float32, or float64 for float64 tokens.
inline ScalarType accumulate_type(Dtype type) {
  return type == Dtype::float64 ? ScalarType::Double : ScalarType::Float;
}

inline std::vector<int64_t> sizes_of(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  return {sizes.begin(), sizes.end()};
}

inline bool has_shape(const Tensor& tensor, const std::vector<int64_t>& shape) { return sizes_of(tensor) == shape; }

inline int64_t product(const std::vector<int64_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, count_or_fail);
}

inline std::string shape_text(const std::vector<int64_t>& sizes) {
  std::string text;
  for (const int64_t size : sizes) {
    text += (text.empty() ? "" : ", ") + std::to_string(size);
  }
  return "[" + text + "]";
}

// What an op wants of a tensor. The ops may be called directly, past the checks in Python, so whatever a kernel reads
// goes through check_tensor.
struct Wanted {
  std::vector<int64_t> shape;
  ScalarType type;
  bool contiguous = false;
};

inline std::string wanted_text(const std::vector<int64_t>& shape, ScalarType type, bool contiguous, bool is_cpu) {
  return std::string(contiguous ? "contiguous " : "") + torch::headeronly::toString(type) + shape_text(shape) +
         (is_cpu ? " on the CPU" : " on another device");
}

inline void check_tensor(const Tensor& tensor, const Wanted& wanted, const char* name, const char* op) {
  if (tensor.is_cpu() && tensor.scalar_type() == wanted.type && has_shape(tensor, wanted.shape) &&
      (!wanted.contiguous || tensor.is_contiguous())) {
    return;
  }
  fail(
      op, name, ": got ",
      wanted_text(sizes_of(tensor), tensor.scalar_type(), wanted.contiguous && tensor.is_contiguous(), tensor.is_cpu()),
      ", wanted ", wanted_text(wanted.shape, wanted.type, wanted.contiguous, true));
}

inline void check_tensor(const std::optional<Tensor>& tensor, const Wanted& wanted, const char* name, const char* op) {
  if (tensor.has_value()) {
    check_tensor(*tensor, wanted, name, op);
  }
}

// At least two dimensions: [..., rows, columns] of matrices, [..., N, C] of tokens.
inline void check_dims(const Tensor& tensor, int64_t dims, bool or_more, const char* name, const char* op) {
  if (!tensor.is_cpu() || tensor.dim() < dims || (!or_more && tensor.dim() != dims)) {
    fail(op, name, ": got ", shape_text(sizes_of(tensor)), tensor.is_cpu() ? "" : " on another device", ", wanted ",
         dims, " dimensions", or_more ? " or more" : "", " on the CPU");
  }
}

// Larger matrices are out of memory on any machine, and the operations on them beyond all integers.
inline void check_fits(int64_t rows, int64_t columns) {
  constexpr int64_t kMaxElements = int64_t{1} << 44;
  if (rows > 0 && columns > kMaxElements / rows) {
    throw OutOfMemory(count_or_fail(count_or_fail(rows, columns), sizeof(float)));
  }
}

// [..., n, n], float32 or float64, as the solvers take them.
inline void check_matrices(const Tensor& tensor, bool square, const char* name, const char* op) {
  check_dims(tensor, 2, true, name, op);
  const ScalarType type = tensor.scalar_type();
  if ((type != ScalarType::Float && type != ScalarType::Double) || (square && tensor.size(-1) != tensor.size(-2))) {
    fail(op, name, ": got ", wanted_text(sizes_of(tensor), type, false, true), ", wanted float32 or float64 ",
         square ? "[..., n, n]" : "[..., m, n]");
  }
  check_fits(tensor.size(-2), tensor.size(-1));
}

// A vector whose length grows with the input.
template <class T>
std::vector<T> buffer(int64_t size) {
  try {
    return std::vector<T>(static_cast<size_t>(size));
  } catch (const std::exception&) {
    throw OutOfMemory(count_or_fail(size, sizeof(T)));
  }
}

inline int64_t element_bytes(ScalarType type) {
  switch (type) {
    case ScalarType::Double:
    case ScalarType::ComplexFloat:
      return 8;
    case ScalarType::ComplexDouble:
      return 16;
    case ScalarType::BFloat16:
    case ScalarType::Half:
      return 2;
    default:
      return 4;
  }
}

inline Tensor allocated(const Tensor& like, const std::vector<int64_t>& sizes, ScalarType type) {
  try {
    return torch::stable::new_empty(like, sizes, type);
  } catch (const std::exception&) {
    // The stable ABI keeps torch's own words to itself; with sizes that fit a tensor there is one thing they can be.
    throw OutOfMemory(count_or_fail(product(sizes), element_bytes(type)));
  }
}

inline Tensor allocated(const Tensor& like, const std::vector<int64_t>& sizes) {
  return allocated(like, sizes, like.scalar_type());
}

// The element offset of every combination of the first `dims` indices, in row-major order.
inline std::vector<int64_t> leading_offsets(const Tensor& tensor, int64_t dims) {
  std::vector<int64_t> offsets{0};
  for (int64_t dim = 0; dim < dims; ++dim) {
    const int64_t size = tensor.size(dim);
    const int64_t stride = tensor.stride(dim);
    std::vector<int64_t> next = buffer<int64_t>(count_or_fail(static_cast<int64_t>(offsets.size()), size));
    auto place = next.begin();
    for (const int64_t offset : offsets) {
      for (int64_t i = 0; i < size; ++i) {
        *place++ = offset + i * stride;
      }
    }
    offsets = std::move(next);
  }
  return offsets;
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
inline std::string batch_index_name(int64_t index, const std::vector<int64_t>& sizes) {
  std::string name;
  for (auto size = sizes.rbegin(); size != sizes.rend(); ++size) {
    name = std::to_string(index % *size) + (name.empty() ? (sizes.size() == 1 ? "," : "") : ", ") + name;
    index /= *size;
  }
  return sizes.empty() ? "" : " (" + name + ")";
}

}  // namespace overtone
