#include "cpu/bench/thread_latency.h"

#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <limits>

namespace overtone {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kBatches = 20;
constexpr int kTrips = 100;  // in a batch: the clock is too coarse for one
constexpr std::chrono::milliseconds kPatience{50};
constexpr int kOver = -1;

// Alone in its cache lines, those that are fetched in pairs included.
struct alignas(128) Line {
  std::atomic<int> number{0};
};

// Waits until the other thread has written `wanted`; false when it took too long or the game is over.
bool wait_for(const Line& line, int wanted, Clock::time_point deadline) {
  constexpr int kSpins = 1 << 16;  // between two looks at the clock
  for (;;) {
    for (int spin = 0; spin < kSpins; ++spin) {
      const int number = line.number.load(std::memory_order_acquire);
      if (number == wanted || number == kOver) {
        return number == wanted;
      }
    }
    if (Clock::now() > deadline) {
      return false;
    }
  }
}

// Writes odd numbers and waits for the even ones behind them.
double ask(Line& line, Clock::time_point deadline) {
  double shortest = std::numeric_limits<double>::quiet_NaN();
  int number = 0;
  for (int batch = 0; batch <= kBatches; ++batch) {
    const Clock::time_point start = Clock::now();
    for (int trip = 0; trip < kTrips; ++trip) {
      line.number.store(++number, std::memory_order_release);
      if (!wait_for(line, ++number, deadline)) {
        return shortest;
      }
    }
    const std::chrono::duration<double> seconds = Clock::now() - start;
    if (batch > 0) {  // the first one waits for the other thread to start
      shortest = std::fmin(shortest, seconds.count() / kTrips);
    }
  }
  return shortest;
}

void answer(Line& line, Clock::time_point deadline) {
  for (int number = 1; wait_for(line, number, deadline); number += 2) {
    line.number.store(number + 1, std::memory_order_release);
  }
}

}  // namespace

double line_round_trip() {
  Line line;
  double shortest = std::numeric_limits<double>::quiet_NaN();
  const Clock::time_point deadline = Clock::now() + kPatience;
  const int64_t threads = torch::stable::get_num_threads();  // all of them: OpenMP ends those that a region leaves out
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    if (begin == 0 && end == 1) {
      shortest = ask(line, deadline);
      line.number.store(kOver, std::memory_order_release);
    } else if (begin == 1) {
      answer(line, deadline);
    }
  });
  return shortest;
}

}  // namespace overtone
