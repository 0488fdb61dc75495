#include "format/element.h"
#include "format/record.h"
#include "kernels/cpu/vectorise.h"
#include "kernels/launch.h"
#include "kernels/merge_weights.h"

namespace nvfp4_dsmla::cpu {
namespace {

template <class T>
NVFP4_DSMLA_INLINE void merge_rows(const MergeParams& p, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    const MergeWeights w = merge_weights(p.lse_a[r], p.lse_b[r]);
    const T* __restrict a = static_cast<const T*>(p.out_a) + r * kNopeDim;
    const T* __restrict b = static_cast<const T*>(p.out_b) + r * kNopeDim;
    T* __restrict out = static_cast<T*>(p.out) + r * kNopeDim;
    for (int d = 0; d < kNopeDim; ++d) out[d] = round_to<T>(merge(w, widen(a[d]), widen(b[d])));
    p.lse[r] = w.lse;
  }
}

// Clones are made of plain functions, not of templates.
NVFP4_DSMLA_VECTORISE void merge_bfloat16(const MergeParams& p, int64_t begin, int64_t end) {
  merge_rows<BFloat16>(p, begin, end);
}
NVFP4_DSMLA_VECTORISE void merge_float16(const MergeParams& p, int64_t begin, int64_t end) {
  merge_rows<Float16>(p, begin, end);
}
NVFP4_DSMLA_VECTORISE void merge_float32(const MergeParams& p, int64_t begin, int64_t end) {
  merge_rows<float>(p, begin, end);
}

}  // namespace

void merge(const MergeParams& p, int64_t begin, int64_t end) {
  switch (p.element) {
    case Element::kBFloat16:
      return merge_bfloat16(p, begin, end);
    case Element::kFloat16:
      return merge_float16(p, begin, end);
    case Element::kFloat32:
      return merge_float32(p, begin, end);
  }
}

}  // namespace nvfp4_dsmla::cpu
