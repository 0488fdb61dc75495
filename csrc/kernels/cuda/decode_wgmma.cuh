// What decode_wgmma_few.cu and decode_wgmma_many.cu have in common: tiles, warpgroups, hardware
// barriers and maxima.
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

// The running maximum is raised if a score exceeds it, and then to 7 below the greatest: sums lose
// nothing by it, the outputs are rescaled a few times a row, not once a tile, and P keeps weights
// down to 2^-31 of the greatest.
inline constexpr float kHeadroom = 7.0f;
// The maximum of no tokens: finite, so that no difference of two is NaN.
inline constexpr float kNoMaximum = -FLT_MAX;

__device__ inline int group_id() { return threadIdx.y / kGroupWarps; }
__device__ inline int group_warp() { return threadIdx.y % kGroupWarps; }

// The hardware barriers of parts of a block, by number: 0 is __syncthreads'. Beside one that is
// polled the compiler may take warps for diverged, and descriptions of matrices then take six
// instructions in place of one.
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

  // Of the `heads` of a block those that there are.
  __device__ int num_heads(const DecodeKernelParams& p, int heads) const {
    return min(heads, static_cast<int>(p.heads) - first_head);
  }
  __device__ int tiles() const { return (end - begin + kTileTokens - 1) / kTileTokens; }

  uint32_t row;
  int split;
  int first_head;
  DecodeKernelParams::Row place;
  int begin, end;  // columns of the indices
};

// 16, 32 heads a block; 64.
int decode_few_heads(const DecodeKernelParams& p, int head_tile, cudaStream_t stream);
int decode_many_heads(const DecodeKernelParams& p, cudaStream_t stream);

}  // namespace nvfp4_dsmla::cuda::hopper
