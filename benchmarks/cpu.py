"""The CPU's kernels against memcpy and the compiled reference, on one thread and on all."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from benchmarks import subjects
from benchmarks.cases import Case, buffer_sets
from benchmarks.comparison import Comparison
from benchmarks.timing import time_calls

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.timing import Call

SIZES = (1, 64, 1024, 16384, 65536)
QUICK_SIZES = (64, 16384)
REFERENCE_SIZES = (16384,)
SETS = 4  # at 16,384 tokens 100 MB, more than a last-level cache


def run(*, quick: bool) -> Iterator[Comparison]:
    """Measures every case on one thread and on all; each comparison is there when measured."""
    all_threads = torch.get_num_threads()
    for threads in dict.fromkeys((1, all_threads)):
        torch.set_num_threads(threads)
        for tokens in QUICK_SIZES if quick else SIZES:
            for case in (
                Case("write", tokens, "shuffled"),
                Case("gather", tokens, "shuffled", requests=16),
                Case("gather", tokens, "shuffled"),
            ):
                yield measure(case, "cpu", with_reference=tokens in REFERENCE_SIZES)
    torch.set_num_threads(all_threads)


def measure(
    case: Case, benchmark: str, *, with_reference: bool, seconds: float = 0.7
) -> Comparison:
    """All subjects on one case, taking turns."""
    sets = buffer_sets(case, torch.device("cpu"), SETS)
    calls: dict[str, list[Call]] = {
        subjects.OURS: [subjects.ours(case, b) for b in sets],
        subjects.COPY: [_copy(case.bytes) for _ in sets],
        subjects.UNPACKED: [subjects.unpacked(case, b) for b in sets],
    }
    if with_reference:
        subjects.check(case, sets[0])
        reference = subjects.reference_of(case, compiled=True)
        calls[subjects.COMPILED] = [reference(b) for b in sets]
    timings = time_calls(calls, seconds=seconds)
    return Comparison(benchmark, case, "host", torch.get_num_threads(), timings)


def _copy(traffic: int) -> Call:
    dst, src = torch.zeros(2, traffic // 2, dtype=torch.uint8).random_()
    if torch.get_num_threads() > 1:
        return lambda: dst.copy_(src)
    # One thread of Tensor.copy_ is slower than memcpy, which knows stores past the caches.
    return lambda: ctypes.memmove(dst.data_ptr(), src.data_ptr(), traffic // 2)
