// Memory that cannot be had: the error says which op wanted how many bytes, also from inside a parallel loop.
#pragma once

#include <cstdint>
#include <exception>
#include <mutex>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "cpu/tensor.h"

namespace overtone {

// Python's MemoryError.
class OutOfMemory : public std::bad_alloc {
 public:
  explicit OutOfMemory(std::string message) : message_(std::move(message)) {}
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  std::string message_;
};

// Elements of a matrix that any machine's memory could hold a few times. Larger ones are out of memory before their
// sizes are multiplied further, and wrap.
constexpr int64_t kMostElements = int64_t{1} << 44;

inline void check_fits(int64_t rows, int64_t columns) {
  if (rows > 0 && columns > kMostElements / rows) {
    throw OutOfMemory("matrices of " + std::to_string(rows) + " x " + std::to_string(columns) + " elements");
  }
}

inline Tensor new_tensor(const Tensor& like, const std::vector<int64_t>& sizes,
                         std::optional<ScalarType> type = std::nullopt) {
  try {
    return torch::stable::new_empty(like, sizes, type);
  } catch (const std::exception&) {  // torch's C interface does not say why; sizes are not negative
    std::string shape;
    for (const int64_t size : sizes) {
      shape += (shape.empty() ? "" : ", ") + std::to_string(size);
    }
    throw OutOfMemory("a result of shape [" + shape + "]");
  }
}

// work(), whose lack of memory is reported in the op's name.
template <class Work>
auto with_memory_for(const char* op, const Work& work) -> decltype(work()) {
  try {
    return work();
  } catch (const OutOfMemory& error) {
    throw OutOfMemory(std::string(op) + ": out of memory: wanted " + error.what());
  } catch (const std::bad_alloc&) {
    throw OutOfMemory(std::string(op) + ": out of memory");
  }
}

// torch's parallel_for, out of which exceptions come as they are: its C interface would leave nothing but an error
// code.
template <class Work>
void parallel_ranges(int64_t begin, int64_t end, int64_t grain, const Work& work) {
  std::exception_ptr first;
  std::mutex mutex;
  torch::stable::parallel_for(begin, end, grain, [&](int64_t range_begin, int64_t range_end) {
    try {
      work(range_begin, range_end);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex);
      first = first == nullptr ? std::current_exception() : first;
    }
  });
  if (first != nullptr) {
    std::rethrow_exception(first);
  }
}

}  // namespace overtone
