"""What each op gives without data: shapes, dtypes and devices, for tracing.

In Python, because a Meta implementation in C++ specialises every size through the stable ABI
(pytorch issue 156622). Nothing here asks a size for its value, so no size is specialised. The real
checks are in C++ and run on real tensors; only what the outputs depend on is looked at here, and
what is wrong in a traced region alone: a written view that PyTorch would move.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4_dsmla.layout import HEAD_DIM, NOPE_DIM


def _refuse_moved_view(name: str, written: Tensor, instead: str) -> None:
    """Inductor writes to `base[i]` at the start of base where the offset is symbolic.

    Pytorch issue 198068, 2.10 to 2.14. A slice keeps base's dimensions and is written right; so is
    an input that is a view of something, whose offset is a symbol of its own: what is computed in
    the traced region is an expression. Looking at it adds no guard.
    """
    base, offset = written._base, written.storage_offset()
    if base is None or base.dim() == written.dim() or not isinstance(offset, torch.SymInt):
        return
    if not offset.node.expr.is_Atom:
        raise ValueError(
            f"{name}: wanted a whole tensor, got a view made in the traced region, at the symbolic "
            f"offset {offset}: torch.compile would write to another place (pytorch issue 198068). "
            f"{instead}"
        )


_POOL = "Pass the whole pool, and layer= to the op."
_INPUT = "Make the view outside of the region and pass it as an input."


@torch.library.register_fake("nvfp4_dsmla::concat_and_cache_nvfp4_ds_mla")
@torch.library.register_fake("nvfp4_dsmla::concat_and_cache_fp8_ds_mla")
@torch.library.register_fake("nvfp4_dsmla::concat_and_cache_bfloat16")
def _(kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, layer: int = 0) -> None:
    _refuse_moved_view("kv_cache", kv_cache, _POOL)


@torch.library.register_fake("nvfp4_dsmla::fused_rmsnorm_rope_concat_and_cache_nvfp4_ds_mla")
def _(
    kv_c: Tensor,
    k_pe: Tensor,
    norm_weight: Tensor,
    eps: float,
    positions: Tensor,
    cos_sin_cache: Tensor,
    is_neox: bool,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    layer: int = 0,
    round_to_input: bool = True,
) -> None:
    _refuse_moved_view("kv_cache", kv_cache, _POOL)


@torch.library.register_fake("nvfp4_dsmla::cp_gather_and_upconvert_nvfp4_kv_cache")
@torch.library.register_fake("nvfp4_dsmla::cp_gather_and_upconvert_fp8_kv_cache")
def _(
    src_cache: Tensor,
    dst: Tensor,
    block_table: Tensor,
    workspace_starts: Tensor,
    batch_size: int,
    seq_starts: Tensor | None = None,
    layer: int = 0,
) -> None:
    _refuse_moved_view("dst", dst, _INPUT)


@torch.library.register_fake("nvfp4_dsmla::gather_and_upconvert_nvfp4_ds_mla")
@torch.library.register_fake("nvfp4_dsmla::gather_and_upconvert_fp8_ds_mla")
def _(kv_cache: Tensor, slots: Tensor, dtype: torch.dtype | None = None, layer: int = 0) -> Tensor:
    return kv_cache.new_empty((*slots.shape, HEAD_DIM), dtype=dtype or torch.bfloat16)


@torch.library.register_fake("nvfp4_dsmla::convert_kv_cache")
def _(src: Tensor, dst: Tensor) -> None:
    _refuse_moved_view("dst", dst, _INPUT)


@torch.library.register_fake("nvfp4_dsmla::sparse_mla_decode")
def _(
    q: Tensor,
    kv_cache: Tensor,
    indices: Tensor,
    softmax_scale: float,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
    layer: int = 0,
) -> tuple[Tensor, Tensor]:
    heads = q.shape[:-1]
    return q.new_empty((*heads, NOPE_DIM)), q.new_empty(heads, dtype=torch.float32)


@torch.library.register_fake("nvfp4_dsmla::merge_attention_states")
def _(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    return out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape)
