// CUDA's implementations: check, then launch on PyTorch's current stream. Nothing is read back
// and nothing waits, so each may be captured in a CUDA graph.
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>

#include "kernels/launch.h"
#include "ops/check.h"
#include "ops/implementations.h"
#include "ops/torch_stable.h"

namespace nvfp4_dsmla {
namespace {

[[noreturn]] void throw_launch_error(const char* op, int32_t device, int error) {
  if (!cuda::is_missing_code(error)) {
    throw std::runtime_error(std::string(op) + ": the launch failed: " + cuda::error_text(error));
  }
  std::string built;  // "sm_90a,sm_100f", to be read
  for (const char c : std::string_view(NVFP4_DSMLA_CUDA_ARCHS)) {
    built += c;
    if (c == ',') built += ' ';
  }
  const cuda::ComputeCapability got = cuda::compute_capability(device);
  throw std::runtime_error(
      std::string(op) + ": wanted a GPU that this build has the op's code for (" + built +
      "), got compute capability " + std::to_string(got.major) + '.' + std::to_string(got.minor));
}

// `enqueue` takes PyTorch's current stream on the device of `on`.
template <class Enqueue>
void on_current_stream(const char* op, TensorRef on, const Enqueue& enqueue) {
  const int32_t device = on.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  if (const int error = enqueue(static_cast<CUstream_st*>(stream)); error != 0) {
    throw_launch_error(op, device, error);
  }
}

template <class Byte>
void check_capacity(const char* op, const PagedCache<Byte>& cache) {
  check_limit(op, "num_blocks * block_size", cache.capacity(), cuda::kMaxCapacity);
}

template <class Params, class Byte>
void launch(const char* op,
            int64_t rows,
            const PagedCache<Byte>& cache,
            const Params& params,
            TensorRef on,
            int (*enqueue)(const Params&, CUstream_st*)) {
  check_limit(op, "tokens", rows, cuda::kMaxCapacity);
  check_capacity(op, cache);
  if (rows == 0) return;
  on_current_stream(op, on, [&](CUstream_st* stream) { return enqueue(params, stream); });
}

template <Format kFormat>
void concat_and_cache(
    TensorRef kv_c, TensorRef k_pe, TensorRef kv_cache, TensorRef slot_mapping, int64_t layer) {
  const WriteParams p = check_write(kFormat, kv_c, k_pe, kv_cache, slot_mapping, layer);
  launch(op_names(kFormat).write, p.num_tokens, p.cache, p, kv_cache, &cuda::write);
}

void fused_concat_and_cache(TensorRef kv_c,
                            TensorRef k_pe,
                            TensorRef norm_weight,
                            double eps,
                            TensorRef positions,
                            TensorRef cos_sin_cache,
                            bool is_neox,
                            TensorRef kv_cache,
                            TensorRef slot_mapping,
                            int64_t layer,
                            bool round_to_input) {
  const FusedWriteParams p =
      check_fused_write(kv_c, k_pe, norm_weight, eps, positions, cos_sin_cache, is_neox, kv_cache,
                        slot_mapping, layer, round_to_input);
  launch(kFusedWrite, p.write.num_tokens, p.write.cache, p, kv_cache, &cuda::fused_write);
}

template <Format kFormat>
void cp_gather(TensorRef src_cache,
               TensorRef dst,
               TensorRef block_table,
               TensorRef workspace_starts,
               int64_t batch_size,
               std::optional<TensorRef> seq_starts,
               int64_t layer) {
  const RequestGatherParams p = check_request_gather(
      kFormat, src_cache, dst, block_table, workspace_starts, batch_size, seq_starts, layer);
  launch<RequestGatherParams>(op_names(kFormat).request_gather, p.num_rows, p.cache, p, src_cache,
                              &cuda::gather);
}

template <Format kFormat>
Tensor gather(TensorRef kv_cache,
              TensorRef slots,
              std::optional<torch::headeronly::ScalarType> dtype,
              int64_t layer) {
  const SlotGather call = check_slot_gather(kFormat, kv_cache, slots, dtype, layer);
  launch<SlotGatherParams>(op_names(kFormat).slot_gather, call.params.num_rows, call.params.cache,
                           call.params, kv_cache, &cuda::gather);
  return call.out;
}

void convert(TensorRef src, TensorRef dst) {
  constexpr const char* kOp = "convert_kv_cache";
  for (const ConvertParams& p : check_convert(src, dst)) {
    check_capacity(kOp, p.src);
    if (p.src.capacity() == 0) continue;
    on_current_stream(kOp, dst, [&](CUstream_st* stream) { return cuda::convert(p, stream); });
  }
}

std::tuple<Tensor, Tensor> decode(TensorRef q,
                                  TensorRef kv_cache,
                                  TensorRef indices,
                                  double softmax_scale,
                                  std::optional<TensorRef> topk_length,
                                  std::optional<TensorRef> attn_sink,
                                  int64_t layer) {
  constexpr const char* kOp = "sparse_mla_decode";
  const Decode call =
      check_decode(q, kv_cache, indices, softmax_scale, topk_length, attn_sink, layer);
  const DecodeParams& p = call.params;
  check_capacity(kOp, p.cache);
  check_limit(kOp, "batch * s_q * heads", p.batch * p.s_q * p.heads, cuda::kMaxCapacity);
  check_limit(kOp, "topk", p.topk, cuda::kMaxTopk);
  if (p.batch * p.s_q * p.heads == 0) return {call.out, call.lse};
  on_current_stream(kOp, kv_cache, [&](CUstream_st* stream) {
    const DecodePlan plan = cuda::decode_plan(p);
    const int64_t bytes = cuda::decode_workspace_bytes(p, plan);
    if (bytes == 0) return cuda::decode(p, plan, nullptr, stream);
    // Given back when the call returns, and taken again only by what runs on the stream after it.
    const Tensor workspace = empty_contiguous({bytes}, aoti_torch_dtype_uint8(),
                                              aoti_torch_device_type_cuda(), q.get_device_index());
    return cuda::decode(p, plan, workspace.data_ptr(), stream);
  });
  return {call.out, call.lse};
}

std::tuple<Tensor, Tensor> merge(TensorRef out_a,
                                 TensorRef lse_a,
                                 TensorRef out_b,
                                 TensorRef lse_b) {
  constexpr const char* kOp = "merge_attention_states";
  const Merge call = check_merge(out_a, lse_a, out_b, lse_b);
  check_limit(kOp, "rows", call.params.num_rows, cuda::kMaxCapacity);
  if (call.params.num_rows == 0) return {call.out, call.lse};
  on_current_stream(kOp, out_a,
                    [&](CUstream_st* stream) { return cuda::merge(call.params, stream); });
  return {call.out, call.lse};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(nvfp4_dsmla, CUDA, library) { NVFP4_DSMLA_IMPLEMENT(library) }

}  // namespace nvfp4_dsmla

#define NVFP4_DSMLA_DEVICE cuda
#include "ops/entry_points.h"
