"""Who may know whom: the includes and imports of the sources, and what may be written where.

    csrc/format -> csrc/kernels -> csrc/ops -> libraries -> _fake -> ops.py -> integrations
        |                                          |
        +-> csrc/pybind -> _C -> layout.py -> reference.py

Each room knows only the rooms to its left.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
PACKAGE = ROOT / "python" / "nvfp4_dsmla"
NATIVE = sorted(p for p in CSRC.rglob("*") if p.suffix in {".h", ".cuh", ".cpp", ".cu"})
MODULES = sorted(PACKAGE.rglob("*.py"))

STD = r"<[a-z_0-9]+>"  # <cstdint>; CUDA's and torch's have a dot or a slash
CUDA = r"<cuda_[a-z0-9_]+\.h>"


class Room(NamedTuple):
    folder: str
    may_include: tuple[str, ...]  # patterns of the whole name, with its brackets or quotes


# A file belongs to the first room whose folder it is in.
ROOMS = (
    Room("format", (STD, r'"format/\w+\.h"')),
    Room(
        "kernels/cpu",
        (STD, r'"format/\w+\.h"', r'"kernels/\w+\.h"', r'"kernels/cpu/\w+\.h"'),
    ),
    Room(
        "kernels/cuda",
        (
            STD,
            CUDA,
            r'"format/\w+\.h"',
            r'"kernels/\w+\.h"',
            r'"kernels/cuda/\w+\.cuh"',
        ),
    ),
    Room("kernels", (STD, r'"format/\w+\.h"', r'"kernels/\w+\.h"')),
    Room(
        "ops",
        (
            STD,
            r"<dlfcn\.h>",
            r"<torch/csrc/stable/[\w/]+\.h>",
            r"<torch/headeronly/[\w/]+\.h>",
            r'"format/(\w*record|paged_cache)\.h"',
            r'"kernels/\w+\.h"',
            r'"ops/\w+\.h"',
        ),
    ),
    Room("pybind", (STD, r"<pybind11/\w+\.h>", r'"format/\w+\.h"')),
)

# What each module of the package may import from the package; those not named: anything but
# integrations.
PYTHON_MAY_IMPORT = {
    "_C": set[str](),
    "_load": {"_C"},
    "layout": {"_C"},
    "reference": {"layout"},
    "_fake": {"layout"},
    "ops": {"layout", "_fake"},
    "cache": {"layout"},
    "inductor": {"layout", "inductor"},
}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def includes_of(path: Path) -> list[str]:
    return re.findall(r'^[ \t]*#[ \t]*include[ \t]+(<[^>]+>|"[^"]+")', path.read_text(), re.M)


def code_of(path: Path) -> str:
    """C++ without comments and strings."""
    token = r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"'
    return re.sub(token, " ", path.read_text(), flags=re.S)


def imports_of(path: Path) -> set[str]:
    """The modules of the package that a module of it imports, by their first name in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level > 0:
            names.add(f"nvfp4_dsmla.{node.module or ''}")
        elif isinstance(node, ast.ImportFrom) and node.module == "nvfp4_dsmla":
            names |= {f"nvfp4_dsmla.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    own = {name.split(".")[1] for name in names if name.startswith("nvfp4_dsmla.")}
    return {name for name in own if not name.startswith("__")}


def test_the_sources_are_found() -> None:
    """Else the tests below would pass over nothing."""
    assert len(NATIVE) > 15
    assert len(MODULES) > 5
    assert sum(len(includes_of(path)) for path in NATIVE) > 40
    assert imports_of(PACKAGE / "reference.py") == {"layout"}


@pytest.mark.parametrize("path", NATIVE, ids=relative)
def test_includes_stay_in_their_rooms(path: Path) -> None:
    room = next((r for r in ROOMS if path.is_relative_to(CSRC / r.folder)), None)
    assert room is not None, f"{relative(path)} is in no room: name one in this test, with its rule"
    for include in includes_of(path):
        assert any(re.fullmatch(pattern, include) for pattern in room.may_include), (
            f"{relative(path)} includes {include}, and csrc/{room.folder} may know none but "
            f"{', '.join(room.may_include)}"
        )


@pytest.mark.parametrize("path", NATIVE, ids=relative)
def test_no_libtorch_cpp_names(path: Path) -> None:
    """The libraries use the stable ABI alone, so that one build serves every torch."""
    found = re.findall(r"\b(?:at|c10|torch::jit)::", code_of(path))
    assert not found, f"{relative(path)} uses {found}"


@pytest.mark.parametrize("path", NATIVE, ids=relative)
def test_record_h_alone_states_the_numbers_of_the_record(path: Path) -> None:
    if path == CSRC / "format" / "record.h":
        return
    found = re.findall(r"(?<![\w.'])(?:352|320|576|512)(?![\w.'])", code_of(path))
    assert not found, f"{relative(path)} has {found}: take them from format/record.h"


@pytest.mark.parametrize("path", sorted((CSRC / "ops").iterdir()), ids=relative)
def test_ops_know_sizes_of_a_record_but_no_offset(path: Path) -> None:
    found = re.findall(r"\b(?:k\w*Offset|scale_offset)\b", code_of(path))
    assert not found, f"{relative(path)} uses {found}"


@pytest.mark.parametrize("path", sorted((CSRC / "format").glob("*.h")), ids=relative)
def test_a_format_header_builds_alone_without_cuda_or_torch(path: Path) -> None:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler in PATH")
    command = [compiler, "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror"]
    program = f'#include "{path.relative_to(CSRC).as_posix()}"\nint main() {{}}\n'
    subprocess.run([*command, f"-I{CSRC}", "-x", "c++", "-"], input=program, text=True, check=True)


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_python_modules_import_leftwards(path: Path) -> None:
    name = path.relative_to(PACKAGE).with_suffix("").parts[0]
    imports = imports_of(path)
    if name in PYTHON_MAY_IMPORT:
        more = imports - PYTHON_MAY_IMPORT[name]
        assert not more, f"{relative(path)} imports {more}"
    if name != "integrations":
        assert "integrations" not in imports, f"{relative(path)} imports integrations"


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_python_takes_the_numbers_of_the_record_from_c(path: Path) -> None:
    numbers = {
        node.value
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and type(node.value) is int
    }
    found = numbers & {352, 320, 576, 512}
    assert not found, f"{relative(path)} has {found}: take them from layout"


def test_no_file_is_named_for_nothing() -> None:
    """A thing is named by what it knows, or it has no room."""
    nameless = {"util", "utils", "common", "helper", "helpers", "misc"}
    folders = [ROOT / name for name in ("csrc", "python", "tests", "benchmarks", "examples")]
    found = [
        relative(path)
        for folder in folders
        for path in folder.rglob("*")
        if path.stem in nameless and "__pycache__" not in path.parts
    ]
    assert not found


def test_no_file_is_longer_than_500_lines() -> None:
    suffixes = {".h", ".cuh", ".cpp", ".cu", ".py", ".pyi", ".cmake", ".md"}
    folders = ("csrc", "python", "tests", "benchmarks", "examples", "docs", "cmake")
    paths = [p for name in folders for p in (ROOT / name).rglob("*") if p.suffix in suffixes]
    assert len(paths) > len(NATIVE) + len(MODULES)
    lengths = {relative(path): len(path.read_text().splitlines()) for path in paths}
    assert {name: length for name, length in lengths.items() if length > 500} == {}
