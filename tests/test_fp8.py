"""The ops of fp8_ds_mla and of bfloat16 caches: golden bytes, every layout, every argument rule.

As in test_write.py and test_gather.py the op runs first, on inputs inside larger allocations, then
the reference on CPU copies of them, and every byte of every allocation is compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import nvfp4_dsmla
from cases import (
    CP_GATHERS,
    DTYPES,
    GATHERS,
    POOL_LAYOUTS,
    WRITES,
    Case,
    assert_margins_equal,
    assert_memory_equal,
    copies_of,
    copy_of,
    distinct_slots,
    golden,
    inside,
    latents,
    memory_of,
    random_cache,
)
from compare import E4M3_VALUES, assert_latents_equal
from nvfp4_dsmla import _C, reference, reference_formats
from nvfp4_dsmla.layout import HEAD_DIM, NOPE_DIM, ROPE_DIM
from nvfp4_dsmla.reference_formats import BFLOAT16, FP8

GOLDEN = Path(__file__).parent / "golden" / "fp8_ds_mla.npz"
WIDTH = _C.FP8_RECORD_BYTES
OPS = torch.ops.nvfp4_dsmla


def what_is_at(byte: int) -> str:
    if byte < _C.FP8_SCALES_OFFSET:
        return f"NoPE dim {byte}"
    if byte < _C.FP8_ROPE_OFFSET:
        return f"scale {(byte - _C.FP8_SCALES_OFFSET) // 4}"
    return f"RoPE dim {(byte - _C.FP8_ROPE_OFFSET) // 2}"


def assert_fp8_records_equal(got: Tensor, want: Tensor) -> None:
    """Every byte of uint8 [..., 656] tensors is equal."""
    assert got.shape == want.shape
    different = (got.cpu() != want.cpu()).nonzero()
    first = [
        f"record {place[:-1]}, byte {place[-1]}, {what_is_at(place[-1])}"
        for place in different[:8].tolist()
    ]
    assert not first, f"{len(different)} bytes differ, the first: {first}"


def written(rows: Tensor, device: torch.device) -> Tensor:
    """The records that the op makes of tokens."""
    cache = torch.zeros(len(rows), 1, WIDTH, dtype=torch.uint8, device=device)
    nvfp4_dsmla.concat_and_cache_fp8_ds_mla(
        kv_c=rows[:, :NOPE_DIM].to(device),
        k_pe=rows[:, NOPE_DIM:].to(device),
        kv_cache=cache,
        slot_mapping=torch.arange(len(rows), device=device),
    )
    return cache[:, 0]


def check_records(rows: Tensor, device: torch.device) -> None:
    want = reference_formats.encode_fp8(rows[:, :NOPE_DIM], rows[:, NOPE_DIM:])
    assert_fp8_records_equal(written(rows, device), want)


# ---- the bytes of a record ---------------------------------------------------------------------


def test_the_layout() -> None:
    assert (_C.FP8_BLOCK_DIM, _C.FP8_NUM_SCALES, WIDTH) == (128, 4, 656)
    assert (_C.FP8_CODES_OFFSET, _C.FP8_SCALES_OFFSET, _C.FP8_ROPE_OFFSET) == (0, 512, 528)
    assert _C.BF16_RECORD_BYTES == 1152


def test_golden_tokens_give_golden_records(device: torch.device) -> None:
    latent, records = golden(GOLDEN)
    assert len(latent) > 80
    assert_fp8_records_equal(written(latent, device), records)


def test_the_reference_gives_golden_records(device: torch.device) -> None:
    latent, records = golden(GOLDEN)
    rows = latent.to(device)
    got = reference_formats.encode_fp8(rows[:, :NOPE_DIM], rows[:, NOPE_DIM:])
    assert_fp8_records_equal(got, records)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_tokens_at_many_magnitudes(
    device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> None:
    check_records(latents((600, HEAD_DIM), dtype, generator), device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_half_as_an_element(device: torch.device, dtype: torch.dtype) -> None:
    """Each in a block of its neighbours, in a block of mixed magnitudes, and as a RoPE dim."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    mixed = every[torch.randperm(2**16, generator=torch.Generator().manual_seed(0))]
    kv_c = torch.cat([every, mixed]).view(-1, NOPE_DIM).repeat(4, 1)
    check_records(torch.cat([kv_c, every.view(-1, ROPE_DIM)], dim=1), device)


def test_quotients_beside_every_tie(device: torch.device, generator: torch.Generator) -> None:
    """fp32 elements at halfway points of e4m3 times a scale of any mantissa, and close to them.

    Where a division is replaced by a product with an inverse, some of these go the other way.
    """
    values = torch.tensor(E4M3_VALUES[:0x7F], dtype=torch.float64)
    halfway = (values[1:] + values[:-1]) / 2
    exponents = torch.randint(-30, 30, (600, 1), generator=generator)
    scales = (1 + torch.rand(600, 1, generator=generator)) * torch.exp2(exponents.float())
    largest = scales * 448.0
    elements = (halfway * (largest / 448.0).double()).float()
    steps = torch.randint(-2, 3, elements.shape, generator=generator, dtype=torch.int32)
    elements = (elements.view(torch.int32) + steps).view(torch.float32)
    block = torch.cat([elements, largest, -largest], dim=1)
    kv_c = torch.cat([block, -block, block.roll(64, 1), block.flip(1)], dim=1)
    check_records(torch.cat([kv_c, kv_c[:, :ROPE_DIM]], dim=1), device)


@pytest.mark.parametrize("exponent", [-126, -110, -91, -90, -89, 99, 100, 101, 118, 119])
def test_scales_at_the_ends_of_fp32(
    device: torch.device, exponent: int, generator: torch.Generator
) -> None:
    """Elements from 448 scales down to a fraction of one, the smallest of them subnormal."""
    mantissas = 1 + torch.rand(64, HEAD_DIM, generator=generator).double()
    signs = torch.randint(0, 2, mantissas.shape, generator=generator) * 2 - 1
    down = torch.randint(-14, 9, mantissas.shape, generator=generator)
    rows = mantissas * signs * torch.exp2((down + exponent).double())
    rows[:, ::128] = 448.0 * 2.0**exponent
    check_records(rows.clamp(-3.4e38, 3.4e38).float(), device)


def test_random_bit_patterns_of_fp32(device: torch.device) -> None:
    bits = np.random.default_rng(4).integers(0, 2**32, (512, HEAD_DIM), dtype=np.uint32)
    check_records(torch.from_numpy(bits.view(np.float32)), device)


def test_a_token_comes_back_within_a_sixteenth(
    device: torch.device, generator: torch.Generator
) -> None:
    """e4m3's steps are an eighth of the power of two below, or 2^-9 of the scale; RoPE is exact."""
    rows = torch.randn(200, HEAD_DIM, generator=generator).bfloat16()
    cache = written(rows, device)[:, None]
    back = nvfp4_dsmla.gather_and_upconvert_fp8_ds_mla(
        kv_cache=cache, slots=torch.arange(200, device=device), dtype=torch.float32
    )
    error = (back.cpu() - rows.float()).abs()
    scale = rows[:, :NOPE_DIM].float().view(200, 4, 128).abs().amax(-1).repeat_interleave(128, 1)
    allowed = torch.maximum(rows[:, :NOPE_DIM].abs() / 16, scale / 448 * 2**-10) * 1.001
    assert (error[:, :NOPE_DIM] <= allowed).all()
    assert_latents_equal(back[:, NOPE_DIM:], rows[:, NOPE_DIM:].float())


# ---- writes ------------------------------------------------------------------------------------


def check_write(arguments: dict[str, Any], codec: reference.Codec) -> None:
    """The op and the reference leave every allocation with the same bytes."""
    want = copies_of(arguments)
    if codec is FP8:
        nvfp4_dsmla.concat_and_cache_fp8_ds_mla(**arguments)
    else:
        nvfp4_dsmla.concat_and_cache_bfloat16(**arguments)
    reference.concat_and_cache(**want, codec=codec)
    for name, argument in arguments.items():
        if isinstance(argument, Tensor):
            assert_memory_equal(argument, want[name], name)


@pytest.mark.parametrize("case", WRITES, ids=lambda case: case.name)
def test_write_sample(device: torch.device, case: Case, generator: torch.Generator) -> None:
    check_write(case.make(generator, device, width=WIDTH), FP8)


def as_bfloat16(arguments: dict[str, Any]) -> dict[str, Any] | None:
    """With its cache of 1152-byte records as bfloat16; None where their bytes are at odd places."""
    cache = arguments["kv_cache"]
    places = (cache.storage_offset(), *cache.stride()[:-1])
    if any(place % 2 for place in places):
        return None
    return {**arguments, "kv_cache": cache.view(torch.bfloat16)}


@pytest.mark.parametrize("case", WRITES, ids=lambda case: case.name)
def test_bfloat16_write_sample(
    device: torch.device, case: Case, generator: torch.Generator
) -> None:
    arguments = as_bfloat16(case.make(generator, device, width=_C.BF16_RECORD_BYTES))
    if arguments is None:
        pytest.skip("no tensor of bfloat16 lies so")
    check_write(arguments, BFLOAT16)


@pytest.mark.parametrize("cache_layout", POOL_LAYOUTS)
@pytest.mark.parametrize("codec", [FP8, BFLOAT16], ids=["fp8", "bfloat16"])
def test_write_in_every_layout(
    device: torch.device, codec: reference.Codec, cache_layout: str, generator: torch.Generator
) -> None:
    rows = latents((70, HEAD_DIM), torch.bfloat16, generator).to(device)
    slots = distinct_slots(70, 128, generator).to(device)
    width = WIDTH if codec is FP8 else _C.BF16_RECORD_BYTES
    cache = random_cache(
        generator,
        device,
        num_blocks=8,
        block_size=16,
        num_layers=3,
        layout=cache_layout,
        width=width,
    )
    arguments: dict[str, Any] | None = {
        "kv_c": rows[:, :NOPE_DIM],
        "k_pe": rows[:, NOPE_DIM:],
        "kv_cache": cache,
        "slot_mapping": slots,
        "layer": 1,
    }
    if codec is BFLOAT16:
        arguments = as_bfloat16(arguments or {})
    if arguments is None:
        pytest.skip("no tensor of bfloat16 lies so")
    check_write(arguments, codec)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bfloat16_is_rounded_to_nearest(device: torch.device, dtype: torch.dtype) -> None:
    """Ties, what is beside them, overflow, NaN of both signs: the bits of the written elements."""
    bits = np.random.default_rng(5).integers(0, 2**32, (64, HEAD_DIM), dtype=np.uint32)
    bits[:32] = bits[:32] & 0xFFFF_0000 | 0x8000  # ties of bfloat16
    bits[32] = 0x7F7F_FFFF  # rounds to infinity
    bits[33, ::2], bits[33, 1::2] = 0x7F80_0001, 0xFFC1_2345
    rows = torch.from_numpy(bits.view(np.float32)).to(dtype)
    arguments = {
        "kv_c": rows[:, :NOPE_DIM].to(device),
        "k_pe": rows[:, NOPE_DIM:].to(device),
        "kv_cache": torch.zeros(64, 1, HEAD_DIM, dtype=torch.bfloat16, device=device),
        "slot_mapping": torch.arange(64, device=device),
    }
    check_write(arguments, BFLOAT16)
    if dtype == torch.bfloat16:
        got = arguments["kv_cache"][:, 0].cpu().view(torch.int16)
        assert torch.equal(got, rows.view(torch.int16))


@pytest.mark.parametrize("op", ["concat_and_cache_fp8_ds_mla", "concat_and_cache_bfloat16"])
def test_a_slot_past_the_capacity(device: torch.device, op: str) -> None:
    width, dtype = (WIDTH, torch.uint8) if "fp8" in op else (HEAD_DIM, torch.bfloat16)
    cache = torch.zeros(2, 4, width, dtype=dtype, device=device)
    rows = torch.ones(3, HEAD_DIM, device=device)
    slots = torch.tensor([1, 8, -1], device=device)
    call = getattr(nvfp4_dsmla, op)
    arguments = {"kv_c": rows[:, :NOPE_DIM], "k_pe": rows[:, NOPE_DIM:], "kv_cache": cache}
    if device.type == "cpu":
        message = rf"{op}: slot_mapping\[1\]: wanted a slot below .* of 8, got 8"
        with pytest.raises(IndexError, match=message):
            call(**arguments, slot_mapping=slots)
        assert not cache.any()
    else:
        call(**arguments, slot_mapping=slots)
        assert cache.view(8, width).any(-1).tolist() == [False, True, *[False] * 6]


# ---- gathers -----------------------------------------------------------------------------------


def check_gather(arguments: dict[str, Any]) -> None:
    before = copies_of(arguments)
    got = nvfp4_dsmla.gather_and_upconvert_fp8_ds_mla(**arguments)
    dtype = before.pop("dtype", None) or torch.bfloat16
    assert_latents_equal(got, reference.gather(**before, dtype=dtype, codec=FP8))
    for name in ("kv_cache", "slots"):
        assert_memory_equal(arguments[name], before[name], name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_golden_records_down(device: torch.device, dtype: torch.dtype) -> None:
    _, records = golden(GOLDEN)
    slots = torch.arange(len(records), device=device)
    check_gather({"kv_cache": records[:, None].to(device), "slots": slots, "dtype": dtype})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_code_under_many_scales(device: torch.device, dtype: torch.dtype) -> None:
    """Each e4m3 byte, under scales of many mantissas and at the ends of every dtype's range."""
    exponents = [-149, -140, -130, -126, -60, -24, -17, -14, -3, 0, 5, 7, 8, 60, 118, 119, 127]
    scales = torch.tensor([m * 2.0**e for e in exponents for m in (1.0, 1.25, 1.9999999, -1.5)])
    cache = torch.zeros(2 * len(scales), 1, WIDTH, dtype=torch.uint8)
    byte = torch.arange(256, dtype=torch.uint8)
    cache[:, 0, :NOPE_DIM] = byte.repeat(2)
    by_block = scales.float().repeat(8)[: 8 * len(scales)].view(-1, 4)
    cache[:, 0, 512:528] = by_block.contiguous().view(torch.uint8)
    halves = torch.arange(2 * len(scales) * 64) * 479 % 2**16
    cache[:, 0, 528:] = halves.view(-1, 64).to(torch.uint16).view(torch.uint8)
    slots = torch.arange(len(cache), device=device)
    check_gather({"kv_cache": cache.to(device), "slots": slots, "dtype": dtype})


@pytest.mark.parametrize("case", GATHERS, ids=lambda case: case.name)
def test_slot_sample(device: torch.device, case: Case, generator: torch.Generator) -> None:
    check_gather(case.make(generator, device, width=WIDTH))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cache_layout", POOL_LAYOUTS)
def test_slots_in_every_layout(
    device: torch.device, cache_layout: str, dtype: torch.dtype, generator: torch.Generator
) -> None:
    cache = random_cache(
        generator,
        device,
        num_blocks=5,
        block_size=16,
        num_layers=3,
        layout=cache_layout,
        width=WIDTH,
    )
    slots = torch.randint(-2, 82, (75,), generator=generator).to(device)
    check_gather({"kv_cache": cache, "slots": slots, "dtype": dtype, "layer": 2})


@pytest.mark.parametrize("rows", [1, 4096, 4097])
def test_numbers_of_slots(device: torch.device, rows: int, generator: torch.Generator) -> None:
    """Few rows are spread over more warps than many are."""
    cache = random_cache(generator, device, num_blocks=3, block_size=64, width=WIDTH)
    slots = torch.randint(-1, 193, (rows,), generator=generator).to(device)
    check_gather({"kv_cache": cache, "slots": slots, "dtype": torch.bfloat16})


def check_cp_gather(arguments: dict[str, Any]) -> None:
    before = copies_of(arguments)
    nvfp4_dsmla.cp_gather_and_upconvert_fp8_kv_cache(**arguments)
    want = dict(before, dst=copy_of(before["dst"]))
    reference.cp_gather(**want, codec=FP8)
    assert_latents_equal(arguments["dst"], want["dst"])
    assert_margins_equal(arguments["dst"], before["dst"], "dst")
    for name, argument in arguments.items():
        if isinstance(argument, Tensor) and name != "dst":
            assert_memory_equal(argument, before[name], name)


@pytest.mark.parametrize("case", CP_GATHERS, ids=lambda case: case.name)
def test_request_sample(device: torch.device, case: Case, generator: torch.Generator) -> None:
    check_cp_gather(case.make(generator, device, width=WIDTH))


def test_a_block_id_out_of_range(device: torch.device, generator: torch.Generator) -> None:
    op = "cp_gather_and_upconvert_fp8_kv_cache"
    arguments = CP_GATHERS[0].make(generator, device, width=WIDTH)
    arguments["block_table"][0, 1] = 12
    if device.type == "cuda":  # its rows are zeros
        check_cp_gather(arguments)
        return
    message = rf"^{op}: block_table\[0, 1\]: wanted a block id in \[0, 12\), got 12$"
    with pytest.raises(IndexError, match=message):
        nvfp4_dsmla.cp_gather_and_upconvert_fp8_kv_cache(**arguments)


# ---- what the ops say of themselves ------------------------------------------------------------

SAMPLES = [
    *(("concat_and_cache_fp8_ds_mla", WIDTH, case) for case in WRITES),
    *(("concat_and_cache_bfloat16", _C.BF16_RECORD_BYTES, case) for case in WRITES[:4]),
    *(("gather_and_upconvert_fp8_ds_mla", WIDTH, case) for case in GATHERS),
    *(("cp_gather_and_upconvert_fp8_kv_cache", WIDTH, case) for case in CP_GATHERS),
]


@pytest.mark.parametrize(
    ("op", "width", "case"), SAMPLES, ids=[f"{op}-{case.name}" for op, _, case in SAMPLES]
)
def test_opcheck(
    device: torch.device, op: str, width: int, case: Case, generator: torch.Generator
) -> None:
    arguments: dict[str, Any] | None = case.make(generator, device, width=width)
    if "bfloat16" in op:
        arguments = as_bfloat16(arguments or {})
    if arguments is None:
        pytest.skip("no tensor of bfloat16 lies so")
    memory = memory_of(arguments["kv_cache" if "kv_cache" in arguments else "src_cache"])
    memory &= 0x3F  # opcheck finds a NaN unequal to itself
    overload = getattr(OPS, op).default
    given = tuple(arguments[a.name] for a in overload._schema.arguments if a.name in arguments)
    torch.library.opcheck(overload, given)


@pytest.mark.parametrize(
    ("op", "cache", "shape"),
    [
        ("concat_and_cache_fp8_ds_mla", torch.zeros(2, 4, 352, dtype=torch.uint8), "656"),
        ("concat_and_cache_fp8_ds_mla", torch.zeros(2, 4, 656, dtype=torch.int8), "656"),
        ("concat_and_cache_bfloat16", torch.zeros(2, 4, 576, dtype=torch.float16), "576"),
        ("concat_and_cache_bfloat16", torch.zeros(2, 4, 1152, dtype=torch.uint8), "576"),
    ],
)
def test_another_cache_is_refused(op: str, cache: Tensor, shape: str) -> None:
    dtype = "bfloat16" if "bfloat16" in op else "uint8"
    message = (
        rf"^{op}: kv_cache: wanted {dtype} of shape \[num_blocks, block_size, {shape}\] or "
        rf"\[num_layers, num_blocks, block_size, {shape}\] with block_size >= 1 and contiguous "
        rf"records, got "
    )
    rows = torch.zeros(1, HEAD_DIM)
    with pytest.raises(ValueError, match=message):
        getattr(nvfp4_dsmla, op)(
            kv_c=rows[:, :NOPE_DIM],
            k_pe=rows[:, NOPE_DIM:],
            kv_cache=cache,
            slot_mapping=torch.tensor([0]),
        )


@pytest.mark.parametrize(
    "op",
    [
        "concat_and_cache_fp8_ds_mla",
        "concat_and_cache_bfloat16",
        "gather_and_upconvert_fp8_ds_mla",
        "cp_gather_and_upconvert_fp8_kv_cache",
    ],
)
def test_tensors_are_wanted_and_devices_compared(op: str, generator: torch.Generator) -> None:
    cases = {"concat": WRITES, "gather": GATHERS, "cp": CP_GATHERS}[op.partition("_")[0]]
    arguments = cases[0].make(generator, torch.device("cpu"), width=WIDTH)
    name = {"concat": "slot_mapping", "gather": "slots", "cp": "block_table"}[op.partition("_")[0]]
    wrong = {
        "the device of .* got meta": arguments[name].to("meta"),
        "a tensor, got list": [arguments[name]],
        "a tensor, got NoneType": None,
    }
    for message, value in wrong.items():
        with pytest.raises(ValueError, match=rf"^{op}: {name}: wanted {message}$"):
            getattr(nvfp4_dsmla, op)(**{**arguments, name: value})


def test_records_that_overlap_are_refused(generator: torch.Generator) -> None:
    memory = inside(torch.zeros(4000, dtype=torch.uint8), generator, torch.device("cpu"))
    cache = memory.as_strided((2, 2, WIDTH), (2 * WIDTH, WIDTH - 1, 1))
    rows = torch.zeros(1, HEAD_DIM)
    with pytest.raises(ValueError, match="wanted strides that keep records apart"):
        nvfp4_dsmla.concat_and_cache_fp8_ds_mla(
            kv_c=rows[:, :NOPE_DIM],
            k_pe=rows[:, NOPE_DIM:],
            kv_cache=cache,
            slot_mapping=torch.tensor([0]),
        )
