"""What the demo shows: progress bars, answers as they grow, the table and what it does not say."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from smollm2.evaluate import TEXT_SOURCE, Quality

# Called with the text of every answer so far, and how many tokens each request has seen.
Show = Callable[[Sequence[str], Sequence[int]], None]

console = Console(highlight=False)


@dataclass(frozen=True)
class FormatResult:
    """A row of the table."""

    name: str
    bytes_per_token: int
    cache_bytes: int
    tokens_per_second: float
    quality: Quality


def progress() -> Progress:
    """Bars that vanish when they are done; without a total, a bar that says it is alive."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,  # a log has no use for bars
    )


@contextmanager
def answers_view(prompts: Sequence[str], *, topk: int) -> Iterator[Show]:
    """The answers as they grow, a panel for each prompt."""

    def panel(prompt: str, answer: str, seen: int) -> Panel:
        attended = f"the top {topk} of {seen}" if seen > topk else f"all {seen}"
        return Panel(
            Text(answer),
            title=Text(prompt.rpartition("\n")[2], style="bold", overflow="ellipsis"),
            title_align="left",
            subtitle=Text(f"attends to {attended} tokens", style="dim"),
            subtitle_align="right",
            box=box.ROUNDED,
        )

    with Live(console=console, refresh_per_second=8) as live:
        yield lambda answers, seen: live.update(Group(*map(panel, prompts, answers, seen)))
    if not console.is_terminal:
        console.line()  # what Live leaves out in a log


@contextmanager
def steps_view(description: str, *, total: int) -> Iterator[Show]:
    """A bar of decode steps."""
    with progress() as bars:
        task = bars.add_task(description, total=total)
        yield lambda _answers, _seen: bars.advance(task)


def summary(results: Sequence[FormatResult], *, batch: int) -> Table:
    """All that was measured, a row for each format; the first is the baseline."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("cache", no_wrap=True, vertical="bottom")
    headings = (
        "bytes a\ntoken",
        f"MB for {batch}\nrequests",
        "tokens/s",
        "perplexity",
        "KL to\nbf16",
        "same\ntop-1",
    )
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True, vertical="bottom")
    baseline = results[0].quality
    for result in results:
        quality = result.quality
        compared = quality is not baseline
        change = quality.perplexity / baseline.perplexity - 1
        table.add_row(
            result.name,
            f"{result.bytes_per_token:,}",
            f"{result.cache_bytes / 1e6:.1f}",
            f"{result.tokens_per_second:.1f}",
            f"{quality.perplexity:.2f}" + (f" ({change:+.1%})" if compared else ""),
            f"{quality.mean_kl:.3f}" if compared else "",
            f"{quality.top1_agreement:.1%}" if compared else "",
        )
    return table


def notes(
    *, positions: int, used: int, width: int, weight_bytes: int, batch: int, reads: str
) -> Text:
    """How the numbers of the table came about, and what they do not say."""
    return Text(
        f"Bytes a token are those of one layer. Every cache stores {width} numbers a token there; "
        f"SmolLM2 fills {used} of them (in bf16 they alone are {2 * used} bytes), the rest is "
        "zeros.\n"
        f"Tokens/s are those of the median step, {batch} requests at once; {reads}. A step "
        f"also reads {weight_bytes / 1e6:,.0f} MB of weights.\n"
        f"Perplexity, KL (mean, nats) and top-1: {positions} positions of {TEXT_SOURCE}, each "
        "attending to what the cache kept of all tokens so far. SmolLM2 is no MLA model: its "
        "records hold rotated keys and values, and rotated keys are harder to quantise than the "
        "latents that the records are made for."
    )
