// Codes -> elements on the device, by moving bits.
//
// An e2m1 code's exponent and mantissa bits put where a wider float has its lowest exponent bits
// and its highest mantissa bit give the code's value times a fixed power of two, subnormals
// included: 2^-126 in bf16 and fp32, 2^-14 in fp16. The block's scale carries most of the way back,
// but not all of it: 448 * 2^126 overflows. So the scale is folded as scale * 2^119 (2^7 in fp16),
// and a second multiplication by 2^7 ends it. Each product is exact.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "format/e4m3.h"
#include "format/element.h"

namespace nvfp4_dsmla::cuda {

// A block's scale, ready to multiply with.
template <class Out>
struct Scale;

template <>
struct Scale<BFloat16> {
  __device__ explicit Scale(uint32_t code) {
    const uint32_t high = bit_cast<uint32_t>(decode_e4m3(code) * 0x1p119f);
    folded = bit_cast<__nv_bfloat162>(__byte_perm(high, 0, 0x3232));
  }
  static constexpr int kMagnitudeBit = 6;  // where the code's lowest bit goes
  __device__ uint32_t restore(uint32_t pair) const {
    const __nv_bfloat162 left = bit_cast<__nv_bfloat162>(0x4300'4300u);  // 2^7
    return bit_cast<uint32_t>(__hmul2(__hmul2(bit_cast<__nv_bfloat162>(pair), folded), left));
  }
  __nv_bfloat162 folded;
};

template <>
struct Scale<Float16> {
  __device__ explicit Scale(uint32_t code) : folded(__float2half2_rn(decode_e4m3(code) * 0x1p7f)) {}
  static constexpr int kMagnitudeBit = 9;
  __device__ uint32_t restore(uint32_t pair) const {
    const __half2 left = bit_cast<__half2>(0x5800'5800u);  // 2^7
    return bit_cast<uint32_t>(__hmul2(__hmul2(bit_cast<__half2>(pair), folded), left));
  }
  __half2 folded;
};

template <>
struct Scale<float> {
  __device__ explicit Scale(uint32_t code) : folded(decode_e4m3(code) * 0x1p119f) {}
  __device__ float restore(uint32_t bits) const { return bit_cast<float>(bits) * folded * 0x1p7f; }
  float folded;
};

// Shifts left, or right if `by` is negative.
template <int by>
__device__ uint32_t shift(uint32_t x) {
  if constexpr (by >= 0) {
    return x << by;
  } else {
    return x >> -by;
  }
}

// 8 codes of one block -> 8 elements, four words. Nibbles i and i+4 are 16 bits apart, so one pass
// places both; a byte permutation puts the pairs back in order.
template <class Out>
__device__ void expand(uint32_t codes, const Scale<Out>& scale, uint32_t (&out)[4]) {
  constexpr int kBit = Scale<Out>::kMagnitudeBit;
  constexpr uint32_t kMagnitudes = (7u << kBit) | (7u << (kBit + 16));
  constexpr uint32_t kSigns = 0x8000'8000u;
  const auto place = [&]<int i>() {
    const uint32_t pair =
        (shift<kBit - 4 * i>(codes) & kMagnitudes) | (shift<12 - 4 * i>(codes) & kSigns);
    return scale.restore(pair);  // elements i and i+4
  };
  const uint32_t p0 = place.template operator()<0>(), p1 = place.template operator()<1>();
  const uint32_t p2 = place.template operator()<2>(), p3 = place.template operator()<3>();
  out[0] = __byte_perm(p0, p1, 0x5410);
  out[1] = __byte_perm(p2, p3, 0x5410);
  out[2] = __byte_perm(p0, p1, 0x7632);
  out[3] = __byte_perm(p2, p3, 0x7632);
}

// 4 codes of one block -> 4 elements, four words.
__device__ inline void expand(uint32_t codes, const Scale<float>& scale, uint32_t (&out)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t code = codes >> 4 * i;
    const uint32_t bits = (code & 7) << 22 | (code & 8) << 28;
    out[i] = bit_cast<uint32_t>(scale.restore(bits));
  }
}

}  // namespace nvfp4_dsmla::cuda
