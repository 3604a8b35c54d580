// Parallel loops, and the one rule for how much work is worth waking a thread for. No header of torch: files compiled
// for an instruction set include this for the queue.
#pragma once

#include <cstdint>

namespace overtone {

// Work items that threads take one by one: a thread that is slow, or got the long items, holds nobody up. Items never
// share a sum, so who does which does not change a bit of the result.
struct WorkQueue {
  int64_t next = 0;
  int64_t end = 0;

  // The next item, or -1 when there is none.
  __attribute__((always_inline)) int64_t pop() {
    const int64_t item = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
    return item < end ? item : -1;
  }
};

// What an item takes, roughly. In floating point: n³ may be beyond all integers.
struct Cost {
  double flops_per_item;
};

// Waking a thread takes as long as so many operations.
constexpr double kFlopsPerTask = 200000;
// Of items that are worth a thread each.
constexpr Cost kLargeItems{kFlopsPerTask};

namespace detail {
void parallel_for(int64_t items, Cost cost, void (*body)(const void*, int64_t, int64_t), const void* context);
}

// body(begin, end) on ranges of [0, items), each a task or more, or all there is.
template <class Body>
void parallel_ranges(int64_t items, Cost cost, const Body& body) {
  detail::parallel_for(
      items, cost,
      [](const void* context, int64_t begin, int64_t end) { (*static_cast<const Body*>(context))(begin, end); }, &body);
}

// work(queue) on every thread, which takes items until there are none left.
template <class Work>
void parallel_items(int64_t items, Cost cost, const Work& work) {
  WorkQueue queue{0, items};
  parallel_ranges(items, cost, [&](int64_t, int64_t) { work(queue); });
}

}  // namespace overtone
