"""What all screens share: a terminal or plain text, JSON, tables, bars and progress."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

# A rule of hyphens under the head and nothing else: what is not a terminal gets no drawn lines.
_PLAIN = box.Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)


class Screen:
    """Where a report goes: stdout, as JSON, as plain text, or in colour on a terminal."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self.console = Console(highlight=False, soft_wrap=False)
        self.is_plain = not self.console.is_terminal

    def show(self, report: dict[str, Any], draw: Callable[[Screen, dict[str, Any]], None]) -> None:
        """Prints the report: itself as JSON, or what `draw` makes of it."""
        if self.as_json:
            json.dump(report, sys.stdout, indent=2)
            sys.stdout.write("\n")
        else:
            draw(self, report)

    def heading(self, text: str) -> None:
        """A line that stands out."""
        self.console.print(Text(text, style="bold"))

    def note(self, text: str) -> None:
        """A sentence, wrapped."""
        self.console.print(Text(text))

    def gap(self) -> None:
        """An empty line."""
        self.console.print()

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str | Text]]) -> None:
        """Columns whose name begins with ">" are set to the right."""
        table = Table(
            box=_PLAIN if self.is_plain else box.SIMPLE_HEAD,
            pad_edge=False,
            show_edge=False,
            header_style="bold",
            padding=(0, 1),
        )
        for column in columns:
            right = column.startswith(">")
            table.add_column(
                column.removeprefix(">"),
                justify="right" if right else "left",
                no_wrap=right,
                overflow="fold",
            )
        for row in rows:
            table.add_row(*row)
        self.console.print(table)

    def pairs(self, rows: Sequence[tuple[str, str]]) -> None:
        """Names and what they are, without a head."""
        table = Table.grid(padding=(0, 2))
        table.add_column(style="" if self.is_plain else "cyan", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in rows:
            table.add_row(name, value)
        self.console.print(table)

    def bar(self, share: float, width: int) -> Text:
        """A bar of `share` of `width` characters; a share above 0 is at least one."""
        full = min(width, max(round(share * width), 1 if share > 0 else 0))
        return Text(("#" if self.is_plain else "█") * full, style="green")

    def verdict(self, passed: bool, text: str) -> Text:
        """The text in the colour of its meaning."""
        return Text(text, style="green" if passed else "bold red")

    @contextmanager
    def progress(self, what: str, total: int) -> Iterator[Callable[[str], None]]:
        """A bar on stderr while something long runs; the function given moves it by one step."""
        errors = Console(stderr=True)
        bar = Progress(
            TextColumn(what),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[now]}"),
            console=errors,
            transient=True,
            disable=not errors.is_terminal,
        )
        with bar:
            task = bar.add_task(what, total=total, now="")
            yield lambda now: bar.update(task, advance=1, now=now)


def bytes_text(count: float) -> str:
    """In binary units, three digits or so: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


def share_text(part: int, whole: int) -> str:
    """A percentage that is 0% only for none, and 100% only for all."""
    if whole == 0:
        return ""
    percent = 100 * part / whole
    if 0 < percent < 0.005:
        return "<0.01%"
    if percent >= 99.995 and part < whole:
        return ">99.99%"
    return f"{percent:.2f}%"
