// The parts of decode_wgmma_few.cu: what a block keeps in shared memory, its barriers, and the
// running softmax.
#pragma once

#include <cstdint>

#include "format/record.h"
#include "kernels/cuda/decode.cuh"
#include "kernels/cuda/decode_wgmma.cuh"
#include "kernels/cuda/decode_wgmma_few_records.cuh"
#include "kernels/cuda/wgmma.cuh"

namespace nvfp4_dsmla::cuda::hopper::few {

// Two warpgroups expand, taking turns at the tiles, and one sums.
inline constexpr int kExpanders = 2;
inline constexpr int kGroups = kExpanders + 1;
inline constexpr int kBuffers = 2;  // of V and P: as many as there is room for
inline constexpr int kHalfChunks = kValueChunks / 2;

template <int kHeadTile>
struct alignas(1024) Shared {
  static constexpr int kHeads = kHeadTile;
  static constexpr int kProbBytes = kHeads * 2;  // a token's probabilities

  uint8_t values[kBuffers][kValueChunks][kTileTokens][kRowBytes];
  uint8_t query[kQueryChunks][kHeads][kRowBytes];
  uint8_t probs[kBuffers][kTileTokens][kProbBytes];
  alignas(16) uint8_t stages[kExpanders * kGroupWarps][kStageBytes];  // records on their way
  float score_scale[kHeads];
  float running_max[kHeads];
  uint32_t raises;  // how often they were raised
  float rescale[kBuffers][kHeads];
  uint32_t rescaled[kBuffers];
  float warp_values[kExpanders][kGroupWarps][kHeads];  // maxima, in the end sums
  float factor[kHeads];
  uint64_t full[kBuffers], finished;
};

// The barriers of parts of a block, by number.
inline constexpr int kGroupBarrier = 1;  // and the group
inline constexpr int kExpandersBarrier = 4;
inline constexpr int kSummerBarrier = 5;
inline constexpr int kTurnBarrier = 6;   // and the expander
inline constexpr int kEmptyBarrier = 8;  // and the buffer of V, and the half of its dims
__device__ inline int empty_barrier(int buffer, int half) {
  return kEmptyBarrier + 2 * buffer + half;
}
inline constexpr int kInTurn = 2 * kGroupThreads;  // threads at a barrier of two warpgroups

__device__ inline void group_sync() { barrier_sync(kGroupBarrier + group_id(), kGroupThreads); }
__device__ inline bool group_any(bool x) {
  uint32_t any;
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbar.red.or.pred q, %2, %3, p;\n"
      "selp.u32 %0, 1, 0, q;\n}"
      : "=r"(any)
      : "r"(uint32_t{x}), "r"(kGroupBarrier + group_id()), "n"(kGroupThreads)
      : "memory");
  return any != 0;
}

// The running softmax of a warpgroup over tokens, the rows of S^T.
template <int kHeads>
struct Softmax {
  static constexpr int kColumns = kHeads / 4;  // a lane's heads: 8j + 2q, 8j + 2q + 1
  __device__ static int head(int column) {
    return 8 * (column / 2) + 2 * (lane_id() % 4) + column % 2;
  }

  __device__ explicit Softmax(const Shared<kHeads>& shared) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      scale[c] = shared.score_scale[head(c)];
      max[c] = kNoMaximum;
      sum[c] = 0.0f;
    }
  }

  // Scores of a lane's two tokens, as they are multiplied, in base 2; -Inf where there is no token.
  __device__ void scale_scores(float (&x)[kHeads / 2], const bool (&present)[2]) const {
#pragma unroll
    for (int i = 0; i < kHeads / 2; ++i) x[i] *= scale[i / 4 * 2 + i % 2];
    if (present[0] && present[1]) return;
#pragma unroll
    for (int i = 0; i < kHeads / 2; ++i) {
      if (!present[i / 2 % 2]) x[i] = -INFINITY;
    }
  }

  // Sees to it that no score exceeds its maximum by more than the slack; whole warpgroup, and one
  // expander after another. x is scaled, in base 2, -Inf where there is no token; raises is
  // shared.raises, read beforehand.
  __device__ void settle_max(Shared<kHeads>& shared,
                             int buffer,
                             uint32_t raises,
                             const float (&x)[kHeads / 2]) {
    if (raises != raises_seen) {  // another expander's doing
      raises_seen = raises;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) raise(c, shared.running_max[head(c)]);
    }
    bool over = false;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) over |= exceeds(tile_max(x, c), max[c]);
    const bool any_over = group_any(over);
    if (any_over) raise_to_tile(shared, buffer, x);
    if (group_warp() == 0 && lane_id() == 0) shared.rescaled[buffer] = any_over;
  }

  // S^T -> P in its buffer, and into the sums.
  __device__ void store_probs(Shared<kHeads>& shared, int buffer, const float (&x)[kHeads / 2]) {
    const int row = 16 * group_warp() + lane_id() / 4;
#pragma unroll
    for (int j = 0; j < kColumns / 2; ++j) {
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        const float low = exp2_approx(x[4 * j + 2 * t] - max[2 * j]);
        const float high = exp2_approx(x[4 * j + 2 * t + 1] - max[2 * j + 1]);
        sum[2 * j] += low;
        sum[2 * j + 1] += high;
        const int token = row + 8 * t;
        const int unit = swizzled_unit<Shared<kHeads>::kProbBytes>(token, j);
        *reinterpret_cast<uint32_t*>(
            &shared.probs[buffer][token][unit * 16 + 4 * (lane_id() % 4)]) =
            pack(low, high, Float16{});
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
      total *= exp2_approx(max[c] - shared.running_max[head(c)]);
      if (lane_id() < 4) shared.warp_values[group_id()][group_warp()][head(c)] = total;
    }
  }

 private:
  // Of a lane's two tokens.
  __device__ static float tile_max(const float (&x)[kHeads / 2], int c) {
    return fmaxf(x[4 * (c / 2) + c % 2], x[4 * (c / 2) + 2 + c % 2]);
  }
  __device__ void raise(int c, float to) {
    sum[c] *= exp2_approx(max[c] - to);
    max[c] = to;
  }

  // Raises the maxima by the tile's, for every expander and for what is summed so far.
  __device__ void raise_to_tile(Shared<kHeads>& shared, int buffer, const float (&x)[kHeads / 2]) {
    auto& warp_max = shared.warp_values[group_id()];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      float top = tile_max(x, c);
#pragma unroll
      for (int step = 4; step < kWarpSize; step *= 2) {
        top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, step));
      }
      if (lane_id() < 4) warp_max[group_warp()][head(c)] = top;
    }
    group_sync();
    const bool leads = group_warp() == 0 && lane_id() < 4;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      float top = warp_max[0][head(c)];
#pragma unroll
      for (int w = 1; w < kGroupWarps; ++w) top = fmaxf(top, warp_max[w][head(c)]);
      top = raised_max(max[c], top, kHeadroom);
      if (leads) {
        shared.rescale[buffer][head(c)] = exp2_approx(max[c] - top);
        shared.running_max[head(c)] = top;
      }
      raise(c, top);
    }
    if (leads && lane_id() == 0) ++shared.raises;
    group_sync();  // before the next tile's warps look at them
    raises_seen = shared.raises;
  }

  float scale[kColumns];
  float max[kColumns];  // what the sums are relative to
  float sum[kColumns];
  uint32_t raises_seen = 0;
};

}  // namespace nvfp4_dsmla::cuda::hopper::few
