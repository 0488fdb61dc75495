"""Allocating a cache, and turning block tables into the slot numbers that the ops take."""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4_dsmla.layout import RECORD_BYTES

__all__ = ["allocate_kv_cache", "slot_mapping_from_block_table"]


def allocate_kv_cache(
    *,
    num_blocks: int,
    block_size: int,
    num_layers: int | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """An empty cache of 352-byte records, one layer's or the pool of a whole model.

    Prefer the pool and the ops' `layer=` argument wherever torch.compile is involved: PyTorch
    miscompiles writes to a layer's view of a pool inside a traced region (pytorch issue 198068).
    A record never written is all zeros, which decodes to a token of zeros.

    Args:
        num_blocks: blocks a layer, 0 or more.
        block_size: tokens a block, 1 or more.
        num_layers: layers of the pool, 1 or more; None for the cache of one layer.
        device: where; PyTorch's default device when None.

    Returns:
        uint8 zeros [num_blocks, block_size, 352], or [num_layers, num_blocks, block_size, 352].

    Raises:
        ValueError: a size is out of its range.
    """
    _check_at_least("num_blocks", num_blocks, 0)
    _check_at_least("block_size", block_size, 1)
    shape = (num_blocks, block_size, RECORD_BYTES)
    if num_layers is None:
        return torch.zeros(shape, dtype=torch.uint8, device=device)
    _check_at_least("num_layers", num_layers, 1)
    return torch.zeros((num_layers, *shape), dtype=torch.uint8, device=device)


def slot_mapping_from_block_table(
    *, block_table: Tensor, positions: Tensor, block_size: int
) -> Tensor:
    """The cache slot of each token, given each request's blocks and the token's place in it.

    Token p of request b lies in slot `block_table[b, p // block_size] * block_size
    + p % block_size`. The result is what the write takes as `slot_mapping` (flattened) and the
    gather as `slots`. There is no host read and no data-dependent shape, so it can be traced and
    captured in a CUDA graph; a negative block id or position is no token and gives -1, which
    every op of this library skips or reads as zeros. Block ids past the cache are not seen here.

    Args:
        block_table: int32 or int64 [>= B, max_blocks], any strides: block ids of each request.
        positions: int32 or int64 [B] or [B, S]: index of a token in its request, from 0.
        block_size: tokens a block, 1 or more.

    Returns:
        int64 of the shape of `positions`; -1 where the position is negative or past the row of
        the block table, or the block id is negative.

    Raises:
        ValueError: a shape, dtype, device or `block_size` is not as above.
    """
    _check_at_least("block_size", block_size, 1)
    _check_table_and_positions(block_table, positions)
    position = positions.long()
    # A last column of no block, for positions that have none: the table may have no other.
    table = torch.nn.functional.pad(block_table, (0, 1), value=-1)
    column = position.div(block_size, rounding_mode="floor")
    column = torch.where(column < 0, block_table.shape[1], column.clamp(max=block_table.shape[1]))
    request = torch.arange(position.shape[0], device=position.device)
    if position.dim() == 2:
        request = request[:, None]
    block = table[request, column].long()
    return torch.where(block >= 0, block * block_size + position.remainder(block_size), -1)


def _check_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name}: wanted {least} or more, got {value}")


def _check_table_and_positions(block_table: Tensor, positions: Tensor) -> None:
    for name, tensor in (("block_table", block_table), ("positions", positions)):
        if tensor.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name}: wanted int32 or int64, got {tensor.dtype}")
    if block_table.dim() != 2:
        raise ValueError(f"block_table: wanted [B, max_blocks], got {block_table.dim()} dimensions")
    if positions.dim() not in (1, 2):
        raise ValueError(f"positions: wanted [B] or [B, S], got {positions.dim()} dimensions")
    if torch.compiler.is_compiling():  # where a traced size is unknown, this is checked at run time
        torch._check(block_table.shape[0] >= positions.shape[0])
    elif block_table.shape[0] < positions.shape[0]:
        raise ValueError(
            f"block_table: wanted a row for each request of positions, {positions.shape[0]}, "
            f"got {block_table.shape[0]}"
        )
    if block_table.device != positions.device:
        raise ValueError(
            f"positions: wanted the device of block_table ({block_table.device}), "
            f"got {positions.device}"
        )
