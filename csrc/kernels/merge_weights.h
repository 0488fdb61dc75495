// What each side of a merge of two attentions counts for: the arithmetic of merge_attention_states,
// the same on every device.
#pragma once

#include <cmath>

#include "format/portability.h"

namespace nvfp4_dsmla {

struct MergeWeights {
  float a;  // a + b = 1, or both 0 where neither side has a token
  float b;
  float lse;
};

NVFP4_DSMLA_INLINE MergeWeights merge_weights(float lse_a, float lse_b) {
  constexpr float kNoToken = -INFINITY;
  if (lse_a == kNoToken && lse_b == kNoToken) return {0.0f, 0.0f, kNoToken};
  const float max = fmaxf(lse_a, lse_b);  // a NaN comes back with the weights
  const float a = expf(lse_a - max), b = expf(lse_b - max);
  return {a / (a + b), b / (a + b), max + logf(a + b)};
}

// A side that counts for nothing is left out, not multiplied by zero: its element may be anything,
// and the other side's keeps every bit.
NVFP4_DSMLA_INLINE float merge(const MergeWeights& w, float a, float b) {
  if (w.b == 0.0f) return w.a == 0.0f ? 0.0f : a;
  if (w.a == 0.0f) return b;
  return w.a * a + w.b * b;
}

}  // namespace nvfp4_dsmla
