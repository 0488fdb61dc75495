#include <algorithm>

#include "format/token.h"
#include "kernels/cpu/prefetch.h"
#include "kernels/cpu/vectorise.h"
#include "kernels/launch.h"

namespace nvfp4_dsmla::cpu {
namespace {

template <class In>
NVFP4_DSMLA_INLINE void write_tokens(const WriteParams& p, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    prefetch_ahead<true>(p.cache, p.slot_mapping, t, end);
    const int64_t slot = p.slot_mapping[t];
    if (!p.cache.holds(slot)) continue;
    encode_token(static_cast<const In*>(p.kv_c) + t * p.kv_c_stride,
                 static_cast<const In*>(p.k_pe) + t * p.k_pe_stride, p.cache.record(slot));
  }
}

// Clones are made of plain functions, not of templates.
NVFP4_DSMLA_VECTORISE void write_bfloat16(const WriteParams& p, int64_t begin, int64_t end) {
  write_tokens<BFloat16>(p, begin, end);
}
NVFP4_DSMLA_VECTORISE void write_float16(const WriteParams& p, int64_t begin, int64_t end) {
  write_tokens<Float16>(p, begin, end);
}
NVFP4_DSMLA_VECTORISE void write_float32(const WriteParams& p, int64_t begin, int64_t end) {
  write_tokens<float>(p, begin, end);
}

}  // namespace

void write(const WriteParams& p, int64_t begin, int64_t end) {
  switch (p.element) {
    case Element::kBFloat16:
      return write_bfloat16(p, begin, end);
    case Element::kFloat16:
      return write_float16(p, begin, end);
    case Element::kFloat32:
      return write_float32(p, begin, end);
  }
}

int64_t find_slot_past_capacity(const WriteParams& p) {
  for (int64_t t = 0; t < p.num_tokens; ++t) {
    if (p.slot_mapping[t] >= p.cache.capacity()) return t;
  }
  return -1;
}

}  // namespace nvfp4_dsmla::cpu
