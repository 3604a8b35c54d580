// 2^x on vectors for softmax: x ≤ 0, −inf gives 0, NaN stays NaN. Within one unit in the last place.
#pragma once

#include "cpu/simd/vector.h"

namespace overtone::OVERTONE_ISA {

template <class A>
struct FloatBits;
template <>
struct FloatBits<float> {
  using Integer = uint32_t;
  static constexpr int kMantissa = 23;
  static constexpr float kLowest = -127.0F;  // taken as zero, like all below
  // 1.5 · 2^23 + 127: adding and subtracting it rounds to an integer, whose exponent is in the sum's last bits.
  static constexpr float kExponent = 12583039.0F;
  // The polynomial with the smallest relative error (1.9e-9) on [−1/2, 1/2].
  static constexpr float kSeries[] = {
      1.0F, 0.6931472057F, 0.2402264689F, 0.05550328777F, 0.009618488957F, 0.001339993121F, 0.0001534581216F};
};
template <>
struct FloatBits<double> {
  using Integer = uint64_t;
  static constexpr int kMantissa = 52;
  static constexpr double kLowest = -1023.0;
  static constexpr double kExponent = 6755399441056767.0;  // 1.5 · 2^52 + 1023
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

// For results that are rounded to bfloat16: relative error 2.8e-6, none at zero.
struct CoarseSeries {
  static constexpr float kSeries[] = {1.0F, 0.6931241751F, 0.2402409911F, 0.05590642616F, 0.009582853876F};
};

// 2^x on [−1/2, 1/2].
template <class A, class Series>
OVERTONE_INLINE Vector<A> exp2_series(Vector<A> x) {
  constexpr int kTerms = sizeof(Series::kSeries) / sizeof(A);
  Vector<A> power = broadcast<A>(Series::kSeries[kTerms - 1]);
  OVERTONE_UNROLL
  for (int k = kTerms - 2; k >= 0; --k) {
    power = power * x + Series::kSeries[k];
  }
  return power;
}

#if OVERTONE_VECTOR_BYTES == 64
template <class A, class Series = FloatBits<A>>
OVERTONE_INLINE Vector<A> exp2_nonpositive(Vector<A> x) {
  using Bits = FloatBits<A>;
  // Zero where 2^x would be subnormal (making one is slow), and for −inf. Rounding and subtracting is twice as fast as
  // vreduceps on AMD's cores.
  if constexpr (std::is_same_v<A, float>) {
    const Vector<A> whole = _mm512_maskz_roundscale_ps(0xffff, x, 0x08);
    const __mmask16 is_normal = _mm512_cmp_ps_mask(x, broadcast(Bits::kLowest + 1), _CMP_NLT_UQ);
    return _mm512_maskz_scalef_ps(is_normal, exp2_series<A, Series>(x - whole), whole);
  } else {
    const Vector<A> whole = _mm512_maskz_roundscale_pd(0xff, x, 0x08);
    const __mmask8 is_normal = _mm512_cmp_pd_mask(x, broadcast(Bits::kLowest + 1), _CMP_NLT_UQ);
    return _mm512_maskz_scalef_pd(is_normal, exp2_series<A, Series>(x - whole), whole);
  }
}
#else
template <class A, class Series = FloatBits<A>>
OVERTONE_INLINE Vector<A> exp2_nonpositive(Vector<A> x) {
  using Bits = FloatBits<A>;
  typedef typename Bits::Integer Integers __attribute__((vector_size(OVERTONE_VECTOR_BYTES)));
  const Vector<A> bounded = max<A>(broadcast(Bits::kLowest), x);  // a NaN stays
  // The sum ends in n, the integer nearest to x, as the exponent of 2^n is written; kLowest is written as that of zero.
  const Vector<A> shifted = bounded + Bits::kExponent;
  const Vector<A> fraction = bounded - (shifted - Bits::kExponent);
  Integers bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits <<= Bits::kMantissa;
  Vector<A> power_of_two;
  std::memcpy(&power_of_two, &bits, sizeof power_of_two);
  return exp2_series<A, Series>(fraction) * power_of_two;
}
#endif

}  // namespace overtone::OVERTONE_ISA
