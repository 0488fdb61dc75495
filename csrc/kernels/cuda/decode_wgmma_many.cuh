// The parts of decode_wgmma_many.cu: its warpgroups, what a block keeps in shared memory, and the
// running softmax.
#pragma once

#include <cstdint>

#include "format/record.h"
#include "kernels/cuda/decode.cuh"
#include "kernels/cuda/decode_wgmma.cuh"
#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/wgmma.cuh"

namespace nvfp4_dsmla::cuda::hopper::many {

// The warpgroups of a block: one that expands, one that scores, two that sum, and a thread's
// registers in each once they have parted: O is 128 of a summer's.
enum Group : int { kExpander, kScorer, kFirstSummer, kGroups = kFirstSummer + 2 };
inline constexpr int kSummers = kGroups - kFirstSummer;
inline constexpr int kExpanderRegisters = 128;  // as at first
inline constexpr int kScorerRegisters = 64;
inline constexpr int kSummerRegisters = 160;

inline constexpr int kBuffers = 2;  // of tiles: as many as there is room for

// For how many tiles records are located ahead. The expander, when it loads the next tile's, knows
// the scorer to be done with the one three before the one it is at.
inline constexpr int kLocated = 4;

struct alignas(1024) Shared {
  static constexpr int kHeads = 64;

  // K of a tile, whose first eight chunks are V. P [heads, tokens] comes in the place of the last,
  // RoPE, once that has been multiplied.
  uint8_t tiles[kBuffers][kQueryChunks][kTileTokens][kRowBytes];
  uint8_t query[kQueryChunks][kHeads][kRowBytes];
  const uint8_t* located[kLocated][kTileTokens];  // records; nullptr where there is none
  union {
    uint8_t whole[kLocated][kGroupWarps];  // whether all of a warp's tokens are there
    uint32_t all_whole[kLocated];
  };
  float score_scale[kHeads];
  float rescale[kBuffers][kHeads];
  union {
    uint8_t rescaled[kBuffers][kGroupWarps];  // whether any of the above is to be looked at
    uint32_t any_rescaled[kBuffers];
  };
  float factor[kHeads];  // of the outputs, at the end
  uint64_t finished;     // a barrier: they are there
};

// Hardware barriers, by number, and how many threads meet at each.
enum Barrier : int {
  kScorerBarrier = 1,
  kQueryBarrier,                              // q is in shared memory
  kFullBarrier,                               // and the buffer: a tile is expanded
  kScoredBarrier = kFullBarrier + kBuffers,   // and the buffer: its P is there
  kEmptyBarrier = kScoredBarrier + kBuffers,  // and the buffer: it is summed, all is located
};
inline constexpr int kExpanderAndScorer = 2 * kGroupThreads;
inline constexpr int kScorerAndSummers = (1 + kSummers) * kGroupThreads;
inline constexpr int kAll = kGroups * kGroupThreads;

// Says where records are: a warp 16 of a tile, a lane (of 16) one. The expander locates those of
// the first tiles itself, each warp its own; then the scorer does, for it has the time.
class Locator {
 public:
  __device__ Locator(const DecodeKernelParams& p, Shared& shared, const BlockWork& work, int tile)
      : p_(p),
        shared_(shared),
        indices_(p.row_indices(work.place)),
        row_(kWarpTokens * group_warp() + lane_id() % kWarpTokens),
        column_(work.begin + tile * kTileTokens + row_),
        end_(work.end) {}

  __device__ void first_tiles() {
    int32_t slots[kLocated];
#pragma unroll
    for (int32_t& slot : slots) slot = read();
#pragma unroll
    for (int tile = 0; tile < kLocated; ++tile) note(tile, slots[tile]);
  }

  // Of the next tile.
  __device__ int32_t read() {
    const int32_t slot = p_.slot_at(indices_, column_, end_);
    column_ += kTileTokens;
    return slot;
  }

  __device__ void note(int place, int32_t slot) {
    const bool there = p_.device_cache.holds(slot);
    shared_.located[place][row_] =
        there ? p_.device_cache.record<true>(static_cast<uint32_t>(slot)) : nullptr;
    const bool whole = __all_sync(kFullWarp, there);
    if (lane_id() == 0) shared_.whole[place][group_warp()] = whole;
  }

 private:
  const DecodeKernelParams& p_;
  Shared& shared_;
  const int32_t* indices_;
  const int row_;  // in its tile
  int column_;     // of the tile that is read next
  const int end_;
};

// The running softmax of the scorer, whose warps have 16 heads each: a lane has heads g and g+8 of
// them, and tokens 8j + 2q and 8j + 2q + 1 of a tile.
class Softmax {
 public:
  static constexpr int kScores = kTileTokens / 2;

  __device__ static int head(int row) { return 16 * group_warp() + lane_id() / 4 + 8 * row; }

  __device__ explicit Softmax(const Shared& shared)
      : scale_{shared.score_scale[head(0)], shared.score_scale[head(1)]} {}

  // P of a tile, and its part in the sums.
  __device__ void take(Shared& shared, int tile, float (&scores)[kScores]) {
    const int buffer = tile % kBuffers, place = tile % kLocated;
#pragma unroll
    for (int i = 0; i < kScores; ++i) scores[i] *= scale_[row(i)];
    if (shared.all_whole[place] != 0x0101'0101u) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        if (shared.located[place][token(i)] == nullptr) scores[i] = -INFINITY;
      }
    }
    settle_max(shared, buffer, scores);
    uint32_t probs[kScores / 2];
#pragma unroll
    for (int i = 0; i < kScores; i += 2) {
      const float low = exp2_approx(scores[i] - max_[row(i)]);
      const float high = exp2_approx(scores[i + 1] - max_[row(i)]);
      sum_[row(i)] += low + high;
      probs[i / 2] = pack(low, high, Float16{});
    }
    barrier_sync(kScorerBarrier, kGroupThreads);  // all have read what P is to overwrite
    const int to_row = 16 * group_warp() + lane_id() % 16;
    const uint8_t* to = shared.tiles[buffer][kValueChunks][to_row];
#pragma unroll
    for (int j = 0; j < kTileTokens / 8; j += 2) {
      const uint32_t four[4] = {probs[2 * j], probs[2 * j + 1], probs[2 * j + 2], probs[2 * j + 3]};
      store_matrices(shared_address(to + 16 * swizzled_unit<kRowBytes>(to_row, j + lane_id() / 16)),
                     four);
    }
  }

  // A head's sum, which every lane of a quad then has, and the maximum it is relative to.
  __device__ float sum(int row) const {
    return of_quad(sum_[row], [](float a, float b) { return a + b; });
  }
  __device__ float max(int row) const { return max_[row]; }

 private:
  // Of score i: as wgmma has its sums.
  __device__ static constexpr int row(int i) { return i / 2 % 2; }
  __device__ static int token(int i) { return i / 4 * 8 + 2 * (lane_id() % 4) + i % 2; }

  // Sees to it that no score exceeds its maximum by more than the slack.
  __device__ void settle_max(Shared& shared, int buffer, const float (&x)[kScores]) {
    float top[2] = {kNoMaximum, kNoMaximum};
#pragma unroll
    for (int i = 0; i < kScores; ++i) top[row(i)] = fmaxf(top[row(i)], x[i]);
    bool over = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      top[r] = of_quad(top[r], [](float a, float b) { return fmaxf(a, b); });
      over |= exceeds(top[r], max_[r]);
    }
    over = __any_sync(kFullWarp, over);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float rescale = 1.0f;
      if (over) {
        const float raised = raised_max(max_[r], top[r], kHeadroom);
        rescale = exp2_approx(max_[r] - raised);
        max_[r] = raised;
        sum_[r] *= rescale;
      }
      if (lane_id() % 4 == 0) shared.rescale[buffer][head(r)] = rescale;
    }
    if (lane_id() == 0) shared.rescaled[buffer][group_warp()] = over;
  }

  template <class Combine>
  __device__ static float of_quad(float x, Combine combine) {
    x = combine(x, __shfl_xor_sync(kFullWarp, x, 1));
    return combine(x, __shfl_xor_sync(kFullWarp, x, 2));
  }

  float scale_[2];  // of the scores
  float max_[2] = {kNoMaximum, kNoMaximum};
  float sum_[2] = {};
};

}  // namespace nvfp4_dsmla::cuda::hopper::many
