// Which function implements which op, once for both devices: register_cpu.cpp and register_cuda.cpp
// have functions of these names.
#pragma once

#include "ops/torch_stable.h"

#define NVFP4_DSMLA_IMPLEMENT(library)                                                           \
  library.impl("concat_and_cache_nvfp4_ds_mla", TORCH_BOX(&concat_and_cache<Format::kNvfp4>));   \
  library.impl("concat_and_cache_fp8_ds_mla", TORCH_BOX(&concat_and_cache<Format::kFp8>));       \
  library.impl("concat_and_cache_bfloat16", TORCH_BOX(&concat_and_cache<Format::kBFloat16>));    \
  library.impl("fused_rmsnorm_rope_concat_and_cache_nvfp4_ds_mla",                               \
               TORCH_BOX(&fused_concat_and_cache));                                              \
  library.impl("cp_gather_and_upconvert_nvfp4_kv_cache", TORCH_BOX(&cp_gather<Format::kNvfp4>)); \
  library.impl("cp_gather_and_upconvert_fp8_kv_cache", TORCH_BOX(&cp_gather<Format::kFp8>));     \
  library.impl("gather_and_upconvert_nvfp4_ds_mla", TORCH_BOX(&gather<Format::kNvfp4>));         \
  library.impl("gather_and_upconvert_fp8_ds_mla", TORCH_BOX(&gather<Format::kFp8>));             \
  library.impl("convert_kv_cache", TORCH_BOX(&convert));                                         \
  library.impl("sparse_mla_decode", TORCH_BOX(&decode));                                         \
  library.impl("merge_attention_states", TORCH_BOX(&merge));
