// A block: 16 NoPE elements under one scale. All arithmetic of scaling is here.
#pragma once

#include <cstdint>

#include "format/e2m1.h"
#include "format/e4m3.h"
#include "format/portability.h"
#include "format/record.h"

namespace nvfp4_dsmla {

struct BlockScale {
  uint32_t code;  // e4m3, 0x01 .. 0x7e
  float inverse;  // 1 / value(code), rounded to nearest
};

// The running maximum of |x|, NaN left out. On the bits, where order is the same and a compiler may
// reorder the reduction.
NVFP4_DSMLA_INLINE float max_magnitude(float amax, float x) {
  const uint32_t m = is_nan(x) ? 0 : magnitude_bits(x);
  const uint32_t a = bit_cast<uint32_t>(amax);
  return bit_cast<float>(a > m ? a : m);
}

// 1 / x to nearest, for x whose inverse is in the normal range too, as that of a scale is.
NVFP4_DSMLA_INLINE float inverse(float x) {
#if defined(__CUDA_ARCH__)
  // What the compiler makes of 1 / x, less the branch for all other x.
  float approximate;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(approximate) : "f"(x));
  return fmaf(approximate, fmaf(-x, approximate, 1.0f), approximate);
#else
  return 1.0f / x;
#endif
}

// The scale of a block whose largest magnitude is amax: t = max(amax / 6, 2^-9), rounded UP to
// e4m3, so that amax over it never exceeds 6; at most 448.
//
// The format asks for a true division. A product with fp32's nearest 1/6, which is 1/6 * (1 +
// 2^-25), gives the same code: the code only changes where t passes an e4m3 value v. At amax = 6v
// the product is v * (1 + 2^-25), which rounds to v as the quotient does; and amax one ulp above 6v
// is at least two thirds of v's ulp above v, which rounds past v in both. (tests/cpp checks every
// fp32 amax, on the host.)
NVFP4_DSMLA_INLINE BlockScale choose_scale(float amax) {
  constexpr float kSixth = 1.0f / kE2m1Max;
  float t = amax * kSixth;
  t = t > kE4m3MinSubnormal ? t : kE4m3MinSubnormal;  // also if amax is NaN
  t = t < kE4m3Max ? t : kE4m3Max;
  const E4m3 scale = round_up_to_e4m3(t);
  return {scale.code, inverse(scale.value)};
}

// x over the block's scale, as the format states it: a product with the rounded inverse, rounded on
// its own. Fused into the adds of encode_e2m1 it would break ties the other way.
NVFP4_DSMLA_INLINE float scale_down(float x, float inverse) { return product(x, inverse); }

}  // namespace nvfp4_dsmla
