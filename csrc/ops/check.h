// Tensors -> parameters. Every message of the library about its arguments is in check.cpp, once,
// for all devices; a bad argument throws std::invalid_argument (ValueError in Python) before
// anything is written.
#pragma once

#include "kernels/params.h"
#include "ops/torch_stable.h"

namespace nvfp4_dsmla {

WriteParams check_write(const Tensor& kv_c,
                        const Tensor& k_pe,
                        const Tensor& kv_cache,
                        const Tensor& slot_mapping,
                        int64_t layer);

RequestGatherParams check_request_gather(const Tensor& src_cache,
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
SlotGather check_slot_gather(const Tensor& kv_cache,
                             const Tensor& slots,
                             std::optional<torch::headeronly::ScalarType> dtype,
                             int64_t layer);

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
