// A block of fp8_ds_mla: 128 NoPE elements under one fp32 scale. All its arithmetic of scaling.
#pragma once

#include <cfloat>
#include <cstdint>

#include "format/e4m3.h"
#include "format/element.h"
#include "format/portability.h"

namespace nvfp4_dsmla::fp8 {

// The scale of a block whose largest magnitude is amax, NaN left out (max_magnitude of block.h). A
// true division; not a power of two; infinite if amax is, and then every code of the block is NaN
// or zero.
NVFP4_DSMLA_INLINE float choose_scale(float amax) {
#if defined(__CUDA_ARCH__)
  const float scale = __fdiv_rn(amax, kE4m3Max);
#else
  const float scale = amax / kE4m3Max;
#endif
  return scale > FLT_MIN ? scale : FLT_MIN;  // also if amax is NaN
}

// A quotient, rounded to nearest on its own before it is rounded to e4m3: a product with the
// scale's inverse gives other codes at ties.
NVFP4_DSMLA_INLINE float scale_down(float x, float scale) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(x, scale);
#else
  return x / scale;
#endif
}

// An element, in fp32. Not exact: a scale has 24 significant bits of its own.
NVFP4_DSMLA_INLINE float scale_up(float code_value, float scale) {
  return product(code_value, scale);
}

}  // namespace nvfp4_dsmla::fp8
