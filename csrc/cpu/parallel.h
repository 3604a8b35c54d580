// torch's parallel loop, whose errors keep what they say: torch's own tells only that there was one.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>
#include <exception>
#include <mutex>

#include "cpu/work_queue.h"

namespace overtone {

// body(begin, end) on ranges of [0, count) that are at least `grain` long, or all there is.
template <class Body>
void parallel_ranges(int64_t count, int64_t grain, const Body& body) {
  std::exception_ptr first;
  std::mutex mutex;
  const auto guarded = [&](int64_t begin, int64_t end) {
    try {
      body(begin, end);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex);
      first = first ? first : std::current_exception();
    }
  };
  if (count > 0) {
    torch::stable::parallel_for(0, count, grain, guarded);
  }
  if (first) {
    std::rethrow_exception(first);
  }
}

// Every thread takes items until there are none left, whatever range it was given. `grain` of them are worth waking a
// thread for.
template <class Work>
void for_items(int64_t items, const Work& work, int64_t grain = 1) {
  WorkQueue queue{0, items};
  parallel_ranges(items, grain, [&](int64_t, int64_t) { work(queue); });
}

}  // namespace overtone
