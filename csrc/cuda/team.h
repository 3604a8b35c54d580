// The threads that work on one matrix: a warp, or a block. What is written against `Team` runs on both.
//
// A team has rank(), size(), sync() and reductions. All threads of a team must call them; results are the same bits in
// every thread. A reduction is a sync() too: what was written to shared memory before it can be read after it.
#pragma once

#include "cuda/linalg/params.h"

namespace overtone::cuda {

// x combined over the warp: a butterfly, so that with a commutative operation all lanes get the same bits.
template <class T, class Combine>
OVERTONE_DEVICE T reduce_warp(T x, Combine combine) {
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    x = combine(x, __shfl_xor_sync(kAllLanes, x, distance));
  }
  return x;
}

template <class T>
OVERTONE_DEVICE T sum_warp(T x) {
  return reduce_warp(x, [](T a, T b) { return a + b; });
}

template <class T, class Team>
class Reductions {
 public:
  OVERTONE_DEVICE T sum(T x) {
    return self().reduce(x, [](T a, T b) { return a + b; });
  }
  OVERTONE_DEVICE T largest(T x) {
    return self().reduce(x, [](T a, T b) { return max(a, b); });
  }
  OVERTONE_DEVICE T smallest(T x) {
    return self().reduce(x, [](T a, T b) { return min(a, b); });
  }

 private:
  OVERTONE_DEVICE Team& self() { return *static_cast<Team*>(this); }
};

template <class T>
class WarpTeam : public Reductions<T, WarpTeam<T>> {
 public:
  static constexpr int kScratch = 0;

  OVERTONE_DEVICE explicit WarpTeam(T*) {}

  OVERTONE_DEVICE int rank() const { return threadIdx.x % kWarp; }
  OVERTONE_DEVICE int size() const { return kWarp; }
  OVERTONE_DEVICE int warp() const { return 0; }
  OVERTONE_DEVICE int warps() const { return 1; }
  OVERTONE_DEVICE void sync() const { __syncwarp(); }

  template <class Combine>
  OVERTONE_DEVICE T reduce(T x, Combine combine) const {
    x = reduce_warp(x, combine);
    __syncwarp();  // a shuffle does not order memory
    return x;
  }
};

template <class T>
class BlockTeam : public Reductions<T, BlockTeam<T>> {
 public:
  static constexpr int kMaxWarps = 8;
  static constexpr int kScratch = 2 * kMaxWarps;

  // `scratch`: kScratch numbers in shared memory.
  OVERTONE_DEVICE explicit BlockTeam(T* scratch) : partials_(scratch), others_(scratch + kMaxWarps) {}

  OVERTONE_DEVICE int rank() const { return threadIdx.x; }
  OVERTONE_DEVICE int size() const { return blockDim.x; }
  OVERTONE_DEVICE int warp() const { return threadIdx.x / kWarp; }
  OVERTONE_DEVICE int warps() const { return blockDim.x / kWarp; }
  OVERTONE_DEVICE void sync() const { __syncthreads(); }

  template <class Combine>
  OVERTONE_DEVICE T reduce(T x, Combine combine) {
    x = reduce_warp(x, combine);
    T* const partials = partials_;
    // The next reduction uses the other half: one barrier is enough, because whoever writes a half again has passed
    // that of the reduction in between, which everybody enters after reading.
    partials_ = others_;
    others_ = partials;
    if (threadIdx.x % kWarp == 0) {
      partials[warp()] = x;
    }
    __syncthreads();
    x = partials[0];
    for (int i = 1; i < warps(); ++i) {
      x = combine(x, partials[i]);
    }
    return x;
  }

 private:
  T *partials_, *others_;
};

// Threads of a block that gives every row of an n × n matrix a thread.
constexpr int threads_for(int n) { return (n + kWarp - 1) / kWarp * kWarp; }

// Matrices of a block whose warps have one each.
constexpr int kWarpsPerBlock = 4;

}  // namespace overtone::cuda
