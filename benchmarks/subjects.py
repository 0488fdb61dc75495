"""What takes part in a measurement: our ops, and what could be in their place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import nvfp4_dsmla
from nvfp4_dsmla import reference
from nvfp4_dsmla.layout import HEAD_DIM
from nvfp4_dsmla.reference_formats import CODECS

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from benchmarks.cases import Buffers, Case
    from benchmarks.timing import Call

OURS = "nvfp4_dsmla"
PLAIN_CALL = "nvfp4_dsmla, from call to end"  # with Python, launch and waiting, one at a time
COPY = "copy of the same bytes"
EMPTY = "empty kernel"
COMPILED = "reference, compiled"
EAGER = "reference, eager"
UNPACKED = "unpacked cache"  # index_copy_ and index_select of whole elements, by slot
SDPA = "gather + SDPA"
WRITE_ALONE = "write alone"
UNFUSED_COMPILED = "unfused, compiled"
UNFUSED_EAGER = "unfused, eager"

BASELINES = (COMPILED, EAGER, UNPACKED, WRITE_ALONE, UNFUSED_COMPILED, UNFUSED_EAGER)


_OPS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]] = {
    "nvfp4_ds_mla": (
        nvfp4_dsmla.concat_and_cache_nvfp4_ds_mla,
        nvfp4_dsmla.cp_gather_and_upconvert_nvfp4_kv_cache,
        nvfp4_dsmla.gather_and_upconvert_nvfp4_ds_mla,
    ),
    "fp8_ds_mla": (
        nvfp4_dsmla.concat_and_cache_fp8_ds_mla,
        nvfp4_dsmla.cp_gather_and_upconvert_fp8_kv_cache,
        nvfp4_dsmla.gather_and_upconvert_fp8_ds_mla,
    ),
}


def ours(case: Case, b: Buffers) -> Call:
    """The op, through its public Python function."""
    write, by_request, by_slot = _OPS[case.format]
    if case.op == "write":
        return lambda: write(
            kv_c=b.kv_c, k_pe=b.k_pe, kv_cache=b.cache, slot_mapping=b.slots, layer=b.layer
        )
    if case.requests:
        return lambda: by_request(
            src_cache=b.cache,
            dst=b.dst,
            block_table=b.block_table,
            workspace_starts=b.workspace_starts,
            batch_size=case.requests,
            layer=b.layer,
        )
    return lambda: by_slot(kv_cache=b.cache, slots=b.slots, dtype=case.torch_dtype, layer=b.layer)


def reference_of(case: Case, *, compiled: bool) -> Callable[[Buffers], Call]:
    """The specification in PyTorch, eager or compiled for this case's sizes alone."""
    if compiled:
        torch.compiler.reset()  # sizes compiled before would cost this one checks of their guards

    def function(eager: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(eager, dynamic=False) if compiled else eager

    codec = CODECS[case.format]
    write = function(reference.concat_and_cache)
    by_request = function(reference.cp_gather)
    by_slot = function(reference.gather)

    def of(b: Buffers) -> Call:
        if case.op == "write":
            return lambda: write(b.kv_c, b.k_pe, b.cache, b.slots, b.layer, codec)
        if case.requests:
            table, starts, requests = b.block_table, b.workspace_starts, case.requests
            return lambda: by_request(b.cache, b.dst, table, starts, requests, None, b.layer, codec)
        return lambda: by_slot(b.cache, b.slots, case.torch_dtype, b.layer, codec)

    return of


def unpacked(case: Case, b: Buffers) -> Call:
    """A cache of whole elements by PyTorch's own indexing, with slots and vectors laid ready."""
    latent = torch.cat([b.kv_c, b.k_pe], dim=-1)
    capacity = b.cache.shape[-3] * b.cache.shape[-2]
    cache = torch.zeros(capacity, HEAD_DIM, dtype=latent.dtype, device=latent.device)
    if case.op == "write":
        return lambda: cache.index_copy_(0, b.slots, latent)
    cache.index_copy_(0, b.slots, latent)
    return lambda: torch.index_select(cache, 0, b.slots, out=b.dst)


def check(case: Case, b: Buffers) -> None:
    """Our op and the reference leave the same bits.

    Raises:
        AssertionError: they do not.
    """
    got = _result(ours(case, b), case, b)
    want = _result(reference_of(case, compiled=False)(b), case, b)
    if not torch.equal(got, want):
        raise AssertionError(f"{case}: the op and the reference differ; its time means nothing")


def _result(call: Call, case: Case, b: Buffers) -> Tensor:
    """The bytes that a call leaves; what it is to write is overwritten before."""
    written = b.cache if case.op == "write" else b.dst
    written.view(torch.uint8).fill_(0xA5)
    out = call()
    out = out if isinstance(out, torch.Tensor) else written
    return out.view(torch.uint8).clone()
