// Scratch memory of one work item. Our own class, and no std::vector: its inline functions, compiled for AVX-512 here,
// could be the copy that the linker keeps for everyone.
#pragma once

#include "cpu/simd/vector.h"

namespace overtone::OVERTONE_ISA {

constexpr int64_t padded_to(int64_t size, int64_t multiple) { return (size + multiple - 1) / multiple * multiple; }

// Elements between rows: whole cache lines, an odd number of them, or the rows of a column would share few cache sets.
template <class A>
constexpr int64_t padded_stride(int64_t size) {
  constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(A));
  return (((size + kLine - 1) / kLine) | 1) * kLine;
}

// Aligned to a cache line; one allocation serves all parts.
template <class A>
class Scratch {
 public:
  explicit Scratch(int64_t size) : memory_(static_cast<A*>(allocate_aligned(size, sizeof(A)))), size_(size) {}
  ~Scratch() { free_aligned(memory_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  A* take(int64_t size) {
    A* part = memory_ + used_;
    used_ += padded(size);
    return part;
  }
  void clear() { std::memset(static_cast<void*>(memory_), 0, size_ * sizeof(A)); }
  static constexpr int64_t padded(int64_t size) { return padded_to(size, 64 / static_cast<int64_t>(sizeof(A))); }

 private:
  A* memory_;
  int64_t size_;
  int64_t used_ = 0;
};

}  // namespace overtone::OVERTONE_ISA
