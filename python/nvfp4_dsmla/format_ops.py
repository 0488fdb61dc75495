"""The ops of `fp8_ds_mla` and `bfloat16`, and the calls that take a format by its name.

What ops.py says of its calls holds for these. A name picks the op in Python, while a traced region
is traced: a string argument of an op leaks memory through the stable ABI (pytorch issue 191340).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nvfp4_dsmla.formats import CacheFormat, get_cache_format
from nvfp4_dsmla.ops import concat_and_cache_nvfp4_ds_mla, refuse_other_than_tensors

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "concat_and_cache_bfloat16",
    "concat_and_cache_fp8_ds_mla",
    "concat_and_cache_mla",
    "convert_kv_cache",
    "cp_gather_and_upconvert_fp8_kv_cache",
    "gather_and_upconvert_fp8_ds_mla",
]

_write_fp8 = torch.ops.nvfp4_dsmla.concat_and_cache_fp8_ds_mla.default
_write_bfloat16 = torch.ops.nvfp4_dsmla.concat_and_cache_bfloat16.default
_cp_gather_fp8 = torch.ops.nvfp4_dsmla.cp_gather_and_upconvert_fp8_kv_cache.default
_gather_fp8 = torch.ops.nvfp4_dsmla.gather_and_upconvert_fp8_ds_mla.default
_convert = torch.ops.nvfp4_dsmla.convert_kv_cache.default


def concat_and_cache_fp8_ds_mla(
    *, kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, layer: int = 0
) -> None:
    """Writes tokens into a paged cache, quantised to `fp8_ds_mla` records.

    Args:
        kv_c: bfloat16, float16 or float32 [T', 512], as in `concat_and_cache_nvfp4_ds_mla`.
        k_pe: like kv_c, [T', 64]. Its bfloat16 elements are copied bit for bit.
        kv_cache: uint8 [num_blocks, block_size, 656], or [num_layers, num_blocks, block_size, 656]
            with `layer`; written in place. Any strides that keep records apart and their bytes
            contiguous; they are wide stores where all are multiples of 16.
        slot_mapping: int64 or int32 [T], T <= T', as in `concat_and_cache_nvfp4_ds_mla`.
        layer: the layer of a pool; 0 for a cache of one layer.

    Raises:
        ValueError: an argument is not as above. Nothing is written.
        IndexError: CPU only, a slot is at or past num_blocks * block_size. Nothing is written.
            CUDA skips such a token.

    Source: what the public engines' `concat_and_cache_mla` does for this format; the record is
    described in docs/format.md.
    """
    try:
        _write_fp8(kv_c, k_pe, kv_cache, slot_mapping, layer)
    except RuntimeError:
        refuse_other_than_tensors(_write_fp8, locals())
        raise


def concat_and_cache_bfloat16(
    *, kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, layer: int = 0
) -> None:
    """Writes tokens into a paged cache of bfloat16 vectors.

    Args:
        kv_c: bfloat16, float16 or float32 [T', 512], as in `concat_and_cache_nvfp4_ds_mla`.
        k_pe: like kv_c, [T', 64].
        kv_cache: bfloat16 [num_blocks, block_size, 576], or
            [num_layers, num_blocks, block_size, 576] with `layer`; written in place. Any strides
            that keep tokens apart and their elements contiguous.
        slot_mapping: int64 or int32 [T], T <= T', as in `concat_and_cache_nvfp4_ds_mla`.
        layer: the layer of a pool; 0 for a cache of one layer.

    Raises:
        ValueError: an argument is not as above. Nothing is written.
        IndexError: CPU only, a slot is at or past num_blocks * block_size. Nothing is written.
            CUDA skips such a token.

    Source: what the public engines' `concat_and_cache_mla` does for an unquantised cache.
    """
    try:
        _write_bfloat16(kv_c, k_pe, kv_cache, slot_mapping, layer)
    except RuntimeError:
        refuse_other_than_tensors(_write_bfloat16, locals())
        raise


def cp_gather_and_upconvert_fp8_kv_cache(
    *,
    src_cache: Tensor,
    dst: Tensor,
    block_table: Tensor,
    workspace_starts: Tensor,
    batch_size: int,
    seq_starts: Tensor | None = None,
    layer: int = 0,
) -> None:
    """Reads the tokens of a batch of requests from `fp8_ds_mla` records into one workspace.

    Everything is as in `cp_gather_and_upconvert_nvfp4_kv_cache`, but for the records, and that a
    NoPE element is a product rounded to the dtype of `dst`.

    Args:
        src_cache: uint8 [num_blocks, block_size, 656], or [num_layers, num_blocks, block_size, 656]
            with `layer`; any strides with contiguous records.
        dst: bfloat16, float16 or float32 [N, 576], written in place.
        block_table: int32 [batch_size or more, max_blocks], any strides.
        workspace_starts: int32 [batch_size or more], non-decreasing from 0.
        batch_size: requests to read, 0 or more.
        seq_starts: int32 [batch_size or more]: the first token to read of each request; None for
            all zero.
        layer: the layer of a pool; 0 for a cache of one layer.

    Raises:
        ValueError: an argument is not as above; on the CPU also where workspace_starts does not
            start at 0 or decreases. Nothing is written.
        IndexError: CPU only, a row is outside its request's blocks, or a block id outside the
            cache. Nothing is written. CUDA makes such a row zero.

    Source: the public engines' function of this name, of which it takes the arguments.
    """
    try:
        _cp_gather_fp8(src_cache, dst, block_table, workspace_starts, batch_size, seq_starts, layer)
    except RuntimeError:
        refuse_other_than_tensors(_cp_gather_fp8, locals())
        raise


def gather_and_upconvert_fp8_ds_mla(
    *, kv_cache: Tensor, slots: Tensor, dtype: torch.dtype | None = None, layer: int = 0
) -> Tensor:
    """Reads tokens by slot from `fp8_ds_mla` records.

    Args:
        kv_cache: uint8 [num_blocks, block_size, 656], or [num_layers, num_blocks, block_size, 656]
            with `layer`; any strides with contiguous records.
        slots: int32 or int64 of any shape and strides.
        dtype: bfloat16 (None), float16 or float32; a NoPE element is a product rounded to it.
        layer: the layer of a pool; 0 for a cache of one layer.

    Returns:
        dtype [*slots.shape, 576], contiguous: 512 NoPE dims, then 64 RoPE dims. A slot outside
        [0, num_blocks * block_size) gives a row of zeros, on every device.

    Raises:
        ValueError: an argument is not as above.

    Source: this library's own; the record is described in docs/format.md.
    """
    try:
        out: Tensor = _gather_fp8(kv_cache, slots, dtype, layer)
    except RuntimeError:
        refuse_other_than_tensors(_gather_fp8, locals())
        raise
    return out


_WRITES = {
    "bfloat16": concat_and_cache_bfloat16,
    "fp8_ds_mla": concat_and_cache_fp8_ds_mla,
    "nvfp4_ds_mla": concat_and_cache_nvfp4_ds_mla,
}


def concat_and_cache_mla(
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    scale: Tensor | None = None,
    *,
    layer: int = 0,
) -> None:
    """Writes tokens into a paged cache of the format that is named.

    The arguments may be given by place, as engines do.

    Args:
        kv_c: bfloat16, float16 or float32 [T', 512], as in `concat_and_cache_nvfp4_ds_mla`.
        k_pe: like kv_c, [T', 64].
        kv_cache: a cache or pool of that format; written in place.
        slot_mapping: int64 or int32 [T], T <= T'.
        kv_cache_dtype: what `canonicalize_kv_cache_dtype` takes.
        scale: accepted and not used: no format here has a scale outside its records.
        layer: the layer of a pool; 0 for a cache of one layer.

    Raises:
        ValueError: `kv_cache_dtype` is unknown, or an argument is not as that format's op wants it.
            Nothing is written.
        IndexError: CPU only, a slot is at or past num_blocks * block_size. Nothing is written.
            CUDA skips such a token.

    Source: the public engines' function of this name, of which it takes the arguments.
    """
    del scale
    write = _WRITES[get_cache_format(kv_cache_dtype).name]
    write(kv_c=kv_c, k_pe=k_pe, kv_cache=kv_cache, slot_mapping=slot_mapping, layer=layer)


def convert_kv_cache(
    *, src: Tensor, src_format: str, dst_format: str, out: Tensor | None = None
) -> Tensor:
    """The cache in another format, record by record, on its device.

    A record is decoded to fp32 in registers and encoded again by the rule of the other format: from
    `bfloat16` that is what its write makes of such tokens, to `bfloat16` what its gather gives.
    Records of the same format are copied. For moving a running cache, for offloading, and for
    handing one over from prefill to decode.

    Args:
        src: a cache [num_blocks, block_size, elements a token] or pool [num_layers, ...] of
            `src_format`; any strides with contiguous records.
        src_format: what `canonicalize_kv_cache_dtype` takes.
        dst_format: likewise.
        out: a cache or pool of `dst_format` with the leading dimensions of `src`, in other memory,
            to be written in place; None for a new one.

    Returns:
        `out`, or a new contiguous tensor.

    Raises:
        ValueError: a name is unknown, or a tensor is not as above. Nothing is written.

    Source: this library's own.
    """
    have, want = get_cache_format(src_format), get_cache_format(dst_format)
    _check_format("src", src, have)
    if out is None:
        out = src.new_empty((*src.shape[:-1], want.elements_per_token), dtype=want.storage_dtype)
    _check_format("out", out, want)
    if out.device != src.device:
        raise ValueError(
            f"convert_kv_cache: out: wanted the device of src ({src.device}), got {out.device}"
        )
    if have is not want:
        _convert(src, out)
        return out
    if out.shape != src.shape:
        raise ValueError(
            f"convert_kv_cache: out: wanted the shape of src, {list(src.shape)}, "
            f"got {list(out.shape)}"
        )
    return out.copy_(src)


def _check_format(name: str, cache: Tensor, wanted: CacheFormat) -> None:
    if cache.dtype != wanted.storage_dtype or cache.shape[-1:] != (wanted.elements_per_token,):
        raise ValueError(
            f"convert_kv_cache: {name}: wanted {wanted.storage_dtype} "
            f"[..., num_blocks, block_size, {wanted.elements_per_token}] for {wanted.name}, "
            f"got {cache.dtype} {list(cache.shape)}"
        )
