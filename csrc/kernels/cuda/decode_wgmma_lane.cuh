// What a lane has of a record, and its expansion: codes by moving bits (expand.cuh), scales and
// RoPE by the conversions that the hardware has from sm_89 on, in a third of the instructions.
#pragma once

#include <cstdint>

#include "format/element.h"
#include "format/record.h"
#include "kernels/cuda/decode_wgmma.cuh"
#include "kernels/cuda/expand.cuh"
#include "kernels/cuda/hopper.cuh"

namespace nvfp4_dsmla::cuda::hopper {

// 4 scale bytes -> fold_scale of each, for both halves of a word.
__device__ inline void fold_by_conversion(uint32_t bytes, uint32_t (&folded)[4]) {
  static_assert(Pairs<Float16>::kE2m1Fold == 0x1p7f);
  constexpr uint32_t kFold = 0x5800'5800u;  // 2^7, twice
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t pair = Pairs<Float16>::multiply(halves_of_e4m3(bytes >> 16 * i), kFold);
    folded[2 * i] = __byte_perm(pair, 0, 0x1010);
    folded[2 * i + 1] = __byte_perm(pair, 0, 0x3232);
  }
}

// 8 RoPE bytes -> 8 elements times 2^-7, in order.
__device__ inline void expand_rope_in_order(uint32_t first, uint32_t second, uint32_t (&pairs)[4]) {
  constexpr uint32_t kFold = 0x2000'2000u;  // 2^-7, twice
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t bytes = (i < 2 ? first : second) >> 16 * (i % 2);
    pairs[i] = Pairs<Float16>::multiply(halves_of_e4m3(bytes), kFold);
  }
}

// A lane's part of a token's record, with q = lane % 4: of each 8 blocks two, 2q and 2q + 1, four
// words of codes; of RoPE a quarter. Of 128 dims the first blocks go to one chunk of 64, the second
// to the next one: pair j (elements j and j+4) of word w of a block to 16-byte unit 4w + j of the
// chunk's row, lane q's at word q. So dim 128i + 32q + 16h + 8w + j + 4e is at position
// 64(2i + h) + 8(4w + j) + 2q + e.
struct LanesRecord {
  // Part 0: the first 16 blocks and the scales; part 1: the others and RoPE. load(from) -> 16
  // bytes.
  template <class Load>
  __device__ void load(const uint8_t* record, int part, Load load) {
    const int q = lane_id() % 4;
#pragma unroll
    for (int i = 2 * part; i < 2 * part + 2; ++i) {
      codes[i] = load(record + kCodesOffset + (8 * i + 2 * q) * kCodeBytesPerBlock);
    }
    if (part == 0) {
      // Block 8i + 2q + h has its scale at byte 2i + q / 2 of half h of this piece.
      scales = load(record + scale_offset(2 * (q % 2)));
      static_assert(
          scale_offset(1) == scale_offset(0) + 8 && scale_offset(3) == scale_offset(2) + 8 &&
          scale_offset(4) == scale_offset(0) + 1 && scale_offset(8) == scale_offset(0) + 2);
    } else {
      rope = load(record + kRopeOffset + q * (kRopeDim / 4));
    }
  }

  // The folded scales of chunks 4 part .. 4 part + 3; zero, so that V is, if there is no token.
  __device__ void fold(int part, uint32_t (&folded)[4]) const {
    const uint32_t of_lane = lane_id() % 4 < 2 ? 0x6240u : 0x7351u;
    const uint32_t four = part == 0 ? __byte_perm(scales.x, scales.z, of_lane)
                                    : __byte_perm(scales.y, scales.w, of_lane);
    fold_by_conversion(present ? four : 0, folded);
  }

  __device__ uint32_t word(int chunk, int w) const {
    const uint4& two = codes[chunk / 2];
    const uint32_t words[4] = {two.x, two.y, two.z, two.w};
    return words[chunk % 2 * 2 + w];
  }

  bool present;
  uint4 codes[kValueChunks / 2], scales, rope;
};

}  // namespace nvfp4_dsmla::cuda::hopper
