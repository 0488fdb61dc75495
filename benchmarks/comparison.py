"""The outcome of a measurement: the subjects' times on one case, and what follows from them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.cases import Case, DecodeCase
from benchmarks.subjects import COMPILED, COPY, OURS, PLAIN_CALL, SDPA
from benchmarks.timing import Timing

# What else than our op itself a comparison may hold that is no alternative to it.
NO_BASELINES = (OURS, PLAIN_CALL)

# The floors of a decode: what an H200's matrix units were seen to do in bfloat16, and what its
# memory does, for where no copy was measured.
MATRIX_TFLOPS = 790
MEMORY_TB_PER_S = 4


@dataclass(frozen=True)
class Comparison:
    """Times of one case.

    clock: "device", cold L2 and graph replay, or "host", plain calls.
    threads: of the CPU; None on a GPU.
    launches: kernels and copies of a call, of the subjects of which they were counted.
    """

    benchmark: str
    case: Case
    clock: str
    threads: int | None
    timings: dict[str, Timing]
    launches: dict[str, int] = field(default_factory=dict)

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
            data["benchmark"],
            Case(**data["case"]),
            data["clock"],
            data["threads"],
            timings,
            data.get("launches", {}),
        )


@dataclass(frozen=True)
class DecodeComparison:
    """Times of one decode. The clock and the threads as in Comparison."""

    case: DecodeCase
    clock: str
    threads: int | None
    timings: dict[str, Timing]

    @property
    def tflops(self) -> float:
        """Ours: operations of the two matrix products, 10^12 a second."""
        return self.case.flop / self.timings[OURS].us / 1e6

    @property
    def record_tb_per_s(self) -> float:
        """Ours: bytes of the records alone, 10^12 a second."""
        return self.case.record_bytes / self.timings[OURS].us / 1e6

    @property
    def matrix_us(self) -> float:
        """The matrix products at MATRIX_TFLOPS."""
        return self.case.flop / MATRIX_TFLOPS / 1e6

    @property
    def bytes_us(self) -> float:
        """A copy of as many bytes in the same run, or else all bytes at MEMORY_TB_PER_S."""
        if COPY in self.timings:
            return self.timings[COPY].us
        return self.case.bytes / MEMORY_TB_PER_S / 1e6

    @property
    def percent_of_floor(self) -> float | None:
        """The tighter floor as a share of ours. None on a CPU, whose floors these are not."""
        if self.clock != "device":
            return None
        return 100 * max(self.matrix_us, self.bytes_us) / self.timings[OURS].us

    @property
    def times_faster_than(self) -> dict[str, float]:
        """How many times ours is as fast as each alternative to it."""
        ours = self.timings[OURS].us
        return {n: self.timings[n].us / ours for n in (SDPA, COMPILED) if n in self.timings}

    def to_json(self) -> dict[str, Any]:
        """As plain data, what follows from the times included."""
        return {
            **asdict(self),
            "bytes": self.case.bytes,
            "tflops": self.tflops,
            "record_tb_per_s": self.record_tb_per_s,
            "matrix_us": self.matrix_us,
            "matrix_us_is_at_tflops": MATRIX_TFLOPS,
            "percent_of_floor": self.percent_of_floor,
            "times_faster_than": self.times_faster_than,
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> DecodeComparison:
        """The inverse; what follows from the times is worked out again."""
        timings = {name: Timing(**timing) for name, timing in data["timings"].items()}
        case = DecodeCase(**data["case"])
        return DecodeComparison(case, data["clock"], data["threads"], timings)


@dataclass(frozen=True)
class HostCost:
    """What a call costs the host before any work is done.

    where: "eager", a call from Python; "compiled", one op more in a torch.compile'd function;
        "packaged", one more in a package of AOTInductor.
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


@dataclass(frozen=True)
class StepTime:
    """What a decode step of a whole model takes, from the call to its end, by the host's clock.

    cache: its format. how: eager, compiled, or as which CUDA graph. context: of the longest
    request, in tokens. launches: kernels and copies on a GPU.
    """

    cache: str
    how: str
    layers: int
    batch: int
    context: int
    device: str
    timing: Timing
    launches: int | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> StepTime:
        return StepTime(**{**data, "timing": Timing(**data["timing"])})
