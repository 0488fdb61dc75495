// Codes -> elements on the device, by moving bits.
//
// An e2m1 code's exponent and mantissa bits put where a wider float has its lowest exponent bits
// and its highest mantissa bit give the code's value times a fixed power of two, subnormals
// included: 2^-126 in bf16 and fp32, 2^-14 in fp16. The block's scale carries most of the way back,
// but not all of it: 448 * 2^126 overflows. So the scale is folded as scale * 2^119 (2^7 in fp16),
// which leaves 2^-7 to make good: in a gather by a second multiplication, in attention by the
// softmax scale and the last scaling of the output. Each product is exact.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "format/e4m3.h"
#include "format/element.h"

namespace nvfp4_dsmla::cuda {

// What a 16-bit float has of its own, above all its arithmetic on two at a time.
template <class T>
struct Pairs;

template <>
struct Pairs<BFloat16> {
  static constexpr int kE2m1Bit = 6;                   // where a code's lowest bit goes
  static constexpr float kE2m1Fold = 0x1p119f;         // 2^126 * 2^-7
  static constexpr uint32_t kMakeGood = 0x4300'4300u;  // 2^7, twice
  __device__ static uint32_t twice(float x) {          // x exact in bf16
    return __byte_perm(bit_cast<uint32_t>(x), 0, 0x3232);
  }
  __device__ static uint32_t multiply(uint32_t a, uint32_t b) {
    return bit_cast<uint32_t>(__hmul2(bit_cast<__nv_bfloat162>(a), bit_cast<__nv_bfloat162>(b)));
  }
};

template <>
struct Pairs<Float16> {
  static constexpr float kE2m1Fold = 0x1p7f;           // 2^14 * 2^-7
  static constexpr uint32_t kMakeGood = 0x5800'5800u;  // 2^7, twice
  __device__ static uint32_t twice(float x) { return bit_cast<uint32_t>(__float2half2_rn(x)); }
  __device__ static uint32_t multiply(uint32_t a, uint32_t b) {
    return bit_cast<uint32_t>(__hmul2(bit_cast<__half2>(a), bit_cast<__half2>(b)));
  }
};

// The folded scale of a block, for both halves of a word.
template <class T>
__device__ uint32_t fold_scale(uint32_t code) {
  return Pairs<T>::twice(decode_e4m3(code) * Pairs<T>::kE2m1Fold);
}

// Shifts left, or right if `by` is negative.
template <int by>
__device__ uint32_t shift(uint32_t x) {
  if constexpr (by >= 0) {
    return x << by;
  } else {
    return x >> -by;
  }
}

// 8 codes of one block -> 8 elements times 2^-7, as the pairs (0, 4), (1, 5), (2, 6), (3, 7):
// nibbles i and i+4 are 16 bits apart, so one pass places both. A dot product does not mind the
// order.
template <class T>
__device__ void expand_pairs(uint32_t codes, uint32_t folded_scale, uint32_t (&pairs)[4]) {
  constexpr int kBit = Pairs<T>::kE2m1Bit;
  constexpr uint32_t kMagnitudes = (7u << kBit) | (7u << (kBit + 16));
  constexpr uint32_t kSigns = 0x8000'8000u;
  const auto place = [&]<int i>() {
    const uint32_t pair =
        (shift<kBit - 4 * i>(codes) & kMagnitudes) | (shift<12 - 4 * i>(codes) & kSigns);
    pairs[i] = Pairs<T>::multiply(pair, folded_scale);
  };
  place.template operator()<0>();
  place.template operator()<1>();
  place.template operator()<2>();
  place.template operator()<3>();
}

// In fp16 a code's byte is the upper one of its element: pairs two nibbles apart are a byte apart
// in one and the same word.
template <>
__device__ inline void expand_pairs<Float16>(uint32_t codes,
                                             uint32_t folded_scale,
                                             uint32_t (&pairs)[4]) {
  constexpr uint32_t kSigns = 0x8080'8080u, kBits = 0x8e00'8e00u;
  // As it is: the compiler would mask each part on its own, one operation more a pair.
  const auto merge = [](uint32_t signs, uint32_t magnitudes) {
    uint32_t merged;
    asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(merged) : "r"(signs), "r"(magnitudes), "r"(kSigns));
    return merged;
  };
  const uint32_t even = merge(codes << 4, codes << 1), odd = merge(codes, codes >> 3);
  pairs[0] = Pairs<Float16>::multiply(even << 8 & kBits, folded_scale);
  pairs[1] = Pairs<Float16>::multiply(odd << 8 & kBits, folded_scale);
  pairs[2] = Pairs<Float16>::multiply(even & kBits, folded_scale);
  pairs[3] = Pairs<Float16>::multiply(odd & kBits, folded_scale);
}

// 4 e4m3 bytes -> the pairs (0, 2), (1, 3) of their bits in fp16: values times 2^-8.
__device__ inline void place_e4m3(uint32_t bytes, uint32_t (&pairs)[2]) {
  constexpr uint32_t kMagnitudes = 0x3f80'3f80u, kSigns = 0x8000'8000u;
  pairs[0] = (bytes << 7 & kMagnitudes) | (bytes << 8 & kSigns);
  pairs[1] = (bytes >> 1 & kMagnitudes) | (bytes & kSigns);
}
__device__ inline bool any_e4m3_nan(uint32_t bytes) {  // a byte 0x7f or 0xff carries into its sign
  return (((bytes & 0x7f7f'7f7fu) + 0x0101'0101u) & 0x8080'8080u) != 0;
}
// .. and those times `factor`, twice; NaN among them makes all NaN.
__device__ inline void multiply_e4m3(uint32_t bytes, uint32_t factor, uint32_t (&pairs)[2]) {
  place_e4m3(bytes, pairs);
#pragma unroll
  for (uint32_t& pair : pairs) pair = Pairs<Float16>::multiply(pair, factor);
  if (any_e4m3_nan(bytes)) pairs[0] = pairs[1] = 0x7fff'7fffu;
}

// 4 RoPE bytes -> 4 elements times 2^-7, as the pairs (0, 2), (1, 3).
__device__ inline void expand_rope_pairs(uint32_t bytes, uint32_t (&pairs)[2]) {
  multiply_e4m3(bytes, 0x4000'4000u, pairs);  // by 2^8 * 2^-7
}

// 4 scale bytes -> fold_scale of each.
__device__ inline void fold_scales(uint32_t bytes, uint32_t (&folded)[4]) {
  uint32_t pairs[2];
  multiply_e4m3(bytes, 0x7800'7800u, pairs);  // by 2^8 * 2^7
  folded[0] = __byte_perm(pairs[0], 0, 0x1010);
  folded[1] = __byte_perm(pairs[1], 0, 0x1010);
  folded[2] = __byte_perm(pairs[0], 0, 0x3232);
  folded[3] = __byte_perm(pairs[1], 0, 0x3232);
}

// 8 codes of one block -> 8 elements in order, four words.
template <class T>
__device__ void expand(uint32_t codes, uint32_t scale_code, uint32_t (&out)[4]) {
  uint32_t p[4];
  expand_pairs<T>(codes, fold_scale<T>(scale_code), p);
#pragma unroll
  for (uint32_t& pair : p) pair = Pairs<T>::multiply(pair, Pairs<T>::kMakeGood);
  out[0] = __byte_perm(p[0], p[1], 0x5410);
  out[1] = __byte_perm(p[2], p[3], 0x5410);
  out[2] = __byte_perm(p[0], p[1], 0x7632);
  out[3] = __byte_perm(p[2], p[3], 0x7632);
}

// 4 codes of one block -> 4 fp32 elements.
template <>
__device__ inline void expand<float>(uint32_t codes, uint32_t scale_code, uint32_t (&out)[4]) {
  const float folded = decode_e4m3(scale_code) * 0x1p119f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t code = codes >> 4 * i;
    const uint32_t bits = (code & 7) << 22 | (code & 8) << 28;
    out[i] = bit_cast<uint32_t>(bit_cast<float>(bits) * folded * 0x1p7f);
  }
}

}  // namespace nvfp4_dsmla::cuda
