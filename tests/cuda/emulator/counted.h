// A float32 that counts what is done to it: kernels instantiated with it tell their FLOPs and accesses to shared
// memory.
#pragma once

#include <limits>
#include <type_traits>

#include "cuda/device.h"
#include "emulator.h"

namespace host_cuda {

// Of all threads. A root and a division are one operation, as an addition is.
struct Tally {
  uint64_t flops = 0;
  uint64_t loads = 0;
  uint64_t stores = 0;
};
inline Tally tally;

struct Counted {
  float x;

  constexpr Counted() = default;
  template <class A>
    requires std::is_arithmetic_v<A>
  constexpr Counted(A value) : x(static_cast<float>(value)) {}
  constexpr Counted(const Counted& other) : x(other.get()) {}
  constexpr Counted& operator=(const Counted& other) {
    x = other.get();
    if (is_shared()) {
      ++tally.stores;
    }
    return *this;
  }

  constexpr float get() const {
    if (is_shared()) {
      ++tally.loads;
    }
    return x;
  }
  explicit constexpr operator int() const { return static_cast<int>(get()); }

  static constexpr Counted result(float value) {
    if (!std::is_constant_evaluated()) {
      ++tally.flops;
    }
    return Counted(value);
  }

  friend constexpr Counted operator+(const Counted& a, const Counted& b) { return result(a.get() + b.get()); }
  friend constexpr Counted operator-(const Counted& a, const Counted& b) { return result(a.get() - b.get()); }
  friend constexpr Counted operator*(const Counted& a, const Counted& b) { return result(a.get() * b.get()); }
  friend constexpr Counted operator/(const Counted& a, const Counted& b) { return result(a.get() / b.get()); }
  friend constexpr Counted operator-(const Counted& a) { return Counted(-a.get()); }
  friend constexpr bool operator<(const Counted& a, const Counted& b) { return a.get() < b.get(); }
  friend constexpr bool operator>(const Counted& a, const Counted& b) { return a.get() > b.get(); }
  friend constexpr bool operator<=(const Counted& a, const Counted& b) { return a.get() <= b.get(); }
  friend constexpr bool operator>=(const Counted& a, const Counted& b) { return a.get() >= b.get(); }
  friend constexpr bool operator==(const Counted& a, const Counted& b) { return a.get() == b.get(); }
  friend constexpr bool operator!=(const Counted& a, const Counted& b) { return a.get() != b.get(); }
  friend constexpr Counted& operator+=(Counted& a, const Counted& b) { return a = a + b; }
  friend constexpr Counted& operator-=(Counted& a, const Counted& b) { return a = a - b; }
  friend constexpr Counted& operator*=(Counted& a, const Counted& b) { return a = a * b; }

 private:
  constexpr bool is_shared() const {
    if (std::is_constant_evaluated()) {
      return false;
    }
    const char *begin = static_cast<const char*>(shared_memory()), *here = reinterpret_cast<const char*>(this);
    return here >= begin && here < begin + shared_bytes();
  }
};

}  // namespace host_cuda

template <>
class std::numeric_limits<host_cuda::Counted> {
  using Float = std::numeric_limits<float>;
  using Counted = host_cuda::Counted;

 public:
  static constexpr Counted epsilon() { return Float::epsilon(); }
  static constexpr Counted min() { return Float::min(); }
  static constexpr Counted max() { return Float::max(); }
  static constexpr Counted infinity() { return Float::infinity(); }
  static constexpr Counted quiet_NaN() { return Float::quiet_NaN(); }
};

namespace overtone::cuda {

template <>
struct Real<host_cuda::Counted> {
  using Bits = uint32_t;
  static constexpr host_cuda::Counted kNothing = Real<float>::kNothing;
  static constexpr host_cuda::Counted kRaise = Real<float>::kRaise;
};

inline host_cuda::Counted root(const host_cuda::Counted& x) { return host_cuda::Counted::result(root(x.get())); }

}  // namespace overtone::cuda
