// Tensors -> parameters. Every message of the library about its arguments is in check.cpp, once,
// for all devices; a bad argument throws std::invalid_argument (ValueError in Python) before
// anything is written.
#pragma once

#include "kernels/params.h"
#include "ops/torch_stable.h"

namespace nvfp4_dsmla {

// The ops of a format by name.
struct OpNames {
  const char* write;
  const char* request_gather;
  const char* slot_gather;
};
constexpr OpNames op_names(Format format) {
  switch (format) {
    case Format::kNvfp4:
      return {"concat_and_cache_nvfp4_ds_mla", "cp_gather_and_upconvert_nvfp4_kv_cache",
              "gather_and_upconvert_nvfp4_ds_mla"};
    case Format::kFp8:
      return {"concat_and_cache_fp8_ds_mla", "cp_gather_and_upconvert_fp8_kv_cache",
              "gather_and_upconvert_fp8_ds_mla"};
    case Format::kBFloat16:
      return {"concat_and_cache_bfloat16", nullptr, nullptr};
  }
  return {};
}

WriteParams check_write(Format format,
                        TensorRef kv_c,
                        TensorRef k_pe,
                        TensorRef kv_cache,
                        TensorRef slot_mapping,
                        int64_t layer);

inline constexpr const char* kFusedWrite = "fused_rmsnorm_rope_concat_and_cache_nvfp4_ds_mla";
FusedWriteParams check_fused_write(TensorRef kv_c,
                                   TensorRef k_pe,
                                   TensorRef norm_weight,
                                   double eps,
                                   TensorRef positions,
                                   TensorRef cos_sin_cache,
                                   bool is_neox,
                                   TensorRef kv_cache,
                                   TensorRef slot_mapping,
                                   int64_t layer,
                                   bool round_to_input);

RequestGatherParams check_request_gather(Format format,
                                         TensorRef src_cache,
                                         TensorRef dst,
                                         TensorRef block_table,
                                         TensorRef workspace_starts,
                                         int64_t batch_size,
                                         std::optional<TensorRef> seq_starts,
                                         int64_t layer);

// Outputs are allocated here; so is a contiguous copy of what is read through one stride and has
// more of them.
struct SlotGather {
  SlotGatherParams params;
  std::optional<Tensor> slots_copy;
  Tensor out;
};
SlotGather check_slot_gather(Format format,
                             TensorRef kv_cache,
                             TensorRef slots,
                             std::optional<torch::headeronly::ScalarType> dtype,
                             int64_t layer);

// One for each layer, in the order of the layers.
std::vector<ConvertParams> check_convert(TensorRef src, TensorRef dst);

struct Decode {
  DecodeParams params;
  Tensor out;
  Tensor lse;
};
Decode check_decode(TensorRef q,
                    TensorRef kv_cache,
                    TensorRef indices,
                    double softmax_scale,
                    std::optional<TensorRef> topk_length,
                    std::optional<TensorRef> attn_sink,
                    int64_t layer);

struct Merge {
  MergeParams params;
  std::vector<Tensor> copies;
  Tensor out;
  Tensor lse;
};
Merge check_merge(TensorRef out_a, TensorRef lse_a, TensorRef out_b, TensorRef lse_b);

// Throws unless count <= limit: what a device's kernels can count to.
void check_limit(const char* op, const char* what, int64_t count, int64_t limit);

}  // namespace nvfp4_dsmla
