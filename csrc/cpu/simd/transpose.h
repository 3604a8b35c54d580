// Squares of kLanes × kLanes elements, transposed in registers.
#pragma once

#include "cpu/simd/vector.h"

namespace overtone::OVERTONE_ISA {

// Interleaves row i with row i + half, for every i.
template <class A, size_t... kLane>
OVERTONE_INLINE void interleave_rows(Vector<A> (&rows)[kLanes<A>], std::index_sequence<kLane...>) {
  constexpr int kSize = kLanes<A>;
  Vector<A> next[kSize];
  OVERTONE_UNROLL
  for (int i = 0; i < kSize / 2; ++i) {
    const Vector<A> x = rows[i];
    const Vector<A> y = rows[i + kSize / 2];
    next[2 * i] = __builtin_shufflevector(x, y, (kLane / 2 + kLane % 2 * kSize)...);
    next[2 * i + 1] = __builtin_shufflevector(x, y, (kSize / 2 + kLane / 2 + kLane % 2 * kSize)...);
  }
  OVERTONE_UNROLL
  for (int i = 0; i < kSize; ++i) {
    rows[i] = next[i];
  }
}

#if OVERTONE_VECTOR_BYTES == 64
// 16 × 16 floats with one-operand-pattern shuffles: the general ones need an index register each, and GCC spills.
OVERTONE_INLINE void transpose_floats(Vector<float> (&r)[16]) {
  Vector<float> t[16];
  OVERTONE_UNROLL
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
  OVERTONE_UNROLL
  for (int i = 0; i < 16; i += 4) {
    for (int j = 0; j < 2; ++j) {
      const __m512d x = _mm512_castps_pd(t[i + j]);
      const __m512d y = _mm512_castps_pd(t[i + j + 2]);
      r[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(x, y));
      r[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(x, y));
    }
  }
  // r[4i + j] now holds, in its quarter q, column 4q + j of rows 4i … 4i + 3: what is left is to move quarters.
  OVERTONE_UNROLL
  for (int j = 0; j < 4; ++j) {
    t[j] = _mm512_shuffle_f32x4(r[j], r[4 + j], 0x88);
    t[4 + j] = _mm512_shuffle_f32x4(r[j], r[4 + j], 0xdd);
    t[8 + j] = _mm512_shuffle_f32x4(r[8 + j], r[12 + j], 0x88);
    t[12 + j] = _mm512_shuffle_f32x4(r[8 + j], r[12 + j], 0xdd);
  }
  OVERTONE_UNROLL
  for (int j = 0; j < 4; ++j) {
    r[j] = _mm512_shuffle_f32x4(t[j], t[8 + j], 0x88);
    r[4 + j] = _mm512_shuffle_f32x4(t[4 + j], t[12 + j], 0x88);
    r[8 + j] = _mm512_shuffle_f32x4(t[j], t[8 + j], 0xdd);
    r[12 + j] = _mm512_shuffle_f32x4(t[4 + j], t[12 + j], 0xdd);
  }
}

// 8 × 8 doubles; the general form needs index registers and copies here too.
OVERTONE_INLINE void transpose_doubles(Vector<double> (&r)[8]) {
  Vector<double> t[8];
  OVERTONE_UNROLL
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm512_unpacklo_pd(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_pd(r[i], r[i + 1]);
  }
  // t[2i + j] now holds, in its quarter q, column 2q + j of rows 2i, 2i + 1: what is left is to move quarters.
  OVERTONE_UNROLL
  for (int i = 0; i < 8; i += 4) {
    OVERTONE_UNROLL
    for (int j = 0; j < 2; ++j) {
      r[i + j] = _mm512_shuffle_f64x2(t[i + j], t[i + 2 + j], 0x88);
      r[i + 2 + j] = _mm512_shuffle_f64x2(t[i + j], t[i + 2 + j], 0xdd);
    }
  }
  OVERTONE_UNROLL
  for (int j = 0; j < 4; ++j) {
    t[j] = _mm512_shuffle_f64x2(r[j], r[4 + j], 0x88);
    t[4 + j] = _mm512_shuffle_f64x2(r[j], r[4 + j], 0xdd);
  }
  OVERTONE_UNROLL
  for (int j = 0; j < 8; ++j) {
    r[j] = t[j];
  }
}
#endif

#if OVERTONE_VECTOR_BYTES == 32
// 8 × 8 floats; GCC makes slower instructions of the general form.
OVERTONE_INLINE void transpose_floats(Vector<float> (&r)[8]) {
  Vector<float> t[8];
  OVERTONE_UNROLL
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  OVERTONE_UNROLL
  for (int i = 0; i < 8; i += 4) {
    for (int j = 0; j < 2; ++j) {
      r[i + 2 * j] = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0x44);
      r[i + 2 * j + 1] = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0xee);
    }
  }
  // r[4i + j] now holds, in its half h, column 4h + j of rows 4i … 4i + 3: what is left is to move halves.
  OVERTONE_UNROLL
  for (int j = 0; j < 4; ++j) {
    const Vector<float> upper = r[j];
    r[j] = _mm256_permute2f128_ps(upper, r[4 + j], 0x20);
    r[4 + j] = _mm256_permute2f128_ps(upper, r[4 + j], 0x31);
  }
}
#endif

// Transposes a square in registers: log2(kLanes) rounds of interleaving. Written out, so that no array is in memory.
template <class A>
OVERTONE_INLINE void transpose_square(Vector<A> (&rows)[kLanes<A>]) {
#if OVERTONE_VECTOR_BYTES >= 32
  if constexpr (std::is_same_v<A, float>) {
    return transpose_floats(rows);
  }
#endif
#if OVERTONE_VECTOR_BYTES == 64
  if constexpr (std::is_same_v<A, double>) {
    return transpose_doubles(rows);
  }
#endif
  constexpr auto kLaneIndices = std::make_index_sequence<size_t{kLanes<A>}>();
  interleave_rows<A>(rows, kLaneIndices);
  if constexpr (kLanes<A> >= 4) {
    interleave_rows<A>(rows, kLaneIndices);
  }
  if constexpr (kLanes<A> >= 8) {
    interleave_rows<A>(rows, kLaneIndices);
  }
}

}  // namespace overtone::OVERTONE_ISA
