"""Both gathers: exact values, every layout, and no byte written beside a row.

Decoding is exact, so every comparison is one of bits. Outputs that the caller gives are full of NaN
before the op runs, inside larger allocations of random bytes; the reference runs after the op, on
CPU copies.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import nvfp4_dsmla
from cases import (
    CP_GATHERS,
    DTYPES,
    GATHERS,
    INT32,
    INT64,
    MARGIN,
    POOL_LAYOUTS,
    Case,
    assert_margins_equal,
    assert_memory_equal,
    copies_of,
    copy_of,
    golden,
    inside,
    random_cache,
)
from compare import E2M1_VALUES, E4M3_VALUES, assert_latents_equal
from nvfp4_dsmla import layout, reference
from nvfp4_dsmla.layout import HEAD_DIM, NOPE_DIM, RECORD_BYTES

GOLDEN = Path(__file__).parent / "golden" / "nvfp4_ds_mla.npz"


def check_gather(arguments: dict[str, Any]) -> Tensor:
    """The op gives the reference's bits, in a new contiguous tensor; it changes nothing."""
    before = copies_of(arguments)
    dtype = arguments.get("dtype") or torch.bfloat16
    poison_free_memory(arguments["slots"].shape, dtype, arguments["kv_cache"].device)
    got = nvfp4_dsmla.gather_and_upconvert_nvfp4_ds_mla(**arguments)
    want = reference.gather(**{**before, "dtype": dtype})
    assert_latents_equal(got, want)
    assert got.is_contiguous()
    assert got.device == arguments["kv_cache"].device
    for name in ("kv_cache", "slots"):
        assert_memory_equal(arguments[name], before[name], name)
    return got


def poison_free_memory(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
    """Leave NaN where an allocator is likely to put an output of this shape next."""
    torch.full((*shape, HEAD_DIM), torch.nan, dtype=dtype, device=device)


def check_cp_gather(arguments: dict[str, Any]) -> None:
    """The op gives the reference's bits in dst, and changes nothing else."""
    before = copies_of(arguments)
    nvfp4_dsmla.cp_gather_and_upconvert_nvfp4_kv_cache(**arguments)
    want = dict(before, dst=copy_of(before["dst"]))
    reference.cp_gather(**want)
    assert_latents_equal(arguments["dst"], want["dst"])
    assert_margins_equal(arguments["dst"], before["dst"], "dst")
    for name, argument in arguments.items():
        if isinstance(argument, Tensor) and name != "dst":
            assert_memory_equal(argument, before[name], name)


# ---- values ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_golden_records_down(device: torch.device, dtype: torch.dtype) -> None:
    _, records = golden(GOLDEN)
    cache = records.view(-1, 8, RECORD_BYTES).to(device)
    got = check_gather({"kv_cache": cache, "slots": torch.arange(104).to(device), "dtype": dtype})
    assert got.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_code_under_every_scale(device: torch.device, dtype: torch.dtype) -> None:
    """Block b of the 256 has the codes 0 to 15 under scale byte b; RoPE has every byte too."""
    code = torch.arange(16, dtype=torch.uint8)
    byte = torch.arange(256, dtype=torch.uint8)
    cache = torch.zeros(8, 1, RECORD_BYTES, dtype=torch.uint8)
    layout.codes(cache)[:] = (code[0::2] | code[1::2] << 4).repeat(32)
    layout.scale_bytes(cache)[:] = byte.view(8, 1, 32)[..., list(layout.SCALE_ORDER)]
    layout.rope_bytes(cache)[:] = byte.view(4, 1, 64).repeat(2, 1, 1)
    got = nvfp4_dsmla.gather_and_upconvert_nvfp4_ds_mla(
        kv_cache=cache.to(device), slots=torch.arange(8, device=device), dtype=dtype
    )
    e2m1, e4m3 = torch.tensor(E2M1_VALUES), torch.tensor(E4M3_VALUES)
    nope = (e4m3[:, None] * e2m1).view(8, NOPE_DIM)
    rope = e4m3.view(4, 64).repeat(2, 1)
    assert_latents_equal(got, torch.cat([nope, rope], dim=1).to(dtype))


# ---- by slot -----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", GATHERS, ids=lambda case: case.name)
def test_slot_sample(device: torch.device, case: Case, generator: torch.Generator) -> None:
    check_gather(case.make(generator, device))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cache_layout", POOL_LAYOUTS)
@pytest.mark.parametrize("block_size", [1, 16, 64, 100])
def test_slots_in_every_layout(
    device: torch.device,
    block_size: int,
    cache_layout: str,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> None:
    num_blocks = -(-100 // block_size) + 1
    pool = random_cache(
        generator,
        device,
        num_blocks=num_blocks,
        block_size=block_size,
        num_layers=3,
        layout=cache_layout,
    )
    slots = torch.randint(-2, num_blocks * block_size + 2, (60,), generator=generator).to(device)
    check_gather({"kv_cache": pool, "slots": slots, "dtype": dtype, "layer": 2})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [31, 33, 4096, 4097, 4099])
def test_number_of_slots(
    device: torch.device, rows: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """Around the sizes where work is split between threads, and kernels change."""
    cache = random_cache(generator, device, num_blocks=5, block_size=16)
    slots = torch.randint(-1, 82, (rows,), generator=generator).to(device)
    got = nvfp4_dsmla.gather_and_upconvert_nvfp4_ds_mla(kv_cache=cache, slots=slots, dtype=dtype)
    latents = torch.zeros(82, HEAD_DIM, dtype=dtype)
    latents[:80] = reference.decode(cache.cpu().view(-1, RECORD_BYTES), dtype)
    assert_latents_equal(got, latents[slots.cpu()])  # slots -1, 80 and 81 are rows of zeros


@pytest.mark.parametrize("block_size", [1, 2, 3, 7, 64, 100, 127, 128, 129, 1000, 65537, 2**20 + 1])
def test_slots_up_to_2_to_the_31(
    device: torch.device, block_size: int, generator: torch.Generator
) -> None:
    """The kernels divide by multiplying. All blocks are one here, so the capacity costs nothing."""
    kept = min(block_size, 128)  # records that exist; they repeat within the block
    one = random_cache(generator, device, num_blocks=1, block_size=kept)
    if block_size > kept:
        one = one[:, :1].expand(1, block_size, RECORD_BYTES)
    num_blocks = INT32.max // block_size
    cache = one.expand(num_blocks, block_size, RECORD_BYTES)
    capacity = num_blocks * block_size
    anywhere = torch.randint(capacity, (200,), generator=generator)
    edges = torch.randint(1, num_blocks, (50,), generator=generator) * block_size
    ends = torch.tensor([0, capacity - 1, capacity, 2**31 - 1, 2**31, 2**32, INT64.max])
    slots = torch.cat([anywhere, edges, edges - 1, ends])
    got = nvfp4_dsmla.gather_and_upconvert_nvfp4_ds_mla(kv_cache=cache, slots=slots.to(device))
    offset = slots % block_size if block_size == kept else torch.zeros_like(slots)
    want = reference.decode(one[0, : min(block_size, kept)].cpu()[offset])
    want[(slots < 0) | (slots >= capacity)] = 0
    assert_latents_equal(got, want)


def test_slots_of_blocks_more_than_2_gib_apart(device: torch.device) -> None:
    block_stride = 2**31 + RECORD_BYTES
    memory = torch.empty(block_stride + 4 * RECORD_BYTES, dtype=torch.uint8, device=device)
    cache = memory.as_strided((2, 2, RECORD_BYTES), (block_stride, RECORD_BYTES, 1))
    _, records = golden(GOLDEN)
    cache.copy_(records[:4].view(2, 2, RECORD_BYTES))
    got = nvfp4_dsmla.gather_and_upconvert_nvfp4_ds_mla(
        kv_cache=cache, slots=torch.tensor([3, 0, 2, 1], device=device)
    )
    assert_latents_equal(got, reference.decode(records[[3, 0, 2, 1]]))


def test_the_default_dtype_is_bfloat16(device: torch.device, generator: torch.Generator) -> None:
    cache = random_cache(generator, device, num_blocks=1, block_size=4)
    slots = torch.zeros(1, dtype=torch.int64, device=device)
    got = nvfp4_dsmla.gather_and_upconvert_nvfp4_ds_mla(kv_cache=cache, slots=slots)
    assert got.dtype == torch.bfloat16


# ---- by request --------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CP_GATHERS, ids=lambda case: case.name)
def test_request_sample(device: torch.device, case: Case, generator: torch.Generator) -> None:
    check_cp_gather(case.make(generator, device))


def request_gather(
    lengths: list[int],
    device: torch.device,
    generator: torch.Generator,
    *,
    seq_starts: list[int] | None = None,
    block_size: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    cache_layout: str = "packed",
    num_blocks: int = 9,
) -> dict[str, Any]:
    """Requests of these many tokens, their tables just wide enough."""
    first = seq_starts or [0] * len(lengths)
    longest = max((f + n for f, n in zip(first, lengths, strict=True)), default=0)
    shape = (len(lengths), -(-longest // block_size))
    starts = torch.tensor([0, *lengths]).cumsum(0)
    table = torch.randint(num_blocks, shape, generator=generator)

    def vector(values: Tensor) -> Tensor:
        return inside(values.int(), generator, device)

    return {
        "src_cache": random_cache(
            generator, device, num_blocks=num_blocks, block_size=block_size, layout=cache_layout
        ),
        "dst": inside(
            torch.full((int(starts[-1]), HEAD_DIM), torch.nan, dtype=dtype), generator, device
        ),
        "block_table": vector(table),
        "workspace_starts": vector(starts[:-1]),
        "batch_size": len(lengths),
        "seq_starts": None if seq_starts is None else vector(torch.tensor(seq_starts)),
    }


def slots_row_by_row(arguments: dict[str, Any]) -> list[int]:
    """The slot of each row of dst, by the words of the contract; -1 for a row of zeros."""
    starts = arguments["workspace_starts"].tolist()[: arguments["batch_size"]]
    firsts = arguments["seq_starts"]
    first_tokens = [0] * len(starts) if firsts is None else firsts.tolist()
    table = arguments["block_table"].tolist()
    num_blocks, block_size = arguments["src_cache"].shape[-3:-1]
    slots = []
    for row in range(len(arguments["dst"])):
        owners = [b for b, start in enumerate(starts) if start <= row]
        slot = -1
        if owners:
            request = owners[-1]
            token = row - starts[request] + first_tokens[request]
            if 0 <= token < len(table[request]) * block_size:
                block = table[request][token // block_size]
                if 0 <= block < num_blocks:
                    slot = block * block_size + token % block_size
        slots.append(slot)
    return slots


def check_row_by_row(arguments: dict[str, Any]) -> None:
    before = copy_of(arguments["dst"])
    nvfp4_dsmla.cp_gather_and_upconvert_nvfp4_kv_cache(**arguments)
    dst = arguments["dst"]
    slots = torch.tensor(slots_row_by_row(arguments), dtype=torch.int64)
    cache = copy_of(arguments["src_cache"])
    assert_latents_equal(dst, reference.gather(cache, slots, dst.dtype, arguments.get("layer", 0)))
    assert_margins_equal(dst, before, "dst")


@pytest.mark.parametrize("requests", [1, 2, 31, 32, 33, 64, 1023, 1024, 1025, 1100])
def test_empty_requests_anywhere(
    device: torch.device, requests: int, generator: torch.Generator
) -> None:
    """At the start, in the middle, at the end; whole runs of them; and none but them."""
    some = torch.randint(4, (requests,), generator=generator)
    for lengths in (
        some,
        some * (torch.arange(requests) % 7 == 3),
        some * (torch.arange(requests) >= requests // 2),
        some * (torch.arange(requests) < requests // 2),
        some * (torch.arange(requests) == requests - 1) + (torch.arange(requests) == 0),
        torch.zeros_like(some),
    ):
        first = torch.randint(3, (requests,), generator=generator).tolist()
        check_cp_gather(request_gather(lengths.tolist(), device, generator, seq_starts=first))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("requests", [3, 40])
def test_thousands_of_rows(
    device: torch.device, requests: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """More than 4,096, which other kernels take, and an odd number: one takes two at a time."""
    lengths = torch.randint(2 * 4200 // requests, (requests,), generator=generator).tolist()
    lengths[1] += max(0, 4200 - sum(lengths))
    lengths[1] += 1 - sum(lengths) % 2
    check_cp_gather(request_gather(lengths, device, generator, block_size=64, dtype=dtype))


@pytest.mark.parametrize("cache_layout", ["packed", "unaligned", "padded_pages", "odd_strides"])
@pytest.mark.parametrize("block_size", [1, 16, 64, 100])
def test_requests_in_every_layout(
    device: torch.device, block_size: int, cache_layout: str, generator: torch.Generator
) -> None:
    check_cp_gather(
        request_gather(
            [70, 0, 33, 1],
            device,
            generator,
            seq_starts=[5, 1, 0, 130],
            block_size=block_size,
            cache_layout=cache_layout,
        )
    )


@given(data=st.data())
def test_any_requests_row_by_row(device: torch.device, data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32), label="seed"))
    lengths = data.draw(
        st.lists(st.integers(0, 9) | st.just(0), min_size=0, max_size=40), label="lengths"
    )
    firsts = [data.draw(st.integers(0, 9), label="first token") for _ in lengths]
    arguments = request_gather(
        lengths,
        device,
        generator,
        seq_starts=data.draw(st.sampled_from([None, firsts]), label="seq_starts"),
        block_size=data.draw(st.integers(1, 9), label="block_size"),
        dtype=data.draw(st.sampled_from(DTYPES), label="dtype"),
    )
    offset = MARGIN + data.draw(st.integers(0, 8), label="offset")
    stride = HEAD_DIM + data.draw(st.sampled_from([0, 1, 8, 64]), label="row padding")
    arguments["dst"] = inside(
        arguments["dst"].cpu(), generator, device, strides=[stride, 1], offset=offset
    )
    check_row_by_row(arguments)


# ---- by request, from data that points outside -------------------------------------------------


def check_out_of_range(arguments: dict[str, Any], message: str) -> None:
    """The CPU raises IndexError and writes nothing; CUDA makes the rows concerned zero."""
    if arguments["dst"].device.type == "cuda":
        check_row_by_row(arguments)
        return
    before = copies_of(arguments)
    with pytest.raises(IndexError, match=message):
        nvfp4_dsmla.cp_gather_and_upconvert_nvfp4_kv_cache(**arguments)
    assert_memory_equal(arguments["dst"], before["dst"], "dst")


@pytest.mark.parametrize("block", [-1, 9, 10, INT32.min, INT32.max])
@pytest.mark.parametrize("requests", [2, 40])
def test_a_block_id_out_of_range(
    device: torch.device, requests: int, block: int, generator: torch.Generator
) -> None:
    arguments = request_gather([6, 11, *[1] * (requests - 2)], device, generator)
    arguments["block_table"][1, 2] = block
    check_out_of_range(
        arguments, rf"block_table\[1, 2\]: wanted a block id in \[0, 9\), got {block}"
    )


def test_a_block_id_out_of_range_that_no_row_needs(
    device: torch.device, generator: torch.Generator
) -> None:
    arguments = request_gather([6, 0, 11], device, generator, seq_starts=[0, 0, 4])
    arguments["block_table"][0, 2] = -1
    arguments["block_table"][1, :] = INT32.max
    arguments["block_table"][2, 0] = INT32.min
    check_cp_gather(arguments)


def test_rows_past_the_block_table(device: torch.device, generator: torch.Generator) -> None:
    arguments = request_gather([6, 11], device, generator)
    arguments["block_table"] = arguments["block_table"][:, :2]
    check_out_of_range(arguments, "rows within request 1's 2 blocks of 4 tokens, got its token 10")


def test_rows_of_requests_without_blocks(device: torch.device, generator: torch.Generator) -> None:
    arguments = request_gather([6, 11], device, generator)
    arguments["block_table"] = arguments["block_table"][:, :0]
    check_out_of_range(arguments, "rows within request 0's 0 blocks of 4 tokens, got its token 5")


def test_rows_of_a_cache_without_blocks(device: torch.device, generator: torch.Generator) -> None:
    arguments = request_gather([3], device, generator)
    arguments["src_cache"] = random_cache(generator, device, num_blocks=0, block_size=4)
    check_out_of_range(arguments, r"wanted a block id in \[0, 0\)")


@pytest.mark.parametrize("first", [-1, INT32.min, INT32.max - 3, INT32.max])
@pytest.mark.parametrize("requests", [2, 40])
def test_a_first_token_out_of_range(
    device: torch.device, requests: int, first: int, generator: torch.Generator
) -> None:
    arguments = request_gather(
        [4, 5, *[1] * (requests - 2)], device, generator, seq_starts=[0] * requests
    )
    arguments["seq_starts"][1] = first
    token = first if first < 0 else first + 4
    check_out_of_range(arguments, f"rows within request 1's 2 blocks .* got its token {token}")


BAD_STARTS = [
    pytest.param([3, 5, 8], r"workspace_starts\[0\]: wanted 0, got 3", id="not_from_zero"),
    pytest.param([-2, 5, 8], r"workspace_starts\[0\]: wanted 0, got -2", id="negative"),
    pytest.param([0, 8, 5], r"workspace_starts\[2\]: wanted no less .* got 5", id="decreasing"),
    pytest.param([0, INT32.min, 5], r"workspace_starts\[1\]: .* got -2147483648", id="int_min"),
    pytest.param([0, INT32.max, 5], r"workspace_starts\[2\]: .* got 5", id="int_max"),
]


@pytest.mark.parametrize("requests", [3, 40])
@pytest.mark.parametrize(("starts", "message"), BAD_STARTS)
def test_starts_that_are_not_as_they_should_be(
    device: torch.device,
    starts: list[int],
    message: str,
    requests: int,
    generator: torch.Generator,
) -> None:
    """CUDA, which does not look, gives each row some token's values or zeros."""
    arguments = request_gather([4] * requests, device, generator)
    arguments["workspace_starts"][:3] = torch.tensor(starts, dtype=torch.int32)
    before = copies_of(arguments)
    if device.type == "cpu":
        with pytest.raises(ValueError, match=message):
            nvfp4_dsmla.cp_gather_and_upconvert_nvfp4_kv_cache(**arguments)
        assert_memory_equal(arguments["dst"], before["dst"], "dst")
        return
    nvfp4_dsmla.cp_gather_and_upconvert_nvfp4_kv_cache(**arguments)
    assert_margins_equal(arguments["dst"], before["dst"], "dst")
    zeros = torch.zeros(1, HEAD_DIM, dtype=torch.bfloat16)
    tokens = torch.cat([zeros, reference.decode(before["src_cache"].flatten(0, 1))])
    rows = {row.tobytes() for row in tokens.nan_to_num(7).view(torch.int16).numpy()}
    got = arguments["dst"].cpu().nan_to_num(7).view(torch.int16).numpy()
    assert all(row.tobytes() in rows for row in got)


def test_int_extremes_of_starts_that_own_no_row(
    device: torch.device, generator: torch.Generator
) -> None:
    arguments = request_gather([6, 3, 0, 0], device, generator)
    arguments["workspace_starts"][2:] = INT32.max
    arguments["block_table"][2:] = INT32.max
    check_cp_gather(arguments)
