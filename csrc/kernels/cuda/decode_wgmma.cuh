// What the two kernels of decode_wgmma.cu have in common: tiles, warpgroups and hardware barriers.
#pragma once

#include <cfloat>
#include <cstdint>

#include "format/record.h"
#include "kernels/cuda/decode.cuh"

namespace nvfp4_dsmla::cuda::hopper {

inline constexpr int kGroupWarps = 4;
inline constexpr int kGroupThreads = kGroupWarps * kWarpSize;
inline constexpr int kTileTokens = kWgmmaTokens;
inline constexpr int kChunkDims = 64;  // 128 bytes of 16-bit elements: one swizzled row
inline constexpr int kValueChunks = kNopeDim / kChunkDims;
inline constexpr int kQueryChunks = kHeadDim / kChunkDims;
inline constexpr int kRowBytes = kChunkDims * 2;
inline constexpr int kChunkBytes = kTileTokens * kRowBytes;
inline constexpr int kWarpTokens = kTileTokens / kGroupWarps;

// What P and its sums are relative to, the running maximum, is raised if a score exceeds it by
// 2^15, and then to 2^7 below the greatest: sums lose nothing by it, the outputs are rescaled a few
// times a row, not once a tile, and P, at most 2^15 in fp16, keeps weights down to 2^-31 of the
// greatest.
inline constexpr float kSlack = 15.0f;
inline constexpr float kHeadroom = 7.0f;
// The maximum of no tokens: finite, so that no difference of two is NaN.
inline constexpr float kNoMaximum = -FLT_MAX;

__device__ inline int group_id() { return threadIdx.y / kGroupWarps; }
__device__ inline int group_warp() { return threadIdx.y % kGroupWarps; }

// The hardware barriers of parts of a block, by number: 0 is __syncthreads'. Where warps multiply,
// with a barrier that is polled the compiler would take them for diverged, and descriptions of
// matrices take six instructions in place of one.
__device__ inline void barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ inline void barrier_pass(int barrier, int threads) {  // arrives, does not wait
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// A block's row, its share of the row's tokens, and its first head.
struct BlockWork {
  __device__ BlockWork(const DecodeKernelParams& p, int heads)
      : row(blockIdx.x / p.num_splits),
        split(static_cast<int>(blockIdx.x % p.num_splits)),
        first_head(static_cast<int>(blockIdx.y) * heads),
        place(p.row(row)) {
    // From lane 0, so that the compiler knows it to be one value a warp, and keeps what follows
    // from it in uniform registers: descriptions of matrices above all.
    const auto share = p.share_of(place, split, kTileTokens);
    begin = __shfl_sync(kFullWarp, share.begin, 0);
    end = __shfl_sync(kFullWarp, p.device_cache.empty() ? begin : share.end, 0);
  }

  __device__ int tiles() const { return (end - begin + kTileTokens - 1) / kTileTokens; }

  uint32_t row;
  int split;
  int first_head;
  DecodeKernelParams::Row place;
  int begin, end;  // columns of the indices
};

// Stores what is known of a head once its sum is, the logarithm in base 2; returns what its outputs
// are to be multiplied by.
__device__ inline float finish_head(
    const DecodeKernelParams& p, const BlockWork& work, int local, float sum, float max) {
  const float lse2 = sum == 0.0f ? -INFINITY : max + log2f(sum);
  float factor = sum == 0.0f ? 0.0f : kMakeGood / sum;
  const int head = work.first_head + local;
  if (head >= p.heads) return factor;
  const int64_t at = static_cast<int64_t>(work.row) * p.heads + head;
  if (p.num_splits > 1) {
    p.partial_lse[work.split * p.rows * p.heads + at] = lse2;
  } else {
    if (sum != 0.0f) factor *= sink_factor(p, head, lse2);
    p.lse[at] = lse2 * kLn2;
  }
  return factor;
}

// 16, 32 heads a block; 64.
int decode_few_heads(const DecodeKernelParams& p, int head_tile, cudaStream_t stream);
int decode_many_heads(const DecodeKernelParams& p, cudaStream_t stream);

template <class Shared, class Kernel>
int launch_blocks(
    Kernel kernel, const DecodeKernelParams& p, int heads, int groups, cudaStream_t stream) {
  constexpr int kBytes = sizeof(Shared);
  static_assert(kBytes <= 227 * 1024);
  if (const cudaError_t error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
      error != cudaSuccess) {
    return error;
  }
  const dim3 grid(p.rows * p.num_splits, (p.heads + heads - 1) / heads);
  kernel<<<grid, warps(groups * kGroupWarps), kBytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace nvfp4_dsmla::cuda::hopper
