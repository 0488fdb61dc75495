"""The outcome of a measurement: the subjects' times on one case, and what follows from them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.cases import Case
from benchmarks.subjects import COPY, OURS, PLAIN_CALL
from benchmarks.timing import Timing

# What else than our op itself a comparison may hold that is no alternative to it.
NO_BASELINES = (OURS, PLAIN_CALL)


@dataclass(frozen=True)
class Comparison:
    """Times of one case.

    clock: "device", cold L2 and graph replay, or "host", plain calls.
    threads: of the CPU; None on a GPU.
    """

    benchmark: str
    case: Case
    clock: str
    threads: int | None
    timings: dict[str, Timing]

    @property
    def gb_per_s(self) -> float:
        """Ours: the least bytes that the case has to move, over the time it took. 10^9 a second."""
        return self.case.bytes / self.timings[OURS].us / 1e3

    @property
    def percent_of_copy(self) -> float | None:
        """Ours: speed as a share of that of a copy of the same bytes in the same run."""
        if COPY not in self.timings:
            return None
        return 100 * self.timings[COPY].us / self.timings[OURS].us

    @property
    def times_faster_than(self) -> dict[str, float]:
        """How many times ours is as fast as each baseline."""
        ours = self.timings[OURS].us
        return {
            name: timing.us / ours
            for name, timing in self.timings.items()
            if name not in NO_BASELINES
        }

    def to_json(self) -> dict[str, Any]:
        """As plain data, what follows from the times included."""
        return {
            **asdict(self),
            "bytes": self.case.bytes,
            "gb_per_s": self.gb_per_s,
            "percent_of_copy": self.percent_of_copy,
            "times_faster_than": self.times_faster_than,
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> Comparison:
        """The inverse; what follows from the times is worked out again."""
        timings = {name: Timing(**timing) for name, timing in data["timings"].items()}
        return Comparison(
            data["benchmark"], Case(**data["case"]), data["clock"], data["threads"], timings
        )


@dataclass(frozen=True)
class HostCost:
    """What a call costs the host before any work is done.

    where: "eager", a call from Python, or "compiled", one op more in a torch.compile'd function.
    tokens: 0 checks and dispatches and does nothing; 1 does the least work, on a GPU a launch.
    """

    op: str
    subject: str
    where: str
    tokens: int
    device: str
    timing: Timing

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> HostCost:
        return HostCost(**{**data, "timing": Timing(**data["timing"])})
