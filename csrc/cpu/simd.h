// Vectors of float or double on GCC's and Clang's vector extensions, and loads and stores that convert.
//
// Included by the kernel headers of every ISA level, inside a translation unit that has chosen its level with
// cpu/level_*.h. Everything here lives in that level's own namespace: the same template compiled for two levels
// must never be merged by the linker, or a machine without AVX-512 would run AVX-512 code.
#pragma once

#ifndef OVERTONE_LEVEL
#error "include a cpu/level_*.h header first"
#endif

#define OVERTONE_STRINGIFY_(x) #x
#define OVERTONE_STRINGIFY(x) OVERTONE_STRINGIFY_(x)
#define OVERTONE_LEVEL_NAME OVERTONE_STRINGIFY(OVERTONE_LEVEL)

namespace overtone::OVERTONE_LEVEL {

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
OVERTONE_INLINE A sum_of_lanes(Vector<A> v) {
  return reduce_lanes<A>(
      v, [](Vector<A> a, Vector<A> b) { return a + b; }, std::make_index_sequence<size_t{kLanes<A>}>());
}

template <class A>
OVERTONE_INLINE A largest_lane(Vector<A> v) {
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
OVERTONE_INLINE Vector<A> first_lanes(Vector<A> v, int count, A rest) {
  return lane_numbers<A>(std::make_index_sequence<size_t{kLanes<A>}>()) < count ? v : broadcast(rest);
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

// A sum carried in twice the precision of what is added: in float64 for float32, as a pair (sum, error) for float64.
// However many tokens there are, and however far from zero they lie, the sum is exact to the last bits of A.
template <class A>
struct WideSum;

template <>
struct WideSum<float> {
  Vector<double> lower{};
  Vector<double> upper{};

  OVERTONE_INLINE void add(Vector<float> v) {
    Vector<double> v_lower;
    Vector<double> v_upper;
    widen_halves(v, v_lower, v_upper);
    lower += v_lower;
    upper += v_upper;
  }

  OVERTONE_INLINE Vector<double> lanes() const { return lower + upper; }

  OVERTONE_INLINE double operator[](int lane) const {
    return lane < kLanes<double> ? lower[lane] : upper[lane - kLanes<double>];
  }

  // The sum times `factor` as value + rest, both float32.
  OVERTONE_INLINE void scaled(double factor, Vector<float>& value, Vector<float>& rest) const {
    const Vector<double> wide_lower = lower * factor;
    const Vector<double> wide_upper = upper * factor;
    value = narrow_halves(wide_lower, wide_upper);
    Vector<double> value_lower;
    Vector<double> value_upper;
    widen_halves(value, value_lower, value_upper);
    rest = narrow_halves(wide_lower - value_lower, wide_upper - value_upper);
  }
};

template <>
struct WideSum<double> {
  Vector<double> sum{};
  Vector<double> error{};

  OVERTONE_INLINE void add(Vector<double> v) {  // Knuth's two-sum
    const Vector<double> total = sum + v;
    const Vector<double> taken = total - sum;
    error += (sum - (total - taken)) + (v - taken);
    sum = total;
  }

  OVERTONE_INLINE Vector<double> lanes() const { return sum + error; }

  OVERTONE_INLINE double operator[](int lane) const { return sum[lane] + error[lane]; }

  OVERTONE_INLINE void scaled(double factor, Vector<double>& value, Vector<double>& rest) const {
    value = (sum + error) * factor;
    // What the product rounded away is of the order of one bit of the value; only tokens equal to 15 digits notice.
    rest = error * factor - (value - sum * factor);
  }
};

}  // namespace overtone::OVERTONE_LEVEL
