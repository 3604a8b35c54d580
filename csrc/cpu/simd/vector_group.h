// A few vectors that go through the same operations: several independent chains in flight hide each other's latency.
#pragma once

#include "cpu/simd/vector.h"

namespace overtone::OVERTONE_ISA {

template <class A, int kParts>
struct PackMask {
  Mask<A> part[kParts];
};

template <class A, int kParts>
struct Pack {
  Vector<A> part[kParts];

  static OVERTONE_INLINE Pack load(const A* p) {
    return make([&](int k) { return load_full(p + k * kLanes<A>); });
  }
  static OVERTONE_INLINE Pack all(A value) {
    return make([&](int) { return broadcast(value); });
  }
  OVERTONE_INLINE void store(A* p) const {
    OVERTONE_UNROLL
    for (int k = 0; k < kParts; ++k) {
      store_full(part[k], p + k * kLanes<A>);
    }
  }

  template <class F>
  static OVERTONE_INLINE Pack make(const F& f) {
    Pack result;
    OVERTONE_UNROLL
    for (int k = 0; k < kParts; ++k) {
      result.part[k] = f(k);
    }
    return result;
  }

  friend OVERTONE_INLINE Pack operator+(const Pack& a, const Pack& b) {
    return make([&](int k) { return a.part[k] + b.part[k]; });
  }
  friend OVERTONE_INLINE Pack operator-(const Pack& a, const Pack& b) {
    return make([&](int k) { return a.part[k] - b.part[k]; });
  }
  friend OVERTONE_INLINE Pack operator*(const Pack& a, const Pack& b) {
    return make([&](int k) { return a.part[k] * b.part[k]; });
  }
  friend OVERTONE_INLINE Pack operator/(const Pack& a, const Pack& b) {
    return make([&](int k) { return a.part[k] / b.part[k]; });
  }
};

template <class A, int kParts, class F>
OVERTONE_INLINE PackMask<A, kParts> make_mask(const F& f) {
  PackMask<A, kParts> result;
  OVERTONE_UNROLL
  for (int k = 0; k < kParts; ++k) {
    result.part[k] = f(k);
  }
  return result;
}

template <class A, int kParts>
OVERTONE_INLINE PackMask<A, kParts> operator&(const PackMask<A, kParts>& a, const PackMask<A, kParts>& b) {
  return make_mask<A, kParts>([&](int k) { return a.part[k] & b.part[k]; });
}
template <class A, int kParts>
OVERTONE_INLINE PackMask<A, kParts> operator|(const PackMask<A, kParts>& a, const PackMask<A, kParts>& b) {
  return make_mask<A, kParts>([&](int k) { return a.part[k] | b.part[k]; });
}
template <class A, int kParts>
OVERTONE_INLINE PackMask<A, kParts> operator~(const PackMask<A, kParts>& a) {
  return make_mask<A, kParts>([&](int k) { return ~a.part[k]; });
}
template <class A, int kParts>
OVERTONE_INLINE bool any(const PackMask<A, kParts>& a) {
  Mask<A> result = a.part[0];
  OVERTONE_UNROLL
  for (int k = 1; k < kParts; ++k) {
    result = result | a.part[k];
  }
  return any(result);
}

template <class A, int kParts>
OVERTONE_INLINE PackMask<A, kParts> less(const Pack<A, kParts>& a, const Pack<A, kParts>& b) {
  return make_mask<A, kParts>([&](int k) { return less(a.part[k], b.part[k]); });
}
template <class A, int kParts>
OVERTONE_INLINE PackMask<A, kParts> less_equal(const Pack<A, kParts>& a, const Pack<A, kParts>& b) {
  return make_mask<A, kParts>([&](int k) { return less_equal(a.part[k], b.part[k]); });
}
template <class A, int kParts>
OVERTONE_INLINE PackMask<A, kParts> equal(const Pack<A, kParts>& a, const Pack<A, kParts>& b) {
  return make_mask<A, kParts>([&](int k) { return equal(a.part[k], b.part[k]); });
}
template <class A, int kParts>
OVERTONE_INLINE Pack<A, kParts> select(const PackMask<A, kParts>& mask, const Pack<A, kParts>& yes,
                                       const Pack<A, kParts>& no) {
  return Pack<A, kParts>::make([&](int k) { return select(mask.part[k], yes.part[k], no.part[k]); });
}
template <class A, int kParts>
OVERTONE_INLINE Pack<A, kParts> absolute(const Pack<A, kParts>& a) {
  return Pack<A, kParts>::make([&](int k) { return absolute<A>(a.part[k]); });
}
template <class A, int kParts>
OVERTONE_INLINE Pack<A, kParts> larger(const Pack<A, kParts>& a, const Pack<A, kParts>& b) {
  return Pack<A, kParts>::make([&](int k) { return larger<A>(a.part[k], b.part[k]); });
}
template <class A, int kParts>
OVERTONE_INLINE Pack<A, kParts> square_root(const Pack<A, kParts>& a) {
  return Pack<A, kParts>::make([&](int k) { return square_root(a.part[k]); });
}
template <class A, int kParts>
OVERTONE_INLINE Pack<A, kParts> reciprocal_root(const Pack<A, kParts>& a) {
  return Pack<A, kParts>::make([&](int k) { return reciprocal_root<A>(a.part[k]); });
}
template <class A, int kParts>
OVERTONE_INLINE Pack<A, kParts> with_sign_of(const Pack<A, kParts>& a, const Pack<A, kParts>& sign) {
  return Pack<A, kParts>::make([&](int k) { return with_sign_of<A>(a.part[k], sign.part[k]); });
}

}  // namespace overtone::OVERTONE_ISA
