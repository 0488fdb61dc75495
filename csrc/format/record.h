// The nvfp4_ds_mla record: one token of a DeepSeek-sparse-attention latent cache.
//
//   byte  0                                 256            320          352
//         | 512 x e2m1, two a byte           | 64 x e4m3    | 32 x e4m3  |
//         | NoPE, low nibble = even element  | RoPE,        | NoPE scales|
//         |                                  | no scale     | one per 16 |
//
// The 32 scales are stored as an 8x4 matrix transposed: block s (NoPE dims 16s .. 16s+15) has its
// scale at byte 320 + 8 * (s % 4) + s / 4, so that thread q of a quad of readers finds the scales
// of its blocks q, 4+q, 8+q .. 28+q in eight contiguous bytes.
//
// This is the only file of the library that states a width or an offset of the record.
#pragma once

#include <cstddef>

#include "format/portability.h"

namespace nvfp4_dsmla {

inline constexpr int kNopeDim = 512;  // the compressed latent kv_c, which is also V
inline constexpr int kRopeDim = 64;   // the shared key k_pe
inline constexpr int kHeadDim = kNopeDim + kRopeDim;

inline constexpr int kBlockDim = 16;  // NoPE dims that share a scale
inline constexpr int kNumScales = kNopeDim / kBlockDim;
inline constexpr int kCodesPerByte = 2;
inline constexpr int kCodeBytesPerBlock = kBlockDim / kCodesPerByte;

inline constexpr int kCodesOffset = 0;
inline constexpr int kRopeOffset = kCodesOffset + kNopeDim / kCodesPerByte;
inline constexpr int kScalesOffset = kRopeOffset + kRopeDim;
inline constexpr int kRecordBytes = kScalesOffset + kNumScales;

inline constexpr int kSectorBytes = 32;  // what a GPU's memory moves at the least

// Where the scale of NoPE block `block` lies, from the start of the record.
NVFP4_DSMLA_INLINE constexpr int scale_offset(int block) {
  constexpr int kQuad = 4;
  return kScalesOffset + (block % kQuad) * (kNumScales / kQuad) + block / kQuad;
}

static_assert(kHeadDim == 576 && kNumScales == 32);
static_assert(kRopeOffset == 256 && kScalesOffset == 320 && kRecordBytes == 352);
static_assert(kRopeOffset % kSectorBytes == 0 && kScalesOffset % kSectorBytes == 0 &&
                  kRecordBytes % kSectorBytes == 0,
              "each part of a record is whole sectors");
static_assert(scale_offset(0) == 320 && scale_offset(1) == 328 && scale_offset(4) == 321 &&
              scale_offset(31) == 351);

}  // namespace nvfp4_dsmla
