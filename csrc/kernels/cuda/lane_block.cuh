// A lane's elements of a token, in registers, of one type: in most kernels 16 NoPE elements and 2
// RoPE elements. How they are loaded, compared and widened.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "format/element.h"
#include "format/record.h"
#include "kernels/cuda/paging.cuh"

namespace nvfp4_dsmla::cuda {

// Loads kCount words, in 16-byte pieces where there are that many.
template <int kCount>
__device__ void load_words(const void* from, uint32_t (&to)[kCount]) {
  using Piece = std::conditional_t<kCount % 4 == 0, uint4,
                                   std::conditional_t<kCount % 2 == 0, uint2, uint32_t>>;
  constexpr int kPieces = kCount * sizeof(uint32_t) / sizeof(Piece);
  Piece pieces[kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) pieces[i] = static_cast<const Piece*>(from)[i];
  memcpy(to, pieces, sizeof(to));
}

// The greater magnitudes of two pairs of a 16-bit type, their signs of no meaning.
template <class In>
__device__ uint32_t max_magnitudes(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
  uint32_t pair;
  if constexpr (std::is_same_v<In, BFloat16>) {
    asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  } else {
    asm("max.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  }
  return pair;
#else
  using Pair = std::conditional_t<std::is_same_v<In, BFloat16>, __nv_bfloat162, __half2>;
  return bit_cast<uint32_t>(__hmax2(__habs2(bit_cast<Pair>(a)), __habs2(bit_cast<Pair>(b))));
#endif
}

// kCount elements as words, two of a 16-bit type a word.
template <class In, int kCount>
struct Elements {
  static constexpr int kPerWord = sizeof(uint32_t) / sizeof(In);
  static constexpr int kWords = kCount / kPerWord;

  // kWide: `from` is aligned to the lesser of 16 bytes and the whole.
  template <bool kWide>
  __device__ void load(const In* from) {
    if constexpr (kWide) {
      load_words(from, words);
    } else {
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        if constexpr (kPerWord == 1) {
          words[i] = bit_cast<uint32_t>(from[i]);
        } else {
          words[i] = from[2 * i].bits | uint32_t{from[2 * i + 1].bits} << 16;
        }
      }
    }
  }

  // Of values in fp32, each rounded to nearest.
  __device__ static Elements rounded(const float (&values)[kCount]) {
    Elements elements;
    if constexpr (std::is_same_v<In, float>) {
      memcpy(elements.words, values, sizeof(values));
    } else {
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        elements.words[w] = round_pair(values[2 * w], values[2 * w + 1]);
      }
    }
    return elements;
  }

  __device__ static uint32_t round_pair(float low, float high) {
    if constexpr (std::is_same_v<In, BFloat16>) {
      return bit_cast<uint32_t>(__floats2bfloat162_rn(low, high));
    } else {
      return bit_cast<uint32_t>(__floats2half2_rn(low, high));
    }
  }

  // Element i; i is a constant once loops are unrolled.
  __device__ float operator[](int i) const {
    const uint32_t word = words[i / kPerWord];
    if constexpr (std::is_same_v<In, float>) {
      return bit_cast<float>(word);
    } else if constexpr (std::is_same_v<In, BFloat16>) {
      return bit_cast<float>(i % 2 == 0 ? word << 16 : word & 0xffff'0000u);
    } else {
      return widen(Float16{static_cast<uint16_t>(i % 2 == 0 ? word : word >> 16)});
    }
  }

  // max |x|, NaN left out, as CUDA's maxima do; NaN if there is nothing else.
  __device__ float max_magnitude() const {
    if constexpr (std::is_same_v<In, float>) {
      float amax = fabsf(bit_cast<float>(words[0]));
#pragma unroll
      for (int i = 1; i < kWords; ++i) amax = fmaxf(amax, fabsf(bit_cast<float>(words[i])));
      return amax;
    } else {
      uint32_t pair = words[0];
#pragma unroll
      for (int i = 1; i < kWords; ++i) pair = max_magnitudes<In>(pair, words[i]);
      Elements<In, 2> both;
      both.words[0] = pair & 0x7fff'7fffu;
      return fmaxf(both[0], both[1]);
    }
  }

  uint32_t words[kWords];
};

inline constexpr int kNopePerLane = kNopeDim / kWarpSize;
inline constexpr int kRopePerLane = kRopeDim / kWarpSize;
static_assert(kNopePerLane == 16 && kRopePerLane == 2);

template <class In>
using NopeElements = Elements<In, kNopePerLane>;
template <class In>
using RopeElements = Elements<In, kRopePerLane>;

}  // namespace nvfp4_dsmla::cuda
