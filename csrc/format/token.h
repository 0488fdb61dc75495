// A token's latent vector <-> its record, on the host. The loops run over whole parts of the vector
// with nothing carried between iterations, and no pointer may alias another, which is what a
// compiler needs to vectorise them.
#pragma once

#include <cstdint>

#include "format/block.h"
#include "format/element.h"
#include "format/record.h"

namespace nvfp4_dsmla {

template <class In>
NVFP4_DSMLA_INLINE void encode_nope(const In* __restrict kv_c, uint8_t* __restrict record) {
  float x[kNopeDim];
  for (int e = 0; e < kNopeDim; ++e) x[e] = widen(kv_c[e]);

  float amax[kNumScales];
  for (int s = 0; s < kNumScales; ++s) {
    uint32_t m = 0;
    for (int i = 0; i < kBlockDim; ++i) {
      m = bit_cast<uint32_t>(max_magnitude(bit_cast<float>(m), x[s * kBlockDim + i]));
    }
    amax[s] = bit_cast<float>(m);
  }

  // Each block's inverse is spread to its elements, so that the next loop is one over elements: a
  // loop over blocks with another inside is vectorised across the blocks, with gathers.
  float inverse[kNopeDim];
  for (int s = 0; s < kNumScales; ++s) {
    const BlockScale scale = choose_scale(amax[s]);
    record[scale_offset(s)] = static_cast<uint8_t>(scale.code);
    for (int i = 0; i < kBlockDim; ++i) inverse[s * kBlockDim + i] = scale.inverse;
  }

  uint8_t code[kNopeDim];
  for (int e = 0; e < kNopeDim; ++e) {
    code[e] = static_cast<uint8_t>(encode_e2m1(scale_down(x[e], inverse[e])));
  }
  for (int i = 0; i < kNopeDim / 2; ++i) {
    record[kCodesOffset + i] = static_cast<uint8_t>(code[2 * i] | code[2 * i + 1] << 4);
  }
}

template <class In>
NVFP4_DSMLA_INLINE void encode_rope(const In* __restrict k_pe, uint8_t* __restrict record) {
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
NVFP4_DSMLA_INLINE void decode_token(const uint8_t* __restrict record, Out* __restrict latent) {
  float stored_scale[kNumScales];
  for (int p = 0; p < kNumScales; ++p) stored_scale[p] = decode_e4m3(record[kScalesOffset + p]);
  float scale[kNopeDim];  // of each element, as in encode_nope
  for (int s = 0; s < kNumScales; ++s) {
    const float of_block = stored_scale[scale_offset(s) - kScalesOffset];
    for (int i = 0; i < kBlockDim; ++i) scale[s * kBlockDim + i] = of_block;
  }
  uint8_t code[kNopeDim];
  for (int i = 0; i < kNopeDim / 2; ++i) {
    code[2 * i] = record[kCodesOffset + i] & 0xf;
    code[2 * i + 1] = record[kCodesOffset + i] >> 4;
  }
  for (int e = 0; e < kNopeDim; ++e) {
    latent[e] = narrow_exact<Out>(decode_e2m1(code[e]) * scale[e]);
  }
  for (int i = 0; i < kRopeDim; ++i) {
    latent[kNopeDim + i] = narrow_exact<Out>(decode_e4m3(record[kRopeOffset + i]));
  }
}

}  // namespace nvfp4_dsmla
