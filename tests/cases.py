"""Sample inputs of the ops, and the memory that they lie in.

One list an op: each sample is run against the reference, and given to opcheck. The tensors of a
sample lie inside larger allocations full of random bytes, at many strides and alignments.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nvfp4_dsmla.layout import HEAD_DIM, NOPE_DIM, RECORD_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
INT32 = torch.iinfo(torch.int32)
INT64 = torch.iinfo(torch.int64)

# Elements before and after a tensor in its allocation. A multiple of 16 bytes, so that an offset of
# MARGIN leaves a tensor aligned, and MARGIN + 1 does not.
MARGIN = 64


# ---- memory ------------------------------------------------------------------------------------


def memory_of(tensor: Tensor) -> Tensor:
    """Every byte of the allocation that `tensor` lies in, as uint8 [n] that shares it."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def copy_of(tensor: Tensor) -> Tensor:
    """A tensor of the same place, shape and strides in a CPU copy of the whole allocation."""
    memory = memory_of(tensor).to("cpu", copy=True)
    place = (tensor.storage_offset(), tensor.shape, tensor.stride())
    return torch.empty(0, dtype=tensor.dtype).set_(memory.untyped_storage(), *place)


def copies_of(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: copy_of(x) if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}


def assert_memory_equal(got: Tensor, want: Tensor, name: str) -> None:
    """Every byte of two allocations is equal, those outside of the tensors included."""
    different = (memory_of(got).cpu() != memory_of(want).cpu()).nonzero().flatten().tolist()
    assert not different, (
        f"{name}: {len(different)} bytes of its allocation differ, the first at {different[:8]}; "
        f"the tensor starts at byte {got.storage_offset() * got.element_size()}"
    )


def assert_margins_equal(got: Tensor, want: Tensor, name: str) -> None:
    """Every byte outside of the tensors is equal: canaries are alive."""
    got, want = copy_of(got), copy_of(want)
    assert_memory_equal(got.zero_(), want.zero_(), name)


def noise(count: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """uint8 [count] of random bytes."""
    return torch.randint(256, (count,), dtype=torch.uint8, generator=generator).to(device)


def inside(
    values: Tensor,
    generator: torch.Generator,
    device: torch.device,
    *,
    strides: Sequence[int] | None = None,
    offset: int = MARGIN,
) -> Tensor:
    """`values` on `device` in a larger allocation of noise, `offset` elements from its start."""
    if strides is None:
        strides = [prod(values.shape[d + 1 :]) for d in range(values.dim())]
    steps = zip(values.shape, strides, strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in steps) if values.numel() > 0 else 0
    memory = noise((offset + span + MARGIN) * values.element_size(), generator, device)
    tensor = memory.view(values.dtype).as_strided(values.shape, strides, offset)
    once = tuple(slice(None if stride > 0 else 1) for stride in strides)  # no element twice
    tensor[once].copy_(values[once])
    return tensor


# ---- contents ----------------------------------------------------------------------------------


def golden(path: Path) -> tuple[Tensor, Tensor]:
    """The golden tokens, bfloat16 [104, 576], and their records, uint8 [104, 352]."""
    with np.load(path) as file:
        bits = torch.from_numpy(file["latent_bf16_bits"].view(np.int16).copy())
        return bits.view(torch.bfloat16), torch.from_numpy(file["record"].copy())


def latents(
    shape: Sequence[int],
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    specials_share: float = 0.002,
) -> Tensor:
    """Normal numbers, each row at a magnitude of its own, and a few specials."""
    values = torch.randn(*shape, generator=generator)
    exponents = torch.randint(-12, 10, (*shape[:-1], 1), generator=generator)
    values = values * torch.exp2(exponents.float())
    specials = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-42, -3e38, 6.0])
    which = torch.randint(len(specials), shape, generator=generator)
    rare = torch.rand(*shape, generator=generator) < specials_share
    return torch.where(rare, specials[which], values).to(dtype)


def distinct_slots(count: int, capacity: int, generator: torch.Generator) -> Tensor:
    """int64 [count], no two equal, in no order."""
    return torch.randperm(capacity, generator=generator)[:count]


LAYOUTS = ("packed", "unaligned", "padded_pages", "padded_tokens", "odd_strides")
POOL_LAYOUTS = (*LAYOUTS, "blocks_first", "tokens_first")


def random_cache(
    generator: torch.Generator,
    device: torch.device,
    *,
    num_blocks: int,
    block_size: int,
    num_layers: int | None = None,
    layout: str = "packed",
    width: int = RECORD_BYTES,
) -> Tensor:
    """A cache or pool of random bytes, `width` a record, inside a larger allocation of more."""
    token = {"padded_tokens": width + 32, "odd_strides": width + 1}.get(layout, width)
    block = block_size * token + {"padded_pages": 160, "odd_strides": 7}.get(layout, 0)
    layer = num_blocks * block + (1 if layout == "odd_strides" else 0)
    layers = 1 if num_layers is None else num_layers
    if layout == "blocks_first":  # allocated [num_blocks, num_layers, block_size, width]
        layer, block = block, block * layers
    elif layout == "tokens_first":  # allocated [num_blocks, block_size, num_layers, width]
        layer, token = width, width * layers
        block = block_size * token
    offset = {"unaligned": 1, "odd_strides": 3}.get(layout, 0) + MARGIN
    shape = [layers, num_blocks, block_size, width]
    content = noise(prod(shape), generator, torch.device("cpu")).reshape(shape)
    cache = inside(content, generator, device, strides=[layer, block, token, 1], offset=offset)
    return cache[0] if num_layers is None else cache


# ---- samples -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One sample: `make` gives the arguments of the op by name.

    The samples of writes and gathers are for records of any width: `make(..., width=656)`.
    """

    name: str
    make: Callable[..., dict[str, Any]]


def write_case(
    name: str,
    *,
    tokens: int,
    dtype: torch.dtype,
    num_blocks: int = 3,
    block_size: int = 16,
    num_layers: int | None = None,
    layer: int = 0,
    layout: str = "packed",
    more_rows: int = 0,
    fused_width: int | None = None,
    offset: int = MARGIN,
    slot_dtype: torch.dtype = torch.int64,
    slot_stride: int = 1,
    skipped: Sequence[int] = (),
    specials_share: float = 0.002,
) -> Case:
    """A write; with `fused_width`, kv_c and k_pe are slices of rows of so many elements."""

    def make(
        generator: torch.Generator, device: torch.device, width: int = RECORD_BYTES
    ) -> dict[str, Any]:
        shape = (tokens + more_rows, HEAD_DIM)
        rows = latents(shape, dtype, generator, specials_share=specials_share)
        if fused_width is not None:
            strides = [fused_width, 1]
            rows = inside(rows, generator, device, strides=strides, offset=offset)
            kv_c, k_pe = rows[:, :NOPE_DIM], rows[:, NOPE_DIM:]
        else:
            kv_c = inside(rows[:, :NOPE_DIM], generator, device, offset=offset)
            k_pe = inside(rows[:, NOPE_DIM:], generator, device, offset=offset)
        slots = distinct_slots(tokens, num_blocks * block_size, generator)
        slots[list(skipped)] = torch.tensor([-1, -7, INT32.min])[: len(skipped)]
        return {
            "kv_c": kv_c,
            "k_pe": k_pe,
            "kv_cache": random_cache(
                generator,
                device,
                num_blocks=num_blocks,
                block_size=block_size,
                num_layers=num_layers,
                layout=layout,
                width=width,
            ),
            "slot_mapping": inside(
                slots.to(slot_dtype), generator, device, strides=[slot_stride], offset=MARGIN + 1
            ),
            "layer": layer,
        }

    return Case(name, make)


BF16, FP16, FP32 = DTYPES

WRITES = [
    write_case("one_token", tokens=1, dtype=BF16, num_blocks=1, block_size=1),
    write_case("bfloat16", tokens=5, dtype=BF16, skipped=[1, 4]),
    write_case("float16", tokens=5, dtype=FP16, slot_dtype=torch.int32, skipped=[0, 1, 2]),
    write_case("float32", tokens=5, dtype=FP32, slot_stride=3),
    write_case(
        "fused_projection", tokens=7, dtype=BF16, fused_width=1536 + HEAD_DIM, layout="odd_strides"
    ),
    write_case("unaligned_bfloat16", tokens=6, dtype=BF16, offset=MARGIN + 1, layout="unaligned"),
    write_case(
        "unaligned_float16", tokens=6, dtype=FP16, fused_width=HEAD_DIM + 1, offset=MARGIN + 3
    ),
    write_case(
        "unaligned_float32", tokens=6, dtype=FP32, fused_width=HEAD_DIM + 1, offset=MARGIN + 1
    ),
    write_case("more_rows_than_tokens", tokens=3, dtype=BF16, more_rows=4, layout="padded_tokens"),
    write_case("no_tokens", tokens=0, dtype=BF16, more_rows=2),
    write_case("pool", tokens=5, dtype=BF16, num_layers=3, layer=1, block_size=64),
    write_case(
        "permuted_pool",
        tokens=5,
        dtype=FP16,
        num_layers=3,
        layer=2,
        layout="blocks_first",
        slot_dtype=torch.int32,
        slot_stride=2,
    ),
    write_case(
        "token_major_pool", tokens=5, dtype=FP32, num_layers=2, layer=1, layout="tokens_first"
    ),
    write_case("padded_pages", tokens=40, dtype=BF16, layout="padded_pages", block_size=100),
]


def _gather(
    name: str,
    *,
    shape: Sequence[int],
    dtype: torch.dtype | None,
    num_blocks: int = 3,
    block_size: int = 16,
    num_layers: int | None = None,
    layer: int = 0,
    layout: str = "packed",
    slot_dtype: torch.dtype = torch.int64,
    slot_strides: Sequence[int] | None = None,
    slots: Sequence[int] | None = None,
) -> Case:
    """A gather by slot, of random slots around the cache's own unless `slots` are given."""

    def make(
        generator: torch.Generator, device: torch.device, width: int = RECORD_BYTES
    ) -> dict[str, Any]:
        capacity = num_blocks * block_size
        drawn = torch.randint(-3, capacity + 3, tuple(shape), generator=generator)
        values = drawn if slots is None else torch.tensor(slots).reshape(*shape)
        return {
            "kv_cache": random_cache(
                generator,
                device,
                num_blocks=num_blocks,
                block_size=block_size,
                num_layers=num_layers,
                layout=layout,
                width=width,
            ),
            "slots": inside(
                values.to(slot_dtype), generator, device, strides=slot_strides, offset=MARGIN + 1
            ),
            "dtype": dtype,
            "layer": layer,
        }

    return Case(name, make)


GATHERS = [
    _gather("one_slot", shape=[], dtype=None, block_size=1),
    _gather("bfloat16", shape=[9], dtype=BF16),
    _gather("float16", shape=[9], dtype=FP16, slot_dtype=torch.int32, layout="unaligned"),
    _gather("float32", shape=[9], dtype=FP32, slot_strides=[2], layout="odd_strides"),
    _gather("matrix", shape=[2, 5], dtype=None, layout="padded_pages", block_size=100),
    _gather("strided_matrix", shape=[3, 4], dtype=FP16, slot_strides=[1, 5]),
    _gather(
        "repeated_rows", shape=[3, 4], dtype=FP32, slot_strides=[0, 1], slots=[5, -1, 0, 47] * 3
    ),
    _gather("three_dims", shape=[2, 1, 3], dtype=BF16, layout="padded_tokens", block_size=64),
    _gather("no_slots", shape=[0, 4], dtype=None),
    _gather("same_slot", shape=[4], dtype=None, slots=[7, 7, 7, 7]),
    _gather(
        "int32_extremes",
        shape=[3],
        dtype=None,
        slot_dtype=torch.int32,
        slots=[INT32.min, 1, INT32.max],
    ),
    _gather("int64_extremes", shape=[4], dtype=None, slots=[INT64.min, 2**32, 1, INT64.max]),
    _gather("pool", shape=[6], dtype=BF16, num_layers=3, layer=1),
    _gather("permuted_pool", shape=[6], dtype=FP32, num_layers=3, layer=2, layout="blocks_first"),
    _gather(
        "token_major_pool", shape=[6], dtype=FP16, num_layers=2, layer=1, layout="tokens_first"
    ),
    _gather("empty_cache", shape=[3], dtype=None, num_blocks=0),
]


def _cp_gather(
    name: str,
    *,
    lengths: Sequence[int],
    dtype: torch.dtype,
    rows: int | None = None,
    seq_starts: Sequence[int] | None = None,
    num_blocks: int = 12,
    block_size: int = 4,
    max_blocks: int = 3,
    num_layers: int | None = None,
    layer: int = 0,
    layout: str = "packed",
    dst_stride: int = HEAD_DIM,
    offset: int = MARGIN,
    more_requests: int = 0,
    transposed_table: bool = False,
    stride: int = 1,
) -> Case:
    """A gather by request; `stride` is that of workspace_starts and seq_starts."""

    def make(
        generator: torch.Generator, device: torch.device, width: int = RECORD_BYTES
    ) -> dict[str, Any]:
        batch = len(lengths)
        ends = torch.tensor([0, *lengths]).cumsum(0)
        # The entries past the batch, and what the table holds past a request's end, are not read.
        starts = torch.cat([ends[:batch], torch.full((more_requests,), -5)])
        table = torch.randint(num_blocks, (batch + more_requests, max_blocks), generator=generator)
        table[batch:] = -1
        table_strides = [1, batch + more_requests] if transposed_table else None
        first = None if seq_starts is None else torch.tensor([*seq_starts, *[-9] * more_requests])
        num_rows = int(ends[-1]) if rows is None else rows

        def vector(values: Tensor) -> Tensor:
            return inside(values.int(), generator, device, strides=[stride])

        return {
            "src_cache": random_cache(
                generator,
                device,
                num_blocks=num_blocks,
                block_size=block_size,
                num_layers=num_layers,
                layout=layout,
                width=width,
            ),
            "dst": inside(
                torch.full((num_rows, HEAD_DIM), torch.nan, dtype=dtype),
                generator,
                device,
                strides=[dst_stride, 1],
                offset=offset,
            ),
            "block_table": inside(table.int(), generator, device, strides=table_strides),
            "workspace_starts": vector(starts),
            "batch_size": batch,
            "seq_starts": None if first is None else vector(first),
            "layer": layer,
        }

    return Case(name, make)


CP_GATHERS = [
    _cp_gather("one_request", lengths=[5], dtype=BF16),
    _cp_gather("float16", lengths=[3, 4], dtype=FP16, layout="odd_strides"),
    _cp_gather("float32", lengths=[3, 12, 1], dtype=FP32, more_requests=2),
    _cp_gather(
        "empty_requests", lengths=[0, 0, 3, 0, 2, 0], dtype=BF16, seq_starts=[0, 3, 1, 0, 6, 12]
    ),
    _cp_gather("only_empty_requests", lengths=[0, 0, 0], dtype=BF16),
    _cp_gather("no_requests", lengths=[], rows=3, dtype=FP16),
    _cp_gather("no_rows", lengths=[2, 3], rows=0, dtype=FP32),
    _cp_gather("fewer_rows_than_tokens", lengths=[2, 3, 4], rows=4, dtype=BF16),
    _cp_gather("more_rows_than_starts_say", lengths=[2, 3], rows=9, dtype=BF16, seq_starts=[0, 5]),
    _cp_gather(
        "strided", lengths=[4, 5], dtype=BF16, dst_stride=640, transposed_table=True, stride=3
    ),
    _cp_gather("unaligned", lengths=[4, 5], dtype=BF16, dst_stride=HEAD_DIM + 1, offset=MARGIN + 1),
    _cp_gather(
        "unaligned_float32", lengths=[4, 5], dtype=FP32, offset=MARGIN + 1, layout="unaligned"
    ),
    _cp_gather("one_block_each", lengths=[1, 1, 1], dtype=BF16, max_blocks=1, block_size=1),
    _cp_gather("no_blocks", lengths=[0, 0], dtype=BF16, max_blocks=0),
    _cp_gather(
        "pool", lengths=[5, 2], dtype=BF16, num_layers=3, layer=2, seq_starts=[1, 2], stride=2
    ),
    _cp_gather(
        "permuted_pool", lengths=[5, 2], dtype=FP16, num_layers=2, layer=1, layout="blocks_first"
    ),
    _cp_gather("many_requests", lengths=[2, 0, 1] * 13, dtype=BF16, block_size=1),
]
