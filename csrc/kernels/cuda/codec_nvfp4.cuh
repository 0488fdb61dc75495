// nvfp4_ds_mla as a warp writes it and reads it.
#pragma once

#include <cstdint>
#include <type_traits>

#include "format/block.h"
#include "format/record.h"
#include "kernels/cuda/e2m1_halves.cuh"
#include "kernels/cuda/expand.cuh"
#include "kernels/cuda/lane_block.cuh"
#include "kernels/cuda/lane_memory.cuh"
#include "kernels/cuda/paging.cuh"

namespace nvfp4_dsmla::cuda {

struct Nvfp4Codec {
  // Where the lane's RoPE elements are.
  template <class Byte>
  __device__ static Byte* rope_of(Byte* record) {
    return record + kRopeOffset + lane_id() * kRopePerLane;
  }

  // ---- a record by lanes: lane l has the NoPE elements of block l and RoPE elements 2l .. ----
  //
  //   lane l  stores 8 code bytes,  1 scale byte,  2 RoPE bytes
  //
  // Across a warp each of the three stores covers whole sectors of the record.
  static constexpr int kStoreBytes = kCodeBytesPerBlock;
  static_assert(kNumScales == kWarpSize && kBlockDim == kNopePerLane);

  struct Encoded {
    uint64_t codes;
    uint16_t rope;
    uint8_t scale;
  };

  // Eight codes, the first in the lowest nibble, of elements from `first` on.
  template <class In, int kCount>
  __device__ static uint32_t encode_eight(const Elements<In, kCount>& nope,
                                          int first,
                                          float inverse) {
    if constexpr (kHasFastHalves && std::is_same_v<In, BFloat16>) {
      const float factor = inverse_for_halves(inverse);
      __half2 y[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        y[i] = __floats2half2_rn(scale_down(nope[first + 2 * i], factor),
                                 scale_down(nope[first + 2 * i + 1], factor));
      }
      return encode_e2m1_halves(y);
    } else {
      float y[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) y[i] = scale_down(nope[first + i], inverse);
      return encode_e2m1x8(y);
    }
  }

  template <class In>
  __device__ static uint64_t encode_codes(const NopeElements<In>& nope, float inverse) {
    return encode_eight(nope, 0, inverse) | uint64_t{encode_eight(nope, 8, inverse)} << 32;
  }

  template <class In>
  __device__ static Encoded encode(const NopeElements<In>& nope, const RopeElements<In>& rope) {
    const BlockScale scale = choose_scale(nope.max_magnitude());
    const uint64_t codes = encode_codes(nope, scale.inverse);
    return {codes, static_cast<uint16_t>(encode_e4m3_pair(rope[0], rope[1])),
            static_cast<uint8_t>(scale.code)};
  }

  template <bool kWide>
  __device__ static void store_nope(uint8_t* record, uint64_t codes, uint32_t scale) {
    const int lane = lane_id();
    store_word<kWide>(record + kCodesOffset + lane * kCodeBytesPerBlock, codes);
    record[scale_offset(lane)] = static_cast<uint8_t>(scale);
  }
  template <bool kWide>
  __device__ static void store(uint8_t* record, const Encoded& encoded) {
    store_nope<kWide>(record, encoded.codes, encoded.scale);
    store_word<kWide>(rope_of(record), encoded.rope);
  }

  using Latent = float;
  static constexpr int kLaneLoadBytes = kCodeBytesPerBlock;
  template <bool kWide>
  __device__ static void load(const uint8_t* record,
                              NopeElements<float>& nope,
                              RopeElements<float>& rope) {
    const int lane = lane_id();
    const auto codes =
        load_word<uint64_t, kWide>(record + kCodesOffset + lane * kCodeBytesPerBlock);
    const auto pair = load_word<uint16_t, kWide>(rope_of(record));
    const float scale = decode_e4m3(record[scale_offset(lane)]);
#pragma unroll
    for (int i = 0; i < kBlockDim; ++i) {
      const float value = decode_e2m1(static_cast<uint32_t>(codes >> 4 * i) & 0xf) * scale;
      nope.words[i] = bit_cast<uint32_t>(value);
    }
    rope.words[0] = bit_cast<uint32_t>(decode_e4m3(pair & 0xff));
    rope.words[1] = bit_cast<uint32_t>(decode_e4m3(pair >> 8));
  }

  // ---- a record by rows of elements: what a gather reads ----

  static constexpr int kRowLoadBytes = 4;
  template <int kCount>
  using Codes = std::conditional_t<kCount == 8, uint32_t, uint16_t>;
  using ScaleWord = uint8_t;
  using RopeWord = uint16_t;

  __device__ static int codes_at(int element) { return kCodesOffset + element / kCodesPerByte; }
  __device__ static int scale_at(int element) { return scale_offset(element / kBlockDim); }

  template <class Out>
  __device__ static void expand(uint32_t codes, uint32_t scale, uint32_t (&out)[4]) {
    cuda::expand<Out>(codes, scale, out);
  }
  template <class Out>
  __device__ static void expand_rope(uint32_t word, Out (&pair)[kRopePerLane]) {
    pair[0] = narrow_exact<Out>(decode_e4m3(word & 0xff));
    pair[1] = narrow_exact<Out>(decode_e4m3(word >> 8));
  }
};

}  // namespace nvfp4_dsmla::cuda
