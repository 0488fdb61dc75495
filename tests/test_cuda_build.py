"""What nvcc makes of the write kernel: the native e2m1 conversion where the target has it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parent.parent / "csrc"
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


def ptx_of_write(target: str, out: Path, *, needs: tuple[int, int]) -> str:
    found = nvcc()
    if found is None:
        pytest.skip("no nvcc in PATH, $CUDA_HOME/bin, $CUDA_PATH/bin or /usr/local/cuda/bin")
    compiler, release = found
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
