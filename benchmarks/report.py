"""Results as a file and as tables."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import nvfp4_dsmla
from benchmarks.comparison import (
    MATRIX_TFLOPS,
    Comparison,
    DecodeComparison,
    HostCost,
    StepTime,
)
from benchmarks.subjects import (
    BASELINES,
    COMPILED,
    COPY,
    EMPTY,
    OURS,
    PLAIN_CALL,
    SDPA,
    WRITE_ALONE,
)

if TYPE_CHECKING:
    from rich.table import Table

Result = Comparison | DecodeComparison | HostCost | StepTime


def machine_facts() -> dict[str, Any]:
    """Where and with what the numbers came about."""
    facts: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "commit": os.environ.get("NVFP4_DSMLA_COMMIT") or _output("git", "rev-parse", "HEAD"),
        "nvfp4_dsmla": nvfp4_dsmla.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cpu": _cpu_name(),
        "cpu_threads": torch.get_num_threads(),
        "system": platform.platform(),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        facts |= {
            "gpu": properties.name,
            "gpu_multiprocessors": properties.multi_processor_count,
            "gpu_l2_bytes": properties.L2_cache_size,
            "driver": (_output(*query) or "").partition("\n")[0] or None,
            "cuda": torch.version.cuda,
        }
    return facts


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=Path(__file__).parent, check=False
        )
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


@dataclass
class Report:
    """All that one run found out."""

    machine: dict[str, Any] = field(default_factory=machine_facts)
    comparisons: list[Comparison] = field(default_factory=list)
    decodes: list[DecodeComparison] = field(default_factory=list)
    host_costs: list[HostCost] = field(default_factory=list)
    steps: list[StepTime] = field(default_factory=list)

    def add(self, result: Result) -> None:
        if isinstance(result, Comparison):
            self.comparisons.append(result)
        elif isinstance(result, DecodeComparison):
            self.decodes.append(result)
        elif isinstance(result, StepTime):
            self.steps.append(result)
        else:
            self.host_costs.append(result)

    def save(self, path: Path) -> None:
        """Writes JSON: machine, comparisons, decodes, host_costs, steps."""
        data = {
            "machine": self.machine,
            "comparisons": [c.to_json() for c in self.comparisons],
            "decodes": [c.to_json() for c in self.decodes],
            "host_costs": [c.to_json() for c in self.host_costs],
            "steps": [c.to_json() for c in self.steps],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: Path) -> Report:
        """Reads what `save` wrote."""
        data = json.loads(path.read_text(encoding="utf-8"))
        return Report(
            machine=data["machine"],
            comparisons=[Comparison.from_json(c) for c in data["comparisons"]],
            decodes=[DecodeComparison.from_json(c) for c in data["decodes"]],
            host_costs=[HostCost.from_json(c) for c in data["host_costs"]],
            steps=[StepTime.from_json(c) for c in data["steps"]],
        )

    def tables(self) -> list[Table]:
        """For rich: one of each kind of comparison, and of decodes, steps and the host's costs."""
        groups: dict[tuple[str, int | None], list[Comparison]] = {}
        for c in self.comparisons:
            groups.setdefault((c.benchmark, c.threads), []).append(c)
        tables = [_comparison_table(group) for group in groups.values()]
        tables += [_decode_table(self.decodes)] if self.decodes else []
        tables += [_step_table(self.steps)] if self.steps else []
        return [*tables, _host_table(self.host_costs)] if self.host_costs else tables


def progress_line(result: Result) -> str:
    """One result in a line, for who waits for the table."""
    if isinstance(result, HostCost):
        what = f"{result.op}, {result.where}, {result.subject}, {result.tokens} tokens"
        return f"{what}: {result.timing.us:.2f} us"
    if isinstance(result, StepTime):
        what = f"{result.layers} layers, b {result.batch}, {result.cache}, {result.how}"
        return f"step, {what}: {result.timing.us:,.0f} us"
    if isinstance(result, DecodeComparison):
        return _decode_line(result)
    case = result.case
    where = f"{case.layout}, block_size {case.block_size}, {case.dtype}"
    threads = "" if result.threads is None else f", {result.threads} threads"
    share = result.percent_of_copy
    percent = "" if share is None else f" = {share:.0f}% of the copy"
    us = result.timings[OURS].us
    alone = result.timings.get(WRITE_ALONE)
    times = "" if alone is None else f" = {us / alone.us:.2f} times the {WRITE_ALONE}"
    return f"{case.name}, {case.tokens} tokens, {where}{threads}: {us:.2f} us{times}{percent}"


def _decode_line(c: DecodeComparison) -> str:
    faster = "".join(f", {x:.2f} x {name}" for name, x in c.times_faster_than.items())
    share = c.percent_of_floor
    percent = "" if share is None else f" = {share:.0f}% of the floor"
    speed = f"{c.tflops:.1f} TFLOPS, {c.record_tb_per_s:.2f} TB/s"
    return f"decode, {c.case.name}: {c.timings[OURS].us:.2f} us, {speed}{faster}{percent}"


def _comparison_table(comparisons: list[Comparison]) -> Table:
    from rich.table import Table

    first = comparisons[0]
    threads = "" if first.threads is None else f", {first.threads} threads"
    extra = [name for name in (EMPTY, PLAIN_CALL) if any(name in c.timings for c in comparisons)]
    baselines = [name for name in BASELINES if any(name in c.timings for c in comparisons)]
    table = Table(title=f"{first.benchmark}: {first.clock} time{threads}")
    for name in ("operation", "tokens", "layout", "dtype"):
        table.add_column(name, justify="right" if name == "tokens" else "left")
    numbers = ["us", "10% .. 90%", "GB/s", "copy, us", "% of copy"]
    numbers += [f"{name}, us" for name in extra] + [f"x {name}" for name in baselines]
    counted = [name for name in (OURS, *BASELINES) if any(name in c.launches for c in comparisons)]
    numbers += ["launches: " + " / ".join(counted)] if counted else []
    for name in numbers:
        table.add_column(name, justify="right")
    for c in comparisons:
        ours = c.timings[OURS]
        faster = c.times_faster_than
        table.add_row(
            c.case.name,
            f"{c.case.tokens:,}",
            f"{c.case.layout}, {c.case.block_size}",
            c.case.dtype,
            _number(ours.us),
            f"{_number(ours.low)} .. {_number(ours.high)}",
            f"{c.gb_per_s:,.0f}" if c.gb_per_s >= 10 else f"{c.gb_per_s:.2f}",
            _number(c.timings[COPY].us) if COPY in c.timings else "",
            "" if c.percent_of_copy is None else f"{c.percent_of_copy:.1f}",
            *(_number(c.timings[name].us) if name in c.timings else "" for name in extra),
            *(f"{faster[name]:.2f}" if name in faster else "" for name in baselines),
            *([" / ".join(str(c.launches.get(name, "")) for name in counted)] if counted else []),
        )
    return table


def _decode_table(decodes: list[DecodeComparison]) -> Table:
    from rich.table import Table

    table = Table(title=f"decode: {decodes[0].clock} time")
    numbers = ["heads", "b", "s_q", "topk", "padded", "us", "10% .. 90%", "TFLOPS"]
    numbers += ["records, TB/s", "copy, us", f"matrix at {MATRIX_TFLOPS} TFLOPS, us", "% of floor"]
    baselines = [n for n in (SDPA, COMPILED) if any(n in c.timings for c in decodes)]
    for name in [*numbers, *(f"x {name}" for name in baselines)]:
        table.add_column(name, justify="right")
    for c in decodes:
        case, ours, faster = c.case, c.timings[OURS], c.times_faster_than
        table.add_row(
            *(str(n) for n in (case.heads, case.batch, case.s_q, case.topk, case.padded)),
            _number(ours.us),
            f"{_number(ours.low)} .. {_number(ours.high)}",
            f"{c.tflops:.1f}",
            f"{c.record_tb_per_s:.3f}",
            _number(c.timings[COPY].us) if COPY in c.timings else "",
            "" if c.percent_of_floor is None else _number(c.matrix_us),
            "" if c.percent_of_floor is None else f"{c.percent_of_floor:.1f}",
            *(f"{faster[name]:.2f}" if name in faster else "" for name in baselines),
        )
    return table


def _step_table(steps: list[StepTime]) -> Table:
    from rich.table import Table

    table = Table(title=f"step on {steps[0].device}: from the call to its end")
    for name in ("layers", "b", "longest context", "cache", "how", "us", "10% .. 90%", "launches"):
        table.add_column(name, justify="left" if name in ("cache", "how") else "right")
    for c in steps:
        spread = f"{_number(c.timing.low)} .. {_number(c.timing.high)}"
        sizes = (f"{n:,}" for n in (c.layers, c.batch, c.context))
        launches = "" if c.launches is None else f"{c.launches:,}"
        table.add_row(*sizes, c.cache, c.how, _number(c.timing.us), spread, launches)
    return table


def _host_table(costs: list[HostCost]) -> Table:
    from rich.table import Table

    table = Table(title="host: microseconds of a call")
    for name in ("device", "operation", "where", "tokens", "subject"):
        table.add_column(name, justify="right" if name == "tokens" else "left")
    for name in ("us", "10% .. 90%"):
        table.add_column(name, justify="right")
    for c in costs:
        spread = f"{c.timing.low:.2f} .. {c.timing.high:.2f}"
        row = (c.device, c.op, c.where, str(c.tokens), c.subject, f"{c.timing.us:.2f}", spread)
        table.add_row(*row)
    return table


def _number(us: float) -> str:
    return f"{us:.2f}" if us < 100 else f"{us:,.0f}"
