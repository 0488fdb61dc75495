// A lane's words in memory, whole where alignment allows (kWide) and byte by byte where it does
// not.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "format/portability.h"

namespace nvfp4_dsmla::cuda {

// What a word is held in: registers have 32 bits.
template <class Word>
using Register = std::conditional_t<(sizeof(Word) < sizeof(uint32_t)), uint32_t, Word>;

// kOnce: what is read is not read again soon, and the caches may let go of it first.
template <class Word, bool kWide, bool kOnce = false>
__device__ Word load_word(const uint8_t* from) {
  if constexpr (kWide || sizeof(Word) == 1) {
    const auto* word = reinterpret_cast<const Word*>(from);
    return kOnce ? __ldcs(word) : __ldg(word);
  } else {
    Word word = 0;
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(Word)); ++i) word |= Word{from[i]} << 8 * i;
    return word;
  }
}

template <bool kWide, class Word>
__device__ void store_word(uint8_t* to, Word word) {
  if constexpr (kWide) {
    *reinterpret_cast<Word*>(to) = word;
  } else {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(Word)); ++i) to[i] = word >> 8 * i & 0xff;
  }
}

template <bool kWide>
__device__ void store_16_bytes(uint8_t* to, const uint32_t (&words)[4]) {
  if constexpr (kWide) {
    *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) store_word<false>(to + 4 * i, words[i]);
  }
}

}  // namespace nvfp4_dsmla::cuda
