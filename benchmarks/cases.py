"""What is measured: which operation, how many tokens, and where in memory they lie."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from nvfp4_dsmla import concat_and_cache_mla, get_kv_cache_spec
from nvfp4_dsmla.layout import HEAD_DIM, NOPE_DIM, RECORD_BYTES, ROPE_DIM

if TYPE_CHECKING:
    from torch import Tensor

SIZES = (1, 8, 64, 512, 2048, 8192, 32768, 131072, 262144)
PREFILL = 131072
CHUNK = 8192
DECODE = 64

POOL_LAYERS = 4
SLOT_BYTES = 8
INDEX_BYTES = 4
LSE_BYTES = 4
TOPK = 2048


@dataclass(frozen=True)
class Case:
    """One operation at one size.

    op: "write", "fused write", or "gather": by request where there are requests, by slot where
        there are none.
    layout: "contiguous", blocks in order; "shuffled", blocks in random order; "layer view", one
        layer of a pool whose layers are interleaved block by block, blocks in order.
    format: of the cache, "nvfp4_ds_mla" or "fp8_ds_mla".
    """

    op: str
    tokens: int
    layout: str = "contiguous"
    block_size: int = 64
    requests: int = 0
    dtype: str = "bfloat16"
    format: str = "nvfp4_ds_mla"

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def bytes(self) -> int:
        """The least that has to be read and written: vectors, records, and slots where used."""
        index = 0 if self.requests else SLOT_BYTES
        if self.op == "fused write":  # positions, too, and a row of cosines and sines for each
            index += SLOT_BYTES + ROPE_DIM * self.torch_dtype.itemsize
        spec = get_kv_cache_spec(kv_cache_dtype=self.format, block_size=self.block_size)
        record = spec.state_content_bytes
        return self.tokens * (HEAD_DIM * self.torch_dtype.itemsize + record + index)

    @property
    def name(self) -> str:
        """The operation in words."""
        what = f"gather, {self.requests} requests" if self.requests else "gather, by slot"
        what = what if self.op == "gather" else self.op
        return what if self.format == "nvfp4_ds_mla" else f"{what}, {self.format}"


def device_cases(*, quick: bool) -> list[Case]:
    """What `cache` measures."""
    sizes = (1, DECODE, CHUNK, PREFILL) if quick else SIZES
    cases = [Case("write", tokens) for tokens in sizes]
    cases += [Case("gather", tokens, requests=16) for tokens in sizes]
    cases += [Case("gather", tokens) for tokens in sizes]
    for tokens in (PREFILL,) if quick else (CHUNK, PREFILL):
        cases += [Case("gather", tokens, requests=requests) for requests in (1, 256)]
        for plain in (Case("write", tokens), Case("gather", tokens, requests=16)):
            cases.append(replace(plain, layout="layer view"))
            cases += [replace(plain, layout="shuffled", block_size=n) for n in (1, 16, 64, 256)]
            cases += [replace(plain, dtype=dtype) for dtype in ("float16", "float32")]
    for tokens in (DECODE, CHUNK, PREFILL):
        for plain in (Case("write", tokens), Case("gather", tokens, requests=16)):
            cases.append(replace(plain, format="fp8_ds_mla"))
    return cases


@dataclass(frozen=True)
class DecodeCase:
    """One call of sparse_mla_decode, in bfloat16.

    padded: how many of a row's topk indices are -1, the last ones.
    """

    heads: int
    batch: int
    topk: int
    s_q: int = 1
    padded: int = 0

    @property
    def rows(self) -> int:
        return self.batch * self.s_q

    @property
    def tokens(self) -> int:
        """Records read, all rows' together. No two rows share one."""
        return self.rows * (self.topk - self.padded)

    @property
    def record_bytes(self) -> int:
        return self.tokens * RECORD_BYTES

    @property
    def bytes(self) -> int:
        """The least that has to be read and written: records, indices, q, out and lse."""
        row = self.topk * INDEX_BYTES + self.heads * (2 * HEAD_DIM + 2 * NOPE_DIM + LSE_BYTES)
        return self.record_bytes + self.rows * row

    @property
    def flop(self) -> int:
        """Of the two matrix products."""
        return 2 * self.heads * self.tokens * (HEAD_DIM + NOPE_DIM)

    @property
    def name(self) -> str:
        """The sizes in words."""
        padded = f", {self.padded} padded" if self.padded else ""
        return f"{self.heads} heads, b {self.batch}, s_q {self.s_q}, topk {self.topk}{padded}"


def decode_cases(*, quick: bool) -> list[DecodeCase]:
    """What `decode` measures on a GPU."""
    heads = (16, 64, 128) if quick else (8, 16, 32, 64, 128)
    batches = (1, 8, 128) if quick else (1, 2, 8, 32, 64, 128, 256)
    cases = [DecodeCase(h, batch, TOPK) for h in heads for batch in batches]
    if quick:
        return cases
    for topk in (64, 512, 4096):
        cases += [DecodeCase(h, batch, topk) for h in (16, 64) for batch in (8, 128)]
    cases += [DecodeCase(h, 128, TOPK, s_q=2) for h in (64, 128)]
    return [*cases, DecodeCase(64, 128, TOPK, padded=TOPK // 10)]


@dataclass(frozen=True)
class Buffers:
    """The tensors of one call, at addresses of their own."""

    kv_c: Tensor
    k_pe: Tensor
    cache: Tensor
    layer: int
    slots: Tensor  # int64 [tokens]
    block_table: Tensor  # int32 [requests or 1, blocks]
    workspace_starts: Tensor  # int32 [requests or 1]
    dst: Tensor


def buffer_sets(case: Case, device: torch.device, count: int) -> list[Buffers]:
    """`count` sets of buffers for one case, each with its own shuffle of the same tokens."""
    generator = torch.Generator(device).manual_seed(case.tokens)
    latent = torch.randn(case.tokens, HEAD_DIM, device=device, generator=generator)
    latent = latent.to(case.torch_dtype)
    return [_buffers(case, latent, generator) for _ in range(count)]


def _buffers(case: Case, latent: Tensor, generator: torch.Generator) -> Buffers:
    device = latent.device
    lengths = torch.tensor(_lengths(case.tokens, max(case.requests, 1)), device=device)
    starts = lengths.cumsum(0) - lengths
    blocks = (lengths + case.block_size - 1) // case.block_size  # of each request
    first_block = blocks.cumsum(0) - blocks
    num_blocks = int(blocks.sum())
    order = (
        torch.randperm(num_blocks, device=device, generator=generator)
        if case.layout == "shuffled"
        else torch.arange(num_blocks, device=device)
    )
    column = torch.arange(int(blocks.max()), device=device)
    place = (first_block[:, None] + column).clamp(max=num_blocks - 1)
    table = torch.where(column < blocks[:, None], order[place], -1)
    request = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)
    token = torch.arange(case.tokens, device=device) - starts[request]
    block = order[first_block[request] + token // case.block_size]

    spec = get_kv_cache_spec(kv_cache_dtype=case.format, block_size=case.block_size)
    shape = spec.shape(num_blocks)
    if case.layout == "layer view":
        pool = torch.zeros(num_blocks, POOL_LAYERS, *shape[1:], dtype=torch.uint8, device=device)
        cache, layer = pool.transpose(0, 1), 1
    else:
        cache, layer = torch.zeros(shape, dtype=torch.uint8, device=device), 0
    buffers = Buffers(
        kv_c=latent[:, :NOPE_DIM].contiguous(),
        k_pe=latent[:, NOPE_DIM:].contiguous(),
        cache=cache,
        layer=layer,
        slots=block * case.block_size + token % case.block_size,
        block_table=table.int(),
        workspace_starts=starts.int(),
        dst=torch.full_like(latent, torch.nan),  # filled, so that its pages are there
    )
    if case.op == "gather":
        concat_and_cache_mla(
            buffers.kv_c, buffers.k_pe, cache, buffers.slots, case.format, layer=layer
        )
    return buffers


def _lengths(tokens: int, requests: int) -> list[int]:
    """Tokens of each request, from half the mean to one and a half of it; they add up."""
    ends = [round(tokens * (r + 0.7 * math.sin(7 * r)) / requests) for r in range(1, requests)]
    return [end - start for start, end in zip([0, *ends], [*ends, tokens], strict=True)]
