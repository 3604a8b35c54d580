// Kernels with and without one mistake, by name: what the stand-in must find, and what it must not.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "emulator.h"

namespace mistakes {

constexpr unsigned kThreads = 64;

struct Case {
  void (*kernel)(float* out);
  unsigned blocks = 1;
};

inline float* shared() { return static_cast<float*>(host_cuda::shared_memory()); }

// Every thread reads what its neighbour, perhaps of the other warp, wrote.
template <bool barrier>
void neighbour(float* out) {
  const unsigned i = threadIdx.x;
  shared()[i] = float(i);
  if (barrier) {
    __syncthreads();
  }
  out[i] = shared()[(i + 1) % kThreads];
}

// The same within a warp.
template <bool barrier>
void neighbour_lane(float* out) {
  const unsigned i = threadIdx.x, lane = i % 32;
  shared()[i] = float(i);
  if (barrier) {
    __syncwarp();
  }
  out[i] = shared()[i - lane + (lane + 1) % 32];
}

// A shuffle is no barrier for memory.
inline void shuffle_for_barrier(float* out) {
  const unsigned i = threadIdx.x, lane = i % 32;
  shared()[i] = float(i);
  const float kept = __shfl_sync(0xffffffffu, float(i), 0);
  out[i] = shared()[i - lane + (lane + 1) % 32] + 0 * kept;
}

// Reads and writes again, with one barrier too few at the end of the loop.
inline void missing_second_barrier(float* out) {
  const unsigned i = threadIdx.x;
  float sum = 0;
  for (int round = 0; round < 2; ++round) {
    shared()[i] = float(i + round);
    __syncthreads();
    sum += shared()[(i + 33) % kThreads];
  }
  out[i] = sum;
}

inline void barrier_not_reached_by_all(float* out) {
  if (threadIdx.x < 40) {
    __syncthreads();
  }
  out[threadIdx.x] = 1;
}

inline void mask_without_the_caller(float* out) { out[threadIdx.x] = __shfl_sync(0x0000ffffu, 1.0f, 0); }

inline void masks_that_differ(float* out) {
  __syncwarp(threadIdx.x % 32 < 16 ? 0xffffffffu : 0xffff0000u);
  out[threadIdx.x] = 1;
}

inline void shuffle_from_outside_of_the_mask(float* out) {
  const unsigned lane = threadIdx.x % 32;
  out[threadIdx.x] = lane < 16 ? __shfl_sync(0x0000ffffu, float(lane), 20) : 0;
}

inline void lanes_at_different_operations(float* out) {
  if (threadIdx.x % 2 == 0) {
    __syncwarp();
  } else {
    __any_sync(0xffffffffu, 1);
  }
  out[threadIdx.x] = 1;
}

inline void write_behind_shared_memory(float* out) {
  shared()[threadIdx.x + 1] = 1;
  out[threadIdx.x] = 1;
}

inline void write_before_shared_memory(float* out) {
  (shared() + threadIdx.x)[-1] = 1;
  out[threadIdx.x] = 1;
}

inline void read_behind_shared_memory(float* out) { out[threadIdx.x] = shared()[threadIdx.x + 1]; }

inline void memory_nobody_wrote(float* out) { out[threadIdx.x] = shared()[threadIdx.x]; }

// Blocks are not ordered: one must not read what another writes.
inline void blocks_that_meet(float* out) { out[(threadIdx.x + blockIdx.x) % kThreads] = 1; }

// Half warps that vote and shuffle on their own are no mistake.
inline void half_warps(float* out) {
  const unsigned lane = threadIdx.x % 32, mask = lane < 16 ? 0x0000ffffu : 0xffff0000u;
  float x = float(lane);
  if (lane < 16) {
    x += __shfl_xor_sync(mask, x, 1);
  }
  __syncwarp(mask);
  out[threadIdx.x] = x + float(__any_sync(mask, lane == 3)) + float(__all_sync(mask, lane > 3));
}

inline const std::map<std::string, Case>& cases() {
  static const std::map<std::string, Case> all = {
      {"neighbour", {&neighbour<true>}},
      {"missing barrier", {&neighbour<false>}},
      {"neighbour lane", {&neighbour_lane<true>}},
      {"missing warp barrier", {&neighbour_lane<false>}},
      {"shuffle for a barrier", {&shuffle_for_barrier}},
      {"missing second barrier", {&missing_second_barrier}},
      {"barrier not reached by all", {&barrier_not_reached_by_all}},
      {"mask without the caller", {&mask_without_the_caller}},
      {"masks that differ", {&masks_that_differ}},
      {"shuffle from outside of the mask", {&shuffle_from_outside_of_the_mask}},
      {"lanes at different operations", {&lanes_at_different_operations}},
      {"write behind shared memory", {&write_behind_shared_memory}},
      {"write before shared memory", {&write_before_shared_memory}},
      {"read behind shared memory", {&read_behind_shared_memory}},
      {"memory nobody wrote", {&memory_nobody_wrote}},
      {"blocks that meet", {&blocks_that_meet, 2}},
      {"half warps", {&half_warps}},
  };
  return all;
}

}  // namespace mistakes

// The bytes of what the kernel's threads wrote.
inline std::string run_mistake(const std::string& name, host_cuda::Order order, uint64_t seed) {
  using namespace mistakes;
  const Case& chosen = cases().at(name);
  std::vector<float> out(kThreads);
  const host_cuda::Launch launch{chosen.blocks, kThreads, kThreads * sizeof(float), order, seed};
  host_cuda::run(launch, [&] { chosen.kernel(out.data()); });
  return std::string(reinterpret_cast<const char*>(out.data()), out.size() * sizeof(float));
}
