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
                        const Tensor& kv_c,
                        const Tensor& k_pe,
                        const Tensor& kv_cache,
                        const Tensor& slot_mapping,
                        int64_t layer);

inline constexpr const char* kFusedWrite = "fused_rmsnorm_rope_concat_and_cache_nvfp4_ds_mla";
FusedWriteParams check_fused_write(const Tensor& kv_c,
                                   const Tensor& k_pe,
                                   const Tensor& norm_weight,
                                   double eps,
                                   const Tensor& positions,
                                   const Tensor& cos_sin_cache,
                                   bool is_neox,
                                   const Tensor& kv_cache,
                                   const Tensor& slot_mapping,
                                   int64_t layer,
                                   bool round_to_input);

RequestGatherParams check_request_gather(Format format,
                                         const Tensor& src_cache,
                                         const Tensor& dst,
                                         const Tensor& block_table,
                                         const Tensor& workspace_starts,
                                         int64_t batch_size,
                                         const std::optional<Tensor>& seq_starts,
                                         int64_t layer);

// Outputs are allocated here. `slots` is replaced by a contiguous copy where its strides are
// more than one.
struct SlotGather {
  SlotGatherParams params;
  Tensor slots;
  Tensor out;
};
SlotGather check_slot_gather(Format format,
                             const Tensor& kv_cache,
                             const Tensor& slots,
                             std::optional<torch::headeronly::ScalarType> dtype,
                             int64_t layer);

// One for each layer, in the order of the layers.
std::vector<ConvertParams> check_convert(const Tensor& src, const Tensor& dst);

struct Decode {
  DecodeParams params;
  Tensor out;
  Tensor lse;
};
Decode check_decode(const Tensor& q,
                    const Tensor& kv_cache,
                    const Tensor& indices,
                    double softmax_scale,
                    const std::optional<Tensor>& topk_length,
                    const std::optional<Tensor>& attn_sink,
                    int64_t layer);

// `inputs`: contiguous copies of those that were not contiguous.
struct Merge {
  MergeParams params;
  std::vector<Tensor> inputs;
  Tensor out;
  Tensor lse;
};
Merge check_merge(const Tensor& out_a,
                  const Tensor& lse_a,
                  const Tensor& out_b,
                  const Tensor& lse_b);

// Throws unless count <= limit: what a device's kernels can count to.
void check_limit(const char* op, const char* what, int64_t count, int64_t limit);

}  // namespace nvfp4_dsmla
