// Vectors of floats in the compiler's own notation: GCC and Clang turn an operation on one into as
// many instructions as the machine's registers need, so the same source serves every instruction
// set. For loops whose speed depends on what stays in registers, which a compiler that vectorises
// plain loops does not promise.
#pragma once

#include <cstdint>
#include <limits>

#include "format/portability.h"

// These types are never passed by value to a function that is not inlined, so no ABI depends on
// the instruction set, whatever GCC fears.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

namespace nvfp4_dsmla::cpu {

inline constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

template <int kLanes>
struct Lanes {
  typedef float Floats __attribute__((vector_size(kLanes * sizeof(float))));
  typedef uint32_t Words __attribute__((vector_size(kLanes * sizeof(uint32_t))));
};

template <class Vector>
NVFP4_DSMLA_INLINE Vector load(const float* from) {
  Vector v;
  memcpy(&v, from, sizeof(v));
  return v;
}

template <class Vector>
NVFP4_DSMLA_INLINE void store(float* to, const Vector& v) {
  memcpy(to, &v, sizeof(v));
}

// exp(x) for x <= 0 or NaN, within 1 ulp; 0 where it would be below the normal numbers. The
// processor's rounding makes n the integer nearest to x / log(2): added to 1.5 * 2^23, where fp32
// has no fractions, n is in the last bits of the sum.
template <int kLanes>
NVFP4_DSMLA_INLINE typename Lanes<kLanes>::Floats exp_not_positive(
    const typename Lanes<kLanes>::Floats& x) {
  using Floats = typename Lanes<kLanes>::Floats;
  using Words = typename Lanes<kLanes>::Words;
  constexpr float kLeast = -87.0f;  // exp of it is still a normal number
  constexpr float kLog2E = 1.44269504f;
  constexpr float kIntegers = 12'582'912.0f;  // 1.5 * 2^23
  constexpr float kLog2High = 0.693145752f;   // log(2) in two parts: n * high is exact
  constexpr float kLog2Low = 1.42860677e-6f;
  const Floats bounded = x < kLeast ? kLeast - Floats{} : x;
  const Floats shifted = bounded * kLog2E + kIntegers;
  const Floats n = shifted - kIntegers;
  const Floats r = (bounded - n * kLog2High) - n * kLog2Low;  // |r| <= log(2) / 2
  // exp(r) by its Taylor series; the first term left out is below 2^-27.
  Floats series = r * (1.0f / 5040) + 1.0f / 720;
  series = series * r + 1.0f / 120;
  series = series * r + 1.0f / 24;
  series = series * r + 1.0f / 6;
  series = series * r + 0.5f;
  series = series * r + 1.0f;
  series = series * r + 1.0f;
  const Words exponent = (Words)shifted << 23;
  const Floats power = (Floats)(exponent + 0x3f80'0000u);  // 2^n
  return x < kLeast ? Floats{} : series * power;           // by a product, which a NaN passes
}

}  // namespace nvfp4_dsmla::cpu
