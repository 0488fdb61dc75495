// A record -> 576 floats, the same bits as format/token.h's decode_token gives. That one is a loop
// for any compiler and machine; these look magnitudes up in a register instead. On an EPYC with
// AVX-512 (Zen 4): 40 ns a token with 16 lanes, 76 with 8, 112 by decode_token.
#pragma once

#include "format/token.h"
#include "kernels/cpu/lanes.h"

namespace nvfp4_dsmla::cpu {

// The elements of NoPE block `block`, under its scale. A word has eight codes, one for each lane,
// which a lane shifts down to itself; a look-up takes the last bits of its index alone.
template <int kLanes>
NVFP4_DSMLA_INLINE void expand_block(const uint8_t* codes, float scale, float* latent);

#if defined(__clang__)
inline constexpr bool kLooksUp = false;  // it has no __builtin_shuffle
#else
inline constexpr bool kLooksUp = true;

template <>
NVFP4_DSMLA_INLINE void expand_block<16>(const uint8_t* codes, float scale, float* latent) {
  using Floats = Lanes<16>::Floats;
  using Words = Lanes<16>::Words;
  constexpr Floats kValues = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                              -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
  constexpr Words kShifts = {0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28};
  constexpr Words kHalves = {0, 1, 2, 3, 4, 5, 6, 7, 24, 25, 26, 27, 28, 29, 30, 31};
  uint32_t word[2];
  memcpy(word, codes, sizeof(word));
  const Words low = word[0] - Words{}, high = word[1] - Words{};
  const Words code = __builtin_shuffle(low, high, kHalves) >> kShifts;
  store(latent, __builtin_shuffle(kValues, code) * scale);
}

template <>
NVFP4_DSMLA_INLINE void expand_block<8>(const uint8_t* codes, float scale, float* latent) {
  using Floats = Lanes<8>::Floats;
  using Words = Lanes<8>::Words;
  constexpr Floats kMagnitudes = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  constexpr Words kShifts = {0, 4, 8, 12, 16, 20, 24, 28};
  for (int half = 0; half < 2; ++half) {
    uint32_t word;
    memcpy(&word, codes + half * sizeof(word), sizeof(word));
    const Words code = (word - Words{}) >> kShifts;
    const Floats magnitude = __builtin_shuffle(kMagnitudes, code) * scale;
    const Words sign = code << 28 & kSignBit;
    store(latent + half * 8, (Floats)((Words)magnitude ^ sign));
  }
}
#endif

template <int kLanes>
NVFP4_DSMLA_INLINE void expand(const uint8_t* __restrict record, float* __restrict latent) {
  if constexpr (kLanes < 8 || !kLooksUp) {
    decode_token(record, latent);
  } else {
    float stored_scale[kNumScales];
    for (int p = 0; p < kNumScales; ++p) stored_scale[p] = decode_e4m3(record[kScalesOffset + p]);
#pragma GCC unroll 4
    for (int s = 0; s < kNumScales; ++s) {
      expand_block<kLanes>(record + kCodesOffset + s * kCodeBytesPerBlock,
                           stored_scale[scale_offset(s) - kScalesOffset], latent + s * kBlockDim);
    }
    for (int i = 0; i < kRopeDim; ++i) {
      latent[kNopeDim + i] = decode_e4m3(record[kRopeOffset + i]);
    }
  }
}

}  // namespace nvfp4_dsmla::cpu
