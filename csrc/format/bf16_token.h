// A token's latent vector <-> its bfloat16 record, on the host; written to be vectorised, as
// token.h is.
#pragma once

#include <cstdint>

#include "format/bf16_record.h"
#include "format/element.h"

namespace nvfp4_dsmla::bf16 {

// A bf16 element stays as it is, NaN's payload included.
NVFP4_DSMLA_INLINE BFloat16 encode_element(BFloat16 x) { return x; }
template <class In>
NVFP4_DSMLA_INLINE BFloat16 encode_element(In x) {
  return round_to<BFloat16>(widen(x));
}

template <class In>
NVFP4_DSMLA_INLINE void encode_token(const In* __restrict kv_c,
                                     const In* __restrict k_pe,
                                     uint8_t* __restrict record) {
  BFloat16 element[kHeadDim];  // a record need not be aligned
  for (int i = 0; i < kNopeDim; ++i) element[i] = encode_element(kv_c[i]);
  for (int i = 0; i < kRopeDim; ++i) element[kNopeDim + i] = encode_element(k_pe[i]);
  memcpy(record, element, sizeof(element));
}

NVFP4_DSMLA_INLINE void decode_token(const uint8_t* record, BFloat16* latent) {
  memcpy(latent, record, kRecordBytes);
}

}  // namespace nvfp4_dsmla::bf16
