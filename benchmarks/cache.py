"""The write and the gathers over sizes, layouts and dtypes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from benchmarks import cpu, subjects
from benchmarks.cases import CHUNK, DECODE, PREFILL, Case, buffer_sets, device_cases
from benchmarks.ceiling import Ceiling
from benchmarks.comparison import Comparison
from benchmarks.timing import time_calls

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.timing import Timing


def run(device: torch.device, *, quick: bool) -> Iterator[Comparison]:
    """Measures every case; each comparison is there when it is measured.

    On a GPU by the device's clock. On a CPU by the host's, and up to a chunk of a prefill.
    """
    cases = device_cases(quick=quick)
    if device.type == "cpu":
        for case in cases:
            if case.tokens <= CHUNK:
                yield cpu.measure(case, "cache", with_reference=False, seconds=0.3)
        return
    ceiling = Ceiling(device)
    empty = ceiling.empty_time()
    for case in cases:
        yield measure(case, ceiling, empty, device, with_reference=has_reference(case, quick=quick))


def has_reference(case: Case, *, quick: bool) -> bool:
    """Where the slow baselines run: three sizes of the plain case, since each compiles anew."""
    plain = case in (Case("write", case.tokens), Case("gather", case.tokens, requests=16))
    return plain and case.tokens in ((CHUNK,) if quick else (DECODE, CHUNK, PREFILL))


def measure(
    case: Case, ceiling: Ceiling, empty: Timing, device: torch.device, *, with_reference: bool
) -> Comparison:
    """All subjects on one case. Checks our op against the reference where that takes part."""
    sets = buffer_sets(case, device, ceiling.sets_for(case.bytes))
    ours = [subjects.ours(case, b) for b in sets]
    timings = {
        subjects.OURS: ceiling.time(ours, case.bytes),
        subjects.COPY: ceiling.copy_time(case.bytes),
        subjects.EMPTY: empty,
    }
    plain = {subjects.PLAIN_CALL: ours}
    timings |= time_calls(plain, finish=torch.cuda.synchronize, seconds=0.05)
    unpacked = [subjects.unpacked(case, b) for b in sets]
    timings[subjects.UNPACKED] = ceiling.time(unpacked, case.bytes)
    if with_reference:
        subjects.check(case, sets[0])
        for name, compiled in ((subjects.COMPILED, True), (subjects.EAGER, False)):
            reference = subjects.reference_of(case, compiled=compiled)
            timings[name] = ceiling.time([reference(b) for b in sets], case.bytes)
        torch.cuda.empty_cache()
    return Comparison("cache", case, "device", None, timings)
