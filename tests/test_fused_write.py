"""fused_rmsnorm_rope_concat_and_cache_nvfp4_ds_mla: the bytes of norm, rotation and write in turn.

As in test_write the op runs first, inside larger allocations, then the reference on CPU copies, and
every byte of every allocation is compared. The reference is compared with PyTorch's own norm, whose
sums are in another order, within a bound.
"""

from __future__ import annotations

from typing import Any

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
    Case,
    assert_memory_equal,
    copies_of,
    copy_of,
    distinct_slots,
    inside,
    latents,
    random_cache,
)
from compare import assert_records_equal
from fused_cases import FUSED_WRITES, cos_sin_table
from nvfp4_dsmla import layout, reference, reference_fused
from nvfp4_dsmla.layout import HEAD_DIM, NOPE_DIM, RECORD_BYTES, ROPE_DIM

CPU = torch.device("cpu")
EPS = 1e-6
TABLE = cos_sin_table(4096, torch.float32)


def fused(**arguments: Any) -> None:
    nvfp4_dsmla.fused_rmsnorm_rope_concat_and_cache_nvfp4_ds_mla(**arguments)


def check_write(arguments: dict[str, Any]) -> None:
    """The op and the reference leave every allocation with the same bytes."""
    want = copies_of(arguments)
    fused(**arguments)
    reference_fused.concat_and_cache(**want)
    assert_records_equal(arguments["kv_cache"], want["kv_cache"])  # the more telling message
    for name, argument in arguments.items():
        if isinstance(argument, Tensor):
            assert_memory_equal(argument, want[name], name)


def random_arguments(
    rows: Tensor,
    device: torch.device,
    generator: torch.Generator,
    *,
    weight: Tensor | None = None,
    **changed: Any,
) -> dict[str, Any]:
    """A write of all rows, each to the slot of its number, on a device."""
    tokens = len(rows)
    if weight is None:
        weight = 1 + torch.randn(NOPE_DIM, generator=generator) / 4
    arguments = {
        "kv_c": rows[:, :NOPE_DIM],
        "k_pe": rows[:, NOPE_DIM:],
        "norm_weight": weight.to(rows.dtype),
        "eps": EPS,
        "positions": torch.randint(len(TABLE), (tokens,), generator=generator),
        "cos_sin_cache": TABLE,
        "is_neox": True,
        "kv_cache": nvfp4_dsmla.allocate_kv_cache(num_blocks=-(-tokens // 64), block_size=64),
        "slot_mapping": torch.arange(tokens),
    }
    return {
        n: x.to(device) if isinstance(x, Tensor) else x for n, x in (arguments | changed).items()
    }


def records_of(arguments: dict[str, Any]) -> Tensor:
    """The records of all tokens, by the op."""
    fused(**arguments)
    cache: Tensor = arguments["kv_cache"]
    return cache.view(-1, RECORD_BYTES)[: len(arguments["slot_mapping"])].cpu()


# ---- the bytes of a record ---------------------------------------------------------------------


@pytest.mark.parametrize("round_to_input", [True, False], ids=["rounded", "unrounded"])
@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [600, 2_500, 8_200])  # on CUDA kernels of their own
def test_many_tokens_at_many_magnitudes(
    device: torch.device,
    tokens: int,
    dtype: torch.dtype,
    is_neox: bool,
    round_to_input: bool,
    generator: torch.Generator,
) -> None:
    rows = latents((tokens, HEAD_DIM), dtype, generator, specials_share=0.0003)
    check_write(
        random_arguments(rows, device, generator, is_neox=is_neox, round_to_input=round_to_input)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_as_the_ops_in_turn(
    device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """The write of what norm and rotation give in the input's dtype has the same bytes."""
    rows = latents((200, HEAD_DIM), dtype, generator, specials_share=0.0)
    arguments = random_arguments(rows, CPU, generator)
    kv_c = reference_fused.rms_norm(arguments["kv_c"], arguments["norm_weight"], EPS)
    k_pe = reference_fused.rope(
        arguments["k_pe"], arguments["positions"], arguments["cos_sin_cache"], is_neox=True
    )
    cache = torch.zeros_like(arguments["kv_cache"]).to(device)
    nvfp4_dsmla.concat_and_cache_nvfp4_ds_mla(
        kv_c=kv_c.to(device, dtype),
        k_pe=k_pe.to(device, dtype),
        kv_cache=cache,
        slot_mapping=arguments["slot_mapping"].to(device),
    )
    arguments = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in arguments.items()}
    fused(**arguments)
    assert_records_equal(arguments["kv_cache"], cache)


@pytest.mark.parametrize("exponent", [-8, -10, -12, -14, -18, -24])
@pytest.mark.parametrize("by", ["weight", "input"])
@pytest.mark.parametrize("tokens", [100, 2_500])
def test_low_magnitudes(
    device: torch.device, tokens: int, by: str, exponent: int, generator: torch.Generator
) -> None:
    """Blocks around and below the smallest scale, because the weight is small or eps is not.

    A fused writer of a public engine had other bytes there than the writer alone.
    """
    rows = torch.randn(tokens, HEAD_DIM, generator=generator)
    weight = 1 + torch.randn(NOPE_DIM, generator=generator) / 4
    small = torch.tensor(2.0**exponent)
    if by == "weight":
        arguments = random_arguments(rows.bfloat16(), device, generator, weight=weight * small)
    else:
        arguments = random_arguments(
            (rows * small).bfloat16(), device, generator, weight=weight, eps=1.0
        )
    check_write(arguments)
    records = arguments["kv_cache"].view(-1, RECORD_BYTES)[:tokens].cpu()
    magnitude = reference.decode(records, torch.float32)[:, :NOPE_DIM].abs()
    if exponent >= -10:  # at least some of a tile's values are more than half the smallest step
        assert magnitude.any(1).all()
    smallest = layout.scale_bytes(records) == 1
    if exponent <= -10:  # 4 standard deviations are below 6 * 2^-9
        assert smallest.float().mean() > 0.9
    elif exponent == -8:
        assert 0 < smallest.float().mean() < 1


def test_zeros(device: torch.device, generator: torch.Generator) -> None:
    """Zero codes of the sign that 0 * weight has, under the smallest scale."""
    arguments = random_arguments(torch.zeros(3, HEAD_DIM).bfloat16(), device, generator)
    check_write(arguments)
    records = arguments["kv_cache"].view(-1, RECORD_BYTES)[:3].cpu()
    assert not reference.decode(records).any()
    assert (layout.scale_bytes(records) == 1).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("special", [torch.nan, -torch.nan, torch.inf, -torch.inf, "largest"])
def test_numbers_that_are_none(
    device: torch.device, dtype: torch.dtype, special: Any, generator: torch.Generator
) -> None:
    """In the latent it spoils its row; in the key, its pair. And no other row."""
    rows = torch.randn(40, HEAD_DIM, generator=generator).to(dtype)
    value = torch.finfo(dtype).max if special == "largest" else special
    rows[3, 100] = rows[5, 3] = rows[7, NOPE_DIM + 1] = value
    arguments = random_arguments(rows, device, generator)
    check_write(arguments)
    latent = reference.decode(arguments["kv_cache"].view(-1, RECORD_BYTES).cpu(), torch.float32)
    if value != value:
        assert (latent[[3, 5], :NOPE_DIM] == 6 * 2.0**-9).all()
        spoiled = [NOPE_DIM + 1, NOPE_DIM + 1 + ROPE_DIM // 2]
        assert latent[7].isnan().nonzero().flatten().tolist() == spoiled


def test_every_position_and_pair(device: torch.device, generator: torch.Generator) -> None:
    """A unit vector in each dim of the key goes where the angle of its position says."""
    for is_neox in (True, False):
        k_pe = torch.eye(ROPE_DIM).repeat(4, 1)
        rows = torch.cat([torch.ones(len(k_pe), NOPE_DIM), k_pe], dim=1)
        positions = torch.arange(len(k_pe)) * 3
        arguments = random_arguments(
            rows, device, generator, is_neox=is_neox, positions=positions, round_to_input=False
        )
        check_write(arguments)
        records = arguments["kv_cache"].view(-1, RECORD_BYTES)[: len(rows)].cpu()
        rope = reference.decode(records, torch.float32)[:, NOPE_DIM:]
        for token in (0, 1, 40, 100, 255):
            dim, position = token % ROPE_DIM, int(positions[token])
            pair = dim % 32 if is_neox else dim // 2
            other = (dim + 32) % 64 if is_neox else dim ^ 1
            is_first = other > dim
            cos, sin = TABLE[position, pair].item(), TABLE[position, 32 + pair].item()
            want = torch.zeros(ROPE_DIM)
            want[dim], want[other] = cos, sin if is_first else -sin
            assert (rope[token] - want).abs().max() <= 2**-4


# ---- the reference -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_reference_norm_is_torchs(dtype: torch.dtype, generator: torch.Generator) -> None:
    """Before the rounding within a few units of fp32: 512 squares, summed in another order."""
    x = latents((500, NOPE_DIM), dtype, generator, specials_share=0.0)
    norm = torch.nn.RMSNorm(NOPE_DIM, eps=EPS, dtype=torch.float32)
    with torch.no_grad():
        norm.weight.copy_(1 + torch.randn(NOPE_DIM, generator=generator) / 4)
        want = norm(x.float())
    got = reference_fused.rms_norm(x, norm.weight.detach(), EPS)
    torch.testing.assert_close(got, want, rtol=8 * 2.0**-23, atol=0)
    rounded = torch.nn.functional.rms_norm(x, [NOPE_DIM], norm.weight.detach().to(dtype), EPS)
    same = reference_fused.rms_norm(x, norm.weight.detach().to(dtype), EPS).to(dtype)
    assert (rounded != same).float().mean() < (0.5 if dtype == torch.float32 else 0.001)
    torch.testing.assert_close(same, rounded, rtol=torch.finfo(dtype).eps * 4, atol=0)


def test_the_reference_rotation_is_a_complex_product(generator: torch.Generator) -> None:
    k_pe = torch.randn(300, ROPE_DIM, generator=generator)
    positions = torch.randint(len(TABLE), (300,), generator=generator)
    cos, sin = TABLE[positions].double().chunk(2, dim=1)
    turned = torch.view_as_complex(k_pe.double().view(300, -1, 2)) * torch.complex(cos, sin)
    got = reference_fused.rope(k_pe, positions, TABLE, is_neox=False)
    torch.testing.assert_close(got, torch.view_as_real(turned).flatten(1).float())
    halves = k_pe.view(300, -1, 2).transpose(1, 2).flatten(1)
    neox = reference_fused.rope(halves, positions, TABLE, is_neox=True)
    assert torch.equal(neox.view(300, 2, -1).transpose(1, 2).flatten(1), got)


# ---- where records go, and from where ----------------------------------------------------------


@pytest.mark.parametrize("case", FUSED_WRITES, ids=lambda case: case.name)
def test_sample(device: torch.device, case: Case, generator: torch.Generator) -> None:
    check_write(case.make(generator, device))


# Around the sizes where work is split between threads, and kernels change.
SIZES = [1, 31, 32, 33, 64, 65, 1024, 1025, 2048, 2049, 8192, 8193]


@pytest.mark.parametrize("tokens", SIZES)
def test_number_of_tokens(device: torch.device, tokens: int, generator: torch.Generator) -> None:
    check_write(some_skipped(tokens, torch.bfloat16, device, generator))


@pytest.mark.parametrize("is_aligned", [True, False], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [2_053, 8_199])
def test_tokens_that_share_a_warp(
    device: torch.device,
    generator: torch.Generator,
    tokens: int,
    dtype: torch.dtype,
    is_neox: bool,
    is_aligned: bool,
) -> None:
    """Those of more than 2,048, and of more than 8,192; not all warps have as many."""
    arguments = some_skipped(tokens, dtype, device, generator)
    table = TABLE.to(dtype) if is_neox else TABLE
    # What is skipped has no position either.
    arguments["positions"][arguments["slot_mapping"] < 0] = len(table)
    arguments |= {
        "is_neox": is_neox,
        "positions": arguments["positions"].int() if is_neox else arguments["positions"],
        "norm_weight": arguments["norm_weight"].float() if is_aligned else arguments["norm_weight"],
        "cos_sin_cache": inside(
            table, generator, device, offset=MARGIN if is_aligned else MARGIN + 1
        ),
    }
    check_write(arguments)


def some_skipped(
    tokens: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> dict[str, Any]:
    """A write to slots in no order, a fifth of which are no slots."""
    rows = torch.randn(tokens, HEAD_DIM, generator=generator).to(dtype)
    slots = distinct_slots(tokens, 150 * 64, generator)
    slots[torch.rand(tokens, generator=generator) < 0.2] = -1
    cache = random_cache(generator, CPU, num_blocks=150, block_size=64)
    return random_arguments(rows, device, generator, slot_mapping=slots, kv_cache=cache)


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
    max_positions = data.draw(st.integers(1, 300), label="max_positions")
    slots = distinct_slots(tokens, capacity, generator)
    skipped = torch.rand(tokens, generator=generator) < data.draw(st.sampled_from([0.0, 0.3, 1.0]))
    positions = torch.randint(max_positions, (rows,), generator=generator)

    def index(values: Tensor, label: str) -> Tensor:
        index_dtype = data.draw(st.sampled_from([torch.int32, torch.int64]), label=f"{label} dtype")
        strides = [data.draw(st.integers(1, 3), label=f"{label} stride")]
        return inside(values.to(index_dtype), generator, device, strides=strides)

    def matrix(values: Tensor, label: str) -> Tensor:
        width = values.shape[-1]
        padding = data.draw(st.sampled_from([0, 1, 7, 64]), label=f"{label} row padding")
        offset = MARGIN + data.draw(st.integers(0, 8), label=f"{label} offset")
        strides = [width + padding, 1][-values.dim() :]
        return inside(values, generator, device, strides=strides, offset=offset)

    def kv_c_or_float(label: str) -> torch.dtype:
        return data.draw(st.sampled_from([dtype, torch.float32]), label=label)

    def of_width(width: int) -> Tensor:
        return latents((rows, width), dtype, generator, specials_share=0.0003)

    weight = 1 + torch.randn(NOPE_DIM, generator=generator) / 4
    check_write(
        {
            "kv_c": matrix(of_width(NOPE_DIM), "kv_c"),
            "k_pe": matrix(of_width(ROPE_DIM), "k_pe"),
            "norm_weight": matrix(weight.to(kv_c_or_float("weight")), "weight"),
            "eps": data.draw(st.sampled_from([0.0, 1e-6, 1e-5, 3.0]), label="eps"),
            "positions": index(torch.where(skipped_of(rows, skipped), -5, positions), "positions"),
            "cos_sin_cache": matrix(TABLE[:max_positions].to(kv_c_or_float("table")), "table"),
            "is_neox": data.draw(st.booleans(), label="is_neox"),
            "kv_cache": random_cache(
                generator,
                device,
                num_blocks=num_blocks,
                block_size=block_size,
                num_layers=num_layers,
                layout=data.draw(st.sampled_from(POOL_LAYOUTS if num_layers else LAYOUTS)),
            ),
            "slot_mapping": index(torch.where(skipped, -1 - slots, slots), "slot"),
            "layer": 0 if num_layers is None else data.draw(st.integers(0, num_layers - 1)),
            "round_to_input": data.draw(st.booleans(), label="round_to_input"),
        }
    )


def skipped_of(rows: int, skipped: Tensor) -> Tensor:
    """Of all rows: those past the tokens count as skipped."""
    return torch.cat([skipped, torch.ones(rows - len(skipped), dtype=torch.bool)])


# ---- slots that are no slot, positions that are no position ------------------------------------


def some_write(
    device: torch.device, generator: torch.Generator, tokens: int = 40, **changed: Any
) -> dict[str, Any]:
    rows = torch.randn(tokens, HEAD_DIM, generator=generator).bfloat16()
    arguments = random_arguments(rows, device, generator, **changed)
    arguments["kv_cache"] = random_cache(generator, device, num_blocks=3, block_size=16)
    for name in ("positions", "slot_mapping"):
        arguments[name] = inside(arguments[name].cpu(), generator, device)
    return arguments


def test_negative_slots_are_skipped(device: torch.device, generator: torch.Generator) -> None:
    slots = torch.tensor([-1, 5, INT64.min, -48, 0])
    check_write(some_write(device, generator, tokens=5, slot_mapping=slots))
    arguments = some_write(device, generator, tokens=5, slot_mapping=torch.full((5,), -1))
    before = copy_of(arguments["kv_cache"])
    fused(**arguments)
    assert_memory_equal(arguments["kv_cache"], before, "kv_cache")


def check_out_of_range(arguments: dict[str, Any], device: torch.device, message: str) -> None:
    """The CPU raises and writes nothing; a captured graph cannot: CUDA skips the token."""
    if device.type == "cuda":
        check_write(arguments)
        return
    before = copies_of(arguments)
    with pytest.raises(IndexError, match=message):
        fused(**arguments)
    assert_memory_equal(arguments["kv_cache"], before["kv_cache"], "kv_cache")


@pytest.mark.parametrize("slot", [48, INT32.max, 2**32, 2**32 + 5, INT64.max])
def test_a_slot_past_the_capacity(
    device: torch.device, slot: int, generator: torch.Generator
) -> None:
    slots = torch.arange(40)
    slots[37] = slot
    message = rf"slot_mapping\[37\]: wanted a slot below .* capacity of 48, got {slot}"
    check_out_of_range(some_write(device, generator, slot_mapping=slots), device, message)


@pytest.mark.parametrize(
    "position",
    [
        torch.tensor(-1),
        torch.tensor(len(TABLE), dtype=torch.int32),
        torch.tensor(INT32.min, dtype=torch.int32),
        torch.tensor(INT32.max, dtype=torch.int32),
        torch.tensor(2**32),  # in 32 bits it would be position 0
        torch.tensor(2**32 + 5),
        torch.tensor(INT64.max),
        torch.tensor(INT64.min),
    ],
    ids=lambda position: f"{position.dtype}-{position.item()}".removeprefix("torch."),
)
def test_a_position_outside_the_table(
    device: torch.device, position: Tensor, generator: torch.Generator
) -> None:
    """Of a token that is written. That of a skipped one, here 5, is not looked at."""
    positions = torch.arange(40, dtype=position.dtype)
    positions[5] = positions[37] = position
    slots = torch.arange(40)
    slots[5] = -1
    arguments = some_write(device, generator, positions=positions, slot_mapping=slots)
    message = (
        rf"positions\[37\]: wanted a row of cos_sin_cache, in \[0, 4096\), got {position.item()}"
    )
    check_out_of_range(arguments, device, message)


def test_a_table_without_positions(device: torch.device, generator: torch.Generator) -> None:
    arguments = some_write(device, generator, tokens=3, cos_sin_cache=TABLE[:0])
    check_out_of_range(arguments, device, r"positions\[0\]: wanted a row .* in \[0, 0\), got")
    arguments["slot_mapping"].fill_(-1)
    check_write(arguments)


def test_a_cache_without_blocks(device: torch.device, generator: torch.Generator) -> None:
    arguments = some_write(device, generator, tokens=2, slot_mapping=torch.tensor([-1, -1]))
    arguments["kv_cache"] = random_cache(generator, device, num_blocks=0, block_size=16)
    check_write(arguments)


def test_a_position_more_than_2_gib_into_the_table(device: torch.device) -> None:
    stride = 2**29 + 1
    memory = torch.zeros(stride + 2 * ROPE_DIM, dtype=torch.float32, device=device)
    table = memory.as_strided((2, ROPE_DIM), (stride, 1))
    table[1] = 0.5
    rows = torch.ones(1, HEAD_DIM)
    arguments = random_arguments(rows, device, torch.Generator(), positions=torch.tensor([1]))
    records = records_of(arguments | {"cos_sin_cache": table})
    rope = reference.decode(records)[0, NOPE_DIM:]
    assert rope.tolist() == [0.0] * 32 + [1.0] * 32


def test_flushed_denormals_change_nothing(generator: torch.Generator) -> None:
    """The CPU op on a thread that treats denormals as zero; few tokens stay on it."""
    rows = latents((16, HEAD_DIM), torch.bfloat16, generator, specials_share=0.0003)
    rows[3, :NOPE_DIM] = 1e-40
    rows[4, :NOPE_DIM] = -1e-38
    arguments = random_arguments(rows, CPU, generator)
    want = records_of(arguments).clone()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        got = records_of(arguments | {"kv_cache": torch.zeros_like(arguments["kv_cache"])})
    finally:
        torch.set_flush_denormal(False)
    assert_records_equal(got, want)
