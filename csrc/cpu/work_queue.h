// Work items that threads take one by one: a thread that is slow, or got the long items, holds nobody up. Items never
// share a sum, so who does which does not change a bit of the result.
#pragma once

#include <cstdint>

namespace overtone {

struct WorkQueue {
  int64_t next = 0;
  int64_t end = 0;
};

// The next item, or -1 when there is none.
inline __attribute__((always_inline)) int64_t take_item(WorkQueue& queue) {
  const int64_t item = __atomic_fetch_add(&queue.next, 1, __ATOMIC_RELAXED);
  return item < queue.end ? item : -1;
}

}  // namespace overtone
