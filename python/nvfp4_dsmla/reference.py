"""The `nvfp4_ds_mla` record in plain PyTorch: its specification, and the oracle of every test.

One token of a latent cache is 512 NoPE dims (the compressed latent kv_c, which is also V) and 64
RoPE dims (the shared key k_pe). Its record is 352 bytes and needs nothing outside itself:

    byte    0                                256            320          352
            | 512 x e2m1, 2 per byte          | 64 x e4m3    | 32 x e4m3  |
            | low nibble = even element       | RoPE,        | NoPE block |
            |                                 | no scale     | scales     |

The scale of block s (dims 16s to 16s + 15) is byte 320 + 8 * (s & 3) + (s >> 2). Writing takes
these steps, and every bit of the outcome is part of the format; x is the input as fp32:

1. amax = the largest |x| of the block, NaN elements ignored.
2. t = max(amax / 6, 2^-9), an fp32 division rounded to nearest.
3. scale = the smallest e4m3 number not below t, at most 448. (Equally: t rounded to the nearest
   e4m3 number, and one step up if that fell below t.)
4. inv = 1 / scale rounded to fp32; y = x * inv rounded to fp32. Not x / scale: at some ties that
   gives another code.
5. code = the e2m1 number nearest to y, a tie going to the even code, beyond 6 to 6; bit 3 is the
   sign of x, kept for zero. NaN is code 0x7 whatever its sign.

A RoPE dim is the e4m3 number nearest to x, a tie going to the even byte, beyond 448 to 448; bit 7
is the sign of x, kept for zero. NaN is 0x7F.

Reading is e2m1(code) * e4m3(scale) and e4m3(byte). Both are exact in bf16, fp16 and fp32, so a
reader is tested for equal bits. Writing what was read gives back every block that holds a code of
magnitude 6, as all with a scale of at least 6 * 2^-9 do, or whose scale is the smallest. Between
2^-9 and 6 * 2^-9 the scales are so far apart that it may get the next smaller one.

This file shares no arithmetic with the C++ sources, and was written to be read rather than to be
fast. Nothing in it depends on the data for its control flow or shapes: what is out of range is
masked. So it runs on CPU and CUDA, under torch.compile, with the same bits, and whether or not
subnormal numbers are flushed to zero.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from nvfp4_dsmla import layout

__all__ = [
    "NVFP4",
    "Codec",
    "attention",
    "concat_and_cache",
    "cp_gather",
    "decode",
    "encode",
    "gather",
    "merge",
]

E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of codes 0 to 7; 8 to 15 negate them
E2M1_MIDPOINTS = tuple((below + above) / 2 for below, above in pairwise(E2M1_MAGNITUDES))
E2M1_NAN = 0x7  # e2m1 has no NaN: it is written as +6
E2M1_MANTISSA_BITS = 1
E2M1_BIAS = 1

E4M3_NAN = 0x7F
E4M3_MANTISSA_BITS = 3
E4M3_BIAS = 7
E4M3_MIN_EXPONENT = -6
E4M3_MAX = 448.0  # 0b0'1111'110 = 1.75 * 2^8; the pattern above it is NaN
E4M3_SMALLEST = 2.0**-9  # 0b0'0000'001


def encode(kv_c: Tensor, k_pe: Tensor) -> Tensor:
    """The records of tokens, by the steps at the top of this file.

    Args:
        kv_c: bf16, fp16 or fp32 [..., 512], the NoPE dims.
        k_pe: bf16, fp16 or fp32 [..., 64], the RoPE dims; the same leading dims as `kv_c`.

    Returns:
        uint8 [..., 352].
    """
    blocks = kv_c.float().reshape(*kv_c.shape[:-1], layout.NUM_SCALES, layout.BLOCK_DIM)
    scale = _block_scale(blocks)
    inverse = (1.0 / from_e4m3(scale).double()).float()  # by way of fp64: see _block_scale
    codes = _to_e2m1(blocks, inverse[..., None])
    pairs = codes.reshape(*kv_c.shape[:-1], layout.NOPE_DIM // 2, 2)
    packed = pairs[..., 0] | (pairs[..., 1] << 4)
    # Stored as an 8 x 4 -> 4 x 8 transpose: a reader's thread q finds its blocks 4c + q together.
    stored_scale = scale.reshape(*scale.shape[:-1], 8, 4).transpose(-1, -2).flatten(-2)
    rope = to_e4m3(k_pe.float())
    return torch.cat([part.to(torch.uint8) for part in (packed, rope, stored_scale)], dim=-1)


def decode(records: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The latent vectors of records. Exact in each of the three dtypes.

    RoPE bytes 0x7F and 0xFF and such scales are NaN, and a NaN scale makes its whole block NaN;
    the sign and payload of those NaNs are unspecified. A scale with the sign bit, which `encode`
    never writes, is a negative number.

    Args:
        records: uint8 [..., 352].
        dtype: bfloat16, float16 or float32.

    Returns:
        `dtype` [..., 576]: the 512 NoPE dims, then the 64 RoPE dims.

    Raises:
        ValueError: `records` is not uint8 [..., 352].
    """
    packed = layout.codes(records).int()
    codes = torch.stack([packed & 0xF, packed >> 4], dim=-1)
    stored_scale = from_e4m3(layout.scale_bytes(records).int())
    scale = stored_scale.reshape(*stored_scale.shape[:-1], 4, 8).transpose(-1, -2).flatten(-2)
    values = _from_e2m1(codes.reshape(*scale.shape, layout.BLOCK_DIM)) * scale[..., None]
    rope = from_e4m3(layout.rope_bytes(records).int())
    return torch.cat([values.flatten(-2).to(dtype), rope.to(dtype)], dim=-1)


class Codec(NamedTuple):
    """A format as the functions below take it; reference_formats has others."""

    width: int
    """Elements of a record: the cache's last dimension."""
    encode: Callable[[Tensor, Tensor], Tensor]
    decode: Callable[[Tensor, torch.dtype], Tensor]


NVFP4 = Codec(layout.RECORD_BYTES, encode, decode)
"""`nvfp4_ds_mla`."""


def concat_and_cache(
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    layer: int = 0,
    codec: Codec = NVFP4,
) -> None:
    """Write the records of tokens to their slots; the rest of the cache stays as it is.

    A token whose slot is outside [0, num_blocks * block_size) is skipped. (The CPU op raises
    IndexError for a slot beyond the capacity before it writes anything.) If two tokens name one
    slot, which of them it holds is unspecified.

    Args:
        kv_c: bf16, fp16 or fp32 [T', 512].
        k_pe: bf16, fp16 or fp32 [T', 64].
        kv_cache: uint8 [num_blocks, block_size, 352] or, with `layer`,
            [num_layers, num_blocks, block_size, 352], any strides; changed in place.
        slot_mapping: int64 or int32 [T], T <= T'; only the first T tokens are written.
        layer: layer of the pool to write, 0 for the cache of one layer.
        codec: of another format, whose cache `kv_cache` then is.

    Raises:
        ValueError: `kv_cache` or `layer` is not as above.
    """
    capacity = _capacity(kv_cache, layer, codec)
    num_tokens = slot_mapping.shape[0]
    if num_tokens == 0 or capacity == 0:
        return
    records = codec.encode(kv_c[:num_tokens], k_pe[:num_tokens])
    slots = slot_mapping.long()
    written = (slots >= 0) & (slots < capacity)
    # The number of writes must not depend on the data. So a skipped token repeats the write of
    # the first written one, and if there is none, puts back what is in slot 0.
    first = written.int().argmax(0, keepdim=True)
    source = torch.where(written, torch.arange(num_tokens, device=slots.device), first)
    some = written.any()
    kept = kv_cache[_place(kv_cache, torch.zeros_like(slots[:1]), layer)]
    slots = torch.where(some, slots[source], 0)
    records = torch.where(some, records[source], kept)
    kv_cache.index_put_(_place(kv_cache, slots, layer), records)


def cp_gather(
    src_cache: Tensor,
    dst: Tensor,
    block_table: Tensor,
    workspace_starts: Tensor,
    batch_size: int,
    seq_starts: Tensor | None = None,
    layer: int = 0,
    codec: Codec = NVFP4,
) -> None:
    """Read the tokens of several requests, back to back, into rows of a workspace.

    Row r belongs to the last request that starts at or before r, and holds token
    r - workspace_starts[request] + seq_starts[request] of it. A row is zero if that token is
    past the row of the block table, if its block id is outside [0, num_blocks), if it belongs to
    no request, or if a bad start makes the token negative. (The CPU op raises IndexError for the
    first two, and ValueError for bad starts.) With `batch_size` 0 every row is zero.

    Args:
        src_cache: uint8 [num_blocks, block_size, 352] or the pool, as in `concat_and_cache`.
        dst: bf16, fp16 or fp32 [N, 576], any strides; every row is written.
        block_table: int32 [>= batch_size, max_blocks]: block ids of each request.
        workspace_starts: int32 [>= batch_size]: first row of each request, from 0 and not
            decreasing; two equal starts make an empty request.
        batch_size: number of requests.
        seq_starts: int32 [>= batch_size]: tokens at the start of each request to leave out; None
            for 0.
        layer: layer of the pool to read, 0 for the cache of one layer.
        codec: of another format, whose cache `src_cache` then is.

    Raises:
        ValueError: `src_cache` or `layer` is not as above.
    """
    capacity = _capacity(src_cache, layer, codec)
    block_size = src_cache.shape[-2]
    max_blocks = block_table.shape[1]
    if batch_size == 0 or capacity == 0 or max_blocks == 0:
        dst.zero_()
        return
    starts = workspace_starts[:batch_size].long()
    row = torch.arange(dst.shape[0], device=dst.device)
    request = (torch.searchsorted(starts, row, right=True) - 1).clamp(min=0)
    token = row - starts[request]  # negative in a row before the first start
    in_table = token >= 0
    if seq_starts is not None:
        token = token + seq_starts[request].long()
    column = token.div(block_size, rounding_mode="floor")
    in_table &= (token >= 0) & (column < max_blocks)
    block = block_table[request, column.clamp(0, max_blocks - 1)].long()
    # A bad block id makes a slot outside the cache, which the gather reads as zeros.
    slots = torch.where(in_table, block * block_size + token.remainder(block_size), -1)
    dst.copy_(gather(src_cache, slots, dst.dtype, layer, codec))


def gather(
    kv_cache: Tensor,
    slots: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    layer: int = 0,
    codec: Codec = NVFP4,
) -> Tensor:
    """Read the tokens at given slots.

    Args:
        kv_cache: uint8 [num_blocks, block_size, 352] or the pool, as in `concat_and_cache`.
        slots: int32 or int64 of any shape; slot i is record i % block_size of block
            i // block_size. A slot outside [0, num_blocks * block_size) gives zeros, whatever
            any record holds.
        dtype: bfloat16, float16 or float32.
        layer: layer of the pool to read, 0 for the cache of one layer.
        codec: of another format, whose cache `kv_cache` then is.

    Returns:
        `dtype` [*slots.shape, 576].

    Raises:
        ValueError: `kv_cache` or `layer` is not as above.
    """
    capacity = _capacity(kv_cache, layer, codec)
    if capacity == 0:
        return torch.zeros(*slots.shape, layout.HEAD_DIM, dtype=dtype, device=kv_cache.device)
    slots = slots.long()
    found = (slots >= 0) & (slots < capacity)
    records = kv_cache[_place(kv_cache, torch.where(found, slots, 0), layer)]
    # Selected and not multiplied: 0 * NaN would let a record that nobody asked for through.
    return torch.where(found[..., None], codec.decode(records, dtype), 0.0)


def attention(
    q: Tensor,
    kv_cache: Tensor,
    indices: Tensor,
    softmax_scale: float,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
    layer: int = 0,
) -> tuple[Tensor, Tensor]:
    """Sparse MLA decode: each query row attends to the tokens at its own slots, in fp32.

    The key of a token is its 576 dims, its value the first 512. An index outside
    [0, num_blocks * block_size) is no token, and neither is one at or past the row's
    `topk_length`. A row with no token gives out 0 and lse -inf. Records that a row does not
    select cannot reach it, NaN or not; a NaN in a selected record makes that row NaN.

    The products are PyTorch's fp32 matmul: with torch.set_float32_matmul_precision at its default
    of "highest" they are fp32 throughout.

    Args:
        q: bf16, fp16 or fp32 [b, s_q, h, 576].
        kv_cache: uint8 [num_blocks, block_size, 352] or the pool, as in `concat_and_cache`.
        indices: int32 [b, s_q, topk]: slots, topk >= 0. A slot named twice counts twice.
        softmax_scale: factor of the scores before the softmax.
        topk_length: int32 [b] or [b, s_q]: how many of a row's indices count; None for all.
        attn_sink: fp32 [h]: a head's score for attending to nothing. Scales out by
            exp(lse) / (exp(lse) + exp(sink)), and leaves lse alone.
        layer: layer of the pool to read, 0 for the cache of one layer.

    Returns:
        out, of q's dtype [b, s_q, h, 512], and lse, fp32 [b, s_q, h]: the natural logarithm of
        the sum of exponentials of the scaled scores, without the sink.

    Raises:
        ValueError: `kv_cache` or `layer` is not as above.
    """
    batch, _, _, _ = q.shape
    topk = indices.shape[-1]
    selected = (indices >= 0) & (indices < _capacity(kv_cache, layer, NVFP4))
    if topk_length is not None:
        rank = torch.arange(topk, device=indices.device)
        selected = selected & (rank < topk_length.reshape(batch, -1, 1))
    latent = gather(kv_cache, torch.where(selected, indices, -1), torch.float32, layer)
    scores = torch.einsum("bqhd,bqkd->bqhk", q.float(), latent) * softmax_scale
    scores = scores.masked_fill(~selected[:, :, None, :], float("-inf"))
    lse = scores.logsumexp(dim=-1)
    empty = ~selected.any(dim=-1)[:, :, None]
    # An empty row's scores are all -inf, and -inf - -inf is NaN: take any finite number for lse.
    weights = torch.exp(scores - lse.masked_fill(empty, 0.0)[..., None])
    if attn_sink is not None:
        # exp(lse) / (exp(lse) + exp(sink)) without overflow.
        share = torch.sigmoid(lse - attn_sink.float()).masked_fill(empty, 0.0)
        weights = weights * share[..., None]
    out = torch.einsum("bqhk,bqkd->bqhd", weights, latent[..., : layout.NOPE_DIM])
    return out.to(q.dtype), lse


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """The attention to two disjoint sets of tokens, from the attention to each, in fp32.

    A side whose lse is -inf has no token: the result is the other side's to the bit, whatever out
    holds there; with no token on either side out is 0 and lse -inf. Neither side has a sink.

    Args:
        out_a: bf16, fp16 or fp32 [..., d].
        lse_a: fp32 [...], as `attention` gives it.
        out_b: like out_a.
        lse_b: like lse_a.

    Returns:
        out, of out_a's dtype [..., d], and lse, fp32 [...].
    """
    lse = torch.logaddexp(lse_a, lse_b)
    no_a, no_b = lse_a.isneginf()[..., None], lse_b.isneginf()[..., None]
    share_a = torch.exp(lse_a - lse)[..., None] * out_a.float()
    share_b = torch.exp(lse_b - lse)[..., None] * out_b.float()
    both = (share_a + share_b).to(out_a.dtype)
    out = torch.where(no_b, torch.where(no_a, 0.0, out_a), torch.where(no_a, out_b, both))
    return out, lse


def _block_scale(blocks: Tensor) -> Tensor:
    """Steps 1 to 3. fp32 [..., 32, 16] -> the byte of each block's scale, int32 [..., 32].

    The division takes the way of fp64, because a division in fp32 is not always one: eager CUDA
    and Inductor make x / 6.0 into x * (1 / 6.0), and Triton's `/` is approximate. An fp64 quotient
    of fp32 numbers, rounded to fp32, is their correctly rounded fp32 quotient, since fp64 has more
    than twice as many bits.
    """
    amax = torch.where(blocks.isnan(), 0.0, blocks.abs()).amax(dim=-1)
    target = (amax.double() / 6.0).float().clamp(E4M3_SMALLEST, E4M3_MAX)
    return _e4m3_magnitude(target, torch.ceil)


def _to_e2m1(x: Tensor, inverse: Tensor) -> Tensor:
    """Steps 4 and 5. fp32 x, and 1 / scale that broadcasts to it -> codes, int32, shaped as x."""
    y = x.abs() * inverse
    code = torch.zeros_like(x, dtype=torch.int32)
    for below, midpoint in enumerate(E2M1_MIDPOINTS):
        # Between codes `below` and `below + 1`; at the midpoint itself the even one is chosen.
        code += (y > midpoint) if below % 2 == 0 else (y >= midpoint)
    code = code | (x.signbit().int() << 3)
    return torch.where(x.isnan(), E2M1_NAN, code)


def to_e4m3(x: Tensor) -> Tensor:
    """fp32 -> the bytes of the nearest e4m3 numbers, int32, saturating at +-448."""
    # Clamped before the conversion, as a kernel has to: not every converter saturates.
    magnitude = torch.where(x.isnan(), 0.0, x.abs()).clamp(max=E4M3_MAX)
    byte = _e4m3_magnitude(magnitude, torch.round) | (x.signbit().int() << 7)
    return torch.where(x.isnan(), E4M3_NAN, byte)


def _e4m3_magnitude(x: Tensor, rounding: Callable[[Tensor], Tensor]) -> Tensor:
    """fp32 in [0, 448] -> an e4m3 byte; `rounding` (torch.round ties to even) picks a neighbour.

    Between two powers of two, e4m3 has eight equal steps, and the same below the smallest normal
    number. Counted in such steps x is exact; its rounding to a whole number is the rounding to
    e4m3. A carry into the next power of two carries from the mantissa bits to the exponent bits.
    """
    exponent_field = (x.view(torch.int32) >> 23) & 0xFF
    exponent = (exponent_field - 127).clamp(min=E4M3_MIN_EXPONENT)
    steps = rounding(x * _power_of_two(E4M3_MANTISSA_BITS - exponent)).int()
    return ((exponent - E4M3_MIN_EXPONENT) << E4M3_MANTISSA_BITS) + steps


def _from_e2m1(code: Tensor) -> Tensor:
    """int32 codes 0 to 15 -> fp32 values."""
    magnitude = _minifloat(code & 0x7, E2M1_MANTISSA_BITS, E2M1_BIAS)
    return torch.where((code & 0x8) != 0, -magnitude, magnitude)


def from_e4m3(byte: Tensor) -> Tensor:
    """int32 bytes 0 to 255 -> fp32 values."""
    magnitude = _minifloat(byte & 0x7F, E4M3_MANTISSA_BITS, E4M3_BIAS)
    magnitude = torch.where((byte & 0x7F) == E4M3_NAN, float("nan"), magnitude)
    return torch.where((byte & 0x80) != 0, -magnitude, magnitude)


def _minifloat(bits: Tensor, mantissa_bits: int, bias: int) -> Tensor:
    """The value of a small float without its sign: exponent field, then mantissa field."""
    field = bits >> mantissa_bits
    # Exponent field 0 is that of the subnormal numbers: no implicit one, the exponent of field 1.
    implicit_one = (field != 0).int() << mantissa_bits
    significand = (bits & ((1 << mantissa_bits) - 1)) | implicit_one
    return significand.float() * _power_of_two(field.clamp(min=1) - bias - mantissa_bits)


def _power_of_two(exponent: Tensor) -> Tensor:
    """fp32 2^exponent for int32 in [-126, 127], by its bits: exp2 and pow need not be exact."""
    return ((exponent + 127) << 23).view(torch.float32)


def _capacity(kv_cache: Tensor, layer: int, codec: Codec) -> int:
    """Slots of a layer; checks the shape of the cache and the layer."""
    if kv_cache.dim() not in (3, 4) or kv_cache.shape[-1] != codec.width:
        raise ValueError(
            f"kv_cache: wanted [num_blocks, block_size, {codec.width}] or "
            f"[num_layers, num_blocks, block_size, {codec.width}], got {list(kv_cache.shape)}"
        )
    num_layers = kv_cache.shape[0] if kv_cache.dim() == 4 else 1
    if not 0 <= layer < num_layers:
        raise ValueError(f"layer: wanted a number in [0, {num_layers}), got {layer}")
    return kv_cache.shape[-3] * kv_cache.shape[-2]


def _place(kv_cache: Tensor, slots: Tensor, layer: int) -> tuple[Tensor, ...]:
    """The index of slots in the cache: block and offset, and for the pool its layer before them.

    The pool is indexed whole, never through `kv_cache[layer]`: see pytorch issue 198068.
    """
    block_size = kv_cache.shape[-2]
    place = (slots.div(block_size, rounding_mode="floor"), slots.remainder(block_size))
    return (torch.full_like(slots, layer), *place) if kv_cache.dim() == 4 else place
