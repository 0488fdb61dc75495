// The warpgroup of decode_wgmma_many.cu that expands: records from memory to tiles in shared
// memory.
#pragma once

#include <cstdint>

#include "format/record.h"
#include "kernels/cuda/decode.cuh"
#include "kernels/cuda/decode_wgmma.cuh"
#include "kernels/cuda/decode_wgmma_lane.cuh"
#include "kernels/cuda/decode_wgmma_many.cuh"
#include "kernels/cuda/expand.cuh"
#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/wgmma.cuh"

namespace nvfp4_dsmla::cuda::hopper::many {

// Of each tile a warp has 16 tokens, a lane two: g and g+8. While they are expanded those of the
// next tile are on their way. Those are asked for many at a time: the compiler has one scoreboard
// for a warp's loads, so that who waits for the first of them waits for the last.
class Expander {
 public:
  __device__ Expander(const DecodeKernelParams& p, Shared& shared, int tiles)
      : shared_(shared),
        first_record_(p.device_cache.record<true>(0)),
        row_(kWarpTokens * group_warp() + lane_id() / 4),
        tiles_(tiles) {
    // Of store_matrices a lane gives row lane % 8 of matrix lane / 8, which is a 16-byte unit.
    const int row = kWarpTokens * group_warp() + lane_id() % 8;
    place_ = row * kRowBytes + 16 * swizzled_unit<kRowBytes>(row, lane_id() / 8);
  }

  __device__ void run() {
    if (tiles_ == 0) return;
    Records x, y;
    locate(x, 0);
    load(x, 0);
    load(x, 1);
    for (int tile = 0; tile < tiles_; tile += 2) {
      expand(x, tile, y);
      if (tile + 1 == tiles_) break;
      expand(y, tile + 1, x);
    }
  }

 private:
  static constexpr int kTokens = 2;  // 8 rows apart
  struct Record : LanesRecord {
    const uint8_t* from;
  };
  using Records = Record[kTokens];

  // Of a token that is not there, and past the last tile none is, slot 0's, so that no load depends
  // on what it replaces: under a condition it would be waited for at once.
  __device__ void locate(Records& records, int tile) const {
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      const uint8_t* located = shared_.located[tile % kLocated][row_ + 8 * t];
      records[t].present = located != nullptr;
      records[t].from = records[t].present ? located : first_record_;
    }
  }

  __device__ static void load(Records& records, int part) {
#pragma unroll
    for (Record& record : records) record.load(record.from, part, load_now);
    __syncwarp();  // they are not to be put off, as the compiler would have it
  }

  __device__ void expand(const Records& records, int tile, Records& next) {
    const int buffer = tile % kBuffers;
    locate(next, tile + 1);
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      load(next, part);  // there are registers for the second once half of these are expanded
      if (part == 0 && tile >= kBuffers) {
        barrier_sync(kEmptyBarrier + buffer, kAll);
      }
#pragma unroll
      for (int t = 0; t < kTokens; ++t) expand(records[t], part, buffer, t);
    }
    fence_for_async();
    barrier_pass(kFullBarrier + buffer, kExpanderAndScorer);
  }

  __device__ void expand(const LanesRecord& record, int part, int buffer, int token) const {
    const uint32_t low = shared_address(&shared_.tiles[buffer]) + place_ + token * 8 * kRowBytes;
    const uint32_t high = low ^ kRowBytes / 2;
    uint32_t folded[4], pairs[4];
    record.fold(part, folded);
#pragma unroll
    for (int chunk = 4 * part; chunk < 4 * part + 4; ++chunk) {
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        expand_pairs<Float16>(record.word(chunk, w), folded[chunk % 4], pairs);
        store_matrices((w == 0 ? low : high) + chunk * kChunkBytes, pairs);
      }
    }
    if (part == 0) return;
    expand_rope_in_order(record.rope.x, record.rope.y, pairs);
    store_matrices(low + kValueChunks * kChunkBytes, pairs);
    expand_rope_in_order(record.rope.z, record.rope.w, pairs);
    store_matrices(high + kValueChunks * kChunkBytes, pairs);
  }

  Shared& shared_;
  const uint8_t* first_record_;
  const int row_;  // in its tile, of a lane's first token
  const int tiles_;
  int place_;  // in a chunk, of the rows that a lane gives to store_matrices
};

}  // namespace nvfp4_dsmla::cuda::hopper::many
