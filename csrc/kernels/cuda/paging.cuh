// What every kernel of this folder shares: a warp's coordinates, and a paged cache as a kernel
// addresses it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "format/paged_cache.h"

namespace nvfp4_dsmla::cuda {

inline constexpr int kWarpSize = 32;
inline constexpr uint32_t kFullWarp = 0xffff'ffffu;

// A warp is one row of a block, so that its number needs no division.
inline dim3 warps(int count) { return dim3(kWarpSize, count); }
// The remainder changes nothing but what the compiler knows: lane_id() / 4 is a shift.
__device__ inline int lane_id() { return static_cast<int>(threadIdx.x % kWarpSize); }
__device__ inline uint32_t warp_id() { return blockIdx.x * blockDim.y + threadIdx.y; }

inline bool aligned(const void* pointer, int64_t alignment) {
  return reinterpret_cast<uintptr_t>(pointer) % alignment == 0;
}

// Row `index` of rows `stride` bytes apart. kNarrow: the stride fits 32 bits, as it does unless
// rows are gigabytes apart, and one multiply-add takes the place of four instructions.
template <bool kNarrow, class T>
__device__ T* row_at(T* base, uint32_t index, int64_t stride) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  const uint64_t offset = kNarrow ? uint64_t{index} * static_cast<uint32_t>(stride)
                                  : uint64_t{index} * static_cast<uint64_t>(stride);
  return reinterpret_cast<T*>(reinterpret_cast<Byte*>(base) + offset);
}

inline bool fits_narrow(int64_t stride) { return stride >= 0 && stride <= UINT32_MAX; }

// n / divisor for 0 <= n < 2^31 by one multiplication: a true division costs a thread about 20
// instructions. With s = ceil(log2(divisor)) and m = ceil(2^(31+s) / divisor), m fits 32 bits, and
// m's rounding error stays below 1/divisor for every such n.
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

// A cache of at most kMaxCapacity tokens (launch.h), so that slots and blocks fit 32 bits.
template <class Byte>
struct DeviceCache {
  explicit DeviceCache(const PagedCache<Byte>& cache)
      : base(cache.base),
        block_stride(cache.block_stride),
        token_stride(cache.token_stride),
        num_blocks(static_cast<uint32_t>(cache.num_blocks)),
        capacity(static_cast<uint32_t>(cache.capacity())),
        block_size(static_cast<uint32_t>(cache.block_size)) {}

  __device__ bool empty() const { return capacity == 0; }
  __device__ bool holds(int64_t slot) const { return static_cast<uint64_t>(slot) < capacity; }

  template <bool kNarrow>
  __device__ Byte* record(uint32_t block, uint32_t offset) const {
    return row_at<kNarrow>(row_at<kNarrow>(base, block, block_stride), offset, token_stride);
  }
  template <bool kNarrow>
  __device__ Byte* record(uint32_t slot) const {
    const uint32_t block = block_size.divide(slot);
    return record<kNarrow>(block, slot - block * block_size.divisor);
  }

  Byte* base;
  int64_t block_stride;  // bytes
  int64_t token_stride;  // bytes
  uint32_t num_blocks;
  uint32_t capacity;
  Divisor block_size;
};

// Whether every record starts at a multiple of `alignment`, and the strides are narrow.
template <class Byte>
bool records_aligned(const PagedCache<Byte>& cache, int64_t alignment) {
  return aligned(cache.base, alignment) && cache.block_stride % alignment == 0 &&
         cache.token_stride % alignment == 0 && fits_narrow(cache.block_stride) &&
         fits_narrow(cache.token_stride);
}

}  // namespace nvfp4_dsmla::cuda
