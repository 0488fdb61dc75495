// Each format as a type: how many bytes a record has, and how the host writes and reads one. A host
// kernel is written once, for any of them.
#pragma once

#include "format/bf16_token.h"
#include "format/fp8_token.h"
#include "format/token.h"

namespace nvfp4_dsmla {

struct Nvfp4Codec {
  static constexpr int kRecordBytes = nvfp4_dsmla::kRecordBytes;
  // What a record is decoded to on its way to another format.
  using Latent = float;

  template <class In>
  NVFP4_DSMLA_INLINE static void encode(const In* kv_c, const In* k_pe, uint8_t* record) {
    encode_token(kv_c, k_pe, record);
  }
  template <class Out>
  NVFP4_DSMLA_INLINE static void decode(const uint8_t* record, Out* latent) {
    decode_token(record, latent);
  }
};

struct Fp8Codec {
  static constexpr int kRecordBytes = fp8::kRecordBytes;
  using Latent = float;

  template <class In>
  NVFP4_DSMLA_INLINE static void encode(const In* kv_c, const In* k_pe, uint8_t* record) {
    fp8::encode_token(kv_c, k_pe, record);
  }
  template <class Out>
  NVFP4_DSMLA_INLINE static void decode(const uint8_t* record, Out* latent) {
    fp8::decode_token(record, latent);
  }
};

struct BFloat16Codec {
  static constexpr int kRecordBytes = bf16::kRecordBytes;
  using Latent = BFloat16;

  template <class In>
  NVFP4_DSMLA_INLINE static void encode(const In* kv_c, const In* k_pe, uint8_t* record) {
    bf16::encode_token(kv_c, k_pe, record);
  }
  NVFP4_DSMLA_INLINE static void decode(const uint8_t* record, BFloat16* latent) {
    bf16::decode_token(record, latent);
  }
};

}  // namespace nvfp4_dsmla
