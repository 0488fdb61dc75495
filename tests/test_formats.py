"""The formats' registry, and what an engine asks of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import nvfp4_dsmla
from nvfp4_dsmla import formats, layout
from nvfp4_dsmla.formats import (
    CACHE_FORMATS,
    QUANTIZED_DS_MLA_CACHE_FORMATS,
    CacheFormat,
    KVQuantMode,
    canonicalize_kv_cache_dtype,
    format_from_cache,
    get_cache_format,
    get_kv_cache_spec,
    get_kv_quant_mode,
    is_quantized_kv_cache,
)

FORMATS = list(CACHE_FORMATS.values())
BITS = {"bfloat16": 16, "float32": 32, "e4m3": 8, "e2m1": 4}

# ---- descriptors -------------------------------------------------------------------------------


def test_the_formats_and_their_bytes() -> None:
    assert {f.name: f.bytes_per_token for f in FORMATS} == {
        "bfloat16": 1152,
        "fp8_ds_mla": 656,
        "nvfp4_ds_mla": 352,
    }


@pytest.mark.parametrize("cache_format", FORMATS, ids=lambda f: f.name)
def test_a_format_is_as_wide_as_its_parts(cache_format: CacheFormat) -> None:
    bits = cache_format.nope_dim * BITS[cache_format.nope_type]
    bits += cache_format.rope_dim * BITS[cache_format.rope_type]
    if cache_format.scale_type is not None:
        bits += cache_format.num_scales * BITS[cache_format.scale_type]
    assert bits == 8 * cache_format.bytes_per_token
    assert cache_format.head_size == 576


@pytest.mark.parametrize("cache_format", FORMATS, ids=lambda f: f.name)
def test_a_format_cannot_be_changed(cache_format: CacheFormat) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        cache_format.bytes_per_token = 1  # type: ignore[misc]


def test_quantized_formats() -> None:
    assert frozenset({"fp8_ds_mla", "nvfp4_ds_mla"}) == QUANTIZED_DS_MLA_CACHE_FORMATS
    assert isinstance(QUANTIZED_DS_MLA_CACHE_FORMATS, frozenset)


# ---- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("auto", "bfloat16"),
        ("bfloat16", "bfloat16"),
        ("fp8", "fp8_ds_mla"),
        ("fp8_ds_mla", "fp8_ds_mla"),
        ("nvfp4_ds_mla", "nvfp4_ds_mla"),  # and never fp8_ds_mla
    ],
)
def test_canonical_names(name: str, canonical: str) -> None:
    assert canonicalize_kv_cache_dtype(name) == canonical
    assert get_cache_format(name) is CACHE_FORMATS[canonical]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("nvfp4_dsmla", "; did you mean 'nvfp4_ds_mla'?"),
        ("NVFP4_DS_MLA", ""),
        ("fp8_e4m3", "; did you mean 'fp8_ds_mla'?"),
        ("bf16", "; did you mean 'bfloat16'?"),
        ("int8", ""),
        (None, ""),
    ],
)
def test_an_unknown_name_lists_the_known_and_the_nearest(name: Any, hint: str) -> None:
    known = "auto, bfloat16, fp8, fp8_ds_mla, nvfp4_ds_mla"
    with pytest.raises(ValueError, match="wanted") as caught:
        canonicalize_kv_cache_dtype(name)
    assert str(caught.value) == f"kv_cache_dtype: wanted one of {known}, got {name!r}{hint}"


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("auto", KVQuantMode.NONE),
        ("bfloat16", KVQuantMode.NONE),
        ("fp8", KVQuantMode.FP8_DS_MLA),
        ("fp8_ds_mla", KVQuantMode.FP8_DS_MLA),
        ("nvfp4_ds_mla", KVQuantMode.NVFP4_DS_MLA),
    ],
)
def test_quant_modes(name: str, mode: KVQuantMode) -> None:
    assert get_kv_quant_mode(name) is mode
    assert is_quantized_kv_cache(name) is (mode is not KVQuantMode.NONE)


# ---- an allocator's questions ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "storage"),
    [
        ("auto", 1152, torch.bfloat16),
        ("fp8", 656, torch.uint8),
        ("nvfp4_ds_mla", 352, torch.uint8),
    ],
)
def test_spec(name: str, content: int, storage: torch.dtype) -> None:
    spec = get_kv_cache_spec(kv_cache_dtype=name, block_size=64)
    assert spec.state_content_bytes == content
    assert spec.page_size_bytes == spec.page_content_bytes == 64 * content
    assert spec.storage_dtype == storage
    assert spec.shape(5)[:2] == (5, 64)
    assert torch.empty(spec.shape(5), dtype=storage, device="meta").nbytes == 5 * 64 * content
    assert spec.num_blocks(10 * 64 * content - 1) == 9


def test_spec_of_an_aligned_page() -> None:
    spec = get_kv_cache_spec(kv_cache_dtype="nvfp4_ds_mla", block_size=3, page_alignment=512)
    assert spec.page_content_bytes == 1056
    assert spec.page_size_bytes == 1536


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"block_size": 0}, "block_size: wanted 1 or more, got 0"),
        ({"page_alignment": 0}, "page_alignment: wanted 1 or more, got 0"),
        (
            {"head_size": 640},
            "head_size: wanted 576 (512 NoPE dims and 64 RoPE dims) for fp8_ds_mla, got 640",
        ),
        (
            {"kv_cache_dtype": "bfloat16", "page_alignment": 3},
            "page_alignment: wanted a multiple of 2, the size of torch.bfloat16, or 1, got 3",
        ),
    ],
)
def test_spec_refuses(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="wanted") as caught:
        get_kv_cache_spec(**{"kv_cache_dtype": "fp8", "block_size": 64, **arguments})
    assert str(caught.value) == message


@pytest.mark.parametrize("name", CACHE_FORMATS)
@pytest.mark.parametrize("alignment", [1, 512])
def test_a_cache_of_pages_is_a_view_without_the_padding(name: str, alignment: int) -> None:
    spec = get_kv_cache_spec(kv_cache_dtype=name, block_size=3, page_alignment=alignment)
    pages = torch.randint(-128, 128, (2, 5, spec.page_size_bytes), dtype=torch.int8)
    cache = spec.cache_of_pages(pages)
    assert cache.shape == (2, *spec.shape(5))
    assert cache.untyped_storage().data_ptr() == pages.untyped_storage().data_ptr()
    assert format_from_cache(cache).name == name
    token = cache[1, 4, 2].contiguous().view(torch.int8)
    start = 2 * spec.state_content_bytes
    assert torch.equal(token, pages[1, 4, start : start + spec.state_content_bytes])


def test_a_page_of_another_size_is_refused() -> None:
    spec = get_kv_cache_spec(kv_cache_dtype="nvfp4_ds_mla", block_size=2)
    with pytest.raises(
        ValueError, match=r"pages: wanted uint8 or int8 \[\.\.\., num_blocks, 704\]"
    ):
        spec.cache_of_pages(torch.zeros(3, 703, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"got torch.float32 \[3, 704\]"):
        spec.cache_of_pages(torch.zeros(3, 704))


@pytest.mark.parametrize("name", sorted(QUANTIZED_DS_MLA_CACHE_FORMATS))
def test_no_path_views_a_quantized_cache_as_fp8(name: str) -> None:
    """Storage is uint8 by every way to a cache, and an op refuses a float8 view of one."""
    spec = get_kv_cache_spec(kv_cache_dtype=name, block_size=4)
    pages = torch.zeros(2, spec.page_size_bytes, dtype=torch.int8)
    ways = [
        spec.cache_of_pages(pages),
        torch.zeros(spec.shape(2), dtype=spec.storage_dtype),
        torch.zeros(spec.shape(2), dtype=get_cache_format(name).storage_dtype),
    ]
    if name == "nvfp4_ds_mla":
        ways.append(nvfp4_dsmla.allocate_kv_cache(num_blocks=2, block_size=4))
    assert {cache.dtype for cache in ways} == {torch.uint8}
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        with pytest.raises(ValueError, match=f"wanted torch.uint8 for {name}"):
            format_from_cache(ways[0].view(dtype))


@pytest.mark.parametrize("name", CACHE_FORMATS)
def test_a_cache_tells_its_format(name: str) -> None:
    spec = get_kv_cache_spec(kv_cache_dtype=name, block_size=4)
    layer = torch.zeros(spec.shape(2), dtype=spec.storage_dtype)
    for cache in (layer, layer.expand(3, *layer.shape), layer[0, 0], layer[:, ::2]):
        assert format_from_cache(cache) is CACHE_FORMATS[name]


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (
            torch.zeros(2, 584, dtype=torch.uint8),
            (
                "cache: wanted a last dimension of one of these bytes: 1152 (bfloat16), "
                "656 (fp8_ds_mla), 352 (nvfp4_ds_mla); got 584, torch.uint8 [2, 584]"
            ),
        ),
        (
            torch.zeros(1152, dtype=torch.uint8),
            (
                "cache: wanted torch.bfloat16 for bfloat16 (1152 bytes a token), "
                "got torch.uint8 [1152]"
            ),
        ),
        (torch.tensor(1.0), "cache: wanted [..., bytes a token], got torch.float32 []"),
    ],
    ids=["584", "bytes_of_bfloat16", "scalar"],
)
def test_a_cache_of_no_format(cache: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match="wanted") as caught:
        format_from_cache(cache)
    assert str(caught.value) == message


def test_the_exports() -> None:
    assert set(formats.__all__) <= set(nvfp4_dsmla.__all__)
    assert formats.CACHE_FORMATS["bfloat16"].elements_per_token == layout.HEAD_DIM
