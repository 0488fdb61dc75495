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

  // To fp16, times a power of two, whose inverse is returned.
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
      const QueryScale scale(__reduce_max_sync(kFullWarp, max(greatest & 0xffffu, greatest >> 16)));
#pragma unroll
      for (auto& part : x) {
#pragma unroll
        for (uint32_t& word : part.words) word = scale.to_fp16(word);
      }
      return scale.inverse;
    }
  }

  // In the order in which K has its dims (LanesRecord).
  __device__ void store(uint8_t (*query)[kRowBytes], int heads, int local) const {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const int eight = lane_id() + kWarpSize * i;
      if (eight >= kEights) break;
      const bool rope = eight >= kNopeDim / 8;
      // Word w of lane q, of each 16; of RoPE, two a lane.
      const int of_lane = rope ? 2 : 4, all = 4 * of_lane;
      const int q = eight % all / of_lane, w = eight % of_lane;
      const int chunk = rope ? kValueChunks : eight / 16 * 2 + w / 2;
      uint8_t* to = query[chunk * heads + local];
      // As expand_pairs leaves them: (0, 4), (1, 5), (2, 6), (3, 7); expand_rope_in_order.
      const auto& words = x[i].words;
      const uint32_t even = rope ? 0x3210 : 0x5410, odd = rope ? 0x7654 : 0x7632;
      const uint32_t b = rope ? words[1] : words[2], c = rope ? words[2] : words[1];
      const uint32_t pairs[4] = {__byte_perm(words[0], b, even), __byte_perm(words[0], b, odd),
                                 __byte_perm(c, words[3], even), __byte_perm(c, words[3], odd)};
      // The lanes of four chunks take four units at a time, which are in banks apart.
      uint32_t turned[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint32_t near = chunk % 2 == 0 ? pairs[k] : pairs[(k + 1) % 4];
        const uint32_t far = chunk % 2 == 0 ? pairs[(k + 2) % 4] : pairs[(k + 3) % 4];
        turned[k] = chunk / 2 % 2 == 0 ? near : far;  // pairs[(k + chunk) % 4]
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int unit = swizzled_unit<kRowBytes>(local, 4 * (w % 2) + (k + chunk) % 4);
        *reinterpret_cast<uint32_t*>(to + unit * 16 + 4 * q) = turned[k];
      }
    }
  }

  Elements<T, 8> x[kParts] = {};
};

// A block's heads, and what their scores are to be multiplied by, in base 2, into shared memory;
// kWarps share the work, and ask for all of theirs at once. kWide: q may be read 16 bytes at a
// time.
template <class T, bool kWide, int kWarps, class Shared>
class QueryLoader {
 public:
  __device__ QueryLoader(const DecodeKernelParams& p, const BlockWork& work, int warp)
      : p_(p), work_(work), warp_(warp) {
    request();
  }

  // What was asked for has the time until here.
  __device__ void store(Shared& shared) {
#pragma unroll
    for (int i = 0; i < kPerWarp; ++i) {
      const int local = i * kWarps + warp_;
      if (local >= kHeads) break;
      const float inverse = heads_[i].to_fp16();
      heads_[i].store(shared.query[0], kHeads, local);
      if (lane_id() == 0) {
        shared.score_scale[local] = p_.softmax_scale * (kLog2e * kMakeGood) * inverse;
      }
    }
  }

 private:
  static constexpr int kHeads = Shared::kHeads;
  static constexpr int kPerWarp = (kHeads + kWarps - 1) / kWarps;

  __device__ void request() {
    const T* row = static_cast<const T*>(p_.q) + work_.place.b * p_.q_batch_stride +
                   work_.place.t * p_.q_token_stride;
#pragma unroll
    for (int i = 0; i < kPerWarp; ++i) {
      const int local = i * kWarps + warp_, head = work_.first_head + local;
      heads_[i] = {};
      if (local < kHeads && head < p_.heads) {
        heads_[i].template load<kWide>(row + head * p_.q_head_stride);
      }
    }
  }

  const DecodeKernelParams& p_;
  const BlockWork& work_;
  const int warp_;
  HeadOfQuery<T> heads_[kPerWarp];
};

}  // namespace nvfp4_dsmla::cuda::hopper
