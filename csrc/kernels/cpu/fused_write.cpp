#include <type_traits>

#include "format/codecs.h"
#include "kernels/cpu/by_element.h"
#include "kernels/cpu/prefetch.h"
#include "kernels/cpu/vectorise.h"
#include "kernels/launch.h"
#include "kernels/norm_rope.h"

namespace nvfp4_dsmla::cpu {
namespace {

template <class In, int kCount>
NVFP4_DSMLA_INLINE void widen_all(const In* __restrict from, float (&to)[kCount]) {
  for (int i = 0; i < kCount; ++i) to[i] = widen(from[i]);
}

// Row `row` of a table of In or float.
template <class In, int kCount>
NVFP4_DSMLA_INLINE void widen_row(
    const void* table, Element element, int64_t row, int64_t stride, float (&to)[kCount]) {
  if (element == Element::kFloat32) {
    widen_all(static_cast<const float*>(table) + row * stride, to);
  } else {
    widen_all(static_cast<const In*>(table) + row * stride, to);
  }
}

template <class In, class Out>
NVFP4_DSMLA_INLINE void normalise_row(const In* __restrict kv_c,
                                      const float (&weight)[kNopeDim],
                                      float eps,
                                      Out* __restrict out) {
  float x[kNopeDim], squares[kNopeDim];
  widen_all(kv_c, x);
  for (int e = 0; e < kNopeDim; ++e) squares[e] = product(x[e], x[e]);
  const float inverse = inverse_rms(sum_of_pairs(squares), eps);
  for (int e = 0; e < kNopeDim; ++e) out[e] = round_to<Out>(normalise(x[e], inverse, weight[e]));
}

// Pair i is the elements `i * kStep` and `kApart` after it.
template <int kStep, int kApart, class In, class Out>
NVFP4_DSMLA_INLINE void rotate_row(const In* __restrict k_pe,
                                   const float (&cos_sin)[kRopeDim],
                                   Out* __restrict out) {
  for (int i = 0; i < kRopePairs; ++i) {
    const int first = i * kStep, second = first + kApart;
    const RopePair turned =
        rotate({widen(k_pe[first]), widen(k_pe[second])}, cos_sin[i], cos_sin[kRopePairs + i]);
    out[first] = round_to<Out>(turned.first);
    out[second] = round_to<Out>(turned.second);
  }
}

bool holds_position(const FusedWriteParams& p, int64_t t) {
  return p.positions[t] >= 0 && p.positions[t] < p.max_positions;
}

// Stored: what is encoded, In or float.
template <class In, class Stored>
NVFP4_DSMLA_INLINE void write_tokens(const FusedWriteParams& p, int64_t begin, int64_t end) {
  const WriteParams& w = p.write;
  float weight[kNopeDim];
  widen_row<In>(p.norm_weight, p.norm_weight_element, 0, 0, weight);
  for (int64_t t = begin; t < end; ++t) {
    prefetch_ahead<Nvfp4Codec, true>(w.cache, w.slot_mapping, t, end);
    const int64_t slot = w.slot_mapping[t];
    if (!w.cache.holds(slot) || !holds_position(p, t)) continue;
    float cos_sin[kRopeDim];
    widen_row<In>(p.cos_sin, p.cos_sin_element, p.positions[t], p.cos_sin_stride, cos_sin);
    Stored kv_c[kNopeDim], k_pe[kRopeDim];
    normalise_row(static_cast<const In*>(w.kv_c) + t * w.kv_c_stride, weight, p.eps, kv_c);
    const In* key = static_cast<const In*>(w.k_pe) + t * w.k_pe_stride;
    if (p.is_neox) {
      rotate_row<1, kRopePairs>(key, cos_sin, k_pe);
    } else {
      rotate_row<2, 1>(key, cos_sin, k_pe);
    }
    Nvfp4Codec::encode(kv_c, k_pe, w.cache.record(slot));
  }
}

// Clones are made of plain functions, not of templates.
#define NVFP4_DSMLA_FUSED_WRITE(name, In, Stored)                                          \
  NVFP4_DSMLA_VECTORISE void name(const FusedWriteParams& p, int64_t begin, int64_t end) { \
    write_tokens<In, Stored>(p, begin, end);                                               \
  }
NVFP4_DSMLA_FUSED_WRITE(bfloat16, BFloat16, BFloat16)
NVFP4_DSMLA_FUSED_WRITE(float16, Float16, Float16)
NVFP4_DSMLA_FUSED_WRITE(float32, float, float)
NVFP4_DSMLA_FUSED_WRITE(bfloat16_unrounded, BFloat16, float)
NVFP4_DSMLA_FUSED_WRITE(float16_unrounded, Float16, float)
#undef NVFP4_DSMLA_FUSED_WRITE

}  // namespace

void fused_write(const FusedWriteParams& p, int64_t begin, int64_t end) {
  const auto kernel = p.round_to_input ? by_element(p.write.element, bfloat16, float16, float32)
                                       : by_element(p.write.element, bfloat16_unrounded,
                                                    float16_unrounded, float32);
  kernel(p, begin, end);
}

int64_t find_position_outside(const FusedWriteParams& p) {
  for (int64_t t = 0; t < p.write.num_tokens; ++t) {
    if (p.write.cache.holds(p.write.slot_mapping[t]) && !holds_position(p, t)) return t;
  }
  return -1;
}

}  // namespace nvfp4_dsmla::cpu
