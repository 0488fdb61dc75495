// A device's ops as C functions, which code that AOTInductor generates calls without a dispatcher
// (its option aot_inductor.custom_ops_to_c_shims; see nvfp4_dsmla.aoti). Included at the end of the
// device's register_*.cpp, which has the implementations and defines NVFP4_DSMLA_DEVICE as torch
// calls it, cpu or cuda.
//
// Names and arguments are AOTInductor's convention (torch 2.10 .. 2.14): the schema's arguments, a
// pointer for an optional one, then a pointer for each result. An op without results gets one
// pointer too, null or to a handle that the caller will own.
#pragma once

#include <cstdio>
#include <exception>
#include <tuple>
#include <type_traits>

#include "ops/check.h"
#include "ops/torch_stable.h"

namespace nvfp4_dsmla {
namespace {

using Handle = AtenTensorHandle;

std::optional<TensorRef> optional(const Handle* handle) {
  return handle == nullptr ? std::nullopt : std::optional<TensorRef>(*handle);
}

void give(const Tensor& tensor, Handle* result) {
  TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(tensor.get(), result));
}

// The caller gets a code and throws an error of its own, which says where but not what.
template <auto kOp, class... Results, class... Arguments>
AOTITorchError call(std::tuple<Results*...> results, const Arguments&... arguments) {
  try {
    if constexpr (std::is_void_v<decltype(kOp(arguments...))>) {
      kOp(arguments...);
      if (Handle* nothing = std::get<0>(results)) *nothing = nullptr;
    } else if constexpr (sizeof...(Results) == 1) {
      give(kOp(arguments...), std::get<0>(results));
    } else {
      const auto [first, second] = kOp(arguments...);
      give(first, std::get<0>(results));
      give(second, std::get<1>(results));
    }
    return AOTI_TORCH_SUCCESS;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "nvfp4_dsmla: %s\n", error.what());
    return AOTI_TORCH_FAILURE;
  }
}

}  // namespace

#define NVFP4_DSMLA_JOIN(device, op) aoti_torch_##device##_##op
#define NVFP4_DSMLA_ENTRY_OF(device, op) \
  __attribute__((visibility("default"))) AOTITorchError NVFP4_DSMLA_JOIN(device, op)
#define NVFP4_DSMLA_ENTRY(op) NVFP4_DSMLA_ENTRY_OF(NVFP4_DSMLA_DEVICE, op)

extern "C" {

#define NVFP4_DSMLA_WRITE_ENTRY(op, kFormat)                                                   \
  NVFP4_DSMLA_ENTRY(op)(Handle kv_c, Handle k_pe, Handle kv_cache, Handle slot_mapping,        \
                        int64_t layer, Handle* nothing) {                                      \
    return call<&concat_and_cache<Format::kFormat>>(std::tuple(nothing), kv_c, k_pe, kv_cache, \
                                                    slot_mapping, layer);                      \
  }
NVFP4_DSMLA_WRITE_ENTRY(concat_and_cache_nvfp4_ds_mla, kNvfp4)
NVFP4_DSMLA_WRITE_ENTRY(concat_and_cache_fp8_ds_mla, kFp8)
NVFP4_DSMLA_WRITE_ENTRY(concat_and_cache_bfloat16, kBFloat16)

NVFP4_DSMLA_ENTRY(fused_rmsnorm_rope_concat_and_cache_nvfp4_ds_mla)(Handle kv_c,
                                                                    Handle k_pe,
                                                                    Handle norm_weight,
                                                                    double eps,
                                                                    Handle positions,
                                                                    Handle cos_sin_cache,
                                                                    int32_t is_neox,
                                                                    Handle kv_cache,
                                                                    Handle slot_mapping,
                                                                    int64_t layer,
                                                                    int32_t round_to_input,
                                                                    Handle* nothing) {
  return call<&fused_concat_and_cache>(std::tuple(nothing), kv_c, k_pe, norm_weight, eps, positions,
                                       cos_sin_cache, is_neox, kv_cache, slot_mapping, layer,
                                       round_to_input);
}

#define NVFP4_DSMLA_REQUEST_GATHER_ENTRY(op, kFormat)                                              \
  NVFP4_DSMLA_ENTRY(op)(Handle src_cache, Handle dst, Handle block_table, Handle workspace_starts, \
                        int64_t batch_size, const Handle* seq_starts, int64_t layer,               \
                        Handle* nothing) {                                                         \
    return call<&cp_gather<Format::kFormat>>(std::tuple(nothing), src_cache, dst, block_table,     \
                                             workspace_starts, batch_size, optional(seq_starts),   \
                                             layer);                                               \
  }
NVFP4_DSMLA_REQUEST_GATHER_ENTRY(cp_gather_and_upconvert_nvfp4_kv_cache, kNvfp4)
NVFP4_DSMLA_REQUEST_GATHER_ENTRY(cp_gather_and_upconvert_fp8_kv_cache, kFp8)

#define NVFP4_DSMLA_SLOT_GATHER_ENTRY(op, kFormat)                                                 \
  NVFP4_DSMLA_ENTRY(op)(Handle kv_cache, Handle slots, const int32_t* dtype, int64_t layer,        \
                        Handle* out) {                                                             \
    return call<&gather<Format::kFormat>>(std::tuple(out), kv_cache, slots, scalar_type_of(dtype), \
                                          layer);                                                  \
  }
NVFP4_DSMLA_SLOT_GATHER_ENTRY(gather_and_upconvert_nvfp4_ds_mla, kNvfp4)
NVFP4_DSMLA_SLOT_GATHER_ENTRY(gather_and_upconvert_fp8_ds_mla, kFp8)

NVFP4_DSMLA_ENTRY(convert_kv_cache)(Handle src, Handle dst, Handle* nothing) {
  return call<&convert>(std::tuple(nothing), src, dst);
}

NVFP4_DSMLA_ENTRY(sparse_mla_decode)(Handle q,
                                     Handle kv_cache,
                                     Handle indices,
                                     double softmax_scale,
                                     const Handle* topk_length,
                                     const Handle* attn_sink,
                                     int64_t layer,
                                     Handle* out,
                                     Handle* lse) {
  return call<&decode>(std::tuple(out, lse), q, kv_cache, indices, softmax_scale,
                       optional(topk_length), optional(attn_sink), layer);
}

NVFP4_DSMLA_ENTRY(merge_attention_states)(
    Handle out_a, Handle lse_a, Handle out_b, Handle lse_b, Handle* out, Handle* lse) {
  return call<&merge>(std::tuple(out, lse), out_a, lse_a, out_b, lse_b);
}

}  // extern "C"

}  // namespace nvfp4_dsmla
