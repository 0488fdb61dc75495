"""The fused write against the write alone, the chain that it replaces, and a copy.

As in an engine, whose layers have a norm each and share the rest, the calls rotate over latents,
caches and weights, and read the same positions and the same rows of one table: small ones are in L2
when a call begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import rms_norm

import nvfp4_dsmla
from benchmarks import subjects
from benchmarks.cases import CHUNK, DECODE, PREFILL, Buffers, Case, buffer_sets
from benchmarks.ceiling import Ceiling
from benchmarks.comparison import Comparison
from benchmarks.cpu import SETS
from benchmarks.timing import count_launches, time_calls
from nvfp4_dsmla import reference_fused
from nvfp4_dsmla.layout import NOPE_DIM, ROPE_DIM

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from benchmarks.timing import Call, Timing

SIZES = (1, 8, DECODE, 512, 2048, CHUNK, PREFILL)
QUICK_SIZES = (1, DECODE, 512, PREFILL)
EPS = 1e-6
MAX_POSITIONS = 163_840


@dataclass(frozen=True)
class Inputs:
    """The tensors of one call."""

    write: Buffers
    norm_weight: Tensor
    positions: Tensor
    cos_sin_cache: Tensor


def run(device: torch.device, *, quick: bool) -> Iterator[Comparison]:
    """Measures every size; each comparison is there when it is measured.

    On a GPU by the device's clock. On a CPU by the host's, and up to a chunk of a prefill.
    """
    cases = [Case("fused write", tokens) for tokens in (QUICK_SIZES if quick else SIZES)]
    compiled = torch.compile(unfused, dynamic=True)
    if device.type == "cpu":
        for case in cases:
            if case.tokens <= CHUNK:
                yield measure_on_cpu(case, compiled)
        return
    ceiling = Ceiling(device)
    empty = ceiling.empty_time()
    for case in cases:
        yield measure(case, compiled, ceiling, empty, device)


def measure(
    case: Case,
    compiled: Callable[[Inputs], None],
    ceiling: Ceiling,
    empty: Timing,
    device: torch.device,
) -> Comparison:
    """All subjects on one case. Checks our op against the reference."""
    sets = input_sets(case, device, ceiling.sets_for(case.bytes))
    check(sets[0])
    calls_by_name = calls_of(sets, compiled)
    timings = {name: ceiling.time(calls, case.bytes) for name, calls in calls_by_name.items()}
    timings |= {subjects.COPY: ceiling.copy_time(case.bytes), subjects.EMPTY: empty}
    launches = {name: count_launches(calls[0]) for name, calls in calls_by_name.items()}
    return Comparison("fused", case, "device", None, timings, launches)


def measure_on_cpu(
    case: Case, compiled: Callable[[Inputs], None], *, seconds: float = 0.7
) -> Comparison:
    """The subjects on one case, taking turns."""
    sets = input_sets(case, torch.device("cpu"), SETS)
    check(sets[0])
    timings = time_calls(calls_of(sets, compiled), seconds=seconds)
    return Comparison("fused", case, "host", torch.get_num_threads(), timings)


def calls_of(sets: list[Inputs], compiled: Callable[[Inputs], None]) -> dict[str, list[Call]]:
    """Each subject's calls."""

    def each(function: Callable[[Inputs], None]) -> list[Call]:
        return [lambda i=i: function(i) for i in sets]  # type: ignore[misc]

    return {
        subjects.OURS: each(ours),
        subjects.WRITE_ALONE: each(write_alone),
        subjects.UNFUSED_COMPILED: each(compiled),
        subjects.UNFUSED_EAGER: each(unfused),
    }


def input_sets(case: Case, device: torch.device, count: int) -> list[Inputs]:
    """`count` sets of inputs of one case."""
    generator = torch.Generator(device).manual_seed(case.tokens)
    half = ROPE_DIM // 2
    frequencies = 10_000 ** (-torch.arange(half, device=device) / half)
    angles = torch.arange(MAX_POSITIONS, device=device)[:, None] * frequencies
    table = torch.cat([angles.cos(), angles.sin()], dim=1).to(case.torch_dtype)
    positions = torch.randperm(MAX_POSITIONS, device=device, generator=generator)[: case.tokens]
    weight = 1 + torch.randn(NOPE_DIM, device=device, generator=generator) / 4
    return [
        Inputs(buffers, weight.to(case.torch_dtype, copy=True), positions, table)
        for buffers in buffer_sets(case, device, count)
    ]


def ours(i: Inputs) -> None:
    """The op, through its public Python function."""
    nvfp4_dsmla.fused_rmsnorm_rope_concat_and_cache_nvfp4_ds_mla(
        kv_c=i.write.kv_c,
        k_pe=i.write.k_pe,
        norm_weight=i.norm_weight,
        eps=EPS,
        positions=i.positions,
        cos_sin_cache=i.cos_sin_cache,
        is_neox=True,
        kv_cache=i.write.cache,
        slot_mapping=i.write.slots,
        layer=i.write.layer,
    )


def write_alone(i: Inputs) -> None:
    """As if latent and key came normalised and rotated."""
    _write(i.write.kv_c, i.write.k_pe, i)


def unfused(i: Inputs) -> None:
    """The chain as a model has it, with the fused op's roundings."""
    normalised = rms_norm(i.write.kv_c, (NOPE_DIM,), i.norm_weight, EPS)
    cos, sin = i.cos_sin_cache[i.positions].float().chunk(2, dim=-1)
    a, b = i.write.k_pe.float().chunk(2, dim=-1)
    rotated = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    _write(normalised, rotated.to(i.write.k_pe.dtype), i)


def _write(kv_c: Tensor, k_pe: Tensor, i: Inputs) -> None:
    nvfp4_dsmla.concat_and_cache_nvfp4_ds_mla(
        kv_c=kv_c,
        k_pe=k_pe,
        kv_cache=i.write.cache,
        slot_mapping=i.write.slots,
        layer=i.write.layer,
    )


def check(i: Inputs) -> None:
    """Our op and the reference leave the same bits.

    Raises:
        AssertionError: they do not.
    """
    cache = i.write.cache
    cache.fill_(0xA5)
    want = cache.clone()
    ours(i)
    reference_fused.concat_and_cache(
        i.write.kv_c,
        i.write.k_pe,
        i.norm_weight,
        EPS,
        i.positions,
        i.cos_sin_cache,
        True,
        want,
        i.write.slots,
        i.write.layer,
    )
    if not torch.equal(cache, want):
        raise AssertionError("the op and the reference differ; its time means nothing")
