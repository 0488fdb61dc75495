"""The built libraries as files and their loading: what they are bound to, what a failure says."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import nvfp4_dsmla
from nvfp4_dsmla import _C

BUILT = Path(_C.__file__).parent
CPU_LIBRARY = "libnvfp4_dsmla.so"
CUDA_LIBRARY = "libnvfp4_dsmla_cuda.so"
TORCH_LIBRARIES = Path(torch.__file__).parent / "lib"

# A name of at::, c10:: or torch:: somewhere in a mangled C++ name: N, qualifiers, length and name.
TORCH_CPP_NAME = re.compile(r"^_Z.*N[rVKRO]*(2at|3c10|5torch)[0-9A-Z]")


class Dynamic(NamedTuple):
    """What the loader reads of a shared library."""

    needed: set[str]
    search_paths: set[str]
    undefined: set[str]
    defined: set[str]


def read_dynamic(path: Path) -> Dynamic:
    """Parse the sections .dynamic and .dynsym of a 64-bit little-endian ELF file."""
    data = path.read_bytes()
    assert data[:6] == b"\x7fELF\x02\x01", f"{path} is no 64-bit little-endian ELF file"
    (table,) = struct.unpack_from("<Q", data, 40)
    entry_size, count = struct.unpack_from("<HH", data, 58)
    headers = data[table : table + entry_size * count]
    sections = list(struct.iter_unpack("<IIQQQQIIQQ", headers))

    def contents(section: tuple[int, ...]) -> bytes:
        return data[section[4] : section[4] + section[5]]

    def text(strings: bytes, offset: int) -> str:
        return strings[offset : strings.index(b"\0", offset)].decode()

    found = Dynamic(set(), set(), set(), set())
    for section in sections:
        strings = contents(sections[section[6]])
        if section[1] == 6:  # SHT_DYNAMIC: (tag, value)
            into = {1: found.needed, 15: found.search_paths, 29: found.search_paths}
            for tag, value in struct.iter_unpack("<qQ", contents(section)):
                if tag in into:  # DT_NEEDED, DT_RPATH, DT_RUNPATH
                    into[tag].add(text(strings, value))
        elif section[1] == 11:  # SHT_DYNSYM: (name, info, other, section, value, size)
            for name, _, _, home, _, _ in struct.iter_unpack("<IBBHQQ", contents(section)):
                (found.defined if home else found.undefined).add(text(strings, name))
    return found


@pytest.fixture(params=[CPU_LIBRARY, CUDA_LIBRARY])
def library(request: pytest.FixtureRequest) -> Path:
    path = BUILT / str(request.param)
    if path.name == CUDA_LIBRARY and not _C.CUDA_ARCHS:
        pytest.skip("this build has no CUDA library")
    return path


def test_version_is_the_distributions() -> None:
    try:
        version = importlib.metadata.version("nvfp4-dsmla")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package is on the path but not installed: there is no distribution")
    assert nvfp4_dsmla.__version__ == version


def test_loaded_libraries() -> None:
    names = [CPU_LIBRARY]
    if _C.CUDA_ARCHS and torch.version.cuda is not None:
        names.append(CUDA_LIBRARY)
    assert nvfp4_dsmla.loaded_libraries() == tuple(BUILT / name for name in names)


def test_the_search_for_cpp_names_finds_torchs_own() -> None:
    undefined = read_dynamic(TORCH_LIBRARIES / "libtorch_python.so").undefined
    found = {match[1] for match in map(TORCH_CPP_NAME.match, undefined) if match}
    assert found == {"2at", "3c10", "5torch"}


def test_no_cpp_symbol_of_torch(library: Path) -> None:
    assert [name for name in read_dynamic(library).undefined if TORCH_CPP_NAME.match(name)] == []


def test_every_torch_symbol_exists(library: Path) -> None:
    wanted = {n for n in read_dynamic(library).undefined if n.startswith(("aoti_torch_", "torch_"))}
    assert wanted
    offered = read_dynamic(TORCH_LIBRARIES / "libtorch_cpu.so").defined
    torch_cuda = TORCH_LIBRARIES / "libtorch_cuda.so"
    if torch_cuda.exists():
        offered |= read_dynamic(torch_cuda).defined
    elif library.name == CUDA_LIBRARY:  # the torch at hand cannot tell of these
        wanted = {name for name in wanted if "cuda" not in name}
    assert wanted - offered == set()


def test_needed_libraries(library: Path) -> None:
    dynamic = read_dynamic(library)
    own = {name for name in dynamic.needed if re.search("torch|c10|cuda|nvfp4", name)}
    assert own == {"libtorch_cpu.so"} | ({"libtorch_cuda.so"} if "cuda" in library.name else set())
    assert dynamic.search_paths == set()


def test_the_c_entry_points_alone_are_exported(library: Path) -> None:
    defined = read_dynamic(library).defined
    ours = {name for name in defined if "nvfp4_dsmla" in name or not name.startswith("_")}
    device_type = "cuda" if library.name == CUDA_LIBRARY else "cpu"
    names = [name for name in torch._C._dispatch_get_all_op_names() if "nvfp4_dsmla::" in name]
    assert ours == {f"aoti_torch_{device_type}_{name.partition('::')[2]}" for name in names}


def run_python(code: str, *first_on_path: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a Python whose import path is `first_on_path` and then this one's.

    -S leaves out the hook of an editable install, which would come before any path.
    """
    path = [*map(str, first_on_path), *filter(None, sys.path)]
    code = f"import sys; sys.path[:] = {path!r}\n{code}"
    return subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, check=False
    )


@pytest.fixture
def copied_package(tmp_path: Path) -> Path:
    """A folder with a whole copy of the package in it, compiled files included."""
    package = tmp_path / "nvfp4_dsmla"
    shutil.copytree(Path(nvfp4_dsmla.__file__).parent, package)
    for built in [Path(_C.__file__), *BUILT.glob("lib*.so")]:
        shutil.copy(built, package)
    return tmp_path


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    return done.stderr.rstrip().rsplit("\n", 1)[-1]


def test_the_copy_works(copied_package: Path) -> None:
    done = run_python("import nvfp4_dsmla; print(nvfp4_dsmla.__file__)", copied_package)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == copied_package / "nvfp4_dsmla" / "__init__.py"


def test_a_second_copy_is_refused(copied_package: Path) -> None:
    other = BUILT / CPU_LIBRARY
    done = run_python(
        f"import torch; torch.ops.load_library({str(other)!r}); import nvfp4_dsmla", copied_package
    )
    assert last_line(done) == (
        f"RuntimeError: nvfp4_dsmla: the ops are registered already, by {other}; loading "
        f"{copied_package / 'nvfp4_dsmla' / CPU_LIBRARY} as well would end the process. Keep one "
        f"copy of the library: uninstall the other package, or load no copy of your own before the "
        f"import."
    )


def test_a_second_copy_of_another_name_is_refused(copied_package: Path) -> None:
    other = shutil.copy(BUILT / CPU_LIBRARY, copied_package / "libother.so")
    done = run_python(
        f"import torch; torch.ops.load_library({str(other)!r}); import nvfp4_dsmla", copied_package
    )
    assert last_line(done).startswith(
        "RuntimeError: nvfp4_dsmla: the ops are registered already, by a library of another name; "
    )


def test_a_copy_loaded_after_the_package_ends_the_process_with_a_sentence(tmp_path: Path) -> None:
    other = shutil.copy(BUILT / CPU_LIBRARY, tmp_path / "libother.so")
    code = f"import nvfp4_dsmla, torch; torch.ops.load_library({str(other)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGABRT
    assert last_line(done) == (
        "nvfp4_dsmla: the ops are registered already, by another copy of the library; "
        f"{other} cannot be loaded as well. Keep one copy."
    )


def test_the_library_may_be_loaded_before_the_package(copied_package: Path) -> None:
    library = copied_package / "nvfp4_dsmla" / CPU_LIBRARY
    done = run_python(
        f"import torch; torch.ops.load_library({str(library)!r})\n"
        "import nvfp4_dsmla; print(nvfp4_dsmla.loaded_libraries()[0])",
        copied_package,
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == library


def test_the_same_library_by_way_of_a_link(copied_package: Path) -> None:
    library = copied_package / "nvfp4_dsmla" / CPU_LIBRARY
    link = copied_package / "link"
    link.symlink_to(copied_package)
    done = run_python(
        f"import torch; torch.ops.load_library({str(library)!r})\n"
        "import nvfp4_dsmla; print(nvfp4_dsmla.loaded_libraries()[0])",
        link,
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == link / "nvfp4_dsmla" / CPU_LIBRARY


def test_a_missing_library(copied_package: Path) -> None:
    package = copied_package / "nvfp4_dsmla"
    (package / CPU_LIBRARY).rename(copied_package / "moved.so")
    assert last_line(run_python("import nvfp4_dsmla", copied_package)) == (
        f"ImportError: nvfp4_dsmla: {CPU_LIBRARY} was looked for in {package}, beside the compiled "
        "module _C, and is not there. Install the package again with the Python and the torch that "
        "are to use it: `pip install --no-build-isolation .` in a checkout."
    )


def test_a_library_that_does_not_load(copied_package: Path) -> None:
    path = copied_package / "nvfp4_dsmla" / CPU_LIBRARY
    path.write_bytes(b"not a library")
    message = last_line(run_python("import nvfp4_dsmla", copied_package))
    assert message.startswith(
        f"ImportError: nvfp4_dsmla: {path} is there but cannot be loaded into torch "
        f"{torch.__version__} (2.10 or newer is needed): "
    )
    assert message.endswith("`pip install --no-build-isolation .` in a checkout.")


def test_a_missing_compiled_module(copied_package: Path) -> None:
    package = copied_package / "nvfp4_dsmla"
    (package / Path(_C.__file__).name).unlink()
    message = last_line(run_python("import nvfp4_dsmla", copied_package))
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert message.startswith(
        f"ImportError: nvfp4_dsmla: the compiled module _C for Python {version} was looked for in "
        f"{package} and cannot be imported: "
    )
