// e2m1, the 4-bit float of NVFP4: sign, two exponent bits (bias 1), one mantissa bit.
#pragma once

#include <cmath>
#include <cstdint>

#include "format/element.h"

namespace nvfp4_dsmla {

//   code        0b0'00'0  0b0'00'1  0b0'01'0  0b0'01'1  0b0'10'0  0b0'10'1  0b0'11'0  0b0'11'1
//   magnitude      0        0.5        1        1.5        2         3         4         6
inline constexpr float kE2m1Max = 6.0f;
inline constexpr uint32_t kE2m1MaxCode = 0b0'11'1;
inline constexpr uint32_t kE2m1SignBit = 0b1'00'0;

// Native conversion exists on the suffixed Blackwell targets only (sm_100a/f, sm_103a, sm_120a/f
// ..): the plain ones, and the PTX kept for chips to come, take the arithmetic below. Same bytes.
#if defined(__CUDA_ARCH__) &&                                               \
    ((defined(__CUDA_ARCH_SPECIFIC__) && __CUDA_ARCH_SPECIFIC__ >= 1000) || \
     (defined(__CUDA_ARCH_FAMILY_SPECIFIC__) && __CUDA_ARCH_FAMILY_SPECIFIC__ >= 1000))
#define NVFP4_DSMLA_NATIVE_E2M1 1
#endif

// The lesser of two, but `b` if `a` is NaN.
NVFP4_DSMLA_INLINE float lesser(float a, float b) {
#if defined(__CUDA_ARCH__)
  return fminf(a, b);
#else
  return a < b ? a : b;
#endif
}

// The code of |y|, as the last bits of the fp32 number 2^23 + code: nearest, ties to the even code,
// saturating; NaN is 7.
//
// The code is min(rne(2|y|), rne(|y|) + 2, rne(|y|/2) + 4, 7): the codes are equally spaced in
// three pieces, of step 1/2, 1 and 2, and since the curve from value to code is concave, the piece
// that applies is the one that gives the least. Rounding is by adding 2^23, where fp32 has no
// fractions left and the adder itself rounds to nearest even; the even +2 and +4 ride along.
inline constexpr float kE2m1Integers = 8'388'608.0f;  // 2^23
NVFP4_DSMLA_INLINE uint32_t encode_e2m1_magnitude(float y) {
  const float magnitude = fabsf(y);  // free on a GPU, where a mask is an instruction
  const float halves = magnitude * 2.0f + kE2m1Integers;  // exact product: a fused add is the same
  const float ones = magnitude + (kE2m1Integers + 2.0f);
  const float twos = magnitude * 0.5f + (kE2m1Integers + 4.0f);
  return bit_cast<uint32_t>(
      lesser(lesser(lesser(halves, ones), twos), kE2m1Integers + float{kE2m1MaxCode}));
}

// Nearest code, ties to the even one; beyond 6 saturates; the sign is kept, that of zero too, but
// NaN is +6 whatever its sign.
NVFP4_DSMLA_INLINE uint32_t encode_e2m1(float y) {
  const uint32_t sign = is_nan(y) ? 0 : bit_cast<uint32_t>(y) >> 31;
  return (encode_e2m1_magnitude(y) & kE2m1MaxCode) | sign * kE2m1SignBit;
}

#if defined(__CUDACC__)
// Eight codes, the first in the lowest nibble. A NaN must be positive here; scale_down's product
// sees to it, since the device's arithmetic knows one NaN only.
__device__ __forceinline__ uint32_t encode_e2m1x8(const float (&y)[8]) {
#if defined(NVFP4_DSMLA_NATIVE_E2M1)
  uint32_t codes;
  asm("{\n"
      ".reg .b8 a, b, c, d;\n"
      "cvt.rn.satfinite.e2m1x2.f32 a, %2, %1;\n"  // the first operand goes to the high nibble
      "cvt.rn.satfinite.e2m1x2.f32 b, %4, %3;\n"
      "cvt.rn.satfinite.e2m1x2.f32 c, %6, %5;\n"
      "cvt.rn.satfinite.e2m1x2.f32 d, %8, %7;\n"
      "mov.b32 %0, {a, b, c, d};\n"
      "}"
      : "=r"(codes)
      : "f"(y[0]), "f"(y[1]), "f"(y[2]), "f"(y[3]), "f"(y[4]), "f"(y[5]), "f"(y[6]), "f"(y[7]));
  return codes;
#else
  // What bounds this on a GPU is not the adds but min, shifts and logic, which run at half their
  // rate (measured on an H200). So the magnitudes are packed by multiply-add, the bits of 2^23 with
  // them, which in the end are one constant to take off.
  uint32_t codes = 0, integers = 0;
#pragma unroll
  for (int i = 7; i >= 0; --i) {
    codes = codes * 16 + encode_e2m1_magnitude(y[i]);
    integers = integers * 16 + bit_cast<uint32_t>(float{kE2m1Integers});
  }
  // Byte permutations that replicate a byte's sign: four signs as four bytes 0x00 or 0xff.
  const auto signs = [&](int first) {
    uint32_t low, high;
    asm("prmt.b32 %0, %1, %2, 0x00fb;" : "=r"(low) : "f"(y[first]), "f"(y[first + 2]));
    asm("prmt.b32 %0, %1, %2, 0x00fb;" : "=r"(high) : "f"(y[first + 4]), "f"(y[first + 6]));
    return __byte_perm(low, high, 0x5410);
  };
  return (codes - integers) | (signs(0) & 0x0808'0808u) | (signs(1) & 0x8080'8080u);
#endif
}
#endif  // __CUDACC__

NVFP4_DSMLA_INLINE float decode_e2m1(uint32_t code) {
  // Twice the magnitude of each code, a nibble each: whole numbers, so no subnormal on the way.
  constexpr uint32_t kTwiceMagnitudes = 0xc864'3210;
  const uint32_t twice = (kTwiceMagnitudes >> (4 * (code & kE2m1MaxCode))) & 0xf;
  const float magnitude = static_cast<float>(static_cast<int32_t>(twice)) * 0.5f;
  return bit_cast<float>(bit_cast<uint32_t>(magnitude) | (code & kE2m1SignBit) << 28);
}

}  // namespace nvfp4_dsmla
