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

// The output is allocated here, and `slots` replaced by a contiguous copy where its strides are
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

// Throws unless count <= limit: what a device's kernels can count to.
void check_limit(const char* op, const char* what, int64_t count, int64_t limit);

}  // namespace nvfp4_dsmla
