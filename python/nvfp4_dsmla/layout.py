"""Where things lie inside a 352-byte `nvfp4_ds_mla` record, and named views of a cache.

    byte    0                                256            320          352
            | 512 x e2m1, 2 per byte          | 64 x e4m3    | 32 x e4m3  |
            | low nibble = even element       | RoPE,        | NoPE block |
            |                                 | no scale     | scales     |

The numbers come from the compiled module, so they exist once in this project. Every function below
takes any uint8 tensor of shape [..., 352]: a record, a batch of records, a layer's cache
[num_blocks, block_size, 352] or a pool [num_layers, num_blocks, block_size, 352], with any strides
as long as the bytes of a record are contiguous.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4_dsmla import _C

NOPE_DIM: int = _C.NOPE_DIM
ROPE_DIM: int = _C.ROPE_DIM
HEAD_DIM: int = _C.HEAD_DIM
BLOCK_DIM: int = _C.BLOCK_DIM
NUM_SCALES: int = _C.NUM_SCALES
RECORD_BYTES: int = _C.RECORD_BYTES
CODES_OFFSET: int = _C.CODES_OFFSET
ROPE_OFFSET: int = _C.ROPE_OFFSET
SCALES_OFFSET: int = _C.SCALES_OFFSET

SCALE_ORDER: tuple[int, ...] = tuple(sorted(range(NUM_SCALES), key=_C.scale_offset))
"""SCALE_ORDER[p] is the element block whose scale lies at byte SCALES_OFFSET + p."""

__all__ = [
    "BLOCK_DIM",
    "CODES_OFFSET",
    "HEAD_DIM",
    "NOPE_DIM",
    "NUM_SCALES",
    "RECORD_BYTES",
    "ROPE_DIM",
    "ROPE_OFFSET",
    "SCALES_OFFSET",
    "SCALE_ORDER",
    "codes",
    "rope_bytes",
    "scale_bytes",
    "scales_by_block",
]


def codes(cache: Tensor) -> Tensor:
    """A view of the e2m1 codes, two a byte: dim 2i in the low nibble of byte i, 2i+1 in the high.

    Args:
        cache: uint8 [..., 352].

    Returns:
        uint8 [..., 256], sharing storage with `cache`.

    Raises:
        ValueError: `cache` is not uint8 or its last dimension is not 352.
    """
    return _bytes(cache, CODES_OFFSET, NOPE_DIM // 2)


def rope_bytes(cache: Tensor) -> Tensor:
    """A view of the RoPE bytes: byte i is dim 512 + i as e4m3, unscaled.

    Args:
        cache: uint8 [..., 352].

    Returns:
        uint8 [..., 64], sharing storage with `cache`.

    Raises:
        ValueError: `cache` is not uint8 or its last dimension is not 352.
    """
    return _bytes(cache, ROPE_OFFSET, ROPE_DIM)


def scale_bytes(cache: Tensor) -> Tensor:
    """A view of the e4m3 scales as they are stored: byte p is the scale of block SCALE_ORDER[p].

    Args:
        cache: uint8 [..., 352].

    Returns:
        uint8 [..., 32] in storage order, sharing storage with `cache`.

    Raises:
        ValueError: `cache` is not uint8 or its last dimension is not 352.
    """
    return _bytes(cache, SCALES_OFFSET, NUM_SCALES)


def scales_by_block(cache: Tensor) -> Tensor:
    """The values of the scales, scale s being that of NoPE dims 16s to 16s + 15.

    Args:
        cache: uint8 [..., 352].

    Returns:
        fp32 [..., 32] in block order, a new tensor.

    Raises:
        ValueError: `cache` is not uint8 or its last dimension is not 352.
    """
    # PyTorch's own e4m3 and not the reference's: this is for looking at a cache, not for kernels.
    stored = scale_bytes(cache).contiguous().view(torch.float8_e4m3fn).float()
    place = [SCALE_ORDER.index(block) for block in range(NUM_SCALES)]
    return stored[..., place]


def _bytes(cache: Tensor, offset: int, length: int) -> Tensor:
    if cache.dtype != torch.uint8 or cache.dim() == 0 or cache.shape[-1] != RECORD_BYTES:
        raise ValueError(
            f"cache: wanted uint8 [..., {RECORD_BYTES}], got {cache.dtype} {list(cache.shape)}"
        )
    return cache.narrow(-1, offset, length)
