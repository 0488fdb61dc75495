// e4m3 (the "fn" kind: no infinity, one NaN), the 8-bit float of the RoPE part and of the scales:
// sign, four exponent bits (bias 7), three mantissa bits.
#pragma once

#include <cmath>
#include <cstdint>

#include "format/element.h"

namespace nvfp4_dsmla {

inline constexpr float kE4m3Max = 448.0f;            // 0b0'1111'110 = 1.75 * 2^8
inline constexpr float kE4m3MinNormal = 0.015625f;   // 0b0'0001'000 = 2^-6
inline constexpr float kE4m3MinSubnormal = 0x1p-9f;  // 0b0'0000'001
inline constexpr uint32_t kE4m3MaxCode = 0b0'1111'110;
inline constexpr uint32_t kE4m3Nan = 0b0'1111'111;

inline constexpr int kE4m3MantissaShift = 23 - 3;
inline constexpr uint32_t kE4m3Rebias = (127 - 7) << 3;  // fp32's exponent bias over e4m3's

// Nearest, ties to even; +-Inf and all beyond 448 saturate; NaN is 0x7f whatever its sign; the sign
// of zero is kept.
NVFP4_DSMLA_INLINE uint32_t encode_e4m3(float x) {
  // Added to a value below 2^-6, it leaves fp32 no bit below e4m3's subnormal step of 2^-9.
  constexpr float kSubnormalSteps = 16'384.0f;  // 2^23 * 2^-9
  const uint32_t bits = bit_cast<uint32_t>(x);
  float magnitude = bit_cast<float>(bits & ~kSignBit);
  magnitude = magnitude < kE4m3Max ? magnitude : kE4m3Max;
  const uint32_t m = bit_cast<uint32_t>(magnitude);
  const uint32_t ties_to_even = (m >> kE4m3MantissaShift) & 1;
  const uint32_t half = (1u << (kE4m3MantissaShift - 1)) - 1;
  const uint32_t normal = ((m + half + ties_to_even) >> kE4m3MantissaShift) - kE4m3Rebias;
  const uint32_t subnormal =
      bit_cast<uint32_t>(magnitude + kSubnormalSteps) - bit_cast<uint32_t>(kSubnormalSteps);
  const uint32_t code = (magnitude < kE4m3MinNormal ? subnormal : normal) | (bits >> 31) << 7;
  return (bits & ~kSignBit) > kInfinityBits ? kE4m3Nan : code;
}

// Two codes in 16 bits, `first` in the low byte.
NVFP4_DSMLA_INLINE uint32_t encode_e4m3_pair(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t pair;  // the first operand goes to the high byte
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  return pair;
#else
  return encode_e4m3(first) | encode_e4m3(second) << 8;
#endif
}

struct E4m3 {
  uint32_t code;
  float value;
};

// The least e4m3 that is no less than t, for t in [2^-9, 448].
NVFP4_DSMLA_INLINE E4m3 round_up_to_e4m3(float t) {
  constexpr uint32_t kBelow = (1u << kE4m3MantissaShift) - 1;
  const uint32_t up = bit_cast<uint32_t>(t) + kBelow;
  const uint32_t normal_code = (up >> kE4m3MantissaShift) - kE4m3Rebias;
  const float normal_value = bit_cast<float>(up & ~kBelow);
  const bool subnormal = t < kE4m3MinNormal;
#if defined(__CUDA_ARCH__)
  // Steps of 2^-9 by an addition, as in encode_e4m3, rounded up: conversions to integers are slow.
  // (tests/cpp tries the other branch.)
  constexpr float kSubnormalSteps = 16'384.0f;
  const float steps = __fadd_ru(t, kSubnormalSteps);
  return {subnormal ? bit_cast<uint32_t>(steps) - bit_cast<uint32_t>(kSubnormalSteps) : normal_code,
          subnormal ? steps - kSubnormalSteps : normal_value};
#else
  const float steps = ceilf(t * 512.0f);  // of 2^-9
  return {subnormal ? static_cast<uint32_t>(static_cast<int32_t>(steps)) : normal_code,
          subnormal ? steps * kE4m3MinSubnormal : normal_value};
#endif
}

NVFP4_DSMLA_INLINE float decode_e4m3(uint32_t code) {
  const uint32_t magnitude = code & 0x7f;
  const float normal = bit_cast<float>((magnitude + kE4m3Rebias) << kE4m3MantissaShift);
  const float subnormal = static_cast<float>(static_cast<int32_t>(magnitude)) * kE4m3MinSubnormal;
  uint32_t bits = bit_cast<uint32_t>(magnitude < 8 ? subnormal : normal);
  bits = magnitude == kE4m3Nan ? 0x7fc0'0000u : bits;
  return bit_cast<float>(bits | (code & 0x80) << 24);
}

}  // namespace nvfp4_dsmla
