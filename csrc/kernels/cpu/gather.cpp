#include <algorithm>

#include "format/codecs.h"
#include "kernels/cpu/by_element.h"
#include "kernels/cpu/prefetch.h"
#include "kernels/cpu/vectorise.h"
#include "kernels/launch.h"

namespace nvfp4_dsmla::cpu {
namespace {

template <class Codec, class Out>
NVFP4_DSMLA_INLINE void gather_slots(const SlotGatherParams& p, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    prefetch_ahead<Codec, false>(p.cache, p.slots, r, end);
    Out* row = static_cast<Out*>(p.dst) + r * kHeadDim;
    const int64_t slot = p.slots[r];
    if (p.cache.holds(slot)) {
      Codec::decode(p.cache.record(slot), row);
    } else {
      std::fill_n(row, kHeadDim, Out{});
    }
  }
}

// The rows of request `request` lie in [start(request), start(request + 1)).
int64_t start(const RequestGatherParams& p, int64_t request) {
  return request < p.num_requests ? p.workspace_starts[request * p.workspace_starts_stride]
                                  : p.num_rows;
}

// Where in its request's blocks row `row` is.
int64_t token_of(const RequestGatherParams& p, int64_t request, int64_t row) {
  const int64_t seq_start =
      p.seq_starts == nullptr ? 0 : p.seq_starts[request * p.seq_starts_stride];
  return seq_start + row - start(p, request);
}

int64_t block_at(const RequestGatherParams& p, int64_t request, int64_t column) {
  return p.block_table[request * p.block_table_row_stride + column * p.block_table_column_stride];
}

// The last request that starts at or before `row`; -1 if there is none.
int64_t request_of(const RequestGatherParams& p, int64_t row) {
  int64_t low = 0, high = p.num_requests;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (start(p, middle) <= row) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low - 1;
}

template <class Codec, class Out>
NVFP4_DSMLA_INLINE void gather_requests(const RequestGatherParams& p, int64_t begin, int64_t end) {
  int64_t request = request_of(p, begin);
  for (int64_t r = begin; r < end; ++r) {
    Out* row = static_cast<Out*>(p.dst) + r * p.dst_stride;
    if (request < 0) {
      std::fill_n(row, kHeadDim, Out{});
      continue;
    }
    while (start(p, request + 1) <= r && request + 1 < p.num_requests) ++request;
    const int64_t token = token_of(p, request, r);
    const int64_t block = block_at(p, request, token / p.cache.block_size);
    Codec::decode(p.cache.record(block, token % p.cache.block_size), row);
  }
}

// Clones are made of plain functions, not of templates.
#define NVFP4_DSMLA_GATHER(name, Codec, Out)                                                       \
  NVFP4_DSMLA_VECTORISE void slots_##name(const SlotGatherParams& p, int64_t begin, int64_t end) { \
    gather_slots<Codec, Out>(p, begin, end);                                                       \
  }                                                                                                \
  NVFP4_DSMLA_VECTORISE void requests_##name(const RequestGatherParams& p, int64_t begin,          \
                                             int64_t end) {                                        \
    gather_requests<Codec, Out>(p, begin, end);                                                    \
  }
NVFP4_DSMLA_GATHER(nvfp4_bfloat16, Nvfp4Codec, BFloat16)
NVFP4_DSMLA_GATHER(nvfp4_float16, Nvfp4Codec, Float16)
NVFP4_DSMLA_GATHER(nvfp4_float32, Nvfp4Codec, float)
NVFP4_DSMLA_GATHER(fp8_bfloat16, Fp8Codec, BFloat16)
NVFP4_DSMLA_GATHER(fp8_float16, Fp8Codec, Float16)
NVFP4_DSMLA_GATHER(fp8_float32, Fp8Codec, float)
#undef NVFP4_DSMLA_GATHER

}  // namespace

void gather(const SlotGatherParams& p, int64_t begin, int64_t end) {
  const Kernel<SlotGatherParams> kernel =
      p.format == Format::kFp8
          ? by_element(p.element, slots_fp8_bfloat16, slots_fp8_float16, slots_fp8_float32)
          : by_element(p.element, slots_nvfp4_bfloat16, slots_nvfp4_float16, slots_nvfp4_float32);
  kernel(p, begin, end);
}

void gather(const RequestGatherParams& p, int64_t begin, int64_t end) {
  const Kernel<RequestGatherParams> kernel =
      p.format == Format::kFp8
          ? by_element(p.element, requests_fp8_bfloat16, requests_fp8_float16, requests_fp8_float32)
          : by_element(p.element, requests_nvfp4_bfloat16, requests_nvfp4_float16,
                       requests_nvfp4_float32);
  kernel(p, begin, end);
}

GatherFaultAt find_gather_fault(const RequestGatherParams& p) {
  if (p.num_requests > 0 && start(p, 0) != 0) {
    return {GatherFault::kStartsNotFromZero, 0, 0, start(p, 0)};
  }
  for (int64_t request = 1; request < p.num_requests; ++request) {
    if (start(p, request) < start(p, request - 1)) {
      return {GatherFault::kStartsDecrease, request, 0, start(p, request)};
    }
  }
  for (int64_t request = 0; request < p.num_requests; ++request) {
    const int64_t first_row = start(p, request);
    const int64_t last_row = std::min(start(p, request + 1), p.num_rows) - 1;
    if (last_row < first_row) continue;
    const int64_t first = token_of(p, request, first_row);
    const int64_t last = token_of(p, request, last_row);
    if (first < 0) return {GatherFault::kTokenOutsideTable, request, 0, first};
    if (last >= p.max_blocks * p.cache.block_size) {
      return {GatherFault::kTokenOutsideTable, request, 0, last};
    }
    for (int64_t c = first / p.cache.block_size; c <= last / p.cache.block_size; ++c) {
      const int64_t block = block_at(p, request, c);
      if (block < 0 || block >= p.cache.num_blocks) {
        return {GatherFault::kBlockOutsideCache, request, c, block};
      }
    }
  }
  return {};
}

}  // namespace nvfp4_dsmla::cpu
