"""Measures nvfp4_dsmla. Run from a checkout: `python -m benchmarks all --out results`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Protocol

import torch
import typer
from rich.console import Console

from benchmarks import cache as cache_benchmark
from benchmarks import cpu as cpu_benchmark
from benchmarks import decode as decode_benchmark
from benchmarks import fused as fused_benchmark
from benchmarks import host as host_benchmark
from benchmarks import package as package_benchmark
from benchmarks import step as step_benchmark
from benchmarks.plot import draw
from benchmarks.report import Report, Result, progress_line

Results = Iterator[Result]


class Run(Protocol):
    """Measures on a device."""

    def __call__(self, device: torch.device, /, *, quick: bool) -> Results: ...


Quick = Annotated[bool, typer.Option("--quick", help="Fewer sizes, nothing slow to compile.")]
Device = Annotated[str, typer.Option(help="cpu or cuda; by default a GPU if there is one.")]
Json = Annotated[Path | None, typer.Option(help="Write all numbers to this file.")]
Plot = Annotated[Path | None, typer.Option(help="Draw a PNG into this file.")]
Out = Annotated[Path | None, typer.Option(help="Both, as benchmarks.json and .png in this folder.")]

app = typer.Typer(
    help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)


def timing(*runs: Run) -> Callable[..., None]:
    """A command that measures these, one after another."""

    def command(
        device: Device = "",
        quick: Quick = False,
        json: Json = None,
        plot: Plot = None,
        out: Out = None,
    ) -> None:
        on = _device(device)
        _measure([partial(run, on, quick=quick) for run in runs], json, plot, out)

    return command


TIMINGS: dict[str, tuple[Run, str]] = {
    "cache": (
        cache_benchmark.run,
        "Time the write and the gathers over sizes, layouts and dtypes.",
    ),
    "fused": (
        fused_benchmark.run,
        "Time the fused write over sizes, against the write alone and the unfused chain.",
    ),
    "decode": (decode_benchmark.run, "Time sparse_mla_decode over heads, batch sizes and topk."),
    "step": (
        step_benchmark.run,
        "Time a model's whole decode step: eager, compiled and as CUDA graphs.",
    ),
    "host": (
        host_benchmark.run,
        "Time what a call costs the host, from Python and in a compiled graph.",
    ),
}


def package(device: Device = "", json: Json = None) -> None:
    """Time what a call costs in a package of AOTInductor. Not among all."""
    on = _device(device)
    _measure([lambda: package_benchmark.run(on)], json, None, None)


def cpu(quick: Quick = False, json: Json = None, plot: Plot = None, out: Out = None) -> None:
    """Time the CPU's kernels on one thread and on all."""
    _measure([partial(cpu_benchmark.run, quick=quick)], json, plot, out)


def show(report: Path, plot: Plot = None) -> None:
    """Print the tables of a JSON file again, and draw its plot."""
    loaded = Report.load(report)
    _print_tables(loaded)
    if plot is not None:
        draw(loaded, plot)


def _device(name: str) -> torch.device:
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def _measure(
    benchmarks: list[Callable[[], Results]], json: Path | None, plot: Path | None, out: Path | None
) -> None:
    progress = Console(stderr=True, highlight=False, soft_wrap=True)
    report = Report()
    json = json or (out / "benchmarks.json" if out else None)
    plot = plot or (out / "benchmarks.png" if out else None)
    for run in benchmarks:
        try:
            for result in run():
                progress.print(progress_line(result))
                report.add(result)
        finally:  # what was measured stays, whatever comes after
            if json is not None:
                report.save(json)
    _print_tables(report)
    if plot is not None:
        draw(report, plot)


def _print_tables(report: Report) -> None:
    console = Console(width=None if Console().is_terminal else 220)
    console.print_json(data=report.machine)
    for table in report.tables():
        console.print(table)


for name, (run, what) in TIMINGS.items():
    app.command(name, help=what)(timing(run))
for command in (package, cpu, show):
    app.command()(command)
app.command("all", help="Do all of them but `package`.")(
    timing(
        *(run for run, _ in TIMINGS.values()), lambda _, *, quick: cpu_benchmark.run(quick=quick)
    )
)

if __name__ == "__main__":
    app(prog_name="python -m benchmarks")
