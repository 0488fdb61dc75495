#include <cmath>

#include "kernels/cpu/attend.h"
#include "kernels/cpu/vectorise.h"

namespace nvfp4_dsmla::cpu {
namespace {

using AttendParts = void(const DecodeParams&, const DecodeParts&, float*, int64_t, int64_t);

// An instance for each number of registers and their width. Not target_clones, which compile one
// source with one size of blocks.
#define NVFP4_DSMLA_ATTEND(name, lanes, sums, ...)                                                 \
  __VA_ARGS__ void name##_bfloat16(const DecodeParams& p, const DecodeParts& parts,                \
                                   float* scratch, int64_t begin, int64_t end) {                   \
    attend<lanes, sums, BFloat16>(p, parts, scratch, begin, end);                                  \
  }                                                                                                \
  __VA_ARGS__ void name##_float16(const DecodeParams& p, const DecodeParts& parts, float* scratch, \
                                  int64_t begin, int64_t end) {                                    \
    attend<lanes, sums, Float16>(p, parts, scratch, begin, end);                                   \
  }                                                                                                \
  constexpr AttendParts* name[] = {&name##_bfloat16, &name##_float16};

NVFP4_DSMLA_ATTEND(attend_128, 4, 8)
#if defined(NVFP4_DSMLA_TARGETS)
NVFP4_DSMLA_ATTEND(attend_256, 8, 8, __attribute__((target("arch=x86-64-v3"))))
NVFP4_DSMLA_ATTEND(attend_512_half, 8, 16, __attribute__((target("arch=x86-64-v4"))))
NVFP4_DSMLA_ATTEND(attend_512, 16, 16, __attribute__((target("arch=x86-64-v4"))))
#endif
#undef NVFP4_DSMLA_ATTEND

AttendParts* const* choose_attend(int64_t heads) {
#if defined(NVFP4_DSMLA_TARGETS)
  if (__builtin_cpu_supports("x86-64-v4")) return heads <= 8 ? attend_512_half : attend_512;
  if (__builtin_cpu_supports("x86-64-v3")) return attend_256;
#endif
  return attend_128;
}

// exp(lse) / (exp(lse) + exp(sink)), the share of its weight that a head gives to tokens at all.
float share_of_tokens(const DecodeParams& p, int64_t head, float lse) {
  if (p.attn_sink == nullptr) return 1.0f;
  return 1.0f / (1.0f + std::exp(p.attn_sink[head * p.attn_sink_stride] - lse));
}

template <class Element>
NVFP4_DSMLA_INLINE void combine(const DecodeParams& p,
                                const DecodeParts& parts,
                                int64_t begin,
                                int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const int64_t row = i / p.heads, head = i % p.heads;
    const int64_t first = row * parts.per_row * p.heads + head;
    const int64_t last = first + parts.per_row * p.heads;
    float max = kMinusInfinity;
    for (int64_t at = first; at < last; at += p.heads) max = std::max(max, parts.max[at]);
    const float finite_max = max == kMinusInfinity ? 0.0f : max;

    float total = 0.0f;
    float out[kNopeDim] = {};
    for (int64_t at = first; at < last; at += p.heads) {
      if (parts.max[at] == kMinusInfinity && parts.sum[at] == 0.0f) continue;  // no token
      const float weight = std::exp(parts.max[at] - finite_max);
      total += weight * parts.sum[at];
      const float* __restrict part = parts.out + at * kNopeDim;
      for (int d = 0; d < kNopeDim; ++d) out[d] += weight * part[d];
    }
    const bool empty = total == 0.0f;
    const float lse = empty ? kMinusInfinity : max + std::log(total);
    const float factor = empty ? 0.0f : share_of_tokens(p, head, lse) / total;
    const int64_t to = parts.first_row * p.heads + i;
    Element* __restrict to_out = static_cast<Element*>(p.out) + to * kNopeDim;
    for (int d = 0; d < kNopeDim; ++d) to_out[d] = round_to<Element>(out[d] * factor);
    p.lse[to] = lse;
  }
}

// Clones are made of plain functions, not of templates.
NVFP4_DSMLA_VECTORISE void combine_bfloat16(const DecodeParams& p,
                                            const DecodeParts& parts,
                                            int64_t begin,
                                            int64_t end) {
  combine<BFloat16>(p, parts, begin, end);
}
NVFP4_DSMLA_VECTORISE void combine_float16(const DecodeParams& p,
                                           const DecodeParts& parts,
                                           int64_t begin,
                                           int64_t end) {
  combine<Float16>(p, parts, begin, end);
}

}  // namespace

int64_t decode_parts_per_row(const DecodeParams& p) {
  const int64_t columns = columns_per_part(p);
  return (p.topk + columns - 1) / columns;
}
int64_t decode_scratch_floats(const DecodeParams& p) { return AttendScratch::num_floats(p.heads); }

void decode(
    const DecodeParams& p, const DecodeParts& parts, float* scratch, int64_t begin, int64_t end) {
  choose_attend(p.heads)[p.element == Element::kFloat16](p, parts, scratch, begin, end);
}

void combine_decode(const DecodeParams& p, const DecodeParts& parts, int64_t begin, int64_t end) {
  return p.element == Element::kFloat16 ? combine_float16(p, parts, begin, end)
                                        : combine_bfloat16(p, parts, begin, end);
}

}  // namespace nvfp4_dsmla::cpu
