// The element types of a latent vector in memory, and their conversion to and from fp32: exact
// where records are read, rounded where something was computed.
#pragma once

#include <cstdint>

#include "format/portability.h"

namespace nvfp4_dsmla {

// The two 16-bit types as bits: the hosts' and the device's own types differ, their bits do not.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

inline constexpr uint32_t kSignBit = 0x8000'0000;
inline constexpr uint32_t kInfinityBits = 0x7f80'0000;

NVFP4_DSMLA_INLINE uint32_t magnitude_bits(float x) { return bit_cast<uint32_t>(x) & ~kSignBit; }
NVFP4_DSMLA_INLINE bool is_nan(float x) { return magnitude_bits(x) > kInfinityBits; }

NVFP4_DSMLA_INLINE float widen(float x) { return x; }

NVFP4_DSMLA_INLINE float widen(BFloat16 x) {
  return bit_cast<float>(static_cast<uint32_t>(x.bits) << 16);
}

// fp16 -> fp32. Subnormals go through 2^-14 + m * 2^-24, never through an fp32 subnormal: a host
// thread that flushes those to zero (torch.set_flush_denormal) must read the same values.
NVFP4_DSMLA_INLINE float widen(Float16 x) {
#if defined(__CUDA_ARCH__)
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
  return wide;
#else
  constexpr uint32_t kRebias = (127 - 15) << 23;
  constexpr uint32_t kTwoToMinus14 = (127 - 14) << 23;
  const uint32_t magnitude = (x.bits & 0x7fffu) << 13;
  const float subnormal =
      bit_cast<float>(kTwoToMinus14 | magnitude) - bit_cast<float>(kTwoToMinus14);
  uint32_t bits = magnitude + kRebias;
  bits = magnitude >= (0x1fu << 23) ? bits + kRebias : bits;  // Inf and NaN keep a full exponent
  bits = magnitude < (1u << 23) ? bit_cast<uint32_t>(subnormal) : bits;
  return bit_cast<float>(bits | (x.bits & 0x8000u) << 16);
#endif
}

// fp32 -> Out for a value Out holds exactly, which every decoded element is (a product of 2 x 4
// significant bits between 2^-10 and 2688, zero, or NaN). So it cuts where others would round.
template <class Out>
NVFP4_DSMLA_INLINE Out narrow_exact(float x);

template <>
NVFP4_DSMLA_INLINE float narrow_exact<float>(float x) {
  return x;
}

template <>
NVFP4_DSMLA_INLINE BFloat16 narrow_exact<BFloat16>(float x) {
  return {static_cast<uint16_t>(bit_cast<uint32_t>(x) >> 16)};
}

template <>
NVFP4_DSMLA_INLINE Float16 narrow_exact<Float16>(float x) {
  constexpr uint32_t kRebias = (127 - 15) << 10;
  const uint32_t magnitude = magnitude_bits(x);
  uint32_t bits = (magnitude >> 13) - kRebias;
  bits = magnitude == 0 ? 0u : bits;
  bits = magnitude > kInfinityBits ? 0x7e00u : bits;
  return {static_cast<uint16_t>(bits | (bit_cast<uint32_t>(x) & kSignBit) >> 16)};
}

// fp32 -> Out, to nearest, ties to even; beyond the largest number infinity.
template <class Out>
NVFP4_DSMLA_INLINE Out round_to(float x);

template <>
NVFP4_DSMLA_INLINE float round_to<float>(float x) {
  return x;
}

template <>
NVFP4_DSMLA_INLINE BFloat16 round_to<BFloat16>(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return {static_cast<uint16_t>(is_nan(x) ? 0x7fc0 : rounded)};
}

template <>
NVFP4_DSMLA_INLINE Float16 round_to<Float16>(float x) {
  constexpr uint32_t kRebias = (127 - 15) << 23;
  constexpr uint32_t kMinNormal = (127 - 14) << 23;  // 2^-14
  constexpr uint32_t kOverflow = 0x477f'f000;        // 65520, halfway from the largest to 2^16
  constexpr float kHalf = 0.5f;                      // its last bit is 2^-24, fp16's smallest step
  const uint32_t m = magnitude_bits(x);
  const uint32_t normal = (m - kRebias + 0xfff + (m >> 13 & 1)) >> 13;
  const uint32_t subnormal =
      bit_cast<uint32_t>(bit_cast<float>(m) + kHalf) - bit_cast<uint32_t>(kHalf);
  uint32_t bits = m < kMinNormal ? subnormal : normal;
  bits = m >= kOverflow ? 0x7c00u : bits;
  bits = m > kInfinityBits ? 0x7e00u : bits;
  return {static_cast<uint16_t>(bits | (bit_cast<uint32_t>(x) & kSignBit) >> 16)};
}

}  // namespace nvfp4_dsmla
