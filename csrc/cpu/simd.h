// Vectors of float or double on GCC's and Clang's vector extensions, and loads and stores that convert.
//
// Included by the kernel headers of every ISA level, inside a translation unit that has chosen its level with
// cpu/level_*.h. Everything here lives in that level's own namespace: the same template compiled for two levels
// must never be merged by the linker, or a machine without AVX-512 would run AVX-512 code.
#pragma once

#ifndef OVERTONE_LEVEL
#error "include a cpu/level_*.h header first"
#endif

namespace overtone::OVERTONE_LEVEL {

#define OVERTONE_INLINE inline __attribute__((always_inline))

using torch::headeronly::BFloat16;
using torch::headeronly::Half;

// Statistics are float32, or float64 for float64 tokens.
template <class T>
struct AccumulatorOf {
  using type = float;
};
template <>
struct AccumulatorOf<double> {
  using type = double;
};
template <class T>
using Accumulator = typename AccumulatorOf<T>::type;

template <class A>
struct VectorOf {
  typedef A type __attribute__((vector_size(OVERTONE_VECTOR_BYTES)));
};
template <class A>
using Vector = typename VectorOf<A>::type;

template <class A>
inline constexpr int kLanes = OVERTONE_VECTOR_BYTES / sizeof(A);

template <class A>
OVERTONE_INLINE Vector<A> broadcast(A value) {
  return value - Vector<A>{};
}

// Round to nearest even, NaN kept quiet. Written on integers so that it vectorises.
OVERTONE_INLINE uint16_t bfloat16_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>(is_nan ? (bits >> 16) | 0x40u : rounded);
}

OVERTONE_INLINE float widen(float value) { return value; }
OVERTONE_INLINE double widen(double value) { return value; }
OVERTONE_INLINE float widen(Half value) { return static_cast<float>(value); }
OVERTONE_INLINE float widen(BFloat16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.x) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

OVERTONE_INLINE void narrow(float value, float* out) { *out = value; }
OVERTONE_INLINE void narrow(double value, double* out) { *out = value; }
OVERTONE_INLINE void narrow(float value, Half* out) { *out = Half(value); }
OVERTONE_INLINE void narrow(float value, BFloat16* out) { out->x = bfloat16_bits(value); }

// A full vector of consecutive elements.
template <class T>
OVERTONE_INLINE Vector<Accumulator<T>> load_full(const T* p) {
  using A = Accumulator<T>;
  Vector<A> v;
  if constexpr (std::is_same_v<T, A>) {
    std::memcpy(&v, p, sizeof v);
    return v;
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    typedef uint16_t Narrow __attribute__((vector_size(OVERTONE_VECTOR_BYTES / 2)));
    typedef uint32_t Wide __attribute__((vector_size(OVERTONE_VECTOR_BYTES)));
    Narrow bits;
    std::memcpy(&bits, p, sizeof bits);
    const Wide wide = __builtin_convertvector(bits, Wide) << 16;
    std::memcpy(&v, &wide, sizeof v);
    return v;
  } else {
#if OVERTONE_VECTOR_BYTES == 64
    // The masked form, all lanes on: the plain one makes GCC 12 warn of an uninitialised value.
    return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif OVERTONE_VECTOR_BYTES == 32
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
    for (int lane = 0; lane < kLanes<A>; ++lane) {
      v[lane] = widen(p[lane]);
    }
    return v;
#endif
  }
}

template <class T>
OVERTONE_INLINE void store_full(Vector<Accumulator<T>> v, T* p) {
  using A = Accumulator<T>;
  if constexpr (std::is_same_v<T, A>) {
    std::memcpy(p, &v, sizeof v);
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    typedef uint16_t Narrow __attribute__((vector_size(OVERTONE_VECTOR_BYTES / 2)));
    typedef uint32_t Wide __attribute__((vector_size(OVERTONE_VECTOR_BYTES)));
    Wide bits;
    std::memcpy(&bits, &v, sizeof bits);
    const Wide rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const Wide quiet_nan = (bits >> 16) | 0x40u;
    const Wide result = (bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded;
    const Narrow out = __builtin_convertvector(result, Narrow);
    std::memcpy(p, &out, sizeof out);
  } else {
#if OVERTONE_VECTOR_BYTES == 64
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_maskz_cvtps_ph(0xffff, v, _MM_FROUND_TO_NEAREST_INT));
#elif OVERTONE_VECTOR_BYTES == 32
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#else
    for (int lane = 0; lane < kLanes<A>; ++lane) {
      narrow(v[lane], p + lane);
    }
#endif
  }
}

// The first `count` lanes from elements `stride` apart; the rest are zero.
template <class T>
OVERTONE_INLINE Vector<Accumulator<T>> load(const T* p, int64_t stride, int count) {
  using A = Accumulator<T>;
  if (stride == 1 && count == kLanes<A>) {
    return load_full(p);
  }
  Vector<A> v{};
  for (int lane = 0; lane < count; ++lane) {
    v[lane] = widen(p[lane * stride]);
  }
  return v;
}

template <class T>
OVERTONE_INLINE void store(Vector<Accumulator<T>> v, T* p, int count) {
  using A = Accumulator<T>;
  if (count == kLanes<A>) {
    store_full(v, p);
    return;
  }
  for (int lane = 0; lane < count; ++lane) {
    narrow(v[lane], p + lane);
  }
}

}  // namespace overtone::OVERTONE_LEVEL
