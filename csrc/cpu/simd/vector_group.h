// A few vectors that go through the same operations: several independent chains in flight hide each other's latency.
#pragma once

#include "cpu/simd/vector.h"

namespace overtone::OVERTONE_ISA {

template <class A, int kParts>
struct VectorGroupMask {
  Mask<A> part[kParts];
};

template <class A, int kParts>
struct VectorGroup {
  Vector<A> part[kParts];

  static OVERTONE_INLINE VectorGroup load(const A* p) {
    return make([&](int k) { return load_full(p + k * kLanes<A>); });
  }
  static OVERTONE_INLINE VectorGroup all(A value) {
    return make([&](int) { return broadcast(value); });
  }
  OVERTONE_INLINE void store(A* p) const {
    OVERTONE_UNROLL
    for (int k = 0; k < kParts; ++k) {
      store_full(part[k], p + k * kLanes<A>);
    }
  }

  template <class F>
  static OVERTONE_INLINE VectorGroup make(const F& f) {
    VectorGroup result;
    OVERTONE_UNROLL
    for (int k = 0; k < kParts; ++k) {
      result.part[k] = f(k);
    }
    return result;
  }

  friend OVERTONE_INLINE VectorGroup operator+(const VectorGroup& a, const VectorGroup& b) {
    return make([&](int k) { return a.part[k] + b.part[k]; });
  }
  friend OVERTONE_INLINE VectorGroup operator-(const VectorGroup& a, const VectorGroup& b) {
    return make([&](int k) { return a.part[k] - b.part[k]; });
  }
  friend OVERTONE_INLINE VectorGroup operator*(const VectorGroup& a, const VectorGroup& b) {
    return make([&](int k) { return a.part[k] * b.part[k]; });
  }
  friend OVERTONE_INLINE VectorGroup operator/(const VectorGroup& a, const VectorGroup& b) {
    return make([&](int k) { return a.part[k] / b.part[k]; });
  }
};

template <class A, int kParts, class F>
OVERTONE_INLINE VectorGroupMask<A, kParts> make_mask(const F& f) {
  VectorGroupMask<A, kParts> result;
  OVERTONE_UNROLL
  for (int k = 0; k < kParts; ++k) {
    result.part[k] = f(k);
  }
  return result;
}

template <class A, int kParts>
OVERTONE_INLINE VectorGroupMask<A, kParts> operator&(const VectorGroupMask<A, kParts>& a,
                                                     const VectorGroupMask<A, kParts>& b) {
  return make_mask<A, kParts>([&](int k) { return a.part[k] & b.part[k]; });
}
template <class A, int kParts>
OVERTONE_INLINE VectorGroupMask<A, kParts> operator|(const VectorGroupMask<A, kParts>& a,
                                                     const VectorGroupMask<A, kParts>& b) {
  return make_mask<A, kParts>([&](int k) { return a.part[k] | b.part[k]; });
}
template <class A, int kParts>
OVERTONE_INLINE VectorGroupMask<A, kParts> operator~(const VectorGroupMask<A, kParts>& a) {
  return make_mask<A, kParts>([&](int k) { return ~a.part[k]; });
}
template <class A, int kParts>
OVERTONE_INLINE bool any(const VectorGroupMask<A, kParts>& a) {
  Mask<A> result = a.part[0];
  OVERTONE_UNROLL
  for (int k = 1; k < kParts; ++k) {
    result = result | a.part[k];
  }
  return any(result);
}

template <class A, int kParts>
OVERTONE_INLINE VectorGroupMask<A, kParts> less(const VectorGroup<A, kParts>& a, const VectorGroup<A, kParts>& b) {
  return make_mask<A, kParts>([&](int k) { return less(a.part[k], b.part[k]); });
}
template <class A, int kParts>
OVERTONE_INLINE VectorGroupMask<A, kParts> less_equal(const VectorGroup<A, kParts>& a,
                                                      const VectorGroup<A, kParts>& b) {
  return make_mask<A, kParts>([&](int k) { return less_equal(a.part[k], b.part[k]); });
}
template <class A, int kParts>
OVERTONE_INLINE VectorGroupMask<A, kParts> equal(const VectorGroup<A, kParts>& a, const VectorGroup<A, kParts>& b) {
  return make_mask<A, kParts>([&](int k) { return equal(a.part[k], b.part[k]); });
}
template <class A, int kParts>
OVERTONE_INLINE VectorGroup<A, kParts> select(const VectorGroupMask<A, kParts>& mask, const VectorGroup<A, kParts>& yes,
                                              const VectorGroup<A, kParts>& no) {
  return VectorGroup<A, kParts>::make([&](int k) { return select(mask.part[k], yes.part[k], no.part[k]); });
}
template <class A, int kParts>
OVERTONE_INLINE VectorGroup<A, kParts> abs(const VectorGroup<A, kParts>& a) {
  return VectorGroup<A, kParts>::make([&](int k) { return abs<A>(a.part[k]); });
}
template <class A, int kParts>
OVERTONE_INLINE VectorGroup<A, kParts> max(const VectorGroup<A, kParts>& a, const VectorGroup<A, kParts>& b) {
  return VectorGroup<A, kParts>::make([&](int k) { return max<A>(a.part[k], b.part[k]); });
}
template <class A, int kParts>
OVERTONE_INLINE VectorGroup<A, kParts> sqrt(const VectorGroup<A, kParts>& a) {
  return VectorGroup<A, kParts>::make([&](int k) { return sqrt(a.part[k]); });
}
template <class A, int kParts>
OVERTONE_INLINE VectorGroup<A, kParts> rsqrt(const VectorGroup<A, kParts>& a) {
  return VectorGroup<A, kParts>::make([&](int k) { return rsqrt<A>(a.part[k]); });
}
template <class A, int kParts>
OVERTONE_INLINE VectorGroup<A, kParts> copysign(const VectorGroup<A, kParts>& a, const VectorGroup<A, kParts>& sign) {
  return VectorGroup<A, kParts>::make([&](int k) { return copysign<A>(a.part[k], sign.part[k]); });
}

}  // namespace overtone::OVERTONE_ISA
