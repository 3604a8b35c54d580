// GELU(x) = x Φ(x) on vectors, and its derivative: Φ the normal distribution.
#pragma once

#include "cpu/simd/exp2.h"

namespace overtone::OVERTONE_ISA {

// Φ(−t) exp(t²/2) for t ≥ 0 as a polynomial of u = 1 − 2 kCenter / (t + kCenter), interpolated in Chebyshev's points
// of what exp(−t²/2) leaves above zero: error 2.0e-9, and 1.5e-17 in float64.
template <class A>
struct NormalTail;
template <>
struct NormalTail<float> {
  static constexpr float kCenter = 4.0F;
  static constexpr float kSeries[] = {0.0944106399837F,    -0.170397727283F,   0.124379368851F,    -0.0717071098056F,
                                      0.0308633601755F,    -0.00849611658699F, 0.000512078989312F, 0.000657920448011F,
                                      -0.000182046529545F, -7.35653222847e-5F};
};
template <>
struct NormalTail<double> {
  static constexpr double kCenter = 5.0;
  static constexpr double kSeries[] = {
      0.076919304975006296198,   -0.14345755526401198477,   0.1160688118860028082,       -0.080883877264127620296,
      0.047855352284211854704,   -0.023413900487638239524,  0.0089913705494794692378,    -0.0023788443582171788268,
      0.00021955075111949755153, 0.00013427686243864852028, -0.000060427571150967201113, 9.6117548732964340237e-7,
      6.6447548098171314609e-6,  -1.2695425054584449132e-6, -6.758072227056797572e-7,    2.4201522382351583173e-7,
      7.7946782872037249938e-8,  -3.7176021331586601741e-8, -1.1293299749381935952e-8,   4.0505322825136389216e-9,
      1.5354210928418546349e-9};
};

template <class A>
struct Normal {
  Vector<A> below;  // Φ(x)
  Vector<A> bell;   // exp(−x²/2)
};

template <class A>
OVERTONE_INLINE Normal<A> normal(Vector<A> x) {
  using Tail = NormalTail<A>;
  constexpr A kHalfLog2E = A(0.72134752044448170368);
  const Vector<A> t = abs<A>(x);
  const Vector<A> bell = exp2_nonpositive<A>(t * t * -kHalfLog2E);
  const Vector<A> tail = bell * exp2_series<A, Tail>(A(1) - A(2) * Tail::kCenter / (t + Tail::kCenter));
  return {select(less(x, Vector<A>{}), tail, A(1) - tail), bell};
}

template <class A>
OVERTONE_INLINE Vector<A> gelu(Vector<A> x) {
  return x * normal<A>(x).below;
}

template <class A>
struct GeluAndSlope {
  Vector<A> value;
  Vector<A> slope;
};

template <class A>
OVERTONE_INLINE GeluAndSlope<A> gelu_and_slope(Vector<A> x) {
  constexpr A kDensity = A(0.39894228040143267794);  // 1 / √(2π)
  const Normal<A> at = normal<A>(x);
  return {x * at.below, at.below + x * kDensity * at.bell};
}

// For results that are rounded to bfloat16: Φ(x) and GELU'(x) as 1/2 + u p(2 u²/c² − 1) with u = x kept within ±c, each
// p the polynomial with the smallest error in GELU and GELU' that is exact at ±c: errors 1.6e-5 and 7.6e-5.
struct CoarseNormal {
  static constexpr float kLargest = 4.5F;
  static constexpr float kBelow[] = {0.1569042601F,   -0.07717623634F,  0.05471960454F, -0.0404280253F,
                                     0.02830173562F,  -0.01752361806F,  0.01080714166F, -0.007777593986F,
                                     0.004237778322F, -0.0009539354889F};
  static constexpr float kSlope[] = {0.1594509365F,  -0.08994195787F, 0.08594718759F, -0.09493876206F,
                                     0.1066599723F,  -0.09008668394F, 0.04435597272F, -0.04113324921F,
                                     0.05809641134F, -0.02729871630F};
};

template <size_t kTerms>
OVERTONE_INLINE Vector<float> polynomial(const float (&series)[kTerms], Vector<float> x) {
  Vector<float> power = broadcast(series[kTerms - 1]);
  OVERTONE_UNROLL
  for (int k = static_cast<int>(kTerms) - 2; k >= 0; --k) {
    power = power * x + series[k];
  }
  return power;
}

// GELU alone where the slope is not used: the compiler drops what nobody reads.
OVERTONE_INLINE GeluAndSlope<float> coarse_gelu_and_slope(Vector<float> x) {
  constexpr float kLargest = CoarseNormal::kLargest;
  const Vector<float> raised = max<float>(broadcast(-kLargest), x);  // a NaN stays; left of this GELU is zero
  const Vector<float> u = min<float>(broadcast(kLargest), raised);
  const Vector<float> t = u * u * (2 / (kLargest * kLargest)) - 1.0F;
  const Vector<float> below = u * polynomial(CoarseNormal::kBelow, t) + 0.5F;
  const Vector<float> slope = u * polynomial(CoarseNormal::kSlope, t) + 0.5F;
  return {raised * below, slope};
}

}  // namespace overtone::OVERTONE_ISA
