"""sparse_mla_decode over heads, batches and topk, against the gather and PyTorch's attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention

import nvfp4_dsmla
from benchmarks.cases import DecodeCase, decode_cases
from benchmarks.ceiling import Ceiling
from benchmarks.comparison import DecodeComparison
from benchmarks.subjects import COMPILED, COPY, EMPTY, OURS, SDPA
from benchmarks.timing import time_calls
from nvfp4_dsmla import reference
from nvfp4_dsmla.layout import HEAD_DIM, NOPE_DIM, RECORD_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from benchmarks.timing import Call, Timing

BLOCK_SIZE = 64
SCALE = HEAD_DIM**-0.5
CPU_CASES = (DecodeCase(16, 1, 64), DecodeCase(16, 2, 64, s_q=2), DecodeCase(16, 2, 64, padded=6))
# Each compiles anew, which takes as long as all else together.
COMPILED_CASES = (DecodeCase(16, 128, 2048), DecodeCase(64, 8, 2048), DecodeCase(64, 128, 2048))


@dataclass(frozen=True)
class Buffers:
    """The inputs of one call. Every row has records of its own, and each is selected once."""

    q: Tensor
    cache: Tensor
    indices: Tensor


def run(device: torch.device, *, quick: bool) -> Iterator[DecodeComparison]:
    """Measures every case; each comparison is there when it is measured.

    On a GPU by the device's clock. On a CPU by the host's, a few small ones.
    NVFP4_DSMLA_DECODE=mma in the environment takes that kernel for all.
    """
    if device.type == "cpu":
        for case in CPU_CASES:
            yield measure_on_cpu(case, seconds=0.3)
        return
    ceiling = Ceiling(device)
    empty = ceiling.empty_time()
    for case in decode_cases(quick=quick):
        compiled = case in COMPILED_CASES and not quick
        yield measure(case, ceiling, empty, device, compiled=compiled)


def measure(
    case: DecodeCase,
    ceiling: Ceiling,
    empty: Timing,
    device: torch.device,
    *,
    compiled: bool,
) -> DecodeComparison:
    """All subjects on one case. Checks our op against the reference: sizes choose its kernel."""
    sets = buffer_sets(case, device, ceiling.sets_for(case.bytes))
    check(case, sets[0])
    timings = {
        OURS: ceiling.time([ours(b) for b in sets], case.bytes),
        COPY: ceiling.copy_time(case.bytes),
        EMPTY: empty,
    }
    if not case.padded:  # which would cost it a mask
        timings[SDPA] = ceiling.time([gather_and_sdpa(b) for b in sets], case.bytes)
    if compiled:
        of = compiled_reference()
        timings[COMPILED] = ceiling.time([of(b) for b in sets], case.bytes)
    del sets
    torch.cuda.empty_cache()
    return DecodeComparison(case, "device", None, timings)


def measure_on_cpu(case: DecodeCase, *, seconds: float) -> DecodeComparison:
    """Ours and, where nothing is padded, the gather with PyTorch's attention, taking turns."""
    sets = buffer_sets(case, torch.device("cpu"), 2)
    check(case, sets[0])
    calls = {OURS: [ours(b) for b in sets]}
    if not case.padded:
        calls[SDPA] = [gather_and_sdpa(b) for b in sets]
    timings = time_calls(calls, seconds=seconds)
    return DecodeComparison(case, "host", torch.get_num_threads(), timings)


def buffer_sets(case: DecodeCase, device: torch.device, count: int) -> list[Buffers]:
    """`count` sets of buffers, each with its own shuffle of the same tokens."""
    generator = torch.Generator(device).manual_seed(case.tokens)
    slots = case.rows * case.topk
    latent = torch.randn(slots, HEAD_DIM, device=device, generator=generator).bfloat16()
    kv_c, k_pe = (part.contiguous() for part in latent.split([NOPE_DIM, HEAD_DIM - NOPE_DIM], -1))
    del latent
    shape = (-(-slots // BLOCK_SIZE), BLOCK_SIZE, RECORD_BYTES)
    sets = []
    for _ in range(count):
        cache = torch.zeros(shape, dtype=torch.uint8, device=device)
        order = torch.randperm(slots, device=device, generator=generator)
        nvfp4_dsmla.concat_and_cache_nvfp4_ds_mla(
            kv_c=kv_c, k_pe=k_pe, kv_cache=cache, slot_mapping=order
        )
        indices = order.int().view(case.batch, case.s_q, case.topk)
        indices[..., case.topk - case.padded :] = -1
        q_shape = (case.batch, case.s_q, case.heads, HEAD_DIM)
        q = torch.randn(q_shape, device=device, generator=generator).bfloat16()
        sets.append(Buffers(q, cache, indices))
    return sets


def ours(b: Buffers) -> Call:
    """The op, through its public Python function."""
    return lambda: nvfp4_dsmla.sparse_mla_decode(
        q=b.q, kv_cache=b.cache, indices=b.indices, softmax_scale=SCALE
    )


def gather_and_sdpa(b: Buffers) -> Call:
    """The records unpacked, then PyTorch's attention, to which a row's heads are its queries."""
    q = b.q.flatten(0, 1)[:, None]

    def call() -> Tensor:
        latent = nvfp4_dsmla.gather_and_upconvert_nvfp4_ds_mla(
            kv_cache=b.cache, slots=b.indices.flatten(), dtype=torch.bfloat16
        ).view(len(q), 1, -1, HEAD_DIM)
        out = scaled_dot_product_attention(q, latent, latent[..., :NOPE_DIM], scale=SCALE)
        return out.view(*b.q.shape[:-1], NOPE_DIM)

    return call


def compiled_reference() -> Callable[[Buffers], Call]:
    """The specification in PyTorch, compiled for one case's sizes alone."""
    torch.compiler.reset()
    attention: Callable[..., Any] = torch.compile(reference.attention, dynamic=False)
    return lambda b: lambda: attention(b.q, b.cache, b.indices, SCALE)


def check(case: DecodeCase, b: Buffers) -> None:
    """Our op and the reference agree, to the rounding of weights and out to bfloat16.

    Raises:
        AssertionError: they do not.
    """
    out, lse = nvfp4_dsmla.sparse_mla_decode(
        q=b.q, kv_cache=b.cache, indices=b.indices, softmax_scale=SCALE
    )
    want, want_lse = reference.attention(b.q.float(), b.cache, b.indices, SCALE)
    # The bounds of tests/test_decode.py, and one on the whole: out is small where topk is large.
    error = float((out.float() - want).norm() / want.norm())
    right = (
        torch.allclose(out.float(), want, rtol=2**-7, atol=2**-9)
        and torch.allclose(lse, want_lse, rtol=2**-12, atol=2**-12)
        and error <= 2**-8
    )
    if not right:
        raise AssertionError(
            f"{case}: the op and the reference differ, by {error:g} of the norm of out; its time "
            "means nothing"
        )
