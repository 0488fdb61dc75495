"""The README: its Python gives what the reference gives, its commands and links are real."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from nvfp4_dsmla import reference
from nvfp4_dsmla.layout import NOPE_DIM, RECORD_BYTES

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def blocks_of(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.M | re.S)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
def test_the_python_runs_and_attends_as_the_reference_does() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    blocks = blocks_of("python")
    assert len(blocks) == 2
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block, names)

    # What the last turn of its loop wrote and returned.
    pool, layer, latent = names["pool"], names["layer"], names["latent"]
    slots = names["slots"].flatten()
    records = reference.encode(latent[:, :NOPE_DIM], latent[:, NOPE_DIM:])
    assert torch.equal(pool[layer].view(-1, RECORD_BYTES)[slots], records)
    assert pool.view(len(pool), -1).any(-1).all(), "a layer was not written"
    out, lse = reference.attention(
        names["q"],
        pool,
        names["selected"][:, None].int(),
        softmax_scale=192**-0.5,
        layer=layer,
    )
    torch.testing.assert_close(names["out"], out)
    torch.testing.assert_close(names["lse"], lse)


def test_the_commands_are_those_of_nox_and_of_ci() -> None:
    demo, tests = (line for block in blocks_of("") for line in block.splitlines() if "nox" in line)
    sessions = re.findall(r"^@nox\.session\ndef (\w+)", (ROOT / "noxfile.py").read_text(), re.M)
    assert {demo.split()[-1], tests.split()[-1]} == {"demo", "tests"} <= set(sessions)
    assert tests in (ROOT / ".ci" / "run").read_text()
    (nox,) = re.findall(r'"(nox==.*)"', (ROOT / "pyproject.toml").read_text())
    assert all(f"pip install -q {nox} " in command for command in (demo, tests))


def test_the_default_architectures_are_cmakes() -> None:
    text = (ROOT / "cmake" / "CompileOptions.cmake").read_text()
    lists = re.findall(r"(?:set|list)\((?:APPEND )?archs (\d.*?)\)", text)
    assert len(lists) == 6  # two lists, and what the age of nvcc adds to them
    for archs in lists:
        assert f"`{archs.replace(' ', ';')}`" in README


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_to_files_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (page.parent / link).exists()] == []
