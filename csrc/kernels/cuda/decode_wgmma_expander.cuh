// The warpgroup of decode_wgmma_many.cu that expands: records from memory to tiles in shared
// memory.
#pragma once

#include <cstdint>

#include "format/record.h"
#include "kernels/cuda/decode.cuh"
#include "kernels/cuda/decode_wgmma.cuh"
#include "kernels/cuda/decode_wgmma_expand.cuh"
#include "kernels/cuda/decode_wgmma_many.cuh"
#include "kernels/cuda/expand.cuh"
#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/wgmma.cuh"

namespace nvfp4_dsmla::cuda::hopper::many {

// A lane's part of a token's record, with q = lane % 4: of each 8 blocks two, 2q and 2q + 1, four
// words of codes; of RoPE a quarter. In two parts: the first 16 blocks and the others, the scales
// with the first and RoPE with the second.
struct LanesRecord {
  // Of a token that is not there it is slot 0's, so that no load depends on what it replaces; the
  // cache is not empty.
  __device__ void locate(const uint8_t* located, const uint8_t* first) {
    present = located != nullptr;
    record = present ? located : first;
  }

  __device__ void load(int part) {
    const int q = lane_id() % 4;
#pragma unroll
    for (int i = 2 * part; i < 2 * part + 2; ++i) {
      codes[i] = load_now<uint4>(record + kCodesOffset + (8 * i + 2 * q) * kCodeBytesPerBlock);
    }
    if (part == 0) {
      // Block 8i + 2q + e has its scale at byte 2i + q / 2 of half e of this piece.
      scales = load_now<uint4>(record + scale_offset(2 * (q % 2)));
      static_assert(
          scale_offset(1) == scale_offset(0) + 8 && scale_offset(3) == scale_offset(2) + 8 &&
          scale_offset(4) == scale_offset(0) + 1 && scale_offset(8) == scale_offset(0) + 2);
    } else {
      rope = load_now<uint4>(record + kRopeOffset + q * (kRopeDim / 4));
    }
  }

  // The folded scale of block 8i + 2q + e at 2i + e, i counted in the part; zero, so that V is, if
  // there is no token.
  __device__ void fold(int part, uint32_t (&folded)[4]) const {
    const uint32_t of_lane = lane_id() % 4 < 2 ? 0x6240u : 0x7351u;
    const uint32_t four = part == 0 ? __byte_perm(scales.x, scales.z, of_lane)
                                    : __byte_perm(scales.y, scales.w, of_lane);
    fold_scales(present ? four : 0, folded);
  }

  bool present;
  const uint8_t* record;
  uint4 codes[4], scales, rope;
};

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
  using Records = LanesRecord[kTokens];

  // Past the last tile no token is there: a load under a condition would be waited for at once.
  __device__ void locate(Records& records, int tile) const {
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      records[t].locate(shared_.located[tile % kLocated][row_ + 8 * t], first_record_);
    }
  }

  __device__ static void load(Records& records, int part) {
#pragma unroll
    for (LanesRecord& record : records) record.load(part);
    __syncwarp();  // they are not to be put off, as the compiler would have it
  }

  __device__ void expand(const Records& records, int tile, Records& next) {
    const int buffer = tile % kBuffers;
    locate(next, tile + 1);
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      load(next, part);  // there are registers for the second once half of these are expanded
      if (part == 0 && tile >= kBuffers) {
        barrier_sync(kEmptyBarrier + buffer, kExpanderAndSummers);
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
    for (int i = 0; i < 2; ++i) {
      const uint4& codes = record.codes[2 * part + i];
      const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        expand_pairs<Float16>(words[w], folded[2 * i + w / 2], pairs);
        const int chunk = 2 * (2 * part + i) + w / 2;
        store_matrices((w % 2 == 0 ? low : high) + chunk * kChunkBytes, pairs);
      }
    }
    if (part == 0) return;
    expand_rope(record.rope.x, record.rope.y, pairs);
    store_matrices(low + kValueChunks * kChunkBytes, pairs);
    expand_rope(record.rope.z, record.rope.w, pairs);
    store_matrices(high + kValueChunks * kChunkBytes, pairs);
  }

  Shared& shared_;
  const uint8_t* first_record_;
  const int row_;  // in its tile, of a lane's first token
  const int tiles_;
  int place_;  // in a chunk, of the rows that a lane gives to store_matrices
};

}  // namespace nvfp4_dsmla::cuda::hopper::many
