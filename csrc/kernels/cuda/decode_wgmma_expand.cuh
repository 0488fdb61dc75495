// Scales and RoPE of records in fp16, by the conversions that the hardware has from sm_89 on: what
// expand.cuh does by moving bits, in a third of the instructions.
#pragma once

#include <cstdint>

#include "format/element.h"
#include "kernels/cuda/expand.cuh"
#include "kernels/cuda/hopper.cuh"

namespace nvfp4_dsmla::cuda::hopper {

// 4 scale bytes -> fold_scale of each, for both halves of a word.
__device__ inline void fold_scales(uint32_t bytes, uint32_t (&folded)[4]) {
  static_assert(Pairs<Float16>::kE2m1Fold == 0x1p7f);
  constexpr uint32_t kFold = 0x5800'5800u;  // 2^7, twice
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t pair = Pairs<Float16>::multiply(halves_of_e4m3(bytes >> 16 * i), kFold);
    folded[2 * i] = __byte_perm(pair, 0, 0x1010);
    folded[2 * i + 1] = __byte_perm(pair, 0, 0x3232);
  }
}

// 8 RoPE bytes -> 8 elements times 2^-7, in order.
__device__ inline void expand_rope(uint32_t first, uint32_t second, uint32_t (&pairs)[4]) {
  constexpr uint32_t kFold = 0x2000'2000u;  // 2^-7, twice
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t bytes = (i < 2 ? first : second) >> 16 * (i % 2);
    pairs[i] = Pairs<Float16>::multiply(halves_of_e4m3(bytes), kFold);
  }
}

}  // namespace nvfp4_dsmla::cuda::hopper
