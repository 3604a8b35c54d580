// A stand-in for CUDA's execution model: runs kernels written for nvcc on the host, and finds their mistakes.
//
// The threads of a block are fibers on one CPU thread. A fiber runs until it waits for others (__syncthreads,
// __syncwarp, a shuffle or a vote) or returns; who goes first is the launch's choice (forward, reverse, or random by
// seed), so that code which relies on an order gives different results. What it finds by itself:
//   - a barrier or warp operation that some of its threads never reach, or reach another one instead;
//   - a mask without the calling lane, masks that differ, a shuffle from a lane outside of the mask;
//   - writes before or after the block's shared memory. That memory is full of NaN at the beginning.
// Built with ThreadSanitizer every fiber is a thread to it, and only barriers order them: a missing one is a data race,
// within a block or between blocks. (Shuffles and votes order nothing, as in CUDA.) Built with AddressSanitizer every
// access outside of shared memory is reported at its line.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>

#define __global__
#define __device__

namespace host_cuda {

enum class Order { forward, reverse, random };

struct Launch {
  unsigned blocks = 1;
  unsigned threads = 32;    // of a block
  size_t shared_bytes = 0;  // of a block
  Order order = Order::forward;
  uint64_t seed = 0;
};

// A mistake of the kernel.
struct Mistake : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Runs kernel() once per thread of every block, blocks in the launch's order too.
void run(const Launch& launch, const std::function<void()>& kernel);

// For the thread that is running.
struct Index {
  unsigned x;
};
Index thread_index();
Index block_index();
Index block_size();
void* shared_memory();

void block_barrier();
void warp_barrier(unsigned mask);
// `bits` of lane `source` of the warp.
uint64_t exchange(unsigned mask, uint64_t bits, unsigned source);
// The lanes of the mask whose predicate is true.
unsigned vote(unsigned mask, bool predicate);

template <class T>
T shuffle(unsigned mask, const T& value, unsigned source) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = exchange(mask, bits, source);
  T result;
  std::memcpy(&result, &bits, sizeof(T));
  return result;
}

}  // namespace host_cuda

// CUDA's names.
#define threadIdx (::host_cuda::thread_index())
#define blockIdx (::host_cuda::block_index())
#define blockDim (::host_cuda::block_size())

inline void __syncthreads() { host_cuda::block_barrier(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { host_cuda::warp_barrier(mask); }
template <class T>
T __shfl_sync(unsigned mask, T value, int source) {
  return host_cuda::shuffle(mask, value, static_cast<unsigned>(source) % 32);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int distance) {
  return host_cuda::shuffle(mask, value, (threadIdx.x % 32) ^ static_cast<unsigned>(distance));
}
inline unsigned __ballot_sync(unsigned mask, int predicate) { return host_cuda::vote(mask, predicate != 0); }
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == mask; }
