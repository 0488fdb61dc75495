#include <algorithm>

#include "format/codecs.h"
#include "kernels/cpu/by_element.h"
#include "kernels/cpu/prefetch.h"
#include "kernels/cpu/vectorise.h"
#include "kernels/launch.h"

namespace nvfp4_dsmla::cpu {
namespace {

template <class Codec, class In>
NVFP4_DSMLA_INLINE void write_tokens(const WriteParams& p, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    prefetch_ahead<Codec, true>(p.cache, p.slot_mapping, t, end);
    const int64_t slot = p.slot_mapping[t];
    if (!p.cache.holds(slot)) continue;
    Codec::encode(static_cast<const In*>(p.kv_c) + t * p.kv_c_stride,
                  static_cast<const In*>(p.k_pe) + t * p.k_pe_stride, p.cache.record(slot));
  }
}

// Clones are made of plain functions, not of templates.
#define NVFP4_DSMLA_WRITE(name, Codec, In)                                            \
  NVFP4_DSMLA_VECTORISE void name(const WriteParams& p, int64_t begin, int64_t end) { \
    write_tokens<Codec, In>(p, begin, end);                                           \
  }
NVFP4_DSMLA_WRITE(nvfp4_bfloat16, Nvfp4Codec, BFloat16)
NVFP4_DSMLA_WRITE(nvfp4_float16, Nvfp4Codec, Float16)
NVFP4_DSMLA_WRITE(nvfp4_float32, Nvfp4Codec, float)
NVFP4_DSMLA_WRITE(fp8_bfloat16, Fp8Codec, BFloat16)
NVFP4_DSMLA_WRITE(fp8_float16, Fp8Codec, Float16)
NVFP4_DSMLA_WRITE(fp8_float32, Fp8Codec, float)
NVFP4_DSMLA_WRITE(bf16_bfloat16, BFloat16Codec, BFloat16)
NVFP4_DSMLA_WRITE(bf16_float16, BFloat16Codec, Float16)
NVFP4_DSMLA_WRITE(bf16_float32, BFloat16Codec, float)
#undef NVFP4_DSMLA_WRITE

}  // namespace

void write(const WriteParams& p, int64_t begin, int64_t end) {
  switch (p.format) {
    case Format::kNvfp4:
      return by_element(p.element, nvfp4_bfloat16, nvfp4_float16, nvfp4_float32)(p, begin, end);
    case Format::kFp8:
      return by_element(p.element, fp8_bfloat16, fp8_float16, fp8_float32)(p, begin, end);
    case Format::kBFloat16:
      return by_element(p.element, bf16_bfloat16, bf16_float16, bf16_float32)(p, begin, end);
  }
}

int64_t find_slot_past_capacity(const WriteParams& p) {
  for (int64_t t = 0; t < p.num_tokens; ++t) {
    if (p.slot_mapping[t] >= p.cache.capacity()) return t;
  }
  return -1;
}

}  // namespace nvfp4_dsmla::cpu
