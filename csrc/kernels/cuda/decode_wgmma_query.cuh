// q in fp16 for decode_wgmma_few.cu and decode_wgmma_many.cu, in shared memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "format/record.h"
#include "kernels/cuda/decode.cuh"
#include "kernels/cuda/decode_wgmma.cuh"
#include "kernels/cuda/lane_block.cuh"
#include "kernels/cuda/wgmma.cuh"

namespace nvfp4_dsmla::cuda::hopper {

// One head's elements, 8 at a time over the lanes of a warp.
template <class T>
struct HeadOfQuery {
  static constexpr int kEights = kHeadDim / 8;
  static constexpr int kParts = (kEights + kWarpSize - 1) / kWarpSize;

  template <bool kWide>
  __device__ void load(const T* head) {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const int eight = lane_id() + kWarpSize * i;
      if (eight < kEights) x[i].template load<kWide>(head + 8 * eight);
    }
  }

  // To fp16, times the power of two that takes the greatest element to 2^14 .. 2^15; its inverse is
  // returned. Elements below 2^-28 of the greatest lose bits by it, below 2^-39 all. With an
  // infinity or a NaN among them nothing is scaled, and what is past fp16's range is infinite too.
  __device__ float to_fp16() {
    if constexpr (std::is_same_v<T, Float16>) {
      return 1.0f;
    } else {
      uint32_t greatest = 0;
#pragma unroll
      for (const auto& part : x) {
#pragma unroll
        for (uint32_t word : part.words) greatest = __vmaxu2(greatest, word & 0x7fff'7fffu);
      }
      greatest = __reduce_max_sync(kFullWarp, max(greatest & 0xffffu, greatest >> 16));
      const int exponent = static_cast<int>(greatest >> 7);  // biased by 127
      // At most 126, so that the inverse is a normal number: which matters to q below 2^-112.
      const int power = greatest == 0 || exponent == 255 ? 0 : min(14 + 127 - exponent, 126);
      const float scale = bit_cast<float>(static_cast<uint32_t>(127 + power) << 23);
#pragma unroll
      for (auto& part : x) {
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          part.words[w] = pack(part[2 * w] * scale, part[2 * w + 1] * scale, Float16{});
        }
      }
      return bit_cast<float>(static_cast<uint32_t>(127 - power) << 23);
    }
  }

  // In the order in which K has its dims, of which lane q of four has kLaneWords words of 8 codes
  // in a row, then the next lane: a 16-byte unit of a row is made of one pair of each.
  template <int kLaneWords>
  __device__ void store(uint8_t (*query)[kRowBytes], int heads, int local) const {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const int eight = lane_id() + kWarpSize * i;
      if (eight >= kEights) break;
      const bool rope = eight >= kNopeDim / 8;
      // Eight w of lane q, of each 4 * kLaneWords; of RoPE's, two a lane.
      constexpr int kAll = 4 * kLaneWords;
      const int of_lane = rope ? 2 : kLaneWords, all = rope ? 8 : kAll;
      const int q = eight % all / of_lane, w = eight % of_lane;
      const int chunk = rope ? kValueChunks : eight / kAll * (kLaneWords / 2) + w / 2;
      uint8_t* to = query[chunk * heads + local];
      // As expand_pairs leaves them: (0, 4), (1, 5), (2, 6), (3, 7); and expand_rope_pairs: (0, 2),
      // (1, 3), (4, 6), (5, 7).
      const auto& words = x[i].words;
      const uint32_t a = words[0], b = rope ? words[1] : words[2];
      const uint32_t c = rope ? words[2] : words[1], d = words[3];
      const uint32_t pairs[4] = {__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632),
                                 __byte_perm(c, d, 0x5410), __byte_perm(c, d, 0x7632)};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int unit = swizzled_unit<kRowBytes>(local, 4 * (w % 2) + k);
        *reinterpret_cast<uint32_t*>(to + unit * 16 + 4 * q) = pairs[k];
      }
    }
  }

  Elements<T, 8> x[kParts] = {};
};

// A block's heads, and what their scores are to be multiplied by, in base 2; `warps` of them share
// the work. kWide: q may be read 16 bytes at a time.
template <class T, bool kWide, int kLaneWords, class Shared>
__device__ void load_query(
    const DecodeKernelParams& p, const BlockWork& work, Shared& shared, int warp, int warps) {
  constexpr int kHeads = Shared::kHeads;
  constexpr int kAtOnce = 3;
  const T* row = static_cast<const T*>(p.q) + work.place.b * p.q_batch_stride +
                 work.place.t * p.q_token_stride;
  for (int first = warp; first < kHeads; first += kAtOnce * warps) {
    HeadOfQuery<T> heads[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int local = first + i * warps, head = work.first_head + local;
      if (local < kHeads && head < p.heads) {
        heads[i].template load<kWide>(row + head * p.q_head_stride);
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int local = first + i * warps;
      if (local >= kHeads) break;
      const float inverse = heads[i].to_fp16();
      heads[i].template store<kLaneWords>(shared.query[0], kHeads, local);
      if (lane_id() == 0) {
        shared.score_scale[local] = p.softmax_scale * (kLog2e * kMakeGood) * inverse;
      }
    }
  }
}

}  // namespace nvfp4_dsmla::cuda::hopper
