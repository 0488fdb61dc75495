"""Results as a picture."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from benchmarks.subjects import BASELINES, COMPILED, COPY, EMPTY, OURS, SDPA

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.figure import SubFigure

    from benchmarks.comparison import Comparison, DecodeComparison, HostCost, StepTime
    from benchmarks.report import Report
    from benchmarks.timing import Timing

PANEL_INCHES = 4.5
SERIES = (OURS, COPY, *BASELINES, EMPTY)

Row = dict[str, list["Comparison"]]  # a panel's title -> its comparisons, by tokens


def draw(report: Report, path: Path) -> None:
    """Draws a PNG: times over tokens and the share of the copy's speed, decodes, steps, host costs.

    Raises:
        ValueError: the report holds nothing to draw.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = rows_of(report.comparisons)
    decodes = panels_of(report.decodes)
    bars = [bars_of_steps(report.steps)] if report.steps else []
    bars += [bars_of_host_costs(report.host_costs)] if report.host_costs else []
    heights = [1.8] * (len(rows) + bool(decodes)) + [1.0] * len(bars)
    if not heights:
        raise ValueError("nothing to draw: the report holds no comparison of a plain case")
    size = (3 * PANEL_INCHES, PANEL_INCHES * sum(heights))
    figure = plt.figure(figsize=size, layout="constrained")
    machine = report.machine
    where = machine.get("gpu") or machine["cpu"]
    figure.suptitle(f"nvfp4_dsmla on {where}, torch {machine['torch']}, {machine['date']}")
    parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    for part, (title, row) in zip(parts, rows.items(), strict=False):
        part.suptitle(title)
        _draw_comparisons(part, row)
    if decodes:
        _draw_decodes(parts[len(rows)], decodes)
    for part, (title, timings) in zip(parts[len(parts) - len(bars) :], bars, strict=True):
        _draw_bars(part, title, timings)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def rows_of(comparisons: list[Comparison]) -> dict[str, Row]:
    """A row's title -> its panels. Sweeps over layouts and dtypes are left to the tables."""
    rows: dict[str, Row] = {}
    for c in comparisons:
        case = c.case
        layout = "shuffled" if c.benchmark == "cpu" else "contiguous"
        plain = (case.layout, case.block_size, case.dtype) == (layout, 64, "bfloat16")
        if plain and case.requests in (0, 16):
            threads = "" if c.threads is None else f", {c.threads} threads"
            row = rows.setdefault(f"{c.benchmark}: {c.clock} time{threads}", {})
            row.setdefault(case.name, []).append(c)
    for row in rows.values():
        for group in row.values():
            group.sort(key=lambda c: c.case.tokens)
    return rows


def panels_of(decodes: list[DecodeComparison]) -> dict[int, list[DecodeComparison]]:
    """Heads -> decodes over batch sizes. Those of other topk or s_q are left to the table."""
    panels: dict[int, list[DecodeComparison]] = {}
    for c in decodes:
        if c.case.padded == 0 and c.case.s_q == 1 and c.case.topk == decodes[0].case.topk:
            panels.setdefault(c.case.heads, []).append(c)
    for group in panels.values():
        group.sort(key=lambda c: c.case.batch)
    return panels


def _draw_decodes(part: SubFigure, panels: dict[int, list[DecodeComparison]]) -> None:
    first = next(iter(panels.values()))[0]
    part.suptitle(f"decode: {first.clock} time, topk {first.case.topk}")
    axes = part.subplots(2, len(panels), squeeze=False, sharex="col")
    for (times, shares), (heads, group) in zip(axes.T, panels.items(), strict=True):
        for i, name in enumerate((OURS, COPY, SDPA, COMPILED)):
            points = [(c.case.batch, c.timings[name].us) for c in group if name in c.timings]
            if points:
                style = {"marker": ".", "color": f"C{i}", "label": name}
                times.plot(*zip(*points, strict=True), **style)
        times.set(title=f"{heads} heads", xscale="log", yscale="log", ylabel="microseconds a call")
        times.legend(fontsize="small", frameon=False)
        percents = [(c.case.batch, c.percent_of_floor) for c in group if c.clock == "device"]
        if percents:
            shares.plot(*zip(*percents, strict=True), marker=".", linewidth=2.5)
        shares.axhline(100, color="grey", linewidth=1)
        shares.set(xlabel="batch", ylabel="tighter floor, % of the time", ylim=(0, 115))
        for axis in (times, shares):
            axis.grid(visible=True, alpha=0.3)


def _draw_comparisons(part: SubFigure, row: Row) -> None:
    axes = part.subplots(2, len(row), squeeze=False, sharex="col")
    for (times, shares), (title, group) in zip(axes.T, row.items(), strict=True):
        for i, name in enumerate(SERIES):
            points = [(c.case.tokens, c.timings[name].us) for c in group if name in c.timings]
            if points:
                wide = {"linewidth": 2.5, "zorder": 3} if name == OURS else {"linewidth": 1.0}
                style = {"marker": ".", "color": f"C{i}", "label": name, **wide}
                times.plot(*zip(*points, strict=True), **style)
        times.set(
            title=textwrap.fill(title, 24), xscale="log", yscale="log", ylabel="microseconds a call"
        )
        times.legend(fontsize="small", frameon=False)
        percents = [(c.case.tokens, c.percent_of_copy) for c in group if COPY in c.timings]
        if percents:
            shares.plot(*zip(*percents, strict=True), marker=".", linewidth=2.5)
        shares.axhline(100, color="grey", linewidth=1)
        shares.set(xlabel="tokens", ylabel="% of the copy's speed", ylim=(0, 115))
        for axis in (times, shares):
            axis.grid(visible=True, alpha=0.3)


def bars_of_steps(steps: list[StepTime]) -> tuple[str, dict[str, Timing]]:
    """A title, and a name for each time."""
    names = (f"{c.layers} layers, b {c.batch}: {c.cache}, {c.how}" for c in steps)
    timings = dict(zip(names, (c.timing for c in steps), strict=True))
    return f"a decode step on {steps[0].device}", timings


def bars_of_host_costs(costs: list[HostCost]) -> tuple[str, dict[str, Timing]]:
    """The same of the host's costs."""
    names = (f"{c.op}, {c.where}, {c.tokens} tokens: {c.subject}" for c in costs)
    timings = dict(zip(names, (c.timing for c in costs), strict=True))
    return f"host cost on {costs[0].device}", timings


def _draw_bars(part: SubFigure, title: str, timings: dict[str, Timing]) -> None:
    axis = part.subplots()
    bars = axis.barh(list(timings), [timing.us for timing in timings.values()])
    axis.bar_label(bars, fmt="%.2f", padding=3)
    axis.invert_yaxis()
    axis.set(title=title, xlabel="microseconds a call")
