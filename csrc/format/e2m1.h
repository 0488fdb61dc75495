// e2m1, the 4-bit float of NVFP4: sign, two exponent bits (bias 1), one mantissa bit.
#pragma once

#include <cstdint>

#include "format/element.h"

namespace nvfp4_dsmla {

//   code        0b0'00'0  0b0'00'1  0b0'01'0  0b0'01'1  0b0'10'0  0b0'10'1  0b0'11'0  0b0'11'1
//   magnitude      0        0.5        1        1.5        2         3         4         6
inline constexpr float kE2m1Max = 6.0f;
inline constexpr uint32_t kE2m1MaxCode = 0b0'11'1;
inline constexpr uint32_t kE2m1SignBit = 0b1'00'0;

// Native conversion exists on the suffixed Blackwell targets only (sm_100a/f, sm_103a, sm_120a/f
// ..): the plain ones, and the PTX kept for chips to come, take the arithmetic below. Same bytes.
#if defined(__CUDA_ARCH__) &&                                               \
    ((defined(__CUDA_ARCH_SPECIFIC__) && __CUDA_ARCH_SPECIFIC__ >= 1000) || \
     (defined(__CUDA_ARCH_FAMILY_SPECIFIC__) && __CUDA_ARCH_FAMILY_SPECIFIC__ >= 1000))
#define NVFP4_DSMLA_NATIVE_E2M1 1
#endif

// Nearest code, ties to the even one; beyond 6 saturates; the sign is kept, that of zero too, but
// NaN is +6 whatever its sign.
//
// For y >= 0 the code is min(rne(2y), rne(y) + 2, rne(y/2) + 4): the codes are equally spaced in
// three pieces, of step 1/2, 1 and 2, and since the curve from value to code is concave, the piece
// that applies is the one that gives the least. Rounding is by adding 2^23, where fp32 has no
// fractions left and the adder itself rounds to nearest even; the even +2 and +4 ride along.
NVFP4_DSMLA_INLINE uint32_t encode_e2m1(float y) {
  constexpr float kIntegers = 8'388'608.0f;  // 2^23
  y = y < kE2m1Max ? y : kE2m1Max;           // NaN compares false, so it is +6 from here on
  y = y > -kE2m1Max ? y : -kE2m1Max;
  const float magnitude = bit_cast<float>(magnitude_bits(y));
  const float halves = magnitude * 2.0f + kIntegers;  // exact product: a fused add is the same
  const float ones = magnitude + (kIntegers + 2.0f);
  const float twos = magnitude * 0.5f + (kIntegers + 4.0f);
  float code = halves < ones ? halves : ones;
  code = code < twos ? code : twos;
  return (bit_cast<uint32_t>(code) & kE2m1MaxCode) | (bit_cast<uint32_t>(y) & kSignBit) >> 28;
}

// Two codes in a byte: `even` in the low nibble.
NVFP4_DSMLA_INLINE uint32_t encode_e2m1_pair(float even, float odd) {
#if defined(NVFP4_DSMLA_NATIVE_E2M1)
  uint32_t pair;
  asm("{ .reg .b8 pair; cvt.rn.satfinite.e2m1x2.f32 pair, %1, %2; cvt.u32.u8 %0, pair; }"
      : "=r"(pair)
      : "f"(odd), "f"(even));
  return pair;
#else
  return encode_e2m1(even) | encode_e2m1(odd) << 4;
#endif
}

NVFP4_DSMLA_INLINE float decode_e2m1(uint32_t code) {
  // Twice the magnitude of each code, a nibble each: whole numbers, so no subnormal on the way.
  constexpr uint32_t kTwiceMagnitudes = 0xc864'3210;
  const uint32_t twice = (kTwiceMagnitudes >> (4 * (code & kE2m1MaxCode))) & 0xf;
  const float magnitude = static_cast<float>(static_cast<int32_t>(twice)) * 0.5f;
  return bit_cast<float>(bit_cast<uint32_t>(magnitude) | (code & kE2m1SignBit) << 28);
}

}  // namespace nvfp4_dsmla
