// What the kernels use of CUDA, and numbers. nvcc compiles them as they are; any C++20 compiler does so too with a
// stand-in for CUDA's execution model on its include path (tests/cuda/emulator).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__CUDACC__)
#define OVERTONE_DEVICE __device__ __forceinline__
#define OVERTONE_UNROLL _Pragma("unroll")
#else
#include "emulator.h"
#define OVERTONE_DEVICE inline
#define OVERTONE_UNROLL
#endif

namespace overtone::cuda {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// The block's dynamic shared memory.
template <class T>
OVERTONE_DEVICE T* shared_memory() {
#if defined(__CUDACC__)
  extern __shared__ __align__(16) unsigned char memory[];
  return reinterpret_cast<T*>(memory);
#else
  return static_cast<T*>(host_cuda::shared_memory());
#endif
}

template <class T>
struct Real;

template <>
struct Real<float> {
  using Bits = uint32_t;
  static constexpr float kTiny = 1e-17f;    // beside numbers of size 1; its square is still accurate
  static constexpr float kRaise = 0x1p64f;  // makes a subnormal number a normal one
};

template <>
struct Real<double> {
  using Bits = uint64_t;
  static constexpr double kTiny = 1e-140;
  static constexpr double kRaise = 0x1p512;
};

template <class T>
inline constexpr T kRounding = std::numeric_limits<T>::epsilon() / 2;
template <class T>
inline constexpr T kNaN = std::numeric_limits<T>::quiet_NaN();
template <class T>
inline constexpr T kInfinity = std::numeric_limits<T>::infinity();
template <class T>
inline constexpr T kMax = std::numeric_limits<T>::max();

OVERTONE_DEVICE float sqrt(float x) { return sqrtf(x); }
OVERTONE_DEVICE double sqrt(double x) { return ::sqrt(x); }

template <class T>
OVERTONE_DEVICE T abs(T x) {
  return x < 0 ? -x : x;
}
template <class T>
OVERTONE_DEVICE T max(T a, T b) {
  return a < b ? b : a;
}
template <class T>
OVERTONE_DEVICE T min(T a, T b) {
  return b < a ? b : a;
}
// Minus zero counts as positive.
template <class T>
OVERTONE_DEVICE T copysign(T size, T sign) {
  return sign < 0 ? -size : size;
}

// |x|, or infinity if x is not finite: maxima of it tell both.
template <class T>
OVERTONE_DEVICE T size_or_infinity(T x) {
  return abs(x) <= kMax<T> ? abs(x) : kInfinity<T>;
}

// The power of two at or below a positive normal number.
template <class T>
OVERTONE_DEVICE T power_of_two_below(T x) {
  using Bits = typename Real<T>::Bits;
  const T infinity = kInfinity<T>;
  Bits bits, exponent;
  memcpy(&bits, &x, sizeof x);
  memcpy(&exponent, &infinity, sizeof x);
  bits &= exponent;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// Powers of two that take a matrix whose largest element is `largest` to about 1, and its eigenvalues back. Two of
// each, because one could overflow. No digit is lost, whether elements are subnormal or near overflow.
template <class T>
struct Scale {
  T first = 1;
  T second = 1;

  OVERTONE_DEVICE static Scale to_one(T largest) {
    Scale scale;
    if (largest > 0) {
      scale.first = largest < 1 / Real<T>::kRaise ? Real<T>::kRaise : T(1);
      // 1/2^e is subnormal for the two largest exponents.
      const T power = power_of_two_below(largest * scale.first);
      scale.second = max(1 / power, std::numeric_limits<T>::min());
    }
    return scale;
  }

  OVERTONE_DEVICE T apply(T x) const { return x * first * second; }
  OVERTONE_DEVICE T undo(T x) const { return x / second / first; }
};

}  // namespace overtone::cuda
