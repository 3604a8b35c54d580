// torch's parallel loop, whose errors keep what they say: torch's own tells only that there was one.
#include "cpu/parallel.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <exception>
#include <mutex>

namespace overtone::detail {

void parallel_for(int64_t items, Cost cost, void (*body)(const void*, int64_t, int64_t), const void* context) {
  std::exception_ptr first;
  std::mutex mutex;
  const auto guarded = [&](int64_t begin, int64_t end) {
    try {
      body(context, begin, end);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex);
      first = first ? first : std::current_exception();
    }
  };
  if (items > 0) {
    const auto grain = static_cast<int64_t>(kFlopsPerTask / std::max(1.0, cost.flops_per_item));
    torch::stable::parallel_for(0, items, std::max<int64_t>(1, grain), guarded);
  }
  if (first) {
    std::rethrow_exception(first);
  }
}

}  // namespace overtone::detail
