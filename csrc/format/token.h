// A token's latent vector <-> its record, on the host. The loops run over whole parts of the vector
// with nothing carried between iterations, which is what a compiler needs to vectorise them.
#pragma once

#include <cstdint>

#include "format/block.h"
#include "format/element.h"
#include "format/record.h"

namespace nvfp4_dsmla {

template <class In>
NVFP4_DSMLA_INLINE void encode_nope(const In* kv_c, uint8_t* record) {
  float x[kNopeDim];
  for (int i = 0; i < kNopeDim; ++i) x[i] = widen(kv_c[i]);

  float amax[kNumScales];
  for (int s = 0; s < kNumScales; ++s) {
    uint32_t m = 0;
    for (int i = 0; i < kBlockDim; ++i) {
      m = bit_cast<uint32_t>(max_magnitude(bit_cast<float>(m), x[s * kBlockDim + i]));
    }
    amax[s] = bit_cast<float>(m);
  }

  float inverse[kNumScales];
  uint8_t scale[kNumScales];
  for (int s = 0; s < kNumScales; ++s) {
    const BlockScale chosen = choose_scale(amax[s]);
    inverse[s] = chosen.inverse;
    scale[s] = static_cast<uint8_t>(chosen.code);
  }
  for (int s = 0; s < kNumScales; ++s) record[scale_offset(s)] = scale[s];

  uint8_t code[kNopeDim];
  for (int s = 0; s < kNumScales; ++s) {
    for (int i = 0; i < kBlockDim; ++i) {
      const int e = s * kBlockDim + i;
      code[e] = static_cast<uint8_t>(encode_e2m1(scale_down(x[e], inverse[s])));
    }
  }
  for (int i = 0; i < kNopeDim / 2; ++i) {
    record[kCodesOffset + i] = static_cast<uint8_t>(code[2 * i] | code[2 * i + 1] << 4);
  }
}

template <class In>
NVFP4_DSMLA_INLINE void encode_rope(const In* k_pe, uint8_t* record) {
  for (int i = 0; i < kRopeDim; ++i) {
    record[kRopeOffset + i] = static_cast<uint8_t>(encode_e4m3(widen(k_pe[i])));
  }
}

template <class In>
NVFP4_DSMLA_INLINE void encode_token(const In* kv_c, const In* k_pe, uint8_t* record) {
  encode_nope(kv_c, record);
  encode_rope(k_pe, record);
}

template <class Out>
NVFP4_DSMLA_INLINE void decode_token(const uint8_t* record, Out* latent) {
  float scale[kNumScales];
  for (int s = 0; s < kNumScales; ++s) scale[s] = decode_e4m3(record[scale_offset(s)]);
  for (int s = 0; s < kNumScales; ++s) {
    for (int i = 0; i < kBlockDim; ++i) {
      const int e = s * kBlockDim + i;
      const uint32_t code = record[kCodesOffset + e / 2] >> 4 * (e % 2) & 0xf;
      latent[e] = narrow_exact<Out>(decode_e2m1(code) * scale[s]);
    }
  }
  for (int i = 0; i < kRopeDim; ++i) {
    latent[kNopeDim + i] = narrow_exact<Out>(decode_e4m3(record[kRopeOffset + i]));
  }
}

}  // namespace nvfp4_dsmla
