// What the nonsymmetric solver works on: matrices interleaved over the lanes, dense and then packed.
#pragma once

#include "cpu/simd/vector.h"

namespace overtone::OVERTONE_ISA {

// Matrices are scaled so that this and smaller numbers are nothing beside their norm. Its square is still accurate.
template <class A>
inline constexpr A kTiny = sizeof(A) == 8 ? static_cast<A>(1e-140) : static_cast<A>(1e-17);

// Unit roundoff.
template <class A>
inline constexpr A kRounding = std::numeric_limits<A>::epsilon() / 2;

// Rows of vectors, `stride` of them apart.
template <class A>
struct DenseLanes {
  Vector<A>* data;
  int64_t n;
  int64_t stride;

  OVERTONE_INLINE Vector<A>* row(int64_t i) const { return data + i * stride; }
};

// The Hessenberg part of an n × n matrix and what a bulge needs: row i holds the columns from i − 3 to n, so a group of
// lanes takes half the cache, and columns never share few cache lines. Row n exists and is zero.
template <class A>
struct HessenbergLanes {
  Vector<A>* data;
  int64_t n;

  static constexpr int64_t size(int64_t n) { return offset(n, n + 1, n) + 1; }
  static constexpr int64_t offset(int64_t i, int64_t j, int64_t n) { return i * (n + 3) - (i * (i - 1) >> 1) + 3 + j; }

  OVERTONE_INLINE Vector<A>* row(int64_t i) const { return data + offset(i, 0, n); }

  // The largest modulus.
  Vector<A> largest() const {
    Vector<A> result{};
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = std::max<int64_t>(i - 1, 0); j < n; ++j) {
        result = max<A>(result, abs<A>(row(i)[j]));
      }
    }
    return result;
  }
};

}  // namespace overtone::OVERTONE_ISA
