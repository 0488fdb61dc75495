// RMSNorm of a latent and RoPE of a key, as the fused write computes them: in fp32, every operation
// rounded to nearest on its own, so that all devices agree to the bit.
//
//   norm   y = (x * r) * weight,  r = 1 / sqrt(sum of x^2 / 512 + eps)
//   RoPE   (a, b)  ->  (a * cos - b * sin,  b * cos + a * sin)
//
// The sum is that of neighbours in pairs, of those sums in pairs, and so on: nine levels, in an
// order in which lanes can take some and exchanges between them the others.
#pragma once

#include <cmath>

#include "format/block.h"
#include "format/portability.h"
#include "format/record.h"

namespace nvfp4_dsmla {

inline constexpr int kRopePairs = kRopeDim / 2;  // a row of the table: their cosines, their sines

template <int kCount>
NVFP4_DSMLA_INLINE float sum_of_pairs(const float (&x)[kCount]) {
  if constexpr (kCount == 1) {
    return x[0];
  } else {
    float sums[kCount / 2];
    for (int i = 0; i < kCount / 2; ++i) sums[i] = x[2 * i] + x[2 * i + 1];
    return sum_of_pairs(sums);
  }
}

NVFP4_DSMLA_INLINE float inverse_rms(float sum_of_squares, float eps) {
  const float x = product(sum_of_squares, 1.0f / kNopeDim) + eps;
#if defined(__CUDA_ARCH__)
  // What the compiler makes of the two, with one branch for results out of the normal range in the
  // place of two.
  if (!(x > 0x1p-100f && x < 0x1p100f)) return __frcp_rn(__fsqrt_rn(x));
  float approximate;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(approximate) : "f"(x));
  const float root = x * approximate;
  return inverse(fmaf(fmaf(-root, root, x), 0.5f * approximate, root));
#else
  return 1.0f / sqrtf(x);
#endif
}

NVFP4_DSMLA_INLINE float normalise(float x, float inverse_rms, float weight) {
  return product(product(x, inverse_rms), weight);
}

struct RopePair {
  float first;
  float second;
};
NVFP4_DSMLA_INLINE RopePair rotate(const RopePair& x, float cos, float sin) {
  return {product(x.first, cos) - product(x.second, sin),
          product(x.second, cos) + product(x.first, sin)};
}

}  // namespace nvfp4_dsmla
