"""convert_kv_cache between any formats, and concat_and_cache_mla, which takes a format's name."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import ReinplaceCounters
from torch._inductor.utils import run_and_get_code

import nvfp4_dsmla
from cases import (
    DTYPES,
    POOL_LAYOUTS,
    assert_memory_equal,
    copy_of,
    distinct_slots,
    latents,
    memory_of,
    random_cache,
)
from compare import assert_latents_equal
from nvfp4_dsmla import reference, reference_formats
from nvfp4_dsmla.formats import CACHE_FORMATS, format_from_cache
from nvfp4_dsmla.layout import HEAD_DIM, NOPE_DIM

FORMATS = list(CACHE_FORMATS)
PAIRS = [(a, b) for a in FORMATS for b in FORMATS if a != b]


def cache_of(
    name: str, generator: torch.Generator, device: torch.device, layout: str = "packed"
) -> Tensor:
    """A pool of random bytes, 3 layers of 5 blocks of 4 tokens."""
    cache_format = CACHE_FORMATS[name]
    pool = random_cache(
        generator,
        device,
        num_blocks=5,
        block_size=4,
        num_layers=3,
        layout=layout,
        width=cache_format.bytes_per_token,
    )
    return pool.view(cache_format.storage_dtype)


def tokens_of(name: str, rows: Tensor) -> Tensor:
    """The records that the reference makes of tokens."""
    return reference_formats.CODECS[name].encode(rows[:, :NOPE_DIM], rows[:, NOPE_DIM:])


def assert_records_alike(got: Tensor, want: Tensor, name: str) -> None:
    """The same bytes; bfloat16 made of a record's NaN may be any NaN."""
    assert got.dtype == want.dtype
    if name == "bfloat16":
        assert_latents_equal(got, want)
    else:
        different = (got.cpu() != want.cpu()).nonzero()
        assert len(different) == 0, f"{len(different)} bytes differ, first {different[0].tolist()}"


# ---- every pair --------------------------------------------------------------------------------


@pytest.mark.parametrize(("src", "dst"), PAIRS)
def test_any_bytes(device: torch.device, src: str, dst: str, generator: torch.Generator) -> None:
    pool = cache_of(src, generator, device)
    got = nvfp4_dsmla.convert_kv_cache(src=pool, src_format=src, dst_format=dst)
    assert got.shape[:-1] == pool.shape[:-1]
    assert got.is_contiguous()
    assert format_from_cache(got).name == dst
    assert_records_alike(got, reference_formats.convert(copy_of(pool), src, dst), dst)


@pytest.mark.parametrize(("src", "dst"), PAIRS)
def test_tokens_there_and_back(
    device: torch.device, src: str, dst: str, generator: torch.Generator
) -> None:
    """And once more there: records that came from a format convert to it without loss."""
    rows = latents((64, HEAD_DIM), torch.bfloat16, generator)
    first = tokens_of(src, rows).view(4, 16, -1)
    want, got = first, first.to(device)
    names = [src, dst, src, dst]
    for have, need in pairwise(names):
        want = reference_formats.convert(want, have, need)
        got = nvfp4_dsmla.convert_kv_cache(src=got, src_format=have, dst_format=need)
        assert_records_alike(got, want, need)


def test_nvfp4_survives_bfloat16(device: torch.device, generator: torch.Generator) -> None:
    """What nvfp4_ds_mla decodes to is exact in bfloat16, so finite records come back as values."""
    rows = torch.randn(64, HEAD_DIM, generator=generator)
    records = tokens_of("nvfp4_ds_mla", rows).view(1, 64, -1).to(device)
    there = nvfp4_dsmla.convert_kv_cache(
        src=records, src_format="nvfp4_ds_mla", dst_format="bfloat16"
    )
    back = nvfp4_dsmla.convert_kv_cache(src=there, src_format="auto", dst_format="nvfp4_ds_mla")
    assert_latents_equal(there.cpu(), reference.decode(records.cpu()))
    assert_latents_equal(
        reference.decode(back.cpu(), torch.float32), reference.decode(records.cpu(), torch.float32)
    )


@pytest.mark.parametrize("name", ["fp8_ds_mla", "nvfp4_ds_mla"])
def test_from_bfloat16_is_the_write_and_to_bfloat16_the_gather(
    device: torch.device, name: str, generator: torch.Generator
) -> None:
    rows = torch.randn(48, HEAD_DIM, generator=generator).bfloat16().to(device)
    slots = torch.arange(48, device=device)
    spec = nvfp4_dsmla.get_kv_cache_spec(kv_cache_dtype=name, block_size=16)
    cache = torch.zeros(spec.shape(3), dtype=spec.storage_dtype, device=device)
    nvfp4_dsmla.concat_and_cache_mla(
        rows[:, :NOPE_DIM], rows[:, NOPE_DIM:], cache, slots, name, torch.ones(1)
    )
    converted = nvfp4_dsmla.convert_kv_cache(
        src=rows.view(3, 16, HEAD_DIM), src_format="bfloat16", dst_format=name
    )
    assert torch.equal(converted, cache)
    gathers = {
        "fp8_ds_mla": nvfp4_dsmla.gather_and_upconvert_fp8_ds_mla,
        "nvfp4_ds_mla": nvfp4_dsmla.gather_and_upconvert_nvfp4_ds_mla,
    }
    back = nvfp4_dsmla.convert_kv_cache(src=cache, src_format=name, dst_format="bfloat16")
    assert_latents_equal(back.view(48, HEAD_DIM), gathers[name](kv_cache=cache, slots=slots))


# ---- where the records lie ---------------------------------------------------------------------


@pytest.mark.parametrize("dst_layout", POOL_LAYOUTS)
@pytest.mark.parametrize("src_layout", POOL_LAYOUTS)
def test_every_layout_and_nothing_beside(
    device: torch.device, src_layout: str, dst_layout: str, generator: torch.Generator
) -> None:
    src = cache_of("fp8_ds_mla", generator, device, src_layout)
    out = cache_of("nvfp4_ds_mla", generator, device, dst_layout)
    before = {"src": copy_of(src), "out": copy_of(out)}
    got = nvfp4_dsmla.convert_kv_cache(
        src=src, src_format="fp8_ds_mla", dst_format="nvfp4_ds_mla", out=out
    )
    assert got is out
    before["out"].copy_(reference_formats.convert(before["src"], "fp8_ds_mla", "nvfp4_ds_mla"))
    assert_memory_equal(out, before["out"], "out")
    assert_memory_equal(src, before["src"], "src")


@pytest.mark.parametrize(("src", "dst"), PAIRS)
def test_padded_pages_of_both(
    device: torch.device, src: str, dst: str, generator: torch.Generator
) -> None:
    source = cache_of(src, generator, device, "padded_pages")
    out = cache_of(dst, generator, device, "padded_tokens")
    nvfp4_dsmla.convert_kv_cache(src=source, src_format=src, dst_format=dst, out=out)
    assert_records_alike(out, reference_formats.convert(copy_of(source), src, dst), dst)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0, 4), (0, 2, 4)])
def test_empty_caches(device: torch.device, shape: tuple[int, ...]) -> None:
    cache = torch.zeros(*shape, 656, dtype=torch.uint8, device=device)
    got = nvfp4_dsmla.convert_kv_cache(src=cache, src_format="fp8", dst_format="auto")
    assert got.shape == (*shape, HEAD_DIM)


@pytest.mark.parametrize("name", FORMATS)
def test_the_same_format_is_a_copy(
    device: torch.device, name: str, generator: torch.Generator
) -> None:
    pool = cache_of(name, generator, device, "blocks_first")
    got = nvfp4_dsmla.convert_kv_cache(src=pool, src_format=name, dst_format=name)
    assert got.data_ptr() != pool.data_ptr()
    assert torch.equal(got.view(torch.uint8), pool.contiguous().view(torch.uint8))


# ---- refusals ----------------------------------------------------------------------------------

FP8_CACHE = torch.zeros(2, 4, 656, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"src_format": "fp7"}, "kv_cache_dtype: wanted one of auto, bfloat16, fp8, "),
        (
            {"src_format": "nvfp4_ds_mla"},
            (
                "convert_kv_cache: src: wanted torch.uint8 [..., num_blocks, block_size, 352] for "
                "nvfp4_ds_mla, got torch.uint8 [2, 4, 656]"
            ),
        ),
        (
            {"out": FP8_CACHE},
            (
                "convert_kv_cache: out: wanted torch.uint8 [..., num_blocks, block_size, 352] for "
                "nvfp4_ds_mla, got torch.uint8 [2, 4, 656]"
            ),
        ),
        (
            {"out": torch.zeros(2, 3, 352, dtype=torch.uint8)},
            "convert_kv_cache: dst: wanted the layers, blocks and block_size of src, [2, 4], got ",
        ),
        (
            {"out": torch.zeros(2, 4, 352, dtype=torch.uint8, device="meta")},
            "convert_kv_cache: out: wanted the device of src (cpu), got meta",
        ),
        (
            {"out": torch.zeros(1, 4, 352, dtype=torch.uint8).expand(2, 4, 352)},
            "convert_kv_cache: dst: wanted strides that keep records apart, got ",
        ),
        (
            {"src": torch.zeros(4, 656, dtype=torch.uint8)},
            "convert_kv_cache: src: wanted uint8 [..., num_blocks, block_size, 352], uint8 [..., ",
        ),
        (
            {"dst_format": "fp8", "out": torch.zeros(3, 4, 656, dtype=torch.uint8)},
            "convert_kv_cache: out: wanted the shape of src, [2, 4, 656], got [3, 4, 656]",
        ),
    ],
)
def test_refusals(change: dict[str, Any], message: str) -> None:
    arguments = {"src": FP8_CACHE, "src_format": "fp8", "dst_format": "nvfp4_ds_mla", **change}
    with pytest.raises(ValueError, match="wanted") as caught:
        nvfp4_dsmla.convert_kv_cache(**arguments)
    assert str(caught.value).startswith(message)


def test_the_op_refuses_one_format_for_both() -> None:
    message = "^convert_kv_cache: dst: wanted another format than that of src, got uint8"
    with pytest.raises(ValueError, match=message):
        torch.ops.nvfp4_dsmla.convert_kv_cache(FP8_CACHE, FP8_CACHE.clone())


@pytest.mark.parametrize(("src", "dst"), PAIRS)
def test_opcheck(device: torch.device, src: str, dst: str, generator: torch.Generator) -> None:
    source, out = cache_of(src, generator, device), cache_of(dst, generator, device)
    memory_of(source).bitwise_and_(0x3F)  # opcheck finds a NaN unequal to itself
    torch.library.opcheck(torch.ops.nvfp4_dsmla.convert_kv_cache.default, (source, out))


# ---- concat_and_cache_mla ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["auto", "bfloat16", "fp8", "fp8_ds_mla", "nvfp4_ds_mla"])
def test_a_write_by_name(
    device: torch.device, name: str, dtype: torch.dtype, generator: torch.Generator
) -> None:
    canonical = nvfp4_dsmla.canonicalize_kv_cache_dtype(name)
    rows = latents((12, HEAD_DIM), dtype, generator).to(device)
    kv_c, k_pe = rows[:, :NOPE_DIM], rows[:, NOPE_DIM:]
    pool = cache_of(canonical, generator, device)
    slots = distinct_slots(12, 20, generator)
    want = copy_of(pool)
    nvfp4_dsmla.concat_and_cache_mla(
        kv_c, k_pe, pool, slots.to(device), name, torch.ones(()), layer=2
    )
    codec = reference_formats.CODECS[canonical]
    reference.concat_and_cache(kv_c.cpu(), k_pe.cpu(), want, slots, layer=2, codec=codec)
    assert_memory_equal(pool, want, "kv_cache")


def test_a_write_by_a_name_that_is_none_or_not_the_caches() -> None:
    rows, slots = torch.zeros(1, HEAD_DIM), torch.tensor([0])
    kv_c, k_pe = rows[:, :NOPE_DIM], rows[:, NOPE_DIM:]
    with pytest.raises(ValueError, match="did you mean 'nvfp4_ds_mla'"):
        nvfp4_dsmla.concat_and_cache_mla(kv_c, k_pe, FP8_CACHE, slots, "nvfp4_dsmla")
    with pytest.raises(ValueError, match=r"^concat_and_cache_nvfp4_ds_mla: kv_cache: wanted uint8"):
        nvfp4_dsmla.concat_and_cache_mla(kv_c, k_pe, FP8_CACHE, slots, "nvfp4_ds_mla")


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_name_picks_the_op_while_tracing(
    device: torch.device, name: str, dynamic: bool, generator: torch.Generator
) -> None:
    """One graph, the op of that format in it, no copy of the pool, the bits of eager code."""
    torch._dynamo.reset()
    ReinplaceCounters.clear()
    rows = torch.randn(6, HEAD_DIM, generator=generator).to(device)
    slots = distinct_slots(6, 20, generator).to(device)
    pool = cache_of(name, generator, device)
    want = pool.clone()

    def step(x: Tensor, cache: Tensor, slots: Tensor, layer: int) -> None:
        for each in (layer, layer - 1):
            nvfp4_dsmla.concat_and_cache_mla(
                x[:, :NOPE_DIM] * 2, x[:, NOPE_DIM:], cache, slots, name, layer=each
            )

    step(rows, want, slots, 2)
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic)
    _, codes = run_and_get_code(compiled, rows, pool, slots, 2)
    assert torch.equal(pool.view(torch.uint8), want.view(torch.uint8))
    write = {"bfloat16": "concat_and_cache_bfloat16"}.get(name, f"concat_and_cache_{name}")
    assert any(write in code for code in codes)
    assert not any("copy_" in code or "clone" in code for code in codes)
    assert ReinplaceCounters.get_total_missed() == 0
