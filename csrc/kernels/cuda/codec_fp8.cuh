// fp8_ds_mla as a warp writes it and reads it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "format/bf16_token.h"
#include "format/fp8_block.h"
#include "format/fp8_record.h"
#include "kernels/cuda/lane_block.cuh"
#include "kernels/cuda/lane_memory.cuh"
#include "kernels/cuda/paging.cuh"

namespace nvfp4_dsmla::cuda {

// Many quotients by one divisor, each x / divisor rounded to nearest as fp8::scale_down has it. A
// division of its own would take twice the instructions, most of them for what depends on the
// divisor alone and for results out of range.
class Quotients {
 public:
  __device__ explicit Quotients(float divisor) {
    divisor_ = divisor;
    inverse_ = __frcp_rn(divisor);
  }

  // Whether the remainders below stay clear of underflow, for every quotient that e4m3 can tell
  // from zero, and the products of overflow: all but infinity and the tiniest scales.
  __device__ bool in_range() const { return divisor_ >= 0x1p-90f && divisor_ <= 0x1p100f; }

  // What the compiler makes of a division, in range: a product, and twice the remainder's share.
  __device__ float of(float x) const {
    float quotient = __fmul_rn(x, inverse_);
    quotient = fmaf(fmaf(-divisor_, quotient, x), inverse_, quotient);
    quotient = fmaf(fmaf(-divisor_, quotient, x), inverse_, quotient);
    return copysignf(quotient, x);  // -0 has lost its sign
  }

 private:
  float divisor_;
  float inverse_;
};

struct Fp8Codec {
  // Where the lane's RoPE elements are.
  template <class Byte>
  __device__ static Byte* rope_of(Byte* record) {
    return record + fp8::kRopeOffset + lane_id() * kRopePerLane * fp8::kRopeElementBytes;
  }

  // ---- a record by lanes: lane l has NoPE elements 16l .. and RoPE elements 2l .. ----
  //
  //   lane l       stores 16 code bytes,  4 RoPE bytes
  //   lane 8s      stores the scale of block s, which is the elements of lanes 8s .. 8s+7
  static constexpr int kStoreBytes = 16;
  static constexpr int kLanesPerBlock = fp8::kBlockDim / kNopePerLane;
  static_assert(kNopePerLane == 16 && kLanesPerBlock == 8);

  struct Encoded {
    uint32_t codes[4];
    uint32_t rope;
    uint32_t scale;
  };

  template <class In>
  __device__ static Encoded encode(const NopeElements<In>& nope, const RopeElements<In>& rope) {
    float amax = nope.max_magnitude();
#pragma unroll
    for (int lanes = 1; lanes < kLanesPerBlock; lanes *= 2) {
      amax = fmaxf(amax, __shfl_xor_sync(kFullWarp, amax, lanes));
    }
    const float scale = fp8::choose_scale(amax);
    Encoded encoded;
    encoded.scale = bit_cast<uint32_t>(scale);
    const Quotients by_scale(scale);
    if (__all_sync(kFullWarp, by_scale.in_range())) {
      encode_nope(nope, encoded.codes, [&](float x) { return by_scale.of(x); });
    } else {
      encode_nope(nope, encoded.codes, [&](float x) { return fp8::scale_down(x, scale); });
    }
    if constexpr (std::is_same_v<In, BFloat16>) {
      encoded.rope = rope.words[0];
    } else {
      encoded.rope = round_to<BFloat16>(rope[0]).bits | uint32_t{round_to<BFloat16>(rope[1]).bits}
                                                            << 16;
    }
    return encoded;
  }

  template <bool kWide>
  __device__ static void store(uint8_t* record, const Encoded& encoded) {
    const int lane = lane_id();
    store_16_bytes<kWide>(record + fp8::kCodesOffset + lane * kNopePerLane, encoded.codes);
    store_word<kWide>(rope_of(record), encoded.rope);
    if (lane % kLanesPerBlock == 0) {
      store_word<kWide>(record + scale_at(lane * kNopePerLane), encoded.scale);
    }
  }

  using Latent = float;
  static constexpr int kLaneLoadBytes = 8;
  template <bool kWide>
  __device__ static void load(const uint8_t* record,
                              NopeElements<float>& nope,
                              RopeElements<float>& rope) {
    const int lane = lane_id();
    const uint8_t* codes = record + fp8::kCodesOffset + lane * kNopePerLane;
    const float scale =
        scale_of(load_word<ScaleWord, kWide>(record + scale_at(lane * kNopePerLane)));
    const auto pair = load_word<RopeWord, kWide>(rope_of(record));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float values[8];
      widen_codes(load_word<uint64_t, kWide>(codes + 8 * half), values);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        nope.words[8 * half + i] = bit_cast<uint32_t>(fp8::scale_up(values[i], scale));
      }
    }
    rope.words[0] = pair << 16;
    rope.words[1] = pair & 0xffff'0000u;
  }

  // ---- a record by rows of elements: what a gather reads ----

  static constexpr int kRowLoadBytes = 8;
  template <int kCount>
  using Codes = std::conditional_t<kCount == 8, uint64_t, uint32_t>;
  using ScaleWord = uint32_t;
  using RopeWord = uint32_t;

  __device__ static int codes_at(int element) { return fp8::kCodesOffset + element; }
  __device__ static int scale_at(int element) {
    return fp8::kScalesOffset + element / fp8::kBlockDim * fp8::kScaleBytes;
  }

  template <class Out, class Word>
  __device__ static void expand(Word codes, ScaleWord scale_word, uint32_t (&out)[4]) {
    constexpr int kCount = sizeof(Word);
    const float scale = scale_of(scale_word);
    float values[kCount];
    widen_codes(codes, values);
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = fp8::scale_up(values[i], scale);
    if constexpr (std::is_same_v<Out, float>) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[i] = bit_cast<uint32_t>(values[i]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[i] = round_pair<Out>(values[2 * i], values[2 * i + 1]);
    }
  }

  template <class Out>
  __device__ static void expand_rope(RopeWord word, Out (&pair)[kRopePerLane]) {
    const float first = bit_cast<float>(word << 16);
    const float second = bit_cast<float>(word & 0xffff'0000u);
    if constexpr (std::is_same_v<Out, float>) {
      pair[0] = first;
      pair[1] = second;
    } else {
      const uint32_t rounded =
          std::is_same_v<Out, BFloat16> ? word : round_pair<Out>(first, second);
      pair[0].bits = static_cast<uint16_t>(rounded);
      pair[1].bits = static_cast<uint16_t>(rounded >> 16);
    }
  }

 private:
  template <class In, class Divide>
  __device__ static void encode_nope(const NopeElements<In>& nope,
                                     uint32_t (&codes)[4],
                                     const Divide& divide) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t low = encode_e4m3_pair(divide(nope[4 * i]), divide(nope[4 * i + 1]));
      const uint32_t high = encode_e4m3_pair(divide(nope[4 * i + 2]), divide(nope[4 * i + 3]));
      codes[i] = low | high << 16;
    }
  }

  __device__ static float scale_of(ScaleWord word) { return bit_cast<float>(word); }

  // The codes in a word, from its lowest byte on, as fp32.
  template <class Word>
  __device__ static void widen_codes(Word codes, float (&values)[sizeof(Word)]) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(Word)); i += 2) {
      const auto pair = static_cast<uint16_t>(codes >> 8 * i);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
      uint32_t halves;
      asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
      const float2 wide = __half22float2(bit_cast<__half2>(halves));
      values[i] = wide.x;
      values[i + 1] = wide.y;
#else
      values[i] = decode_e4m3(pair & 0xff);
      values[i + 1] = decode_e4m3(pair >> 8);
#endif
    }
  }

  // Two fp32 numbers -> two 16-bit ones in a word, the first in its low half.
  template <class Out>
  __device__ static uint32_t round_pair(float first, float second) {
    if constexpr (std::is_same_v<Out, BFloat16>) {
      return bit_cast<uint32_t>(__floats2bfloat162_rn(first, second));
    } else {
      return bit_cast<uint32_t>(__floats2half2_rn(first, second));
    }
  }
};

}  // namespace nvfp4_dsmla::cuda
