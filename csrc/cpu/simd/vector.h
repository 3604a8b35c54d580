// Vectors of float or double on GCC's and Clang's vector extensions, and loads and stores that convert.
//
// Included by the kernel headers, inside a translation unit that has chosen its instruction set with
// cpu/isa/begin.h. Everything here lives in its own namespace: the same template compiled for two instruction sets
// must never be merged by the linker, or a machine without AVX-512 would run AVX-512 code.
#pragma once

#ifndef OVERTONE_ISA
#error "define OVERTONE_ISA and include cpu/isa/begin.h first"
#endif

#define OVERTONE_STRINGIFY_(x) #x
#define OVERTONE_STRINGIFY(x) OVERTONE_STRINGIFY_(x)
#define OVERTONE_ISA_NAME OVERTONE_STRINGIFY(OVERTONE_ISA)

namespace overtone::OVERTONE_ISA {

#define OVERTONE_INLINE inline __attribute__((always_inline))
#if defined(__clang__)
#define OVERTONE_UNROLL _Pragma("unroll")
#else
#define OVERTONE_UNROLL _Pragma("GCC unroll 16")
#endif

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
inline constexpr int kLanes = OVERTONE_VECTOR_BYTES / static_cast<int>(sizeof(A));

template <class A>
OVERTONE_INLINE Vector<A> broadcast(A value) {
  return value - Vector<A>{};
}

// Round to nearest even, NaN kept quiet. Written on integers so that it vectorizes.
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

typedef uint32_t Words __attribute__((vector_size(OVERTONE_VECTOR_BYTES)));

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
    Narrow bits;
    std::memcpy(&bits, p, sizeof bits);
    const Words wide = __builtin_convertvector(bits, Words) << 16;
    std::memcpy(&v, &wide, sizeof v);
    return v;
  } else {
#if OVERTONE_VECTOR_BYTES == 64
    // The masked form, all lanes on: the plain one makes GCC 12 warn of an uninitialized value.
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

// The bfloat16 numbers nearest to v (NaN kept quiet), in the low halves of 32-bit words.
OVERTONE_INLINE Words bfloat16_words(Vector<float> v) {
#if OVERTONE_HAS_AVX512BF16
  return (Words)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)_mm512_maskz_cvtneps_pbh(0xffff, v));
#else
  Words bits;
  std::memcpy(&bits, &v, sizeof bits);
  const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const Words quiet_nan = (bits >> 16) | 0x40u;
  return (bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded;
#endif
}

template <class T>
OVERTONE_INLINE void store_full(Vector<Accumulator<T>> v, T* p) {
  using A = Accumulator<T>;
  if constexpr (std::is_same_v<T, A>) {
    std::memcpy(p, &v, sizeof v);
  } else if constexpr (std::is_same_v<T, BFloat16>) {
#if OVERTONE_HAS_AVX512BF16
    const auto out = _mm512_maskz_cvtneps_pbh(0xffff, v);
#else
    typedef uint16_t Narrow __attribute__((vector_size(OVERTONE_VECTOR_BYTES / 2)));
    const Narrow out = __builtin_convertvector(bfloat16_words(v), Narrow);
#endif
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

// Combines all lanes of a vector: halves, quarters, … in log2(kLanes) steps.
template <class A, class Combine, size_t... kLane>
OVERTONE_INLINE A reduce_lanes(Vector<A> v, Combine combine, std::index_sequence<kLane...>) {
  constexpr size_t kSize = sizeof...(kLane);
  if constexpr (kSize >= 16) {
    v = combine(v, __builtin_shufflevector(v, v, ((kLane + 8) % kSize)...));
  }
  if constexpr (kSize >= 8) {
    v = combine(v, __builtin_shufflevector(v, v, ((kLane + 4) % kSize)...));
  }
  if constexpr (kSize >= 4) {
    v = combine(v, __builtin_shufflevector(v, v, ((kLane + 2) % kSize)...));
  }
  v = combine(v, __builtin_shufflevector(v, v, ((kLane + 1) % kSize)...));
  return v[0];
}

template <class A>
OVERTONE_INLINE A reduce_add(Vector<A> v) {
  return reduce_lanes<A>(
      v, [](Vector<A> a, Vector<A> b) { return a + b; }, std::make_index_sequence<size_t{kLanes<A>}>());
}

template <class A>
OVERTONE_INLINE A reduce_max(Vector<A> v) {
  return reduce_lanes<A>(
      v, [](Vector<A> a, Vector<A> b) { return a > b ? a : b; }, std::make_index_sequence<size_t{kLanes<A>}>());
}

template <class A, size_t... kLane>
OVERTONE_INLINE auto lane_numbers(std::index_sequence<kLane...>) {
  using Number = std::conditional_t<sizeof(A) == 4, int32_t, int64_t>;
  typedef Number Numbers __attribute__((vector_size(OVERTONE_VECTOR_BYTES)));
  return Numbers{static_cast<Number>(kLane)...};
}

// v in the first `count` lanes, `rest` in the others.
template <class A>
OVERTONE_INLINE Vector<A> mask_tail(Vector<A> v, int count, A rest) {
  return lane_numbers<A>(std::make_index_sequence<size_t{kLanes<A>}>()) < count ? v : broadcast(rest);
}

// Lane masks: what a comparison of vectors gives. A mask register with AVX-512, otherwise a vector of ones and zeros.
// Comparisons with NaN are false.
template <class A>
using Bits = std::conditional_t<sizeof(A) == 8, int64_t, int32_t>;

#if OVERTONE_VECTOR_BYTES == 64
template <class A>
using MaskBits = std::conditional_t<sizeof(A) == 8, __mmask8, __mmask16>;
#else
template <class A>
using MaskBits = typename VectorOf<Bits<A>>::type;
#endif

template <class A>
struct Mask {
  MaskBits<A> bits;

  OVERTONE_INLINE Mask operator&(Mask other) const { return {static_cast<MaskBits<A>>(bits & other.bits)}; }
  OVERTONE_INLINE Mask operator|(Mask other) const { return {static_cast<MaskBits<A>>(bits | other.bits)}; }
  OVERTONE_INLINE Mask operator~() const { return {static_cast<MaskBits<A>>(~bits)}; }
};

template <class A>
OVERTONE_INLINE Mask<A> no_lane() {
  return {MaskBits<A>{}};
}

template <class A>
OVERTONE_INLINE Mask<A> every_lane() {
  return ~no_lane<A>();
}

#if OVERTONE_VECTOR_BYTES == 64
OVERTONE_INLINE Mask<float> less(Vector<float> a, Vector<float> b) { return {_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ)}; }
OVERTONE_INLINE Mask<double> less(Vector<double> a, Vector<double> b) { return {_mm512_cmp_pd_mask(a, b, _CMP_LT_OQ)}; }
OVERTONE_INLINE Mask<float> less_equal(Vector<float> a, Vector<float> b) {
  return {_mm512_cmp_ps_mask(a, b, _CMP_LE_OQ)};
}
OVERTONE_INLINE Mask<double> less_equal(Vector<double> a, Vector<double> b) {
  return {_mm512_cmp_pd_mask(a, b, _CMP_LE_OQ)};
}
OVERTONE_INLINE Mask<float> equal(Vector<float> a, Vector<float> b) { return {_mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ)}; }
OVERTONE_INLINE Mask<double> equal(Vector<double> a, Vector<double> b) {
  return {_mm512_cmp_pd_mask(a, b, _CMP_EQ_OQ)};
}
OVERTONE_INLINE Vector<float> select(Mask<float> mask, Vector<float> yes, Vector<float> no) {
  return _mm512_mask_blend_ps(mask.bits, no, yes);
}
OVERTONE_INLINE Vector<double> select(Mask<double> mask, Vector<double> yes, Vector<double> no) {
  return _mm512_mask_blend_pd(mask.bits, no, yes);
}
template <class A>
OVERTONE_INLINE bool any(Mask<A> mask) {
  return mask.bits != 0;
}
#else
template <class V>
using ElementOf = std::remove_cvref_t<decltype(V{}[0])>;

template <class V, class A = ElementOf<V>>
OVERTONE_INLINE Mask<A> less(V a, V b) {
  return {a < b};
}
template <class V, class A = ElementOf<V>>
OVERTONE_INLINE Mask<A> less_equal(V a, V b) {
  return {a <= b};
}
template <class V, class A = ElementOf<V>>
OVERTONE_INLINE Mask<A> equal(V a, V b) {
  return {a == b};
}
template <class A>
OVERTONE_INLINE Vector<A> select(Mask<A> mask, std::type_identity_t<Vector<A>> yes,
                                 std::type_identity_t<Vector<A>> no) {
  return mask.bits ? yes : no;
}
template <class A>
OVERTONE_INLINE bool any(Mask<A> mask) {
#if OVERTONE_VECTOR_BYTES == 32
  return !_mm256_testz_si256((__m256i)mask.bits, (__m256i)mask.bits);
#elif defined(__x86_64__)
  return _mm_movemask_epi8((__m128i)mask.bits) != 0;
#else
  bool found = false;
  for (int lane = 0; lane < kLanes<A>; ++lane) {
    found |= mask.bits[lane] != 0;
  }
  return found;
#endif
}
#endif

template <class A>
OVERTONE_INLINE bool all(Mask<A> mask) {
  return !any(~mask);
}

// Whether one lane's bit is set; for the slow ends of kernels.
template <class A>
OVERTONE_INLINE bool lane_of(Mask<A> mask, int lane) {
#if OVERTONE_VECTOR_BYTES == 64
  return (mask.bits >> lane & 1) != 0;
#else
  return mask.bits[lane] != 0;
#endif
}

OVERTONE_INLINE Vector<float> sqrt(Vector<float> v) {
#if OVERTONE_VECTOR_BYTES == 64
  return _mm512_maskz_sqrt_ps(0xffff, v);
#elif OVERTONE_VECTOR_BYTES == 32
  return _mm256_sqrt_ps(v);
#elif defined(__x86_64__)
  return _mm_sqrt_ps(v);
#else
  for (int lane = 0; lane < kLanes<float>; ++lane) {
    v[lane] = __builtin_sqrtf(v[lane]);
  }
  return v;
#endif
}

OVERTONE_INLINE Vector<double> sqrt(Vector<double> v) {
#if OVERTONE_VECTOR_BYTES == 64
  return _mm512_maskz_sqrt_pd(0xff, v);
#elif OVERTONE_VECTOR_BYTES == 32
  return _mm256_sqrt_pd(v);
#elif defined(__x86_64__)
  return _mm_sqrt_pd(v);
#else
  for (int lane = 0; lane < kLanes<double>; ++lane) {
    v[lane] = __builtin_sqrt(v[lane]);
  }
  return v;
#endif
}

// 1/√v to about one unit in the last place, for v > 0 that is neither subnormal nor infinite.
template <class A>
OVERTONE_INLINE Vector<A> rsqrt(Vector<A> v) {
#if OVERTONE_VECTOR_BYTES == 64
  // 14 bits from the machine; each of Newton's steps doubles them.
  const auto refined = [v](Vector<A> y) { return y + A(0.5) * y * (A(1) - v * y * y); };
  if constexpr (sizeof(A) == 8) {
    return refined(refined(_mm512_maskz_rsqrt14_pd(0xff, v)));
  } else {
    return refined(_mm512_maskz_rsqrt14_ps(0xffff, v));
  }
#else
  return A(1) / sqrt(v);
#endif
}

// On bits, because comparisons would lose the sign of zero and the NaN.
template <class A>
OVERTONE_INLINE Vector<A> copysign(Vector<A> magnitude, std::type_identity_t<Vector<A>> sign) {
  typedef typename VectorOf<Bits<A>>::type IntegerVector;
  const IntegerVector sign_bit = IntegerVector{} + std::numeric_limits<Bits<A>>::min();
  return (Vector<A>)(((IntegerVector)magnitude & ~sign_bit) | ((IntegerVector)sign & sign_bit));
}

template <class A>
OVERTONE_INLINE Vector<A> abs(Vector<A> v) {
  return copysign<A>(v, Vector<A>{});
}

// Of two lanes the larger (smaller); the second if one is NaN. Intrinsics, because GCC makes two instructions of the
// comparison.
template <class A>
OVERTONE_INLINE Vector<A> max(Vector<A> a, std::type_identity_t<Vector<A>> b) {
#if OVERTONE_VECTOR_BYTES == 64
  if constexpr (sizeof(A) == 8) {
    return _mm512_maskz_max_pd(0xff, a, b);
  } else {
    return _mm512_maskz_max_ps(0xffff, a, b);
  }
#elif OVERTONE_VECTOR_BYTES == 32
  if constexpr (sizeof(A) == 8) {
    return _mm256_max_pd(a, b);
  } else {
    return _mm256_max_ps(a, b);
  }
#else
  return a > b ? a : b;
#endif
}
template <class A>
OVERTONE_INLINE Vector<A> min(Vector<A> a, std::type_identity_t<Vector<A>> b) {
  return a < b ? a : b;
}

// The first `count` lanes from elements `stride` apart; the rest are zero.
template <class T>
OVERTONE_INLINE Vector<Accumulator<T>> load(const T* p, int64_t stride, int count) {
  using A = Accumulator<T>;
  if (stride == 1 && count == kLanes<A>) {
    return load_full(p);
  }
  // Through an array: indexing the vector itself would force it, and what it is added to, out of the registers.
  A lanes[kLanes<A>] = {};
  for (int lane = 0; lane < count; ++lane) {
    lanes[lane] = widen(p[lane * stride]);
  }
  Vector<A> v;
  std::memcpy(&v, lanes, sizeof v);
  return v;
}

template <class T>
OVERTONE_INLINE void store(Vector<Accumulator<T>> v, T* p, int count) {
  using A = Accumulator<T>;
  if (count == kLanes<A>) {
    store_full(v, p);
    return;
  }
  A lanes[kLanes<A>];
  std::memcpy(lanes, &v, sizeof v);
  for (int lane = 0; lane < count; ++lane) {
    narrow(lanes[lane], p + lane);
  }
}

// The lower and upper half of the lanes in float64, and back. Intrinsics, because GCC 12 makes __builtin_convertvector
// of these widths go through memory.
OVERTONE_INLINE void widen_halves(Vector<float> v, Vector<double>& lower, Vector<double>& upper) {
#if OVERTONE_VECTOR_BYTES == 64
  lower = _mm512_maskz_cvtps_pd(0xff, _mm512_castps512_ps256(v));
  upper = _mm512_maskz_cvtps_pd(0xff, _mm512_maskz_extractf32x8_ps(0xff, v, 1));
#elif OVERTONE_VECTOR_BYTES == 32
  lower = _mm256_cvtps_pd(_mm256_castps256_ps128(v));
  upper = _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1));
#elif defined(__x86_64__)
  lower = _mm_cvtps_pd(v);
  upper = _mm_cvtps_pd(_mm_movehl_ps(v, v));
#else
  lower = Vector<double>{v[0], v[1]};
  upper = Vector<double>{v[2], v[3]};
#endif
}

OVERTONE_INLINE Vector<float> narrow_halves(Vector<double> lower, Vector<double> upper) {
#if OVERTONE_VECTOR_BYTES == 64
  return _mm512_insertf32x8(_mm512_castps256_ps512(_mm512_maskz_cvtpd_ps(0xff, lower)),
                            _mm512_maskz_cvtpd_ps(0xff, upper), 1);
#elif OVERTONE_VECTOR_BYTES == 32
  return _mm256_set_m128(_mm256_cvtpd_ps(upper), _mm256_cvtpd_ps(lower));
#elif defined(__x86_64__)
  return _mm_movelh_ps(_mm_cvtpd_ps(lower), _mm_cvtpd_ps(upper));
#else
  return Vector<float>{static_cast<float>(lower[0]), static_cast<float>(lower[1]), static_cast<float>(upper[0]),
                       static_cast<float>(upper[1])};
#endif
}

}  // namespace overtone::OVERTONE_ISA
