// What each operation needs, as plain data: checked, resolved, free of tensors. One struct an op.
// Unless a comment says otherwise, strides are in elements of the pointer's type and no pointer is
// null while its extent is not zero.
#pragma once

#include <cstdint>

#include "format/paged_cache.h"

namespace nvfp4_dsmla {

enum class Element : uint8_t { kBFloat16, kFloat16, kFloat32 };
enum class Index : uint8_t { kInt32, kInt64 };

// A vector of slots, whichever integer type the caller has.
struct Slots {
  const void* data;
  Index type;
  int64_t stride;

  NVFP4_DSMLA_INLINE int64_t operator[](int64_t i) const {
    return type == Index::kInt64 ? static_cast<const int64_t*>(data)[i * stride]
                                 : static_cast<const int32_t*>(data)[i * stride];
  }
};

// concat_and_cache_nvfp4_ds_mla
struct WriteParams {
  const void* kv_c;     // [num_tokens or more, 512] of `element`, rows contiguous
  const void* k_pe;     // [num_tokens or more, 64] of `element`, rows contiguous
  int64_t kv_c_stride;  // between rows
  int64_t k_pe_stride;  // between rows
  Element element;
  PagedCache<uint8_t> cache;
  Slots slot_mapping;  // [num_tokens]; a slot the cache does not hold is skipped
  int64_t num_tokens;
};

// cp_gather_and_upconvert_nvfp4_kv_cache
struct RequestGatherParams {
  PagedCache<const uint8_t> cache;
  void* dst;           // [num_rows, 576] of `element`, rows contiguous
  int64_t dst_stride;  // between rows
  Element element;
  int64_t num_rows;
  const int32_t* block_table;  // [num_requests, max_blocks]
  int64_t block_table_row_stride;
  int64_t block_table_column_stride;
  int64_t max_blocks;
  const int32_t* workspace_starts;  // [num_requests], non-decreasing from 0
  int64_t workspace_starts_stride;
  const int32_t* seq_starts;  // [num_requests] or null: all zero
  int64_t seq_starts_stride;
  int64_t num_requests;  // may be 0: then every row is zero
};

// gather_and_upconvert_nvfp4_ds_mla
struct SlotGatherParams {
  PagedCache<const uint8_t> cache;
  void* dst;  // [num_rows, 576] of `element`, contiguous
  Element element;
  Slots slots;  // [num_rows]; a slot the cache does not hold gives a zero row
  int64_t num_rows;
};

}  // namespace nvfp4_dsmla
