"""concat_and_cache_nvfp4_ds_mla: golden bytes, every layout, and nothing written beside a record.

The op runs first, on inputs inside larger allocations; then the reference, on CPU copies of them.
Compared is every byte of every allocation, so slots that no token names and the margins count too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import nvfp4_dsmla
from cases import (
    DTYPES,
    INT32,
    INT64,
    LAYOUTS,
    MARGIN,
    POOL_LAYOUTS,
    WRITES,
    Case,
    assert_memory_equal,
    copies_of,
    copy_of,
    distinct_slots,
    golden,
    inside,
    latents,
    random_cache,
)
from compare import E4M3_VALUES, assert_records_equal
from nvfp4_dsmla import layout, reference
from nvfp4_dsmla.layout import HEAD_DIM, NOPE_DIM, RECORD_BYTES, ROPE_DIM

GOLDEN = Path(__file__).parent / "golden" / "nvfp4_ds_mla.npz"
CPU = torch.device("cpu")


def check_write(arguments: dict[str, Any]) -> None:
    """The op and the reference leave every allocation with the same bytes."""
    want = copies_of(arguments)
    nvfp4_dsmla.concat_and_cache_nvfp4_ds_mla(**arguments)
    reference.concat_and_cache(**want)
    assert_records_equal(arguments["kv_cache"], want["kv_cache"])  # the more telling message
    for name, argument in arguments.items():
        if isinstance(argument, Tensor):
            assert_memory_equal(argument, want[name], name)


def written(kv_c: Tensor, k_pe: Tensor, device: torch.device, *, block_size: int = 64) -> Tensor:
    """The records [T, 352] that the op makes of tokens, by way of a cache."""
    tokens = len(kv_c)
    cache = nvfp4_dsmla.allocate_kv_cache(
        num_blocks=-(-tokens // block_size), block_size=block_size, device=device
    )
    slots = torch.arange(tokens, device=device)
    nvfp4_dsmla.concat_and_cache_nvfp4_ds_mla(
        kv_c=kv_c.to(device), k_pe=k_pe.to(device), kv_cache=cache, slot_mapping=slots
    )
    return cache.view(-1, RECORD_BYTES)[:tokens].cpu()


def check_records(rows: Tensor, device: torch.device) -> None:
    kv_c, k_pe = rows[:, :NOPE_DIM], rows[:, NOPE_DIM:]
    assert_records_equal(written(kv_c, k_pe, device), reference.encode(kv_c, k_pe))


# ---- the bytes of a record ---------------------------------------------------------------------


def test_golden_tokens_give_golden_records(device: torch.device) -> None:
    latent, records = golden(GOLDEN)
    assert_records_equal(written(latent[:, :NOPE_DIM], latent[:, NOPE_DIM:], device), records)


def test_golden_tokens_in_shuffled_slots_of_a_pool(
    device: torch.device, generator: torch.Generator
) -> None:
    latent, records = golden(GOLDEN)
    pool = random_cache(generator, device, num_blocks=3, block_size=64, num_layers=3)
    slots = distinct_slots(len(latent), 3 * 64, generator)
    before = copy_of(pool)
    nvfp4_dsmla.concat_and_cache_nvfp4_ds_mla(
        kv_c=latent[:, :NOPE_DIM].to(device),
        k_pe=latent[:, NOPE_DIM:].to(device),
        kv_cache=pool,
        slot_mapping=slots.to(device),
        layer=1,
    )
    before[1].view(-1, RECORD_BYTES)[slots] = records
    assert_memory_equal(pool, before, "kv_cache")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_tokens_at_many_magnitudes(
    device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> None:
    check_records(latents((1500, HEAD_DIM), dtype, generator), device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_half_as_an_element(device: torch.device, dtype: torch.dtype) -> None:
    """Each in a block of its neighbours, in a block of mixed magnitudes, and as a RoPE dim."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    every = bits.view(dtype)
    mixed = every[torch.randperm(2**16, generator=torch.Generator().manual_seed(0))]
    kv_c = torch.cat([every, mixed]).view(-1, NOPE_DIM)
    k_pe = every.view(-1, ROPE_DIM)
    kv_c = kv_c.repeat(4, 1)
    assert len(kv_c) == len(k_pe) == 1024
    check_records(torch.cat([kv_c, k_pe], dim=1), device)


def test_every_scale_mantissa_at_every_tie(device: torch.device) -> None:
    """fp32 blocks of y * scale for the ties y of e2m1 and the numbers beside them."""
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    scales = torch.tensor(E4M3_VALUES[1:0x7F], dtype=torch.float32)[:, None]
    product = scales * ties
    ups = torch.nextafter(product, torch.tensor(torch.inf))
    downs = torch.nextafter(product, torch.tensor(-torch.inf))
    rows = []
    for values in (product, ups, downs):
        sign = torch.tensor([1.0, -1.0] * 8)
        block = torch.cat([scales * 6, values, scales * 0.0, values], dim=1) * sign
        rows.append(block)
    blocks = torch.cat(rows)
    blocks = torch.cat([blocks, blocks.new_zeros(-len(blocks) % 32, 16)])
    kv_c = blocks.view(-1, NOPE_DIM)
    check_records(torch.cat([kv_c, kv_c[:, :ROPE_DIM]], dim=1), device)


def test_every_bfloat16_under_every_scale(device: torch.device) -> None:
    """All that is not rounded to zero, hence all that are ties; a block's scale is set by its first
    element. The CUDA kernel has arithmetic of its own for bfloat16."""
    blocks = []
    for scale in E4M3_VALUES[1:0x7F].tolist():
        largest = torch.tensor(6 * scale).bfloat16()
        below = int(largest.view(torch.int16)) - torch.arange(6 * 128 // 15 * 15)
        values = below.to(torch.int16).view(torch.bfloat16).view(-1, 15)
        blocks.append(torch.cat([largest.expand(len(values), 1), values], dim=1))
    block = torch.cat(blocks)
    block = torch.cat([block, -block])
    block = torch.cat([block, block.new_zeros(-len(block) % 32, 16)])
    kv_c = block.view(-1, NOPE_DIM)
    check_records(torch.cat([kv_c, kv_c[:, :ROPE_DIM]], dim=1), device)


def test_random_bit_patterns_of_fp32(device: torch.device) -> None:
    bits = np.random.default_rng(4).integers(0, 2**32, (512, HEAD_DIM), dtype=np.uint32)
    check_records(torch.from_numpy(bits.view(np.float32)), device)


@given(
    bits=st.lists(st.integers(0, 2**32 - 1), min_size=16, max_size=16),
    exponent=st.integers(-14, 12),
)
def test_any_block(device: torch.device, bits: list[int], exponent: int) -> None:
    """Any bits at all, and the same mantissas close to one magnitude."""
    raw = np.array(bits, dtype=np.uint32)
    tame = raw & 0x81FF_FFFF | np.uint32((127 + exponent - 3) << 23)
    kv_c = torch.from_numpy(np.resize(np.concatenate([raw, tame]), NOPE_DIM).view(np.float32))
    check_records(torch.cat([kv_c, kv_c[:ROPE_DIM]])[None], device)


# ---- the seed criteria: how far a record may be from its token at most -------------------------


def seed_tokens(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Normal numbers of many magnitudes within the format's range: no Inf, NaN or saturation."""
    rows = torch.randn(600, HEAD_DIM, generator=generator)
    rows *= torch.exp2(torch.randint(-6, 6, (600, 1), generator=generator).float())
    rows = rows.bfloat16().float()
    return rows[:, :NOPE_DIM], rows[:, NOPE_DIM:]


def test_seed_scale_within_one_e4m3_ulp(device: torch.device, generator: torch.Generator) -> None:
    kv_c, k_pe = seed_tokens(generator)
    records = written(kv_c.bfloat16(), k_pe.bfloat16(), device)
    amax = kv_c.view(-1, 32, 16).abs().amax(-1).double().numpy()
    nearest = np.abs(amax[..., None] / 6 - E4M3_VALUES[:0x7F]).argmin(-1)
    got = layout.scale_bytes(records)[:, np.argsort(layout.SCALE_ORDER)].numpy().astype(int)
    assert np.abs(got - nearest).max() <= 1


def test_seed_values_within_one_and_a_half_scales(
    device: torch.device, generator: torch.Generator
) -> None:
    kv_c, k_pe = seed_tokens(generator)
    records = written(kv_c.bfloat16(), k_pe.bfloat16(), device)
    scale = layout.scales_by_block(records).repeat_interleave(16, dim=1)
    error = (reference.decode(records, torch.float32)[:, :NOPE_DIM] - kv_c).abs()
    assert (error <= 1.5 * scale).all()


def test_seed_rope_within_an_eighth(device: torch.device, generator: torch.Generator) -> None:
    kv_c, k_pe = seed_tokens(generator)
    records = written(kv_c.bfloat16(), k_pe.bfloat16(), device)
    error = (reference.decode(records, torch.float32)[:, NOPE_DIM:] - k_pe).abs()
    assert (error <= k_pe.abs() * 2**-3 + 2**-9).all()


# ---- where records go --------------------------------------------------------------------------


@pytest.mark.parametrize("case", WRITES, ids=lambda case: case.name)
def test_sample(device: torch.device, case: Case, generator: torch.Generator) -> None:
    check_write(case.make(generator, device))


@pytest.mark.parametrize("cache_layout", POOL_LAYOUTS)
@pytest.mark.parametrize("block_size", [1, 16, 64, 100])
def test_layout_and_block_size(
    device: torch.device, block_size: int, cache_layout: str, generator: torch.Generator
) -> None:
    num_blocks = -(-100 // block_size) + 1
    rows = latents((70, HEAD_DIM), torch.bfloat16, generator).to(device)
    slots = distinct_slots(70, num_blocks * block_size, generator)
    check_write(
        {
            "kv_c": rows[:, :NOPE_DIM],
            "k_pe": rows[:, NOPE_DIM:],
            "kv_cache": random_cache(
                generator,
                device,
                num_blocks=num_blocks,
                block_size=block_size,
                num_layers=3,
                layout=cache_layout,
            ),
            "slot_mapping": slots.to(device),
            "layer": 1,
        }
    )


@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 64, 65, 1024, 1025])
def test_number_of_tokens(device: torch.device, tokens: int, generator: torch.Generator) -> None:
    """Around the sizes where work is split between threads, and kernels change."""
    rows = latents((tokens, HEAD_DIM), torch.bfloat16, generator).to(device)
    check_write(
        {
            "kv_c": rows[:, :NOPE_DIM],
            "k_pe": rows[:, NOPE_DIM:],
            "kv_cache": random_cache(generator, device, num_blocks=18, block_size=64),
            "slot_mapping": distinct_slots(tokens, 18 * 64, generator).to(device),
        }
    )


@given(data=st.data())
def test_any_arguments(device: torch.device, data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32), label="seed"))
    num_blocks = data.draw(st.integers(1, 5), label="num_blocks")
    block_size = data.draw(st.integers(1, 20), label="block_size")
    num_layers = data.draw(st.none() | st.integers(1, 3), label="num_layers")
    capacity = num_blocks * block_size
    tokens = data.draw(st.integers(0, min(capacity, 40)), label="tokens")
    rows = tokens + data.draw(st.integers(0, 2), label="rows past the tokens")
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    slots = distinct_slots(tokens, capacity, generator)
    skipped = torch.rand(tokens, generator=generator) < data.draw(st.sampled_from([0.0, 0.3, 1.0]))

    def matrix(width: int) -> Tensor:
        return inside(
            latents((rows, width), dtype, generator),
            generator,
            device,
            strides=[width + data.draw(st.sampled_from([0, 1, 7, 64]), label="row padding"), 1],
            offset=MARGIN + data.draw(st.integers(0, 8), label="offset"),
        )

    check_write(
        {
            "kv_c": matrix(NOPE_DIM),
            "k_pe": matrix(ROPE_DIM),
            "kv_cache": random_cache(
                generator,
                device,
                num_blocks=num_blocks,
                block_size=block_size,
                num_layers=num_layers,
                layout=data.draw(st.sampled_from(POOL_LAYOUTS if num_layers else LAYOUTS)),
            ),
            "slot_mapping": inside(
                torch.where(skipped, -1 - slots, slots).to(
                    data.draw(st.sampled_from([torch.int32, torch.int64]), label="slot dtype")
                ),
                generator,
                device,
                strides=[data.draw(st.integers(1, 3), label="slot stride")],
            ),
            "layer": 0 if num_layers is None else data.draw(st.integers(0, num_layers - 1)),
        }
    )


def test_blocks_more_than_2_gib_apart(device: torch.device) -> None:
    block_stride = 2**31 + RECORD_BYTES
    memory = torch.empty(block_stride + 4 * RECORD_BYTES, dtype=torch.uint8, device=device)
    cache = memory.as_strided((2, 2, RECORD_BYTES), (block_stride, RECORD_BYTES, 1))
    cache.zero_()
    latent, records = golden(GOLDEN)
    nvfp4_dsmla.concat_and_cache_nvfp4_ds_mla(
        kv_c=latent[:2, :NOPE_DIM].to(device),
        k_pe=latent[:2, NOPE_DIM:].to(device),
        kv_cache=cache,
        slot_mapping=torch.tensor([3, 0], device=device),
    )
    assert_records_equal(cache[1, 1].cpu(), records[0])
    assert_records_equal(cache[0, 0].cpu(), records[1])
    assert not cache[0, 1].any()
    assert not cache[1, 0].any()


# ---- slots that are no slot --------------------------------------------------------------------


def some_write(
    slots: Tensor, device: torch.device, generator: torch.Generator, *, block_size: int = 16
) -> dict[str, Any]:
    rows = latents((len(slots), HEAD_DIM), torch.bfloat16, generator)
    return {
        "kv_c": inside(rows[:, :NOPE_DIM], generator, device),
        "k_pe": inside(rows[:, NOPE_DIM:], generator, device),
        "kv_cache": random_cache(generator, device, num_blocks=3, block_size=block_size),
        "slot_mapping": inside(slots, generator, device),
    }


def test_negative_slots_are_skipped(device: torch.device, generator: torch.Generator) -> None:
    check_write(some_write(torch.tensor([-1, 5, INT64.min, -48, 0]), device, generator))
    slots = torch.tensor([-1, 5, INT32.min, -48, 0], dtype=torch.int32)
    check_write(some_write(slots, device, generator))


def test_only_negative_slots_write_nothing(
    device: torch.device, generator: torch.Generator
) -> None:
    arguments = some_write(torch.full((70,), -1), device, generator)
    before = copy_of(arguments["kv_cache"])
    nvfp4_dsmla.concat_and_cache_nvfp4_ds_mla(**arguments)
    assert_memory_equal(arguments["kv_cache"], before, "kv_cache")


@pytest.mark.parametrize(
    "slot",
    [
        torch.tensor(48),
        torch.tensor(49, dtype=torch.int32),
        torch.tensor(INT32.max, dtype=torch.int32),
        torch.tensor(2**32),  # in 32 bits it would be slot 0
        torch.tensor(2**32 + 5),
        torch.tensor(INT64.max),
    ],
    ids=lambda slot: f"{slot.dtype}-{slot.item()}".removeprefix("torch."),
)
def test_a_slot_past_the_capacity(
    device: torch.device, slot: Tensor, generator: torch.Generator
) -> None:
    slots = torch.arange(40, dtype=slot.dtype)
    slots[37] = slot
    arguments = some_write(slots, device, generator)
    if device.type == "cuda":  # a captured graph cannot raise: the token is skipped
        check_write(arguments)
        return
    before = copies_of(arguments)
    message = rf"slot_mapping\[37\]: wanted a slot below .* capacity of 48, got {slot.item()}"
    with pytest.raises(IndexError, match=message):
        nvfp4_dsmla.concat_and_cache_nvfp4_ds_mla(**arguments)
    assert_memory_equal(arguments["kv_cache"], before["kv_cache"], "kv_cache")


def test_a_cache_without_blocks(device: torch.device, generator: torch.Generator) -> None:
    arguments = some_write(torch.tensor([-1, -1]), device, generator)
    arguments["kv_cache"] = random_cache(generator, device, num_blocks=0, block_size=16)
    check_write(arguments)


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64], ids=str)
def test_two_tokens_of_one_slot(
    device: torch.device, slot_dtype: torch.dtype, generator: torch.Generator
) -> None:
    """Each byte of the slot is one of theirs; a token repeated leaves its record."""
    slots = torch.tensor([3, 9, 3, 9, 20], dtype=slot_dtype)
    arguments = some_write(slots, device, generator)
    for name in ("kv_c", "k_pe"):
        arguments[name][3] = arguments[name][1]
    before = copies_of(arguments)
    nvfp4_dsmla.concat_and_cache_nvfp4_ds_mla(**arguments)
    records = reference.encode(before["kv_c"], before["k_pe"])
    cache = arguments["kv_cache"].view(-1, RECORD_BYTES)
    got = cache[3].cpu()
    assert ((got == records[0]) | (got == records[2])).all()
    assert_records_equal(cache[9].cpu(), records[1])
    assert_records_equal(cache[20].cpu(), records[4])
    want = before["kv_cache"].view(-1, RECORD_BYTES)
    want[[3, 9, 20]] = cache[[3, 9, 20]].cpu()
    assert_memory_equal(arguments["kv_cache"], before["kv_cache"], "kv_cache")


def test_flushed_denormals_change_nothing() -> None:
    """The CPU op on a thread that treats denormals as zero; few tokens stay on it."""
    latent, records = golden(GOLDEN)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        parts = [written(t[:, :NOPE_DIM], t[:, NOPE_DIM:], CPU) for t in latent.split(16)]
    finally:
        torch.set_flush_denormal(False)
    assert_records_equal(torch.cat(parts), records)
