"""What each op gives without data: shapes, dtypes and devices, for tracing.

In Python, because a Meta implementation in C++ specialises every size through the stable ABI
(pytorch issue 156622). Nothing here asks a size for its value, so no size is specialised. The real
checks are in C++ and run on real tensors; only what the outputs depend on is looked at here, and
what does not get there or too late: no tensor, one of another device (with a meta tensor among real
ones PyTorch runs nothing but the fake), a written view that PyTorch would move.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nvfp4_dsmla.layout import HEAD_DIM, NOPE_DIM

if TYPE_CHECKING:
    from collections.abc import Callable

    Fake = Callable[..., Any]


def _register(*ops: str, of: str) -> Callable[[Fake], Fake]:
    """Registers a fake of the ops, behind a check that all tensors are on the device of `of`."""

    def register(fake: Fake) -> Fake:
        for op in ops:
            checked = partial(_fake_of_tensors, op, of, fake)
            torch.library.register_fake(f"nvfp4_dsmla::{op}", checked)
        return fake

    return register


def _fake_of_tensors(op: str, of: str, fake: Fake, /, *args: object, **kwargs: object) -> object:
    signature = inspect.signature(fake)
    given = signature.bind(*args, **kwargs).arguments
    for name, value in given.items():
        if value is None and signature.parameters[name].default is not None:
            raise ValueError(f"{op}: {name}: wanted a tensor, got NoneType")
    wanted = given[of].device
    for name, value in given.items():
        if isinstance(value, Tensor) and value.device != wanted:
            raise ValueError(
                f"{op}: {name}: wanted the device of {of} ({wanted}), got {value.device}"
            )
    return fake(*args, **kwargs)


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


@_register(
    "concat_and_cache_nvfp4_ds_mla",
    "concat_and_cache_fp8_ds_mla",
    "concat_and_cache_bfloat16",
    of="kv_cache",
)
def _(kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, layer: int = 0) -> None:
    _refuse_moved_view("kv_cache", kv_cache, _POOL)


@_register("fused_rmsnorm_rope_concat_and_cache_nvfp4_ds_mla", of="kv_cache")
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


@_register(
    "cp_gather_and_upconvert_nvfp4_kv_cache", "cp_gather_and_upconvert_fp8_kv_cache", of="src_cache"
)
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


@_register("gather_and_upconvert_nvfp4_ds_mla", "gather_and_upconvert_fp8_ds_mla", of="kv_cache")
def _(kv_cache: Tensor, slots: Tensor, dtype: torch.dtype | None = None, layer: int = 0) -> Tensor:
    return kv_cache.new_empty((*slots.shape, HEAD_DIM), dtype=dtype or torch.bfloat16)


@_register("convert_kv_cache", of="src")
def _(src: Tensor, dst: Tensor) -> None:
    _refuse_moved_view("dst", dst, _INPUT)


@_register("sparse_mla_decode", of="kv_cache")
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


@_register("merge_attention_states", of="out_a")
def _(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    return out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape)
