// Memory that a thread reads or writes soon, asked for while it computes, so that it is in the second-level cache by
// then. Rows far apart are nothing that the hardware would foresee.
//
// What prefetches is always inlined: GCC 12 takes a function that does only that for one that does nothing, and drops
// its calls.
#pragma once

#include "cpu/simd/vector.h"
#include "cpu/strided.h"

namespace overtone::OVERTONE_ISA {

OVERTONE_INLINE void prefetch_bytes(const char* first, int64_t bytes) {
  constexpr int64_t kLine = 64;
  for (int64_t byte = 0; byte < bytes; byte += kLine) {
    __builtin_prefetch(first + byte, 0, 2);
  }
}

template <class T>
OVERTONE_INLINE void prefetch(const T* first, int64_t elements) {
  prefetch_bytes(reinterpret_cast<const char*>(first), elements * static_cast<int64_t>(sizeof(T)));
}

// Rows of a few matrices, asked for one after another.
class Prefetcher {
 public:
  void clear() {
    matrices_ = 0;
    next_ = 0;
  }

  // Rows that are not together in memory are left to the hardware.
  void add(const StridedMatrix& source, int64_t rows, int64_t width) {
    if (source.column_stride == 1) {
      const int64_t size = bytes_of(source.type);
      matrix_[matrices_++] = {static_cast<const char*>(source.data), source.row_stride * size, width * size, rows};
    }
  }

  // The next row of every matrix.
  OVERTONE_INLINE void prefetch_row() {
    for (int i = 0; i < matrices_; ++i) {
      const Rows& matrix = matrix_[i];
      if (next_ < matrix.rows) {
        prefetch_bytes(matrix.data + next_ * matrix.stride, matrix.width);
      }
    }
    ++next_;
  }

 private:
  static constexpr int kMaxMatrices = 5;

  struct Rows {
    const char* data;
    int64_t stride;  // in bytes, as the width
    int64_t width;
    int64_t rows;
  };

  Rows matrix_[kMaxMatrices];
  int matrices_ = 0;
  int64_t next_ = 0;
};

}  // namespace overtone::OVERTONE_ISA
