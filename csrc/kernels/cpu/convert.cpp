#include "format/codecs.h"
#include "kernels/cpu/vectorise.h"
#include "kernels/launch.h"

namespace nvfp4_dsmla::cpu {
namespace {

template <class From, class To>
NVFP4_DSMLA_INLINE void convert_records(const ConvertParams& p, int64_t begin, int64_t end) {
  for (int64_t slot = begin; slot < end; ++slot) {
    typename From::Latent latent[kHeadDim];
    From::decode(p.src.record(slot), latent);
    To::encode(latent, latent + kNopeDim, p.dst.record(slot));
  }
}

// Clones are made of plain functions, not of templates.
#define NVFP4_DSMLA_CONVERT(name, From, To)                                             \
  NVFP4_DSMLA_VECTORISE void name(const ConvertParams& p, int64_t begin, int64_t end) { \
    convert_records<From, To>(p, begin, end);                                           \
  }
NVFP4_DSMLA_CONVERT(nvfp4_to_fp8, Nvfp4Codec, Fp8Codec)
NVFP4_DSMLA_CONVERT(nvfp4_to_bf16, Nvfp4Codec, BFloat16Codec)
NVFP4_DSMLA_CONVERT(fp8_to_nvfp4, Fp8Codec, Nvfp4Codec)
NVFP4_DSMLA_CONVERT(fp8_to_bf16, Fp8Codec, BFloat16Codec)
NVFP4_DSMLA_CONVERT(bf16_to_nvfp4, BFloat16Codec, Nvfp4Codec)
NVFP4_DSMLA_CONVERT(bf16_to_fp8, BFloat16Codec, Fp8Codec)
#undef NVFP4_DSMLA_CONVERT

}  // namespace

void convert(const ConvertParams& p, int64_t begin, int64_t end) {
  switch (p.from) {
    case Format::kNvfp4:
      return (p.to == Format::kFp8 ? nvfp4_to_fp8 : nvfp4_to_bf16)(p, begin, end);
    case Format::kFp8:
      return (p.to == Format::kNvfp4 ? fp8_to_nvfp4 : fp8_to_bf16)(p, begin, end);
    case Format::kBFloat16:
      return (p.to == Format::kNvfp4 ? bf16_to_nvfp4 : bf16_to_fp8)(p, begin, end);
  }
}

}  // namespace nvfp4_dsmla::cpu
