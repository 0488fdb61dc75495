// A token's latent vector <-> its fp8_ds_mla record, on the host; written to be vectorised, as
// token.h is.
#pragma once

#include <cstdint>

#include "format/bf16_token.h"
#include "format/element.h"
#include "format/fp8_block.h"
#include "format/fp8_record.h"

namespace nvfp4_dsmla::fp8 {

template <class In>
NVFP4_DSMLA_INLINE void encode_token(const In* __restrict kv_c,
                                     const In* __restrict k_pe,
                                     uint8_t* __restrict record) {
  float x[kNopeDim];
  uint32_t magnitude[kNopeDim];  // by itself: with the test for NaN in it, no maximum is vectorised
  for (int e = 0; e < kNopeDim; ++e) {
    x[e] = widen(kv_c[e]);
    magnitude[e] = is_nan(x[e]) ? 0 : magnitude_bits(x[e]);
  }
  float scale[kNumScales];
  for (int s = 0; s < kNumScales; ++s) {
    uint32_t amax = 0;
    for (int i = 0; i < kBlockDim; ++i) {
      const uint32_t m = magnitude[s * kBlockDim + i];
      amax = amax > m ? amax : m;
    }
    scale[s] = choose_scale(bit_cast<float>(amax));
    for (int i = 0; i < kBlockDim; ++i) {
      x[s * kBlockDim + i] = scale_down(x[s * kBlockDim + i], scale[s]);
    }
  }
  for (int e = 0; e < kNopeDim; ++e) {
    record[kCodesOffset + e] = static_cast<uint8_t>(encode_e4m3(x[e]));
  }
  memcpy(record + kScalesOffset, scale, sizeof(scale));
  BFloat16 rope[kRopeDim];
  for (int i = 0; i < kRopeDim; ++i) rope[i] = bf16::encode_element(k_pe[i]);
  memcpy(record + kRopeOffset, rope, sizeof(rope));
}

template <class Out>
NVFP4_DSMLA_INLINE void decode_token(const uint8_t* __restrict record, Out* __restrict latent) {
  for (int s = 0; s < kNumScales; ++s) {
    float scale;
    memcpy(&scale, record + kScalesOffset + s * kScaleBytes, kScaleBytes);
    for (int i = 0; i < kBlockDim; ++i) {
      const int e = s * kBlockDim + i;
      latent[e] = round_to<Out>(scale_up(decode_e4m3(record[kCodesOffset + e]), scale));
    }
  }
  BFloat16 rope[kRopeDim];
  memcpy(rope, record + kRopeOffset, sizeof(rope));
  for (int i = 0; i < kRopeDim; ++i) latent[kNopeDim + i] = round_to<Out>(widen(rope[i]));
}

}  // namespace nvfp4_dsmla::fp8
