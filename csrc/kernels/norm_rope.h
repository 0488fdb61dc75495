// RMSNorm of a latent and RoPE of a key, as the fused write computes them: in fp32, every operation
// rounded to nearest on its own, so that all devices agree to the bit.
//
//   norm   y = (x * r) * weight,  r = 1 / sqrt(sum of x^2 / 512 + eps)
//   RoPE   (a, b)  ->  (a * cos - b * sin,  b * cos + a * sin)
//
// The sum is that of neighbours in pairs, of those sums in pairs, and so on: nine levels. The lower
// four are the elements of a block, the upper five a warp's exchange of blocks.
#pragma once

#include <cmath>

#include "format/portability.h"
#include "format/record.h"

namespace nvfp4_dsmla {

inline constexpr int kRopePairs = kRopeDim / 2;  // a row of the table: their cosines, their sines

NVFP4_DSMLA_INLINE float inverse_rms(float sum_of_squares, float eps) {
  const float mean = sum_of_squares * (1.0f / kNopeDim);  // exact: fused, the sum is the same
#if defined(__CUDA_ARCH__)
  return __frcp_rn(__fsqrt_rn(mean + eps));
#else
  return 1.0f / sqrtf(mean + eps);
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
