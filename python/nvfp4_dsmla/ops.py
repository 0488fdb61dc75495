"""The ops as Python calls, keyword-only, each docstring its contract.

They are `torch.ops.nvfp4_dsmla.*` with one check more, devices, so everything said here holds for
those too: they trace under torch.compile without a graph break or a copy of the cache, and can be
captured in a CUDA graph. In a traced region pass the whole pool and `layer=`, not a view of it:
PyTorch miscompiles a mutated view whose offset is symbolic (pytorch issue 198068).

A bad argument raises ValueError, a sentence with the name, the wanted and the got, before anything
is written. Data that points outside the tensors never makes an op touch memory outside of them; the
CPU raises IndexError for it, CUDA, where a captured graph cannot raise, skips or writes zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "concat_and_cache_nvfp4_ds_mla",
    "cp_gather_and_upconvert_nvfp4_kv_cache",
    "gather_and_upconvert_nvfp4_ds_mla",
]

# Bound once: looking an overload up costs a third of a microsecond a call.
_write = torch.ops.nvfp4_dsmla.concat_and_cache_nvfp4_ds_mla.default
_cp_gather = torch.ops.nvfp4_dsmla.cp_gather_and_upconvert_nvfp4_kv_cache.default
_gather = torch.ops.nvfp4_dsmla.gather_and_upconvert_nvfp4_ds_mla.default


def _same_device(op: str, cache_name: str, cache: Tensor, **others: Tensor | None) -> None:
    """The C++ checks this too, but a meta tensor among real ones never gets there: nothing runs."""
    device = cache.device
    for name, tensor in others.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(
                f"{op}: {name}: wanted the device of {cache_name} ({device}), got {tensor.device}"
            )


def concat_and_cache_nvfp4_ds_mla(
    *, kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, layer: int = 0
) -> None:
    """Writes tokens into a paged cache, quantised to `nvfp4_ds_mla` records.

    Args:
        kv_c: bfloat16, float16 or float32 [T', 512], the compressed latents (NoPE part). The last
            dimension contiguous; any row stride and alignment, so a slice of a fused projection
            will do. Rows past T are not read.
        k_pe: like kv_c, [T', 64], the shared key after RoPE.
        kv_cache: uint8 [num_blocks, block_size, 352], or [num_layers, num_blocks, block_size, 352]
            with `layer`; written in place. Any strides that keep records apart and their bytes
            contiguous.
        slot_mapping: int64 or int32 [T], T <= T'. Token t goes to record
            `slot % block_size` of block `slot // block_size`. A negative slot skips the token. Of
            two tokens with one slot, either's bytes may stay, or a mix.
        layer: the layer of a pool; 0 for a cache of one layer.

    Raises:
        ValueError: an argument is not as above. Nothing is written.
        IndexError: CPU only, a slot is at or past num_blocks * block_size. Nothing is written.
            CUDA skips such a token.

    Source: the signature is that of the public engines' `concat_and_cache_mla`, without the format
    name and scale; the record is described in docs/format.md.
    """
    _same_device(
        "concat_and_cache_nvfp4_ds_mla",
        "kv_cache",
        kv_cache,
        kv_c=kv_c,
        k_pe=k_pe,
        slot_mapping=slot_mapping,
    )
    _write(kv_c, k_pe, kv_cache, slot_mapping, layer)


def cp_gather_and_upconvert_nvfp4_kv_cache(
    *,
    src_cache: Tensor,
    dst: Tensor,
    block_table: Tensor,
    workspace_starts: Tensor,
    batch_size: int,
    seq_starts: Tensor | None = None,
    layer: int = 0,
) -> None:
    """Reads the tokens of a batch of requests into one workspace, decoded, row after row.

    Row r belongs to the last request b that starts at or before it, and holds that request's token
    `r - workspace_starts[b] + seq_starts[b]`, found through its row of the block table. Decoding is
    exact in every output dtype.

    Args:
        src_cache: uint8 [num_blocks, block_size, 352], or [num_layers, num_blocks, block_size, 352]
            with `layer`; any strides with contiguous records.
        dst: bfloat16, float16 or float32 [N, 576], written in place: 512 NoPE dims, then 64 RoPE
            dims. The last dimension contiguous, rows at any stride that keeps them apart.
        block_table: int32 [batch_size or more, max_blocks], any strides: each request's blocks.
        workspace_starts: int32 [batch_size or more], non-decreasing from 0: the first row of each
            request. Equal neighbours make an empty request, legal anywhere.
        batch_size: requests to read, 0 or more. With 0 every row is zero.
        seq_starts: int32 [batch_size or more]: the first token to read of each request; None for
            all zero.
        layer: the layer of a pool; 0 for a cache of one layer.

    Raises:
        ValueError: an argument is not as above; on the CPU also where workspace_starts does not
            start at 0 or decreases. Nothing is written.
        IndexError: CPU only, a row is outside its request's blocks, or a block id outside the
            cache. Nothing is written. CUDA makes such a row zero.

    Source: the signature is that of the public engines' `cp_gather_and_upconvert_fp8_kv_cache`.
    """
    _same_device(
        "cp_gather_and_upconvert_nvfp4_kv_cache",
        "src_cache",
        src_cache,
        dst=dst,
        block_table=block_table,
        workspace_starts=workspace_starts,
        seq_starts=seq_starts,
    )
    _cp_gather(src_cache, dst, block_table, workspace_starts, batch_size, seq_starts, layer)


def gather_and_upconvert_nvfp4_ds_mla(
    *, kv_cache: Tensor, slots: Tensor, dtype: torch.dtype | None = None, layer: int = 0
) -> Tensor:
    """Reads tokens by slot, decoded: what attention over a top-k selection needs.

    Args:
        kv_cache: uint8 [num_blocks, block_size, 352], or [num_layers, num_blocks, block_size, 352]
            with `layer`; any strides with contiguous records.
        slots: int32 or int64 of any shape and strides.
        dtype: bfloat16 (None), float16 or float32. Decoding is exact in each.
        layer: the layer of a pool; 0 for a cache of one layer.

    Returns:
        dtype [*slots.shape, 576], contiguous: 512 NoPE dims, then 64 RoPE dims. A slot outside
        [0, num_blocks * block_size) gives a row of zeros, on every device.

    Raises:
        ValueError: an argument is not as above.

    Source: this library's own; the record is described in docs/format.md.
    """
    _same_device("gather_and_upconvert_nvfp4_ds_mla", "kv_cache", kv_cache, slots=slots)
    out: Tensor = _gather(kv_cache, slots, dtype, layer)
    return out
