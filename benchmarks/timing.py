"""How a call is timed: on the device by graph replay, on the host by its clock. Its launches."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Call = Callable[[], object]

WARM_SECONDS = 0.05  # a GPU that idled, while something was compiled say, has slowed its clock
REPLAYS = 25
LEAST_TURNS = 7
MOST_TURNS = 500


@dataclass(frozen=True)
class Timing:
    """Microseconds a call: the median, and what a tenth of the samples lie below and above."""

    us: float
    low: float
    high: float
    samples: int

    @staticmethod
    def of(samples: Sequence[float]) -> Timing:
        """Of at least one sample, in microseconds."""
        ordered = sorted(samples)
        last = len(ordered) - 1
        median = (ordered[last // 2] + ordered[last - last // 2]) / 2
        return Timing(
            us=median,
            low=ordered[round(last * 0.1)],
            high=ordered[round(last * 0.9)],
            samples=len(ordered),
        )


def time_graph(calls: Sequence[Call], *, before: Call | None = None) -> Timing:
    """Device time of a call: all calls captured in one CUDA graph, which is replayed.

    Args:
        calls: the same work on buffers of their own, which is what keeps L2 cold: together they
            must span several times its size, or `before` must push them out of it.
        before: enqueued before each replay and not timed. It also keeps the device busy while the
            host launches the graph, as the replay before does where there is none.
    """
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # Held, so that a call which allocates its output doesn't get the memory of the last one's.
        held = [call() for call in calls]
    warm = time.perf_counter() + WARM_SECONDS
    while time.perf_counter() < warm:
        graph.replay()
        torch.cuda.synchronize()
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(1 + REPLAYS)
    ]
    for start, end in events:
        if before is not None:
            before()
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    del held
    # Not the first, before which the device had nothing to do while the host launched.
    milliseconds = (start.elapsed_time(end) for start, end in events[1:])
    return Timing.of([ms * 1e3 / len(calls) for ms in milliseconds])


def time_calls(
    subjects: Mapping[str, Sequence[Call]], *, finish: Call | None = None, seconds: float = 0.5
) -> dict[str, Timing]:
    """Time of plain calls by the host's clock, each until its work is done.

    The subjects take turns, so that what else the machine does falls on all of them alike.

    Args:
        subjects: the calls of each, on buffers of their own, used one after the other.
        finish: waits for the device; None where a call returns when its work is done.
        seconds: how long to go on after the least number of turns.
    """
    samples: dict[str, list[float]] = {name: [] for name in subjects}
    for calls in subjects.values():
        for call in (calls[0], calls[-1]):
            call()
    end = time.perf_counter() + seconds
    for turn in range(MOST_TURNS):
        if turn >= LEAST_TURNS and time.perf_counter() > end:
            break
        for name, calls in subjects.items():
            call = calls[turn % len(calls)]
            if finish is not None:
                finish()
            start = time.perf_counter()
            call()
            if finish is not None:
                finish()
            samples[name].append((time.perf_counter() - start) * 1e6)
    return {name: Timing.of(values) for name, values in samples.items()}


def time_loops(
    subjects: Mapping[str, Call], *, repeats: int = 15, seconds: float = 0.02
) -> dict[str, Timing]:
    """Host time of short calls, in loops of many that do not wait for the device.

    The subjects take turns, as in `time_calls`.

    Args:
        subjects: a call of each.
        repeats: loops of each.
        seconds: how long a loop takes at the least.
    """
    counts: dict[str, int] = {}
    for name, call in subjects.items():
        counts[name] = 1
        while _loop(call, counts[name]) < seconds:
            counts[name] *= 2
    samples: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(repeats):
        for name, call in subjects.items():
            samples[name].append(_loop(call, counts[name]) * 1e6 / counts[name])
    return {name: Timing.of(values) for name, values in samples.items()}


def count_launches(call: Call) -> int:
    """Kernels and copies of a call, as CUDA's profiler sees them; 0 where it sees nothing."""
    # Before 2.13 it warns, even of a first cycle, that it keeps the events of the last one alone.
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True
    ) as profile:
        call()
        torch.cuda.synchronize()
    on_device = [event for event in profile.events() if str(event.device_type).endswith("CUDA")]
    # Inductor's names for its regions are shown on the device too.
    return sum(not getattr(event, "is_user_annotation", False) for event in on_device)


def _loop(call: Call, count: int) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    return time.perf_counter() - start
