"""PyTorch ops for `nvfp4_ds_mla`, the 4-bit KV-cache record of sparse latent attention.

A token's latent vector, 512 NoPE dims and 64 RoPE dims, is stored in 352 bytes: 4-bit e2m1 codes
with an e4m3 scale for each 16 of them, and the RoPE dims in e4m3. `concat_and_cache_nvfp4_ds_mla`
writes tokens into a paged cache, `cp_gather_and_upconvert_nvfp4_kv_cache` and
`gather_and_upconvert_nvfp4_ds_mla` read them back, `sparse_mla_decode` attends to them where they
lie, on CPU and CUDA, in eager code and in traced regions. `layout` names the parts of a record,
`reference` is its specification in plain PyTorch.

Importing this package registers the ops as `torch.ops.nvfp4_dsmla.*`.
"""

from __future__ import annotations

from nvfp4_dsmla._load import load as _load_libraries
from nvfp4_dsmla._load import loaded_libraries

_load_libraries()

from nvfp4_dsmla import _C, aoti, layout, reference, reference_formats, reference_fused
from nvfp4_dsmla import _fake as _fake
from nvfp4_dsmla.cache import allocate_kv_cache, slot_mapping_from_block_table
from nvfp4_dsmla.compile import mark_static_pools, mark_varying_sizes
from nvfp4_dsmla.format_ops import (
    concat_and_cache_bfloat16,
    concat_and_cache_fp8_ds_mla,
    concat_and_cache_mla,
    convert_kv_cache,
    cp_gather_and_upconvert_fp8_kv_cache,
    gather_and_upconvert_fp8_ds_mla,
)
from nvfp4_dsmla.formats import (
    CACHE_FORMATS,
    QUANTIZED_DS_MLA_CACHE_FORMATS,
    CacheFormat,
    KVCacheSpec,
    KVQuantMode,
    canonicalize_kv_cache_dtype,
    format_from_cache,
    get_cache_format,
    get_kv_cache_spec,
    get_kv_quant_mode,
    is_quantized_kv_cache,
)
from nvfp4_dsmla.ops import (
    concat_and_cache_nvfp4_ds_mla,
    cp_gather_and_upconvert_nvfp4_kv_cache,
    fused_rmsnorm_rope_concat_and_cache_nvfp4_ds_mla,
    gather_and_upconvert_nvfp4_ds_mla,
    merge_attention_states,
    sparse_mla_decode,
)
from nvfp4_dsmla.support import explain_missing_cuda as _explain_missing_cuda
from nvfp4_dsmla.support import supports_combination

_explain_missing_cuda()

__version__: str = _C.VERSION

__all__ = [
    "CACHE_FORMATS",
    "QUANTIZED_DS_MLA_CACHE_FORMATS",
    "CacheFormat",
    "KVCacheSpec",
    "KVQuantMode",
    "__version__",
    "allocate_kv_cache",
    "aoti",
    "canonicalize_kv_cache_dtype",
    "concat_and_cache_bfloat16",
    "concat_and_cache_fp8_ds_mla",
    "concat_and_cache_mla",
    "concat_and_cache_nvfp4_ds_mla",
    "convert_kv_cache",
    "cp_gather_and_upconvert_fp8_kv_cache",
    "cp_gather_and_upconvert_nvfp4_kv_cache",
    "format_from_cache",
    "fused_rmsnorm_rope_concat_and_cache_nvfp4_ds_mla",
    "gather_and_upconvert_fp8_ds_mla",
    "gather_and_upconvert_nvfp4_ds_mla",
    "get_cache_format",
    "get_kv_cache_spec",
    "get_kv_quant_mode",
    "is_quantized_kv_cache",
    "layout",
    "loaded_libraries",
    "mark_static_pools",
    "mark_varying_sizes",
    "merge_attention_states",
    "reference",
    "reference_formats",
    "reference_fused",
    "slot_mapping_from_block_table",
    "sparse_mla_decode",
    "supports_combination",
]
