// CUDA's implementations: check, then one launch on PyTorch's current stream. Nothing is read back
// and nothing waits, so each may be captured in a CUDA graph.
#include <stdexcept>
#include <string>

#include "kernels/launch.h"
#include "ops/check.h"
#include "ops/torch_stable.h"

namespace nvfp4_dsmla {
namespace {

template <class Params>
void launch(const char* op,
            int64_t rows,
            const Params& params,
            const Tensor& on,
            int (*enqueue)(const Params&, CUstream_st*)) {
  check_limit(op, "tokens", rows, cuda::kMaxCapacity);
  check_limit(op, "num_blocks * block_size", params.cache.capacity(), cuda::kMaxCapacity);
  if (rows == 0) return;
  const int32_t device = on.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  if (const int error = enqueue(params, static_cast<CUstream_st*>(stream)); error != 0) {
    throw std::runtime_error(std::string(op) + ": the launch failed: " + cuda::error_text(error));
  }
}

void concat_and_cache(const Tensor& kv_c,
                      const Tensor& k_pe,
                      const Tensor& kv_cache,
                      const Tensor& slot_mapping,
                      int64_t layer) {
  const WriteParams p = check_write(kv_c, k_pe, kv_cache, slot_mapping, layer);
  launch("concat_and_cache_nvfp4_ds_mla", p.num_tokens, p, kv_cache, &cuda::write);
}

void cp_gather(const Tensor& src_cache,
               const Tensor& dst,
               const Tensor& block_table,
               const Tensor& workspace_starts,
               int64_t batch_size,
               const std::optional<Tensor>& seq_starts,
               int64_t layer) {
  const RequestGatherParams p = check_request_gather(src_cache, dst, block_table, workspace_starts,
                                                     batch_size, seq_starts, layer);
  launch<RequestGatherParams>("cp_gather_and_upconvert_nvfp4_kv_cache", p.num_rows, p, src_cache,
                              &cuda::gather);
}

Tensor gather(const Tensor& kv_cache,
              const Tensor& slots,
              std::optional<torch::headeronly::ScalarType> dtype,
              int64_t layer) {
  const SlotGather call = check_slot_gather(kv_cache, slots, dtype, layer);
  launch<SlotGatherParams>("gather_and_upconvert_nvfp4_ds_mla", call.params.num_rows, call.params,
                           kv_cache, &cuda::gather);
  return call.out;
}

}  // namespace
}  // namespace nvfp4_dsmla

STABLE_TORCH_LIBRARY_IMPL(nvfp4_dsmla, CUDA, library) {
  library.impl("concat_and_cache_nvfp4_ds_mla", TORCH_BOX(&nvfp4_dsmla::concat_and_cache));
  library.impl("cp_gather_and_upconvert_nvfp4_kv_cache", TORCH_BOX(&nvfp4_dsmla::cp_gather));
  library.impl("gather_and_upconvert_nvfp4_ds_mla", TORCH_BOX(&nvfp4_dsmla::gather));
}
