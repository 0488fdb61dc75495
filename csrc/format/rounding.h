// fp32 -> the 16-bit elements, for values they need not hold: to nearest, ties to even.
#pragma once

#include <cstdint>

#include "format/element.h"

namespace nvfp4_dsmla {

template <class Out>
NVFP4_DSMLA_INLINE Out round_to(float x);

template <>
NVFP4_DSMLA_INLINE float round_to<float>(float x) {
  return x;
}

// NaN is 0x7fff whatever its sign and payload, as NVIDIA's conversion instruction has it.
template <>
NVFP4_DSMLA_INLINE BFloat16 round_to<BFloat16>(float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  BFloat16 rounded;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(rounded.bits) : "f"(x));
  return rounded;
#else
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t ties_to_even = (bits >> 16) & 1;
  const uint32_t rounded = (bits + 0x7fffu + ties_to_even) >> 16;
  return {static_cast<uint16_t>(is_nan(x) ? 0x7fffu : rounded)};
#endif
}

// Beyond 65504 by half a step or more it is infinity; NaN is 0x7fff, as above.
template <>
NVFP4_DSMLA_INLINE Float16 round_to<Float16>(float x) {
#if defined(__CUDA_ARCH__)
  Float16 rounded;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(rounded.bits) : "f"(x));
  return rounded;
#else
  constexpr uint32_t kRebias = (127 - 15) << 10;
  constexpr uint32_t kInfinity = 0x7c00;
  constexpr uint32_t kMinNormal = (127 - 14) << 23;
  constexpr float kSubnormalSteps = 0.5f;  // 2^23 * 2^-24, the step of fp16's subnormals
  const uint32_t m = magnitude_bits(x);
  const uint32_t ties_to_even = (m >> 13) & 1;
  const uint32_t normal = ((m + 0xfffu + ties_to_even) >> 13) - kRebias;
  const uint32_t subnormal = bit_cast<uint32_t>(bit_cast<float>(m) + kSubnormalSteps) -
                             bit_cast<uint32_t>(kSubnormalSteps);
  uint32_t bits = normal < kInfinity ? normal : kInfinity;
  bits = m < kMinNormal ? subnormal : bits;
  bits |= (bit_cast<uint32_t>(x) & kSignBit) >> 16;
  return {static_cast<uint16_t>(is_nan(x) ? 0x7fffu : bits)};
#endif
}

}  // namespace nvfp4_dsmla
