"""What each op gives without data: shapes, dtypes and devices, for tracing.

In Python, because a Meta implementation in C++ specialises every size through the stable ABI
(pytorch issue 156622). Nothing here asks a size for its value, so no size is specialised. The real
checks are in C++ and run on real tensors; only what the outputs depend on is looked at here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4_dsmla.layout import HEAD_DIM


@torch.library.register_fake("nvfp4_dsmla::concat_and_cache_nvfp4_ds_mla")
def _(kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, layer: int = 0) -> None:
    return None


@torch.library.register_fake("nvfp4_dsmla::cp_gather_and_upconvert_nvfp4_kv_cache")
def _(
    src_cache: Tensor,
    dst: Tensor,
    block_table: Tensor,
    workspace_starts: Tensor,
    batch_size: int,
    seq_starts: Tensor | None = None,
    layer: int = 0,
) -> None:
    return None


@torch.library.register_fake("nvfp4_dsmla::gather_and_upconvert_nvfp4_ds_mla")
def _(kv_cache: Tensor, slots: Tensor, dtype: torch.dtype | None = None, layer: int = 0) -> Tensor:
    return kv_cache.new_empty((*slots.shape, HEAD_DIM), dtype=dtype or torch.bfloat16)
