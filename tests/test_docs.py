"""The documentation: its Python runs, its screens are what the commands print, its names exist."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import nvfp4_dsmla
from nvfp4_dsmla.cli.app import app
from nvfp4_dsmla.formats import CACHE_FORMATS

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.M | re.S)


def rows_of(page: Path, head: str) -> list[list[str]]:
    """The cells of the table that begins with `head`."""
    text = page.read_text()
    table = text[text.index(head) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def names_in(cell: str) -> list[str]:
    return re.findall(r"`([\w.]+)`", cell)


def found(name: str) -> Any:
    value: Any = nvfp4_dsmla
    for part in name.split("."):
        value = getattr(value, part)
    return value


WITH_PYTHON = [page for page in PAGES if blocks(page, "python")]


@pytest.mark.filterwarnings("ignore:.isinstance.treespec:FutureWarning")  # PyTorch's own
@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.name)
def test_the_python_of_a_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All blocks of a page one after another, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": page.stem}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), namespace)


def test_the_pages_with_python_are_found() -> None:
    assert {page.name for page in WITH_PYTHON} >= {
        "format.md",
        "engines.md",
        "cli.md",
        "compile.md",
    }


def test_a_screen_is_what_the_command_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    page = DOCS / "cli.md"
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), {})
    screens = blocks(page, "console")
    assert len(screens) == 2
    for screen in screens:
        command, _, shown = screen.partition("\n")
        program, *arguments = shlex.split(command.removeprefix("$ "))
        assert program == "nvfp4-dsmla"
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output
        printed = [line.rstrip() for line in done.stdout.splitlines()]
        assert printed == shown.splitlines()


def test_every_command_and_option_is_on_the_page() -> None:
    text = (DOCS / "cli.md").read_text()
    for command in app.registered_commands:
        assert command.callback is not None
        assert f"## `{command.callback.__name__}" in text
    for option in re.findall(r"`(--[\w-]+)", text):
        helps = [
            CliRunner(env={"COLUMNS": "200"}).invoke(app, [name, "--help"]).output
            for name in ("info", "verify", "plan", "inspect")
        ]
        assert any(option in shown for shown in helps), option


def test_the_formats_table_is_the_registry() -> None:
    rows = {cells[0].strip("`"): cells for cells in rows_of(DOCS / "format.md", "| name | bytes")}
    assert set(rows) == set(CACHE_FORMATS)
    widest = CACHE_FORMATS["bfloat16"].bytes_per_token
    for name, cache_format in CACHE_FORMATS.items():
        _, size, nope, scales, rope, against = rows[name]
        assert int(size) == cache_format.bytes_per_token
        assert nope.split(",")[0] == cache_format.nope_type
        assert rope == cache_format.rope_type
        if cache_format.scale_block is not None:
            assert f"one per {cache_format.scale_block} dims" in scales
        times = float(against.split()[0])
        assert times == pytest.approx(widest / cache_format.bytes_per_token, abs=0.005)


# ---- names -------------------------------------------------------------------------------------


def test_every_name_that_engines_are_told_of_exists() -> None:
    parts = rows_of(DOCS / "engines.md", "| part of the engine | calls |")
    assert len(parts) > 5
    for _, calls in parts:
        assert names_in(calls)
        for name in names_in(calls):
            assert found(name) is not None


def test_every_name_beside_an_engines_is_tried_by_a_test() -> None:
    table = rows_of(DOCS / "engines.md", "| vLLM | here | tried by |")
    ours = {name for _, here, _ in table for name in names_in(here)}
    for name in ours:
        assert found(name) is not None
    for _, here, tried_by in table:
        assert bool(names_in(here)) == bool(tried_by), here
        if tried_by:
            file, _, test = tried_by.partition("::")
            source = (ROOT / "tests" / file).read_text()
            assert f"def {test}(" in source, tried_by
    # Nothing that is public is missing from the table, but for what is about this package itself.
    own = {"__version__", "loaded_libraries", "CacheFormat", "aoti"}
    assert {name.partition(".")[0] for name in ours} == set(nvfp4_dsmla.__all__) - own


def test_every_public_name_is_in_the_reference() -> None:
    documented: set[str] = set()
    for page in (DOCS / "api").glob("*.md"):
        for target in re.findall(r"^::: ([\w.]+)$", page.read_text(), flags=re.M):
            documented.add(target.rpartition(".")[2])
            if (ROOT / "python" / f"{target.replace('.', '/')}.py").is_file():
                documented |= set(importlib.import_module(target).__all__)
    assert set(nvfp4_dsmla.__all__) - {"__version__"} <= documented


def test_every_page_is_in_the_navigation() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = re.findall(r"^ +- (?:[^:\n]+: )?([\w/]+\.md)$", nav, flags=re.M)
    assert sorted(listed) == [page.relative_to(DOCS).as_posix() for page in PAGES]
