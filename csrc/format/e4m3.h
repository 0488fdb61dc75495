// e4m3 (the "fn" kind: no infinity, one NaN), the 8-bit float of the RoPE part and of the scales:
// sign, four exponent bits (bias 7), three mantissa bits.
#pragma once

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

// The least code whose value is no less than t, for t in [2^-9, 448].
NVFP4_DSMLA_INLINE uint32_t encode_e4m3_up(float t) {
  const uint32_t below = (1u << kE4m3MantissaShift) - 1;
  const uint32_t normal = ((bit_cast<uint32_t>(t) + below) >> kE4m3MantissaShift) - kE4m3Rebias;
  const float steps = t * 512.0f;  // of 2^-9
  const int32_t whole = static_cast<int32_t>(steps);
  const uint32_t subnormal =
      static_cast<uint32_t>(whole + (static_cast<float>(whole) < steps ? 1 : 0));
  return t < kE4m3MinNormal ? subnormal : normal;
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
