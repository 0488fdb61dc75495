// What each operation needs, as plain data: checked, resolved, free of tensors. One struct an op.
// Unless a comment says otherwise, strides are in elements of the pointer's type and no pointer is
// null while its extent is not zero.
#pragma once

#include <cstdint>

#include "format/paged_cache.h"

namespace nvfp4_dsmla {

// Of a cache's records: nvfp4_ds_mla, fp8_ds_mla and bfloat16 (format/codecs.h).
enum class Format : uint8_t { kNvfp4, kFp8, kBFloat16 };
enum class Element : uint8_t { kBFloat16, kFloat16, kFloat32 };
enum class Index : uint8_t { kInt32, kInt64 };

// A vector of slots or positions, whichever integer type the caller has.
struct IndexVector {
  const void* data;
  Index type;
  int64_t stride;

  NVFP4_DSMLA_INLINE int64_t operator[](int64_t i) const {
    return type == Index::kInt64 ? static_cast<const int64_t*>(data)[i * stride]
                                 : static_cast<const int32_t*>(data)[i * stride];
  }
};

// concat_and_cache_nvfp4_ds_mla, .._fp8_ds_mla, .._bfloat16
struct WriteParams {
  Format format;
  const void* kv_c;     // [num_tokens or more, 512] of `element`, rows contiguous
  const void* k_pe;     // [num_tokens or more, 64] of `element`, rows contiguous
  int64_t kv_c_stride;  // between rows
  int64_t k_pe_stride;  // between rows
  Element element;
  PagedCache<uint8_t> cache;
  IndexVector slot_mapping;  // [num_tokens]; a slot the cache does not hold is skipped
  int64_t num_tokens;
};

// fused_rmsnorm_rope_concat_and_cache_nvfp4_ds_mla
struct FusedWriteParams {
  WriteParams write;        // kv_c before the norm, k_pe before the rotation
  const void* norm_weight;  // [512] of `norm_weight_element`, contiguous
  Element norm_weight_element;
  float eps;
  IndexVector positions;  // [num_tokens]; one outside [0, max_positions) is skipped
  const void* cos_sin;    // [max_positions, 64] of `cos_sin_element`, rows contiguous
  int64_t cos_sin_stride;
  Element cos_sin_element;
  int64_t max_positions;
  bool is_neox;         // element i is turned with i + 32, else 2i with 2i + 1
  bool round_to_input;  // what is encoded, to `write.element`; else it stays float
};

// cp_gather_and_upconvert_nvfp4_kv_cache, .._fp8_kv_cache
struct RequestGatherParams {
  Format format;  // kNvfp4 or kFp8
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

// gather_and_upconvert_nvfp4_ds_mla, .._fp8_ds_mla
struct SlotGatherParams {
  Format format;  // kNvfp4 or kFp8
  PagedCache<const uint8_t> cache;
  void* dst;  // [num_rows, 576] of `element`, contiguous
  Element element;
  IndexVector slots;  // [num_rows]; a slot the cache does not hold gives a zero row
  int64_t num_rows;
};

// convert_kv_cache, one layer: record i of src becomes record i of dst.
struct ConvertParams {
  Format from;
  Format to;  // not `from`
  PagedCache<const uint8_t> src;
  PagedCache<uint8_t> dst;  // as many blocks of as many tokens as src
};

// sparse_mla_decode
struct DecodeParams {
  const void* q;  // [batch, s_q, heads, 576] of `element`, the last dimension contiguous
  int64_t q_batch_stride;
  int64_t q_token_stride;
  int64_t q_head_stride;
  Element element;  // kBFloat16 or kFloat16
  PagedCache<const uint8_t> cache;
  const int32_t* indices;  // [batch, s_q, topk]; an index the cache does not hold is no token
  int64_t indices_batch_stride;
  int64_t indices_token_stride;
  int64_t indices_column_stride;
  int64_t batch;
  int64_t s_q;
  int64_t heads;
  int64_t topk;
  // [batch] (token stride 0) or [batch, s_q], or null: topk. Columns at or past it are not read.
  // Below 0 counts as 0, above topk as topk.
  const int32_t* topk_length;
  int64_t topk_length_batch_stride;
  int64_t topk_length_token_stride;
  const float* attn_sink;  // [heads] or null
  int64_t attn_sink_stride;
  float softmax_scale;
  void* out;   // [batch, s_q, heads, 512] of `element`, contiguous
  float* lse;  // [batch, s_q, heads], contiguous; natural logarithm, without the sink
};

// merge_attention_states: of two attentions over disjoint tokens, that over both.
struct MergeParams {
  const void* out_a;   // [num_rows, 512] of `element`, contiguous
  const float* lse_a;  // [num_rows], contiguous; -inf: no token, and the row of out_a is not used
  const void* out_b;   // likewise
  const float* lse_b;
  Element element;
  int64_t num_rows;
  void* out;   // [num_rows, 512] of `element`, contiguous
  float* lse;  // [num_rows], contiguous
};

}  // namespace nvfp4_dsmla
