// The parts of decode_wgmma.cu: what a block keeps in shared memory, records in registers, and the
// running softmax.
#pragma once

#include <cstdint>

#include "format/record.h"
#include "kernels/cuda/decode.cuh"
#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/wgmma.cuh"

namespace nvfp4_dsmla::cuda::hopper {

inline constexpr int kGroupWarps = 4;
inline constexpr int kGroupThreads = kGroupWarps * kWarpSize;
inline constexpr int kGroups = 3;
inline constexpr int kTileTokens = kWgmmaTokens;
inline constexpr int kChunkDims = 64;  // 128 bytes of 16-bit elements: one swizzled row
inline constexpr int kValueChunks = kNopeDim / kChunkDims;
inline constexpr int kQueryChunks = kHeadDim / kChunkDims;
inline constexpr int kRowBytes = kChunkDims * 2;

// Scores may exceed the running maximum by 2^8 before it is raised: sums lose nothing by it, and
// the outputs are rescaled a few times a row, not once a tile.
inline constexpr float kSlack = 8.0f;

template <int kHeads>
struct alignas(1024) Shared {
  static constexpr int kExpanders = kHeads == 64 ? 1 : 2;
  static constexpr int kSummers = kGroups - kExpanders;
  static constexpr int kProbBytes = kHeads * 2;  // a token's probabilities
  // With three, neither of two expanders waits for its last tile to be summed. 64 heads leave no
  // room.
  static constexpr int kBuffers = kHeads == 16 ? 3 : 2;

  uint8_t values[kBuffers][kValueChunks][kTileTokens][kRowBytes];
  uint8_t query[kQueryChunks][kHeads][kRowBytes];
  uint8_t probs[kBuffers][kTileTokens][kProbBytes];
  float running_max[kHeads];
  float rescale[kBuffers][kHeads];
  uint32_t rescaled[kBuffers];
  float warp_values[kExpanders][kGroupWarps][kHeads];  // maxima, in the end sums
  float factor[kHeads];
  uint64_t full[kBuffers], empty[kBuffers], turn, finished;
};

__device__ inline int group_id() { return threadIdx.y / kGroupWarps; }
__device__ inline int group_warp() { return threadIdx.y % kGroupWarps; }

// The barrier of one warpgroup.
__device__ inline void group_sync() {
  asm volatile("bar.sync %0, %1;" ::"r"(1 + group_id()), "n"(kGroupThreads) : "memory");
}
// The barrier of all expanders.
template <int kExpanders>
__device__ void expanders_sync() {
  asm volatile("bar.sync %0, %1;" ::"n"(1 + kGroups), "n"(kExpanders * kGroupThreads) : "memory");
}
__device__ inline bool group_any(bool x) {
  uint32_t any;
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbar.red.or.pred q, %2, %3, p;\n"
      "selp.u32 %0, 1, 0, q;\n}"
      : "=r"(any)
      : "r"(uint32_t{x}), "r"(1 + group_id()), "n"(kGroupThreads)
      : "memory");
  return any != 0;
}

// A lane's part of the records of tokens g and g+8 of its warp's 16. Of a token that is not there
// it is stale, but for the scales: with those zero, V is.
struct Records {
  __device__ void load(const DecodeKernelParams& p, const int (&slots)[2]) {
    const int q = lane_id() % 4;
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      present[t] = p.device_cache.holds(slots[t]);
      scales[t] = {};
      if (!present[t]) continue;
      const uint8_t* record = p.device_cache.record<true>(static_cast<uint32_t>(slots[t]));
      const uint8_t* mine = record + q * kCodeBytesPerBlock;
#pragma unroll
      for (int c = 0; c < kValueChunks; ++c) {
        codes[t][c] =
            __ldg(reinterpret_cast<const uint2*>(mine + kCodesOffset + 4 * c * kCodeBytesPerBlock));
      }
      scales[t] = __ldg(reinterpret_cast<const uint2*>(record + kScalesOffset + 8 * q));
      rope[t] = __ldg(reinterpret_cast<const uint4*>(record + kRopeOffset + 16 * q));
    }
  }

  uint2 codes[2][kValueChunks] = {};
  uint2 scales[2];
  uint4 rope[2] = {};
  bool present[2];
};

// The running softmax of a warpgroup over tokens, the rows of S^T.
template <int kHeads>
struct Softmax {
  static constexpr int kColumns = kHeads / 4;  // a lane's heads: 8j + 2q, 8j + 2q + 1
  __device__ static int head(int column) {
    return 8 * (column / 2) + 2 * (lane_id() % 4) + column % 2;
  }

  __device__ void start() {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      max[c] = -INFINITY;
      sum[c] = 0.0f;
    }
  }

  // Raises the running maxima to those of the tile; whole warpgroup.
  __device__ void raise_max(Shared<kHeads>& shared,
                            int buffer,
                            const float (&x)[kHeads / 2],
                            float (&base)[kColumns]) {
    auto& warp_max = shared.warp_values[group_id()];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      float top = fmaxf(x[4 * (c / 2) + c % 2], x[4 * (c / 2) + 2 + c % 2]);
#pragma unroll
      for (int step = 4; step < kWarpSize; step *= 2) {
        top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, step));
      }
      if (lane_id() < 4) warp_max[group_warp()][head(c)] = top;
    }
    group_sync();
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      float top = base[c];
#pragma unroll
      for (int w = 0; w < kGroupWarps; ++w) top = fmaxf(top, warp_max[w][head(c)]);
      if (group_warp() == 0 && lane_id() < 4) {
        // No token before: nothing to rescale, and no Inf - Inf.
        shared.rescale[buffer][head(c)] = base[c] == -INFINITY ? 0.0f : exp2f(base[c] - top);
        shared.running_max[head(c)] = top;
      }
      base[c] = top;
    }
    group_sync();  // before the next tile's warps look at the maxima
  }

  // S^T -> P in its buffer; x is scaled, in base 2, -Inf where there is no token.
  template <class T>
  __device__ void update(Shared<kHeads>& shared, int buffer, const float (&x)[kHeads / 2]) {
    float base[kColumns];
    bool over = false;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      base[c] = shared.running_max[head(c)];
      over |= fmaxf(x[4 * (c / 2) + c % 2], x[4 * (c / 2) + 2 + c % 2]) > base[c] + kSlack;
    }
    const bool raise = group_any(over);
    if (raise) raise_max(shared, buffer, x, base);
    if (group_warp() == 0 && lane_id() == 0) shared.rescaled[buffer] = raise;

    const int row = 16 * group_warp() + lane_id() / 4;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      if (base[c] != max[c]) {
        sum[c] *= max[c] == -INFINITY ? 0.0f : exp2_approx(max[c] - base[c]);
        max[c] = base[c];
      }
      if (base[c] == -INFINITY) base[c] = 0.0f;
    }
#pragma unroll
    for (int j = 0; j < kColumns / 2; ++j) {
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        const float low = exp2_approx(x[4 * j + 2 * t] - base[2 * j]);
        const float high = exp2_approx(x[4 * j + 2 * t + 1] - base[2 * j + 1]);
        sum[2 * j] += low;
        sum[2 * j + 1] += high;
        const int token = row + 8 * t;
        const int unit = swizzled_unit<Shared<kHeads>::kProbBytes>(token, j);
        *reinterpret_cast<uint32_t*>(
            &shared.probs[buffer][token][unit * 16 + 4 * (lane_id() % 4)]) = pack(low, high, T{});
      }
    }
  }

  // This warp's sums, relative to the final maxima.
  __device__ void finish(Shared<kHeads>& shared) const {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      float total = sum[c];
#pragma unroll
      for (int step = 4; step < kWarpSize; step *= 2) {
        total += __shfl_xor_sync(kFullWarp, total, step);
      }
      if (max[c] != -INFINITY) total *= exp2f(max[c] - shared.running_max[head(c)]);
      if (lane_id() < 4) shared.warp_values[group_id()][group_warp()][head(c)] = total;
    }
  }

  float max[kColumns];
  float sum[kColumns];
};

}  // namespace nvfp4_dsmla::cuda::hopper
