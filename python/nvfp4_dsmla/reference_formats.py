"""`fp8_ds_mla` and `bfloat16` records in plain PyTorch, and the way from any format to any other.

    fp8_ds_mla
    byte    0                                 512          528                656
            | 512 x e4m3                       | 4 x fp32   | 64 x bf16        |
            | NoPE                             | scales     | RoPE             |

Scale s is that of dims 128s to 128s + 127. Writing takes these steps; x is the input as fp32:

1. amax = the largest |x| of the block, NaN elements ignored.
2. scale = max(amax / 448, 2^-126), an fp32 division rounded to nearest; infinite if amax is.
3. code = the e4m3 number nearest to x / scale, an fp32 division rounded to nearest first; beyond
   448 it is 448, and NaN is 0x7F.

A RoPE dim is copied if it is bfloat16, else rounded to nearest, ties to even, its NaN to 0x7FC0.

Reading is e4m3(code) * scale in fp32, then rounded to the dtype that is asked for.

A `bfloat16` record is 576 elements of that type, each as a RoPE dim above.

Like reference.py this shares no arithmetic with the C++ sources, and was written to be read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4_dsmla import _C, layout, reference

__all__ = [
    "BFLOAT16",
    "CODECS",
    "FP8",
    "convert",
    "decode_bfloat16",
    "decode_fp8",
    "encode_bfloat16",
    "encode_fp8",
]

FP8_SMALLEST_SCALE = 2.0**-126
BFLOAT16_NAN = 0x7FC0


def encode_fp8(kv_c: Tensor, k_pe: Tensor) -> Tensor:
    """The `fp8_ds_mla` records of tokens.

    Args:
        kv_c: bf16, fp16 or fp32 [..., 512], the NoPE dims.
        k_pe: bf16, fp16 or fp32 [..., 64], the RoPE dims; the same leading dims as `kv_c`.

    Returns:
        uint8 [..., 656].
    """
    blocks = kv_c.float().reshape(*kv_c.shape[:-1], _C.FP8_NUM_SCALES, _C.FP8_BLOCK_DIM)
    amax = torch.where(blocks.isnan(), 0.0, blocks.abs()).amax(dim=-1)
    # Quotients by way of fp64: a division in fp32 is not always one (reference.py says why).
    scale = (amax.double() / reference.E4M3_MAX).float().clamp(min=FP8_SMALLEST_SCALE)
    quotient = (blocks.double() / scale.double()[..., None]).float()
    codes = reference.to_e4m3(quotient).to(torch.uint8).flatten(-2)
    parts = [codes, scale.view(torch.uint8), _to_bfloat16(k_pe).view(torch.uint8)]
    return torch.cat(parts, dim=-1)


def decode_fp8(records: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The latent vectors of `fp8_ds_mla` records, rounded to `dtype`.

    The sign and payload of a NaN are unspecified.

    Args:
        records: uint8 [..., 656].
        dtype: bfloat16, float16 or float32.

    Returns:
        `dtype` [..., 576]: the 512 NoPE dims, then the 64 RoPE dims.
    """
    codes = records[..., _C.FP8_CODES_OFFSET :][..., : layout.NOPE_DIM].int()
    scale = records[..., _C.FP8_SCALES_OFFSET : _C.FP8_ROPE_OFFSET].contiguous()
    rope = records[..., _C.FP8_ROPE_OFFSET :].contiguous().view(torch.bfloat16)
    blocks = reference.from_e4m3(codes).unflatten(-1, (_C.FP8_NUM_SCALES, _C.FP8_BLOCK_DIM))
    values = blocks * scale.view(torch.float32)[..., None]
    return torch.cat([values.flatten(-2).to(dtype), rope.to(dtype)], dim=-1)


def encode_bfloat16(kv_c: Tensor, k_pe: Tensor) -> Tensor:
    """The `bfloat16` records of tokens.

    Args:
        kv_c: bf16, fp16 or fp32 [..., 512], the NoPE dims.
        k_pe: bf16, fp16 or fp32 [..., 64], the RoPE dims; the same leading dims as `kv_c`.

    Returns:
        bfloat16 [..., 576].
    """
    return torch.cat([_to_bfloat16(kv_c), _to_bfloat16(k_pe)], dim=-1)


def decode_bfloat16(records: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The latent vectors of `bfloat16` records, rounded to `dtype`.

    Args:
        records: bfloat16 [..., 576].
        dtype: bfloat16, float16 or float32.

    Returns:
        `dtype` [..., 576].
    """
    return records.to(dtype)


FP8 = reference.Codec(_C.FP8_RECORD_BYTES, encode_fp8, decode_fp8)
"""`fp8_ds_mla`."""
BFLOAT16 = reference.Codec(layout.HEAD_DIM, encode_bfloat16, decode_bfloat16)
"""`bfloat16`."""
CODECS: dict[str, reference.Codec] = {
    "bfloat16": BFLOAT16,
    "fp8_ds_mla": FP8,
    "nvfp4_ds_mla": reference.NVFP4,
}
"""Each format's codec by its name."""


def convert(records: Tensor, src_format: str, dst_format: str) -> Tensor:
    """Records of one format from those of another: decoded to fp32 and encoded again.

    What is decoded is what is encoded: bfloat16 records are encoded from bfloat16, so that a RoPE
    dim which stays of that type is copied. Records of the same format are copied.

    Args:
        records: uint8, or bfloat16 for that format [..., elements a token].
        src_format: a key of `CODECS`.
        dst_format: likewise.

    Returns:
        [..., elements a token], of the same leading dimensions.
    """
    if src_format == dst_format:
        return records.clone()
    dtype = torch.bfloat16 if src_format == "bfloat16" else torch.float32
    latent = CODECS[src_format].decode(records, dtype)
    return CODECS[dst_format].encode(latent[..., : layout.NOPE_DIM], latent[..., layout.NOPE_DIM :])


def _to_bfloat16(x: Tensor) -> Tensor:
    if x.dtype == torch.bfloat16:
        return x.contiguous()
    bits = x.to(torch.bfloat16).contiguous().view(torch.int16)
    return torch.where(x.isnan(), BFLOAT16_NAN, bits).view(torch.bfloat16)
