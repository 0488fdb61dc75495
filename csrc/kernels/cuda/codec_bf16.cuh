// The bfloat16 record as a warp writes it, and reads it on its way to another format.
#pragma once

#include <cstdint>
#include <type_traits>

#include "format/bf16_record.h"
#include "kernels/cuda/lane_block.cuh"
#include "kernels/cuda/lane_memory.cuh"
#include "kernels/cuda/paging.cuh"

namespace nvfp4_dsmla::cuda {

struct BFloat16Codec {
  // Lane l has NoPE elements 16l .. and RoPE elements 2l ..
  static constexpr int kStoreBytes = 16;

  struct Encoded {
    NopeElements<BFloat16> nope;
    RopeElements<BFloat16> rope;
  };

  template <class In>
  __device__ static Encoded encode(const NopeElements<In>& nope, const RopeElements<In>& rope) {
    Encoded encoded;
    round(nope, encoded.nope);
    round(rope, encoded.rope);
    return encoded;
  }

  template <bool kWide>
  __device__ static void store(uint8_t* record, const Encoded& encoded) {
    uint8_t* nope = record + lane_id() * kNopePerLane * bf16::kElementBytes;
    const auto& words = encoded.nope.words;
    store_16_bytes<kWide>(nope, {words[0], words[1], words[2], words[3]});
    store_16_bytes<kWide>(nope + 16, {words[4], words[5], words[6], words[7]});
    store_word<kWide>(rope_of(record), encoded.rope.words[0]);
  }

  using Latent = BFloat16;
  static constexpr int kLaneLoadBytes = 16;
  template <bool kWide>
  __device__ static void load(const uint8_t* record,
                              NopeElements<BFloat16>& nope,
                              RopeElements<BFloat16>& rope) {
    const uint8_t* from = record + lane_id() * kNopePerLane * bf16::kElementBytes;
    if constexpr (kWide) {
      load_words(from, nope.words);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) nope.words[i] = load_word<uint32_t, false>(from + 4 * i);
    }
    rope.words[0] = load_word<uint32_t, kWide>(rope_of(record));
  }

 private:
  template <class Byte>
  __device__ static Byte* rope_of(Byte* record) {
    return record + bf16::kRopeOffset + lane_id() * kRopePerLane * bf16::kElementBytes;
  }

  template <class In, int kCount>
  __device__ static void round(const Elements<In, kCount>& from, Elements<BFloat16, kCount>& to) {
    if constexpr (std::is_same_v<In, BFloat16>) {
      to = from;
    } else {
#pragma unroll
      for (int i = 0; i < kCount; i += 2) {
        to.words[i / 2] =
            round_to<BFloat16>(from[i]).bits | uint32_t{round_to<BFloat16>(from[i + 1]).bits} << 16;
      }
    }
  }
};

}  // namespace nvfp4_dsmla::cuda
