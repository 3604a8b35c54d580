// 2^x on vectors for softmax: x ≤ 0, −inf gives 0, NaN stays NaN. Within one unit in the last place.
#pragma once

#include "cpu/simd.h"

namespace overtone::OVERTONE_LEVEL {

template <class A>
struct FloatBits;
template <>
struct FloatBits<float> {
  using Integer = uint32_t;
  static constexpr int kMantissa = 23;
  static constexpr float kRounding = 12582912.0F;  // 1.5 · 2^23: adding and subtracting it rounds to an integer
  static constexpr float kLowest = -126.0F;        // below, 2^x is subnormal: taken as zero
  // The polynomial with the smallest relative error (1.9e-9) on [−1/2, 1/2].
  static constexpr float kSeries[] = {
      1.0F, 0.6931472057F, 0.2402264689F, 0.05550328777F, 0.009618488957F, 0.001339993121F, 0.0001534581216F};
};
template <>
struct FloatBits<double> {
  using Integer = uint64_t;
  static constexpr int kMantissa = 52;
  static constexpr double kRounding = 6755399441055744.0;  // 1.5 · 2^52
  static constexpr double kLowest = -1022.0;
  // Taylor's: (ln 2)^k / k!
  static constexpr double kSeries[] = {1.0,
                                       0.69314718055994530942,
                                       0.24022650695910071233,
                                       0.055504108664821579953,
                                       0.0096181291076284771620,
                                       0.0013333558146428443423,
                                       0.00015403530393381609954,
                                       1.5252733804059840280e-05,
                                       1.3215486790144309488e-06,
                                       1.0178086009239699727e-07,
                                       7.0549116208011233299e-09,
                                       4.4455382718708114976e-10,
                                       2.5678435993488205142e-11};
};

// power · 2^n for the integers n nearest to x; zero where 2^x would be subnormal (making one is slow), NaN for NaN.
template <class A>
OVERTONE_INLINE Vector<A> scale_by_power_of_two(Vector<A> power, Vector<A> n, Vector<A> x) {
  using Bits = FloatBits<A>;
#if OVERTONE_VECTOR_BYTES == 64
  if constexpr (std::is_same_v<A, float>) {
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, broadcast(Bits::kLowest), _CMP_NLT_UQ), power, n);
  } else {
    return _mm512_maskz_scalef_pd(_mm512_cmp_pd_mask(x, broadcast(Bits::kLowest), _CMP_NLT_UQ), power, n);
  }
#else
  typedef typename Bits::Integer Integers __attribute__((vector_size(OVERTONE_VECTOR_BYTES)));
  // Adding 1.5 · 2^mantissa leaves the integer in the low bits.
  const Vector<A> shifted = n + Bits::kRounding;
  Integers exponent;
  std::memcpy(&exponent, &shifted, sizeof exponent);
  Integers bits;
  std::memcpy(&bits, &power, sizeof bits);
  bits += exponent << Bits::kMantissa;
  Vector<A> result;
  std::memcpy(&result, &bits, sizeof result);
  result = x == x ? result : x;
  return x < Bits::kLowest ? Vector<A>{} : result;
#endif
}

// x minus the integer nearest to it; 0 for −inf on AVX-512, where scalef does the rest.
template <class A>
OVERTONE_INLINE Vector<A> distance_to_integer(Vector<A> x) {
#if OVERTONE_VECTOR_BYTES == 64
  if constexpr (std::is_same_v<A, float>) {
    return _mm512_maskz_reduce_ps(0xffff, x, 0x08);
  } else {
    return _mm512_maskz_reduce_pd(0xff, x, 0x08);
  }
#else
  return x - ((x + FloatBits<A>::kRounding) - FloatBits<A>::kRounding);
#endif
}

template <class A>
OVERTONE_INLINE Vector<A> exp2_nonpositive(Vector<A> x) {
  using Bits = FloatBits<A>;
  constexpr int kTerms = sizeof(Bits::kSeries) / sizeof(A);
  const Vector<A> fraction = distance_to_integer<A>(x);
  const Vector<A> n = x - fraction;
  Vector<A> power = broadcast<A>(Bits::kSeries[kTerms - 1]);
  OVERTONE_UNROLL
  for (int k = kTerms - 2; k >= 0; --k) {
    power = power * fraction + Bits::kSeries[k];
  }
  return scale_by_power_of_two<A>(power, n, x);
}

}  // namespace overtone::OVERTONE_LEVEL
