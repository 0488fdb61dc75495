"""The lists of GPUs to build for, and what nvcc makes of the write: native e2m1 where there is."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from nvfp4_dsmla import support

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
NATIVE = "cvt.rn.satfinite.e2m1x2.f32"

pytestmark = pytest.mark.nvcc


@cache
def nvcc() -> tuple[Path, tuple[int, int]] | None:
    """The compiler and its release; None where there is none."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    places = [shutil.which("nvcc"), *(f"{home}/bin/nvcc" for home in homes if home)]
    path = next((Path(p) for p in places if p and Path(p).is_file()), None)
    if path is None:
        return None
    text = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    release = re.search(r"release (\d+)\.(\d+)", text)
    assert release is not None, text
    return path, (int(release[1]), int(release[2]))


def nvcc_or_skip() -> tuple[Path, tuple[int, int]]:
    found = nvcc()
    if found is None:
        pytest.skip("no nvcc in PATH, $CUDA_HOME/bin, $CUDA_PATH/bin or /usr/local/cuda/bin")
    return found


def ptx_of_write(target: str, out: Path, *, needs: tuple[int, int]) -> str:
    compiler, release = nvcc_or_skip()
    if release < needs:
        pytest.skip(f"{target} needs CUDA {needs[0]}.{needs[1]}, this is {release[0]}.{release[1]}")
    source = CSRC / "kernels" / "cuda" / "write.cu"
    ptx = out / "write.ptx"
    options = ["-std=c++20", f"-I{CSRC}", f"-arch={target}", "-ptx"]
    done = subprocess.run(
        [compiler, *options, source, "-o", ptx], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return ptx.read_text()


def entries(ptx: str, codec: str) -> int:
    """Kernels that write the format of a codec."""
    return len(re.findall(rf"\.entry \S*{codec}", ptx))


@pytest.mark.parametrize(
    ("target", "needs"),
    [
        ("sm_100a", (12, 8)),
        ("sm_100f", (12, 9)),
        ("sm_103a", (12, 9)),
        ("sm_120a", (12, 8)),
        ("sm_120f", (12, 9)),
    ],
)
def test_blackwell_targets_convert_natively(
    target: str, needs: tuple[int, int], tmp_path: Path
) -> None:
    ptx = ptx_of_write(target, tmp_path, needs=needs)
    kernels = entries(ptx, "Nvfp4Codec")
    # Each lane converts the 16 elements of its block, two by an instruction.
    assert kernels > 0
    assert ptx.count(NATIVE) == 8 * kernels


@pytest.mark.parametrize(
    ("target", "needs"), [("sm_75", (12, 0)), ("sm_90a", (12, 0)), ("compute_100", (12, 8))]
)
def test_other_targets_do_it_by_arithmetic(
    target: str, needs: tuple[int, int], tmp_path: Path
) -> None:
    ptx = ptx_of_write(target, tmp_path, needs=needs)
    assert ".entry" in ptx
    assert "e2m1" not in re.sub(r"//.*|\S*_Z\S*", "", ptx)  # in no instruction


def test_no_fused_multiply_add_between_scaling_and_rounding(tmp_path: Path) -> None:
    """The format rounds x / scale on its own: fused, ties would break the other way."""
    ptx = ptx_of_write("sm_90a", tmp_path, needs=(12, 0))
    products = re.findall(r"mul\.rn\.f32", ptx)
    assert len(products) >= 16 * entries(ptx, "Nvfp4Codec")


def cmake_archs(wanted: str, release: tuple[int, int], folder: Path) -> tuple[list[str], list[str]]:
    """What cmake makes of NVFP4_DSMLA_CUDA_ARCHS with nvcc of a release: flags, and targets."""
    if shutil.which("cmake") is None:
        pytest.skip("no cmake in PATH")
    options = ROOT / "cmake" / "CompileOptions.cmake"
    (folder / "CMakeLists.txt").write_text(
        f"""
        cmake_minimum_required(VERSION 3.28)
        project(archs LANGUAGES NONE)
        set(CMAKE_CUDA_COMPILER_VERSION {release[0]}.{release[1]})
        include({options.as_posix()})
        nvfp4_dsmla_cuda_archs(flags names)
        message(STATUS "flags: ${{flags}}, names: ${{names}}.")
        """
    )
    command = ["cmake", "-S", folder, "-B", folder / "build", f"-DNVFP4_DSMLA_CUDA_ARCHS={wanted}"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"flags: (.*), names: (.*)\.", done.stdout)
    assert found is not None, done.stdout
    return found[1].split(";"), found[2].split(",")


@pytest.mark.parametrize("release", [(12, 0), (12, 8), (12, 9), (13, 0)])
@pytest.mark.parametrize("wanted", ["", "few"])
def test_every_gpu_runs_what_is_built(
    wanted: str, release: tuple[int, int], tmp_path: Path
) -> None:
    _, targets = cmake_archs(wanted, release, tmp_path)
    for chip in ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)):
        # The second is of sparse decode, which has no code for older ones.
        for first in ((7, 5), (8, 0)):
            served = any(support._runs_on(target, chip, first) for target in targets)
            assert served == (chip >= first), (chip, first, targets)
    assert "sm_90a" in targets
    assert ("sm_120f" in targets) == (release >= (12, 9))


def test_nvcc_knows_the_short_list(tmp_path: Path) -> None:
    compiler, release = nvcc_or_skip()
    flags, _ = cmake_archs("few", release, tmp_path)
    source = CSRC / "kernels" / "cuda" / "error.cu"
    command = [
        compiler,
        "-std=c++20",
        f"-I{CSRC}",
        *flags,
        "-c",
        source,
        "-o",
        tmp_path / "error.o",
    ]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
