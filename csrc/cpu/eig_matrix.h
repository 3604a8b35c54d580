// What the nonsymmetric solver works on: matrices interleaved over the lanes, dense and then packed.
#pragma once

#include "cpu/simd.h"

namespace overtone::OVERTONE_LEVEL {

// Matrices are scaled so that this and smaller numbers are nothing beside their norm. Its square is still accurate.
template <class A>
inline constexpr A kNothing = sizeof(A) == 8 ? static_cast<A>(1e-140) : static_cast<A>(1e-17);

// Unit roundoff.
template <class A>
inline constexpr A kRounding = std::numeric_limits<A>::epsilon() / 2;

// From the vector that `offset`, a whole number, gives for each lane, that lane.
OVERTONE_INLINE Vector<float> gather_lanes(const float* base, Vector<float> offset) {
#if OVERTONE_VECTOR_BYTES == 64
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i index = _mm512_add_epi32(_mm512_slli_epi32(_mm512_cvttps_epi32(offset), 4), lane);
  return _mm512_i32gather_ps(index, base, 4);
#elif OVERTONE_VECTOR_BYTES == 32
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i index = _mm256_add_epi32(_mm256_slli_epi32(_mm256_cvttps_epi32(offset), 3), lane);
  return _mm256_i32gather_ps(base, index, 4);
#else
  Vector<float> v;
  for (int lane = 0; lane < kLanes<float>; ++lane) {
    v[lane] = base[static_cast<int64_t>(offset[lane]) * kLanes<float> + lane];
  }
  return v;
#endif
}

OVERTONE_INLINE Vector<double> gather_lanes(const double* base, Vector<double> offset) {
#if OVERTONE_VECTOR_BYTES == 64
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i index = _mm256_add_epi32(_mm256_slli_epi32(_mm512_cvttpd_epi32(offset), 3), lane);
  return _mm512_i32gather_pd(index, base, 8);
#elif OVERTONE_VECTOR_BYTES == 32
  const __m128i lane = _mm_setr_epi32(0, 1, 2, 3);
  const __m128i index = _mm_add_epi32(_mm_slli_epi32(_mm256_cvttpd_epi32(offset), 2), lane);
  return _mm256_i32gather_pd(base, index, 8);
#else
  Vector<double> v;
  for (int lane = 0; lane < kLanes<double>; ++lane) {
    v[lane] = base[static_cast<int64_t>(offset[lane]) * kLanes<double> + lane];
  }
  return v;
#endif
}

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
  static constexpr int64_t offset(int64_t i, int64_t j, int64_t n) { return i * (n + 3) - i * (i - 1) / 2 + 3 + j; }

  OVERTONE_INLINE Vector<A>* row(int64_t i) const { return data + offset(i, 0, n); }

  // Where row i begins, for whole numbers i that differ between the lanes; exact in float32 up to n = 4000.
  OVERTONE_INLINE Vector<A> row_offset(Vector<A> i) const {
    return i * static_cast<A>(n + 3) - i * (i - 1) * static_cast<A>(0.5) + 3;
  }
  // Element `offset` of every lane.
  OVERTONE_INLINE Vector<A> gather(Vector<A> offset) const {
    return gather_lanes(reinterpret_cast<const A*>(data), offset);
  }

  // The largest modulus.
  Vector<A> largest() const {
    Vector<A> result{};
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = std::max<int64_t>(i - 1, 0); j < n; ++j) {
        result = larger<A>(result, absolute<A>(row(i)[j]));
      }
    }
    return result;
  }
};

}  // namespace overtone::OVERTONE_LEVEL
