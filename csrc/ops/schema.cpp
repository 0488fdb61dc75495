// Every schema of the library, and nothing else.
//
// A cache of nvfp4_ds_mla is uint8: one layer [num_blocks, block_size, 352] with layer 0, or the
// whole pool [num_layers, num_blocks, block_size, 352] with the layer's number; one of fp8_ds_mla
// has 656 in the place of 352, one of bfloat16 is of that dtype and has 576. In a traced region
// pass the pool: PyTorch (2.10 .. 2.14) miscompiles a mutated view whose storage offset is symbolic
// (issue 198068). What varies from call to call is SymInt: an int would recompile for every value.
#include "ops/torch_stable.h"

STABLE_TORCH_LIBRARY(nvfp4_dsmla, library) {
  library.def(
      "concat_and_cache_nvfp4_ds_mla(Tensor kv_c, Tensor k_pe, Tensor(a!) kv_cache, "
      "Tensor slot_mapping, SymInt layer=0) -> ()");
  library.def(
      "concat_and_cache_fp8_ds_mla(Tensor kv_c, Tensor k_pe, Tensor(a!) kv_cache, "
      "Tensor slot_mapping, SymInt layer=0) -> ()");
  library.def(
      "concat_and_cache_bfloat16(Tensor kv_c, Tensor k_pe, Tensor(a!) kv_cache, "
      "Tensor slot_mapping, SymInt layer=0) -> ()");
  library.def(
      "fused_rmsnorm_rope_concat_and_cache_nvfp4_ds_mla(Tensor kv_c, Tensor k_pe, "
      "Tensor norm_weight, float eps, Tensor positions, Tensor cos_sin_cache, bool is_neox, "
      "Tensor(a!) kv_cache, Tensor slot_mapping, SymInt layer=0, bool round_to_input=True) -> ()");
  library.def(
      "cp_gather_and_upconvert_nvfp4_kv_cache(Tensor src_cache, Tensor(a!) dst, "
      "Tensor block_table, Tensor workspace_starts, SymInt batch_size, Tensor? seq_starts=None, "
      "SymInt layer=0) -> ()");
  library.def(
      "cp_gather_and_upconvert_fp8_kv_cache(Tensor src_cache, Tensor(a!) dst, "
      "Tensor block_table, Tensor workspace_starts, SymInt batch_size, Tensor? seq_starts=None, "
      "SymInt layer=0) -> ()");
  library.def(
      "gather_and_upconvert_nvfp4_ds_mla(Tensor kv_cache, Tensor slots, ScalarType? dtype=None, "
      "SymInt layer=0) -> Tensor");
  library.def(
      "gather_and_upconvert_fp8_ds_mla(Tensor kv_cache, Tensor slots, ScalarType? dtype=None, "
      "SymInt layer=0) -> Tensor");
  library.def("convert_kv_cache(Tensor src, Tensor(a!) dst) -> ()");
  library.def(
      "sparse_mla_decode(Tensor q, Tensor kv_cache, Tensor indices, float softmax_scale, "
      "Tensor? topk_length=None, Tensor? attn_sink=None, SymInt layer=0) -> (Tensor out, Tensor "
      "lse)");
  library.def(
      "merge_attention_states(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor "
      "out, Tensor lse)");
}
