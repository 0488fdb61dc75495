// The bfloat16 record: the latent vector itself, 512 NoPE dims and then 64 RoPE dims.
//
// This is the only file of the library that states a width or an offset of this record.
#pragma once

#include "format/record.h"

namespace nvfp4_dsmla::bf16 {

inline constexpr int kElementBytes = 2;
inline constexpr int kRopeOffset = kNopeDim * kElementBytes;
inline constexpr int kRecordBytes = kHeadDim * kElementBytes;

static_assert(kRopeOffset == 1024 && kRecordBytes == 1152);

}  // namespace nvfp4_dsmla::bf16
