"""The formats a latent cache can have: their names, sizes and rules, for an engine to ask.

A token is 512 NoPE dims and 64 RoPE dims in each of them:

| name | bytes | NoPE | scales | RoPE |
|---|---|---|---|---|
| `bfloat16` | 1152 | bfloat16 | none | bfloat16 |
| `fp8_ds_mla` | 656 | e4m3 | fp32, one per 128 dims | bfloat16 |
| `nvfp4_ds_mla` | 352 | e2m1, two a byte | e4m3, one per 16 dims | e4m3 |

The quantised ones are self-describing: no scale is kept outside a record. Their storage is uint8
and never a float8 dtype, since a record is no array of one type. Other engines call records of
other sizes `nvfp4_ds_mla` too; here the name means the one above and nothing else.
"""

from __future__ import annotations

import difflib
import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from nvfp4_dsmla import _C
from nvfp4_dsmla.layout import BLOCK_DIM, HEAD_DIM, NOPE_DIM, RECORD_BYTES, ROPE_DIM

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "CACHE_FORMATS",
    "QUANTIZED_DS_MLA_CACHE_FORMATS",
    "CacheFormat",
    "KVCacheSpec",
    "KVQuantMode",
    "canonicalize_kv_cache_dtype",
    "format_from_cache",
    "get_cache_format",
    "get_kv_cache_spec",
    "get_kv_quant_mode",
    "is_quantized_kv_cache",
]


class KVQuantMode(enum.Enum):
    """How the elements of a cache are quantised."""

    NONE = "none"
    FP8_DS_MLA = "fp8_ds_mla"
    NVFP4_DS_MLA = "nvfp4_ds_mla"


@dataclass(frozen=True)
class CacheFormat:
    """What a record of one format is.

    Attributes:
        name: as a configuration gives it, and as it is printed.
        aliases: other names that `canonicalize_kv_cache_dtype` takes for it.
        bytes_per_token: of one record.
        storage_dtype: of a cache tensor: uint8, or bfloat16 for the format of that name.
        nope_dim: elements of the compressed latent kv_c, which is also V.
        rope_dim: elements of the shared key k_pe.
        nope_type: of a NoPE element.
        rope_type: of a RoPE element.
        scale_type: of a scale; None where there is none.
        scale_block: NoPE dims that share a scale; None where there is none.
        scale_rule: how a scale is chosen from its block and how an element is rounded.
        page_rule: where the records of a page lie.
        quant_mode: how the elements are quantised.
    """

    name: str
    aliases: tuple[str, ...]
    bytes_per_token: int
    storage_dtype: torch.dtype
    nope_type: str
    rope_type: str
    scale_type: str | None
    scale_block: int | None
    scale_rule: str
    quant_mode: KVQuantMode
    nope_dim: int = NOPE_DIM
    rope_dim: int = ROPE_DIM
    page_rule: str = (
        "token i of a page is its record i; records lie one after another, or at any one stride "
        "that keeps them apart, and a page may be padded at its end"
    )

    @property
    def head_size(self) -> int:
        """Elements of a token, NoPE and RoPE."""
        return self.nope_dim + self.rope_dim

    @property
    def num_scales(self) -> int:
        """Scales of a record."""
        return 0 if self.scale_block is None else self.nope_dim // self.scale_block

    @property
    def elements_per_token(self) -> int:
        """Size of a cache tensor's last dimension: elements of `storage_dtype`."""
        return self.bytes_per_token // self.storage_dtype.itemsize

    @property
    def is_quantized(self) -> bool:
        """Whether a record is anything but the vector itself."""
        return self.quant_mode is not KVQuantMode.NONE


_BFLOAT16 = CacheFormat(
    name="bfloat16",
    aliases=("auto",),
    bytes_per_token=_C.BF16_RECORD_BYTES,
    storage_dtype=torch.bfloat16,
    nope_type="bfloat16",
    rope_type="bfloat16",
    scale_type=None,
    scale_block=None,
    scale_rule="no scale; to the nearest bfloat16, ties to even",
    quant_mode=KVQuantMode.NONE,
)
_FP8_DS_MLA = CacheFormat(
    name="fp8_ds_mla",
    aliases=("fp8",),
    bytes_per_token=_C.FP8_RECORD_BYTES,
    storage_dtype=torch.uint8,
    nope_type="e4m3",
    rope_type="bfloat16",
    scale_type="float32",
    scale_block=_C.FP8_BLOCK_DIM,
    scale_rule=(
        "scale = max(amax / 448, FLT_MIN), not a power of two; element = x / scale, a division, "
        "to the nearest e4m3, ties to even, saturating at 448"
    ),
    quant_mode=KVQuantMode.FP8_DS_MLA,
)
_NVFP4_DS_MLA = CacheFormat(
    name="nvfp4_ds_mla",
    aliases=(),
    bytes_per_token=RECORD_BYTES,
    storage_dtype=torch.uint8,
    nope_type="e2m1",
    rope_type="e4m3",
    scale_type="e4m3",
    scale_block=BLOCK_DIM,
    scale_rule=(
        "scale = max(amax / 6, 2^-9) rounded up to e4m3, at most 448; element = x * (1 / scale) to "
        "the nearest e2m1, ties to even, saturating at 6; RoPE to the nearest e4m3, no scale"
    ),
    quant_mode=KVQuantMode.NVFP4_DS_MLA,
)

CACHE_FORMATS: dict[str, CacheFormat] = {f.name: f for f in (_BFLOAT16, _FP8_DS_MLA, _NVFP4_DS_MLA)}
"""Every format by its name, the widest first."""

QUANTIZED_DS_MLA_CACHE_FORMATS: frozenset[str] = frozenset(
    f.name for f in CACHE_FORMATS.values() if f.is_quantized
)
"""The names of the quantised formats."""

_CANONICAL = {name: f.name for f in CACHE_FORMATS.values() for name in (f.name, *f.aliases)}


def canonicalize_kv_cache_dtype(kv_cache_dtype: str) -> str:
    """The name of the format that a configuration asks for.

    Args:
        kv_cache_dtype: a format's name, which stays as it is, or "auto" for bfloat16 or "fp8" for
            fp8_ds_mla.

    Returns:
        A key of `CACHE_FORMATS`.

    Raises:
        ValueError: no format has that name; the message lists those there are, and the nearest.

    Source: the rule of the public engines' sparse MLA backends, with nvfp4_ds_mla beside it.
    """
    known = _CANONICAL.get(kv_cache_dtype)
    if known is not None:
        return known
    near = difflib.get_close_matches(str(kv_cache_dtype), _CANONICAL, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"kv_cache_dtype: wanted one of {', '.join(sorted(_CANONICAL))}, got {kv_cache_dtype!r}"
        f"{hint}"
    )


def get_cache_format(kv_cache_dtype: str) -> CacheFormat:
    """The format that a configuration asks for.

    Args:
        kv_cache_dtype: what `canonicalize_kv_cache_dtype` takes.

    Raises:
        ValueError: as `canonicalize_kv_cache_dtype`.
    """
    return CACHE_FORMATS[canonicalize_kv_cache_dtype(kv_cache_dtype)]


def get_kv_quant_mode(kv_cache_dtype: str) -> KVQuantMode:
    """How the cache that a configuration asks for is quantised.

    Args:
        kv_cache_dtype: what `canonicalize_kv_cache_dtype` takes.

    Raises:
        ValueError: as `canonicalize_kv_cache_dtype`.
    """
    return get_cache_format(kv_cache_dtype).quant_mode


def is_quantized_kv_cache(kv_cache_dtype: str) -> bool:
    """Whether the cache that a configuration asks for is quantised.

    Args:
        kv_cache_dtype: what `canonicalize_kv_cache_dtype` takes.

    Raises:
        ValueError: as `canonicalize_kv_cache_dtype`.
    """
    return get_cache_format(kv_cache_dtype).is_quantized


@dataclass(frozen=True)
class KVCacheSpec:
    """What an engine's allocator has to know of one layer's cache: make it by `get_kv_cache_spec`.

    Attributes:
        format: of the records.
        block_size: tokens a page.
        page_alignment: a page's size in bytes is a multiple of this.
    """

    format: CacheFormat
    block_size: int
    page_alignment: int

    @property
    def storage_dtype(self) -> torch.dtype:
        """Of the cache tensor: uint8 for a quantised format."""
        return self.format.storage_dtype

    @property
    def state_content_bytes(self) -> int:
        """Bytes of one token's record."""
        return self.format.bytes_per_token

    @property
    def page_content_bytes(self) -> int:
        """Bytes of the records of a page, without its padding."""
        return self.block_size * self.state_content_bytes

    @property
    def page_size_bytes(self) -> int:
        """Bytes of a page, padding included."""
        return -(-self.page_content_bytes // self.page_alignment) * self.page_alignment

    def shape(self, num_blocks: int) -> tuple[int, int, int]:
        """The shape of a layer's cache tensor of so many pages."""
        return (num_blocks, self.block_size, self.format.elements_per_token)

    def num_blocks(self, memory_bytes: int) -> int:
        """How many pages fit into so many bytes."""
        return memory_bytes // self.page_size_bytes

    def cache_of_pages(self, pages: Tensor) -> Tensor:
        """The cache that lies in an engine's pages: a view, with the padding left out.

        Args:
            pages: uint8 or int8 [..., num_blocks, page_size_bytes], any strides with contiguous
                bytes in a page.

        Returns:
            `storage_dtype` [..., num_blocks, block_size, elements a token], sharing storage with
            `pages`: what the ops take.

        Raises:
            ValueError: `pages` is not as above.
        """
        fits = pages.dim() >= 2 and pages.shape[-1] == self.page_size_bytes
        if pages.dtype not in (torch.uint8, torch.int8) or not fits:
            raise ValueError(
                f"pages: wanted uint8 or int8 [..., num_blocks, {self.page_size_bytes}], "
                f"got {pages.dtype} {list(pages.shape)}"
            )
        records = pages.view(torch.uint8)[..., : self.page_content_bytes]
        by_token = records.unflatten(-1, (self.block_size, self.state_content_bytes))
        cache: Tensor = by_token.view(self.storage_dtype)
        return cache


def get_kv_cache_spec(
    *,
    kv_cache_dtype: str,
    block_size: int,
    head_size: int = HEAD_DIM,
    page_alignment: int = 1,
) -> KVCacheSpec:
    """What an engine's allocator has to know of a cache.

    Args:
        kv_cache_dtype: what `canonicalize_kv_cache_dtype` takes.
        block_size: tokens a page, 1 or more; every op takes any.
        head_size: elements of a token; every format here has 576.
        page_alignment: make a page's size a multiple of so many bytes, 1 or more.

    Raises:
        ValueError: an argument is not as above.
    """
    chosen = get_cache_format(kv_cache_dtype)
    for name, value in (("block_size", block_size), ("page_alignment", page_alignment)):
        if value < 1:
            raise ValueError(f"{name}: wanted 1 or more, got {value}")
    if head_size != chosen.head_size:
        raise ValueError(
            f"head_size: wanted {chosen.head_size} ({chosen.nope_dim} NoPE dims and "
            f"{chosen.rope_dim} RoPE dims) for {chosen.name}, got {head_size}"
        )
    if page_alignment % chosen.storage_dtype.itemsize != 0 and page_alignment != 1:
        raise ValueError(
            f"page_alignment: wanted a multiple of {chosen.storage_dtype.itemsize}, the size of "
            f"{chosen.storage_dtype}, or 1, got {page_alignment}"
        )
    return KVCacheSpec(format=chosen, block_size=block_size, page_alignment=page_alignment)


def format_from_cache(cache: Tensor) -> CacheFormat:
    """The format of a cache, by its bytes a token.

    Args:
        cache: a cache or pool [..., num_blocks, block_size, elements a token], or any other tensor
            of records; uint8, or bfloat16 for the format of that name.

    Raises:
        ValueError: no format has so many bytes a token, or the one that has is not stored in that
            dtype. A quantised cache that was made into a view of a float8 dtype is refused here.

    Source: the public decode kernels tell these formats apart in the same way.
    """
    if cache.dim() == 0:
        raise ValueError(f"cache: wanted [..., bytes a token], got {cache.dtype} []")
    bytes_per_token = cache.shape[-1] * cache.element_size()
    for candidate in CACHE_FORMATS.values():
        if candidate.bytes_per_token != bytes_per_token:
            continue
        if candidate.storage_dtype != cache.dtype:
            raise ValueError(
                f"cache: wanted {candidate.storage_dtype} for {candidate.name} "
                f"({bytes_per_token} bytes a token), got {cache.dtype} {list(cache.shape)}"
            )
        return candidate
    known = ", ".join(f"{f.bytes_per_token} ({f.name})" for f in CACHE_FORMATS.values())
    raise ValueError(
        f"cache: wanted a last dimension of one of these bytes: {known}; got {bytes_per_token}, "
        f"{cache.dtype} {list(cache.shape)}"
    )
