// What the kernels of this folder share: a warp's coordinates, fast division, launching.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace nvfp4_dsmla::cuda {

inline constexpr int kWarpSize = 32;
inline constexpr uint32_t kFullWarp = 0xffff'ffffu;

__device__ inline int lane_id() { return static_cast<int>(threadIdx.x); }

// n / divisor and the remainder for 0 <= n < 2^31, by one multiplication: a true division costs a
// thread about 20 instructions. With s = ceil(log2(divisor)) and m = ceil(2^(31+s) / divisor), m
// fits 32 bits, and m's rounding error stays below 1/divisor for every such n.
struct Divisor {
  explicit Divisor(uint32_t divisor) : divisor(divisor) {
    while ((uint64_t{1} << (shift + 1)) < divisor) ++shift;  // s - 1, the shift past the high word
    if (divisor > 1) {
      multiplier = static_cast<uint32_t>(((uint64_t{1} << (32 + shift)) + divisor - 1) / divisor);
    }
  }
  __device__ uint32_t divide(uint32_t n) const {
    return divisor == 1 ? n : __umulhi(n, multiplier) >> shift;
  }

  uint32_t divisor;
  uint32_t multiplier = 0;
  uint32_t shift = 0;
};

// A warp is one row of a block, so that its number needs no division.
inline dim3 warps(int count) { return dim3(kWarpSize, count); }

inline bool aligned(const void* pointer, int64_t alignment) {
  return reinterpret_cast<uintptr_t>(pointer) % alignment == 0;
}

}  // namespace nvfp4_dsmla::cuda
