// 2^x on vectors for softmax: x ≤ 0, −inf gives 0, NaN stays NaN. Within one unit in the last place.
#pragma once

#include "cpu/simd.h"

namespace overtone::OVERTONE_LEVEL {

template <class A>
struct FloatBits;
template <>
struct FloatBits<float> {
  using Integer = int32_t;
  static constexpr int kMantissa = 23;
  static constexpr float kLowest = -126.0F;  // below, 2^x is subnormal: taken as zero
  // Taylor coefficients of 2^f on [−1/2, 1/2]: (ln 2)^k / k!
  static constexpr float kSeries[] = {1.0F,           0.693147182F,   0.240226507F,    0.0555041087F,
                                      0.00961812911F, 0.00133335581F, 0.000154035304F, 1.52527338e-05F};
};
template <>
struct FloatBits<double> {
  using Integer = int64_t;
  static constexpr int kMantissa = 52;
  static constexpr double kLowest = -1022.0;
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

template <class A>
OVERTONE_INLINE Vector<A> exp2_nonpositive(Vector<A> x) {
  using Bits = FloatBits<A>;
  typedef typename Bits::Integer Integers __attribute__((vector_size(OVERTONE_VECTOR_BYTES)));
  constexpr int kTerms = sizeof(Bits::kSeries) / sizeof(A);
  // Adding 1.5 · 2^mantissa rounds to the nearest integer and leaves it in the low bits.
  const A magic = static_cast<A>(int64_t{3} << (Bits::kMantissa - 1));
  const Vector<A> clamped = x < Bits::kLowest ? broadcast<A>(Bits::kLowest) : x;
  const Vector<A> shifted = clamped + magic;
  const Vector<A> fraction = clamped - (shifted - magic);
  Vector<A> power = broadcast<A>(Bits::kSeries[kTerms - 1]);
  OVERTONE_UNROLL
  for (int k = kTerms - 2; k >= 0; --k) {
    power = power * fraction + Bits::kSeries[k];
  }
  Integers exponent;
  std::memcpy(&exponent, &shifted, sizeof exponent);
  Integers bits;
  std::memcpy(&bits, &power, sizeof bits);
  bits += exponent << Bits::kMantissa;
  Vector<A> result;
  std::memcpy(&result, &bits, sizeof result);
  result = x < Bits::kLowest ? Vector<A>{} : result;
  return x == x ? result : x;
}

}  // namespace overtone::OVERTONE_LEVEL
