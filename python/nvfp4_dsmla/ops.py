"""The ops as Python calls, keyword-only, each docstring its contract.

They are `torch.ops.nvfp4_dsmla.*`, which only say less well that an argument is no tensor. So
everything said here holds for those too: they trace under torch.compile without a graph break or a
copy of the cache, and can be captured in a CUDA graph. In a traced region pass the whole pool and
`layer=`, not a view of it: PyTorch miscompiles a mutated view whose offset is symbolic (pytorch
issue 198068), so tracing one is an error.

A bad argument raises ValueError, a sentence with the name, the wanted and the got, before anything
is written. Data that points outside the tensors never makes an op touch memory outside of them; the
CPU raises IndexError for it, CUDA, where a captured graph cannot raise, skips or writes zeros.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "concat_and_cache_nvfp4_ds_mla",
    "cp_gather_and_upconvert_nvfp4_kv_cache",
    "fused_rmsnorm_rope_concat_and_cache_nvfp4_ds_mla",
    "gather_and_upconvert_nvfp4_ds_mla",
    "merge_attention_states",
    "sparse_mla_decode",
]

# Bound once: looking an overload up costs a third of a microsecond a call.
_write = torch.ops.nvfp4_dsmla.concat_and_cache_nvfp4_ds_mla.default
_fused_write = torch.ops.nvfp4_dsmla.fused_rmsnorm_rope_concat_and_cache_nvfp4_ds_mla.default
_cp_gather = torch.ops.nvfp4_dsmla.cp_gather_and_upconvert_nvfp4_kv_cache.default
_gather = torch.ops.nvfp4_dsmla.gather_and_upconvert_nvfp4_ds_mla.default
_decode = torch.ops.nvfp4_dsmla.sparse_mla_decode.default
_merge = torch.ops.nvfp4_dsmla.merge_attention_states.default


def refuse_other_than_tensors(op: torch._ops.OpOverload, arguments: Mapping[str, object]) -> None:
    """Says which argument is no tensor, where PyTorch has refused a call for one."""
    for parameter in op._schema.arguments:
        value = arguments[parameter.name]
        if "Tensor" not in str(parameter.type) or isinstance(value, Tensor):
            continue
        if value is not None or not isinstance(parameter.type, torch.OptionalType):
            raise ValueError(
                f"{op._schema.name.removeprefix('nvfp4_dsmla::')}: {parameter.name}: "
                f"wanted a tensor, got {type(value).__name__}"
            ) from None


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
    try:
        _write(kv_c, k_pe, kv_cache, slot_mapping, layer)
    except RuntimeError:
        refuse_other_than_tensors(_write, locals())
        raise


def fused_rmsnorm_rope_concat_and_cache_nvfp4_ds_mla(
    *,
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
    """RMSNorm of the latents, RoPE of the keys, and the write of both, in one kernel.

    The bytes are those of `concat_and_cache_nvfp4_ds_mla` after

        kv_c = (kv_c * rsqrt(mean(kv_c**2) + eps)) * norm_weight
        k_pe = each pair (a, b) as (a * cos - b * sin, b * cos + a * sin)

    in fp32, each rounded to the input's dtype once, at its end, as torch.nn.RMSNorm does and as
    DeepSeek's code does both. Every operation is rounded to nearest on its own and the sum's order
    is fixed (`reference_fused` has it), so the bytes are the same on every device. Neither result
    is returned, and no input is changed.

    Args:
        kv_c: bfloat16, float16 or float32 [T', 512], the compressed latents before their norm. The
            last dimension contiguous; any row stride and alignment, so a slice of a fused
            projection will do. Rows past T are not read.
        k_pe: like kv_c, [T', 64], the shared key before RoPE.
        norm_weight: of kv_c's dtype or float32 [512], contiguous.
        eps: what is added to the mean of the squares; 0 or more.
        positions: int64 or int32 [T'], any stride: each token's position.
        cos_sin_cache: of kv_c's dtype or float32 [max_positions, 64], rows contiguous and at any
            stride: of each position the cosines of the 32 pairs, then their sines.
        is_neox: whether pair i is dims i and i + 32; else it is dims 2i and 2i + 1.
        kv_cache: uint8 [num_blocks, block_size, 352], or [num_layers, num_blocks, block_size, 352]
            with `layer`; written in place. Any strides that keep records apart and their bytes
            contiguous.
        slot_mapping: int64 or int32 [T], T <= T'. Token t goes to record
            `slot % block_size` of block `slot // block_size`. A negative slot skips the token, and
            its position is not looked at. Of two tokens with one slot, either's bytes may stay, or
            a mix.
        layer: the layer of a pool; 0 for a cache of one layer.
        round_to_input: False leaves out the two roundings to the input's dtype: what is quantised
            is fp32. The error stays what it was (docs/kernels.md has it measured), and the records
            are no longer those of an unfused chain.

    A latent with a NaN or an infinity in it, or whose squares do not fit fp32, is what the formula
    makes of it: all NaN, or zeros and NaN. A NaN in the latent is written as the record's largest
    code under the smallest scale, 6 * 2^-9; in the key it stays a NaN.

    Raises:
        ValueError: an argument is not as above. Nothing is written.
        IndexError: CPU only, a slot is at or past num_blocks * block_size, or the position of a
            token that has a slot is outside [0, max_positions). Nothing is written. CUDA skips
            such a token.

    Source: this library's own; the table of cosines and sines and `is_neox` are those of the public
    engines' `rotary_embedding`.
    """
    try:
        _fused_write(
            kv_c,
            k_pe,
            norm_weight,
            eps,
            positions,
            cos_sin_cache,
            is_neox,
            kv_cache,
            slot_mapping,
            layer,
            round_to_input,
        )
    except RuntimeError:
        refuse_other_than_tensors(_fused_write, locals())
        raise


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
    try:
        _cp_gather(src_cache, dst, block_table, workspace_starts, batch_size, seq_starts, layer)
    except RuntimeError:
        refuse_other_than_tensors(_cp_gather, locals())
        raise


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
    try:
        out: Tensor = _gather(kv_cache, slots, dtype, layer)
    except RuntimeError:
        refuse_other_than_tensors(_gather, locals())
        raise
    return out


def sparse_mla_decode(
    *,
    q: Tensor,
    kv_cache: Tensor,
    indices: Tensor,
    softmax_scale: float,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
    layer: int = 0,
) -> tuple[Tensor, Tensor]:
    """Attention of each query row to the tokens at its own slots, straight from the records.

    The key of a token is its 576 dims, its value the first 512. A row's heads share its tokens.
    Records are read as the exact numbers they stand for; scores, softmax and sums are in fp32. On
    CUDA the factors of the two products are float16, into whose range a bfloat16 q is brought by
    powers of two. Weights below 2^-31 of the greatest (on sm_90a; elsewhere 2^-39) are then
    nothing. Where several thread blocks share a row's tokens, their results are rounded to float16
    before they are combined.

    Args:
        q: bfloat16 or float16 [b, s_q, h_q, 576], 512 NoPE dims, then 64 RoPE dims: the queries
            with the key's up-projection absorbed. Any h_q; any strides with the last dimension
            contiguous.
        kv_cache: uint8 [num_blocks, block_size, 352], or [num_layers, num_blocks, block_size, 352]
            with `layer`; any strides with contiguous records.
        indices: int32 [b, s_q, topk], any strides, topk >= 0: slots, `block * block_size + offset`.
            One outside [0, num_blocks * block_size), -1 or any other, is no token, and no
            record's bytes reach a result by it. One that comes twice counts twice.
        softmax_scale: the factor of the scores before the softmax; of any sign, or 0.
        topk_length: int32 [b] or [b, s_q]: how many of a row's indices count, from the first on;
            the others are not read. Below 0 is 0, beyond topk is topk. None for all.
        attn_sink: float32 [h_q]: each head's score for attending to no token; -inf for none.
        layer: the layer of a pool; 0 for a cache of one layer.

    Returns:
        out, of q's dtype [b, s_q, h_q, 512], contiguous. With a sink it is scaled by
            exp(lse) / (exp(lse) + exp(sink)).
        lse, float32 [b, s_q, h_q], contiguous: the natural logarithm of the sum of exponentials of
            the scaled scores, without the sink.

        A row with no token has out 0 and lse -inf. (FlashMLA's kernel, whose arguments these are,
        gives +inf for it, so `masked_fill` that before you merge its results with these.) Records
        that a row does not select cannot reach it, whatever their bytes; a NaN in one that it
        selects makes its out and lse NaN, and no other row's.

        The results are deterministic. On the CPU those of a row depend neither on the rows beside
        it nor on the number of threads.

    Raises:
        ValueError: an argument is not as above.

    Source: the arguments are those of FlashMLA's `flash_mla_with_kvcache` with sparse indices.
    """
    try:
        out, lse = _decode(q, kv_cache, indices, softmax_scale, topk_length, attn_sink, layer)
    except RuntimeError:
        refuse_other_than_tensors(_decode, locals())
        raise
    return out, lse


def merge_attention_states(
    *, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """The attention to two disjoint sets of tokens, from the attention to each.

    What context parallelism needs: each rank attends to its own tokens, and the results are merged
    in any order. They must be results without a sink; the last merge's out times
    `torch.sigmoid(lse - attn_sink)` is that with it.

    Args:
        out_a: bfloat16, float16 or float32 [..., 512], any strides: `sparse_mla_decode`'s out.
        lse_a: float32 [...], of out_a's shape without its last dimension: its lse. -inf: no token,
            and that row of out_a is not used, whatever is in it.
        out_b: like out_a, of its dtype and shape.
        lse_b: like lse_a.

    Returns:
        out, of the dtype and shape of out_a, contiguous. Where one side has no token it is the
            other's, to the bit; where neither has, 0.
        lse, of the shape of lse_a, contiguous: the logarithm of exp(lse_a) + exp(lse_b).

    Raises:
        ValueError: an argument is not as above.

    Source: this library's own; the formula is that of the online softmax.
    """
    try:
        out, lse = _merge(out_a, lse_a, out_b, lse_b)
    except RuntimeError:
        refuse_other_than_tensors(_merge, locals())
        raise
    return out, lse
