// The tokens of a write.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/lane_block.cuh"
#include "kernels/cuda/paging.cuh"
#include "kernels/params.h"

namespace nvfp4_dsmla::cuda {

// A vector of slots or positions, its stride in bytes.
struct IndexColumn {
  explicit IndexColumn(const IndexVector& v)
      : data(v.data),
        stride(v.stride * (v.type == Index::kInt64 ? sizeof(int64_t) : sizeof(int32_t))),
        is_int64(v.type == Index::kInt64) {}

  template <bool kNarrow>
  __device__ int64_t at(uint32_t i) const {
    const void* entry = row_at<kNarrow>(data, i, stride);
    return is_int64 ? *static_cast<const int64_t*>(entry) : *static_cast<const int32_t*>(entry);
  }

  const void* data;
  int64_t stride;
  bool is_int64;
};

// WriteParams, resolved: strides in bytes.
struct Tokens {
  Tokens(const WriteParams& p, int64_t element_bytes)
      : kv_c(p.kv_c),
        k_pe(p.k_pe),
        kv_c_stride(p.kv_c_stride * element_bytes),
        k_pe_stride(p.k_pe_stride * element_bytes),
        slots(p.slot_mapping),
        cache(p.cache),
        count(static_cast<uint32_t>(p.num_tokens)) {}

  const void* kv_c;
  const void* k_pe;
  int64_t kv_c_stride;
  int64_t k_pe_stride;
  IndexColumn slots;
  DeviceCache<uint8_t> cache;
  uint32_t count;
};

// A lane's elements of token `token`.
template <class In>
struct LaneElements {
  template <bool kWide>
  __device__ void load(const Tokens& tokens, uint32_t token) {
    const int lane = lane_id();
    const In* kv_c = static_cast<const In*>(row_at<kWide>(tokens.kv_c, token, tokens.kv_c_stride));
    const In* k_pe = static_cast<const In*>(row_at<kWide>(tokens.k_pe, token, tokens.k_pe_stride));
    nope.template load<kWide>(kv_c + lane * kNopePerLane);
    rope.template load<kWide>(k_pe + lane * kRopePerLane);
  }

  NopeElements<In> nope;
  RopeElements<In> rope;
};

// Whether kv_c may be loaded 16 bytes at a time, a lane's RoPE elements and its parts of a record
// whole.
template <class Codec>
bool can_go_wide(const Tokens& t, const PagedCache<uint8_t>& cache, int64_t element_bytes) {
  const int64_t rope_bytes = kRopePerLane * element_bytes;
  return aligned(t.kv_c, 16) && t.kv_c_stride % 16 == 0 && fits_narrow(t.kv_c_stride) &&
         aligned(t.k_pe, rope_bytes) && t.k_pe_stride % rope_bytes == 0 &&
         fits_narrow(t.k_pe_stride) && fits_narrow(t.slots.stride) &&
         records_aligned(cache, Codec::kStoreBytes);
}

// For a write at every size from 1 to 262,144 tokens as good as 1, 2, 8 or 16, or better
// (docs/kernels.md).
inline constexpr uint32_t kWarpsPerBlock = 4;

}  // namespace nvfp4_dsmla::cuda
