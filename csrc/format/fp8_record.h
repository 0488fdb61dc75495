// The fp8_ds_mla record: the same token as record.h's, at 8 bits an element.
//
//   byte  0                                 512          528                656
//         | 512 x e4m3                       | 4 x fp32   | 64 x bf16        |
//         | NoPE                             | NoPE       | RoPE, as it is   |
//         |                                  | scales     |                  |
//
// Scale s, little-endian, belongs to NoPE dims 128s .. 128s+127.
//
// This is the only file of the library that states a width or an offset of this record.
#pragma once

#include "format/record.h"

namespace nvfp4_dsmla::fp8 {

inline constexpr int kBlockDim = 128;  // NoPE dims that share a scale
inline constexpr int kNumScales = kNopeDim / kBlockDim;
inline constexpr int kScaleBytes = 4;
inline constexpr int kRopeElementBytes = 2;

inline constexpr int kCodesOffset = 0;
inline constexpr int kScalesOffset = kCodesOffset + kNopeDim;
inline constexpr int kRopeOffset = kScalesOffset + kNumScales * kScaleBytes;
inline constexpr int kRecordBytes = kRopeOffset + kRopeDim * kRopeElementBytes;

static_assert(kNumScales == 4 && kRopeOffset == 528 && kRecordBytes == 656);
static_assert(kScalesOffset % 16 == 0 && kRopeOffset % 16 == 0 && kRecordBytes % 16 == 0,
              "each part of a record may be moved 16 bytes at a time");

}  // namespace nvfp4_dsmla::fp8
