// e2m1 codes of bfloat16 elements by arithmetic on pairs of halves: half the instructions of that
// on floats (format/e2m1.h), same codes.
//
// y = x / scale, in fp32, is rounded to fp16, and the three lines of e2m1.h are taken there. The
// second rounding must move no y onto a tie or off it. A tie times the scale has at most 7
// significant bits, and x has 8: so x is that product, or at least 1 / 255 away from it, far more
// than any rounding moves it. For an x that is the product, y is the tie itself, unless the scale's
// mantissa is 1.875. Its rounded inverse is too large, and y is one ulp of fp32 above the
// ties 1.25, 2.5 and 5, which then round up and not to even; not above 0.25, and above the others
// it is all the same. An inverse that is larger by 0.9 * 2^-11 does this in fp16: over a mantissa
// of 1.25 that is 1.125 of half an ulp, and rounds up, over one of 1 it is 0.9, and is rounded
// away. (test_write.py tries every bfloat16 under every scale.)
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "format/e2m1.h"
#include "format/portability.h"

namespace nvfp4_dsmla::cuda {

// Minima of pairs came with sm_80; chips that convert to e2m1 by themselves need none.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800 && !defined(NVFP4_DSMLA_NATIVE_E2M1)
inline constexpr bool kHasFastHalves = true;
#else
inline constexpr bool kHasFastHalves = false;
#endif

// The inverse of a scale -> what to multiply by before rounding to fp16.
__device__ inline float inverse_for_halves(float inverse) {
  constexpr uint32_t kMantissa = 0x7f'ffff;
  constexpr uint32_t kOfInverse1875 = 0x08'8889;  // 1 / 1.875 = 1.0666667 / 2
  constexpr float kOverTies = 1.0f + 0.9f * 0x1p-11f;
  return (bit_cast<uint32_t>(inverse) & kMantissa) == kOfInverse1875 ? inverse * kOverTies
                                                                     : inverse;
}

// Eight codes, the first in the lowest nibble, of y in pairs. A NaN must be positive.
__device__ inline uint32_t encode_e2m1_halves(const __half2 (&y)[4]) {
  constexpr float kIntegers = 1024.0f;  // 2^10: halves from here on have no fractions
  constexpr uint32_t kIntegersBits = 0x6400'6400;
  // In registers: the compiler would put both in one, which takes it five instructions.
  uint32_t two, half;
  asm("mov.b32 %0, 0x40004000;" : "=r"(two));
  asm("mov.b32 %0, 0x38003800;" : "=r"(half));
  uint32_t bits[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __half2 magnitude = __habs2(y[i]);
    const __half2 halves = __hfma2(magnitude, bit_cast<__half2>(two), __float2half2_rn(kIntegers));
    const __half2 ones = __hadd2(magnitude, __float2half2_rn(kIntegers + 2));
    const __half2 twos =
        __hfma2(magnitude, bit_cast<__half2>(half), __float2half2_rn(kIntegers + 4));
    const __half2 most = __float2half2_rn(kIntegers + 7);
    bits[i] = bit_cast<uint32_t>(__hmin2(__hmin2(__hmin2(halves, ones), twos), most));
  }
  // Two pairs in a word, a byte each: 0 2 1 3, and 4 6 5 7. Then the even ones and the odd ones.
  const auto even = [](uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x5410); };
  const auto odd = [](uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x7632); };
  const uint32_t codes_a = bits[0] + (bits[1] << 8), codes_b = bits[2] + (bits[3] << 8);
  constexpr uint32_t kConstant = kIntegersBits + (kIntegersBits << 8);  // in each of the two
  constexpr uint32_t kEven = (kConstant & 0xffff) * 0x1'0001u, kOdd = (kConstant >> 16) * 0x1'0001u;
  const uint32_t codes =
      even(codes_a, codes_b) + (odd(codes_a, codes_b) << 4) - (kEven + (kOdd << 4));
  // In the same places a sign bit, eight times over.
  const auto signs = [&](int i) {
    uint32_t bytes;
    asm("prmt.b32 %0, %1, %2, 0xfbd9;"
        : "=r"(bytes)
        : "r"(bit_cast<uint32_t>(y[i])), "r"(bit_cast<uint32_t>(y[i + 1])));
    return bytes;
  };
  const uint32_t signs_a = signs(0), signs_b = signs(2);
  return codes | (even(signs_a, signs_b) & 0x0808'0808u) | (odd(signs_a, signs_b) & 0x8080'8080u);
}

}  // namespace nvfp4_dsmla::cuda
