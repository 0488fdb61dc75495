"""The table of docs/compile.md about PyTorch's versions: its rows are the script's, and hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.torch_behaviours import (
    BEHAVIOURS,
    HEAD,
    Behaviour,
    column_name,
    read_table,
    write_table,
)

PAGE = Path(__file__).resolve().parents[1] / "docs" / "compile.md"
COLUMNS = read_table(PAGE.read_text(encoding="utf-8"))


def test_the_table_is_the_scripts() -> None:
    assert write_table(COLUMNS) in PAGE.read_text(encoding="utf-8")
    assert HEAD in write_table(COLUMNS)
    for found in COLUMNS.values():
        assert set(found.values()) <= {"yes", "no", "error", "-"}
        for each in BEHAVIOURS:
            assert each.gpu_only or found[each.statement] != "-"


def test_a_new_column_comes_where_its_version_belongs() -> None:
    columns = {**COLUMNS, "2.9.1+cpu, CPU": {}, "2.12.0, a GPU": dict.fromkeys(["nothing"], "yes")}
    head, *_ = write_table(columns).splitlines()
    names = [cell.strip() for cell in head.strip("|").split("|")][1:]
    assert [name.split(".")[1] for name in names] == sorted(
        (name.split(".")[1] for name in names), key=int
    )


# Not those that take a compiler several seconds, which test_aoti.py shows, nor the last, which
# leaves inference mode on.
@pytest.mark.slow
@pytest.mark.parametrize(
    "each", [e for e in BEHAVIOURS[:-1] if not e.slow], ids=lambda e: e.statement
)
def test_the_column_of_this_pytorch(device: torch.device, each: Behaviour) -> None:
    column = COLUMNS.get(column_name(device))
    if column is None:
        pytest.skip(f"the table has no column for {column_name(device)}")
    assert each.find_out(device) == column[each.statement]
