"""Sample inputs of sparse_mla_decode and merge_attention_states: more of what cases.py is."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from cases import BF16, FP16, FP32, INT32, MARGIN, Case, inside, noise, random_cache
from nvfp4_dsmla import layout
from nvfp4_dsmla.layout import HEAD_DIM, NOPE_DIM, RECORD_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

SCALE = HEAD_DIM**-0.5
Q_LAYOUTS = ("packed", "unaligned", "padded", "heads_first", "one_token")


def q_strides(layout: str, shape: Sequence[int]) -> list[int] | None:
    batch, s_q, heads, dim = shape
    if layout == "padded":  # a slice of wider rows, and odd strides
        return [s_q * heads * 700 + 3, heads * 700 + 1, 700, 1]
    if layout == "heads_first":  # allocated [heads, s_q, batch, 576]
        return [dim, batch * dim, s_q * batch * dim, 1]
    if layout == "one_token":  # every request asks the same
        return [0, 0, dim, 1]
    return None


def decode_arguments(
    generator: torch.Generator,
    device: torch.device,
    *,
    batch: int = 2,
    s_q: int = 1,
    heads: int = 4,
    topk: int = 10,
    dtype: torch.dtype = BF16,
    num_blocks: int = 3,
    block_size: int = 16,
    num_layers: int | None = None,
    layer: int = 0,
    cache_layout: str = "packed",
    q_layout: str = "packed",
    index_strides: Sequence[int] | None = None,
    indices: Sequence[int] | None = None,
    scale: float = SCALE,
    lengths: Any = None,
    sink: Sequence[float] | None = None,
) -> dict[str, Any]:
    """Tokens in one layer, random bytes in the others; random slots around the cache's own unless
    `indices` are given, the same for every row."""
    capacity = num_blocks * block_size
    cache = random_cache(
        generator,
        device,
        num_blocks=num_blocks,
        block_size=block_size,
        num_layers=num_layers,
        layout=cache_layout,
    )
    written = cache if num_layers is None else cache[layer]
    written.copy_(random_tokens(capacity, generator).view(written.shape))
    q = torch.randn(batch, s_q, heads, HEAD_DIM, generator=generator).to(dtype)
    if indices is None:
        slots = torch.randint(-3, capacity + 3, (batch, s_q, topk), generator=generator)
    else:
        slots = torch.tensor(indices).expand(batch, s_q, -1)
    return {
        "q": inside(
            q,
            generator,
            device,
            strides=q_strides(q_layout, q.shape),
            offset=MARGIN + (q_layout == "unaligned"),
        ),
        "kv_cache": cache,
        "indices": inside(slots.int(), generator, device, strides=index_strides, offset=MARGIN + 1),
        "softmax_scale": scale,
        "topk_length": None if lengths is None else vector(lengths, torch.int32, generator, device),
        "attn_sink": None if sink is None else vector(sink, FP32, generator, device),
        "layer": layer,
    }


def random_tokens(count: int, generator: torch.Generator) -> Tensor:
    """Records uint8 [count, 352] of any code, under scales from 1/8 to 1, and RoPE up to +-1."""
    records = noise(count * RECORD_BYTES, generator, torch.device("cpu")).view(count, RECORD_BYTES)
    for part, end in ((layout.scale_bytes(records), 0x38), (layout.rope_bytes(records), 0x39)):
        part.copy_(torch.randint(0x20, end, part.shape, generator=generator))
    rope = layout.rope_bytes(records)
    rope |= torch.randint(2, rope.shape, generator=generator, dtype=torch.uint8) << 7
    return records


def vector(
    values: Any, dtype: torch.dtype, generator: torch.Generator, device: torch.device
) -> Tensor:
    """On every third place."""
    tensor = torch.tensor(values, dtype=dtype)
    strides = [3] if tensor.dim() == 1 else [3 * tensor.shape[1] + 1, 3]
    return inside(tensor, generator, device, strides=strides)


def _decode(name: str, **sizes: Any) -> Case:
    return Case(name, lambda generator, device: decode_arguments(generator, device, **sizes))


DECODES = [
    _decode("one_token", batch=1, heads=1, topk=1, num_blocks=1, block_size=1, indices=[0]),
    _decode("bfloat16", heads=16),
    _decode("float16", heads=3, dtype=FP16, s_q=2),
    _decode("many_heads", heads=33, topk=70),
    _decode("parts", batch=1, heads=9, topk=600, num_blocks=8, block_size=64),
    _decode("no_topk", topk=0),
    _decode("no_rows", batch=0),
    _decode("no_heads", heads=0),
    _decode("no_token", indices=[-1, 48, INT32.min, INT32.max]),
    _decode("empty_cache", num_blocks=0),
    _decode("same_slot", indices=[7] * 5),
    _decode("lengths", batch=3, topk=8, lengths=[3, 0, 8]),
    _decode("lengths_of_rows", s_q=2, topk=8, lengths=[[3, -1], [9, INT32.max]]),
    _decode("extreme_lengths", batch=3, lengths=[INT32.min, INT32.max, 1]),
    _decode("sink", heads=3, sink=[0.5, -math.inf, math.inf], lengths=[0, 8]),
    _decode("padded_q", s_q=3, heads=5, q_layout="padded"),
    _decode("permuted_q", s_q=2, heads=17, q_layout="heads_first", dtype=FP16),
    _decode("unaligned_q", q_layout="unaligned", cache_layout="unaligned"),
    _decode("expanded_q", batch=3, s_q=2, q_layout="one_token"),
    _decode("strided_indices", batch=3, s_q=2, topk=5, index_strides=[1, 40, 7]),
    _decode("shared_indices", batch=3, s_q=2, topk=5, index_strides=[0, 0, 1], indices=range(5)),
    _decode("pool", num_layers=3, layer=1, block_size=64),
    _decode("permuted_pool", num_layers=3, layer=2, cache_layout="blocks_first", block_size=100),
    _decode("token_major_pool", num_layers=2, layer=1, cache_layout="tokens_first"),
    _decode("odd_strides", cache_layout="odd_strides", block_size=1, num_blocks=30),
    _decode("padded_pages", cache_layout="padded_pages"),
]


def _merge(
    name: str,
    *,
    rows: Sequence[int] = (2, 3),
    dtype: torch.dtype = BF16,
    empty_a: Sequence[int] = (),
    empty_b: Sequence[int] = (),
    strides: Sequence[int] | None = None,
    lse_strides: Sequence[int] | None = None,
    offset: int = MARGIN,
) -> Case:
    """`empty_a` and `empty_b`: numbers of rows that have no token, with anything in their out."""

    def make(generator: torch.Generator, device: torch.device) -> dict[str, Any]:
        arguments = {}
        for side, empty in (("a", empty_a), ("b", empty_b)):
            out = torch.randn((*rows, NOPE_DIM), generator=generator)
            lse = torch.randn(tuple(rows), generator=generator) * 5
            lse.view(-1)[list(empty)] = -math.inf
            out.view(-1, NOPE_DIM)[list(empty)] = 1e30
            arguments[f"out_{side}"] = inside(
                out.to(dtype), generator, device, strides=strides, offset=offset
            )
            arguments[f"lse_{side}"] = inside(
                lse, generator, device, strides=lse_strides, offset=MARGIN + 1
            )
        return arguments

    return Case(name, make)


MERGES = [
    _merge("bfloat16"),
    _merge("float16", dtype=FP16, rows=[2, 1, 5]),
    _merge("float32", dtype=FP32, rows=[70]),
    _merge("unaligned", offset=MARGIN + 1),
    _merge("one_row", rows=[]),
    _merge("no_rows", rows=[3, 0]),
    _merge("empty_rows", dtype=FP32, empty_a=[0, 1, 4], empty_b=[1, 3]),
    _merge("strided", rows=[4, 3], strides=[600, 2500, 1], lse_strides=[7, 2]),
    _merge("column_major", dtype=FP16, rows=[3, 2], strides=[2, 1, 6], lse_strides=[1, 3]),
    _merge("expanded", rows=[3, 2], strides=[0, 0, 1], lse_strides=[0, 1]),
]
