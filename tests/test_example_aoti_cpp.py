"""The example in examples/aoti_cpp: a package decodes as the model does, in C++ as in Python."""

from __future__ import annotations

import contextlib
import io
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch
from torch import Tensor

import nvfp4_dsmla

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from aoti_cpp.export import CONFIG, DecodeStep, Run, main, make_step
from deepseek.cache import NvFp4Cache
from deepseek.model import Decoder

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "aoti_cpp"

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [
    pytest.mark.filterwarnings("ignore:.isinstance.treespec:FutureWarning"),  # PyTorch's own
    pytest.mark.slow,
]


class Exported(NamedTuple):
    folder: Path
    printed: str


@pytest.fixture(scope="module")
def exported(device: torch.device, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    folder = tmp_path_factory.mktemp("aoti_cpp")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        main(folder, device, steps=24)
    return Exported(folder, printed.getvalue())


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("cmake") is None:
        pytest.skip("no cmake in PATH")
    build = tmp_path_factory.mktemp("program")
    torch_folder = f"-DTORCH={Path(torch.__file__).parent}"
    for command in (["-S", EXAMPLE, "-B", build, torch_folder], ["--build", build]):
        done = subprocess.run(["cmake", *map(str, command)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return build / "decode"


def run_program(program: Path, *arguments: Path) -> subprocess.CompletedProcess[str]:
    command = list(map(str, (program, *arguments)))
    return subprocess.run(command, capture_output=True, text=True, check=False)


def libraries(device: torch.device) -> tuple[Path, ...]:
    return nvfp4_dsmla.loaded_libraries()[: 2 if device.type == "cuda" else 1]


def test_the_program_decodes_as_python_does(
    device: torch.device, exported: Exported, program: Path
) -> None:
    done = run_program(program, exported.folder, *libraries(device))
    assert done.returncode == 0, done.stderr
    *requests, logits, cache = done.stdout.splitlines(keepends=True)
    assert "".join(requests) == exported.printed
    assert logits.startswith("logits: sum ")
    assert cache == "cache: the bytes that Python wrote\n"
    lengths = [len(line.split()) - 2 for line in requests]
    assert lengths[0] == 25
    assert len(set(lengths)) > 3, "the batch was to change from step to step"


def test_the_program_notices_another_cache(
    device: torch.device, exported: Exported, program: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(exported.folder, tmp_path / "copy"))
    cache = bytearray((folder / "latents.bin").read_bytes())
    cache[1000] ^= 1
    (folder / "latents.bin").write_bytes(cache)
    done = run_program(program, folder, *libraries(device))
    assert done.returncode == 1
    assert done.stdout.endswith("cache: NOT the bytes that Python wrote\n")


def test_the_program_needs_no_python(program: Path) -> None:
    done = subprocess.run(["ldd", program], capture_output=True, text=True, check=True)
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert "libtorch_cpu.so" in names
    assert [name for name in names if "python" in name] == []


def test_without_the_ops_library_the_entry_point_is_named(
    device: torch.device, exported: Exported, program: Path
) -> None:
    if device.type == "cuda":
        pytest.skip("the second library says that it is for CUDA")
    other = Path(torch.__file__).parent / "lib" / "libc10.so"
    done = run_program(program, exported.folder, other)
    assert done.returncode == 1
    assert "undefined symbol: aoti_torch_cpu_" in done.stderr


def test_the_package_is_as_close_to_fp32_as_eager_code(
    device: torch.device, exported: Exported
) -> None:
    """Bits differ between eager and compiled bf16, for Inductor rounds less often."""
    run = Run(steps=24)
    package = torch._inductor.aoti_load_package(str(exported.folder / "model.pt2"))
    eager = make_step(device)
    wide = DecodeStep(
        Decoder(CONFIG, NvFp4Cache, num_blocks=2, block_size=16, dtype=torch.float32, device=device)
    )
    wide.load_state_dict(eager.state_dict())
    latents, keys = run.caches(device)
    caches = [run.caches(device), run.caches(device), (latents, keys.float())]
    tokens = [[request] for request in range(run.requests)]
    models: list[Callable[..., Tensor]] = [package, eager, wide]
    logits: list[list[Tensor]] = [[], [], []]
    for step in range(8):
        active, columns = run.inputs(step, tokens, device)
        for request in active:
            tokens[request].append(7 * step % CONFIG.vocab)
        for outputs, model, cache in zip(logits, models, caches, strict=True):
            outputs.append(model(*cache, *columns).flatten())
    of_package, of_eager, right = (torch.cat(outputs) for outputs in logits)
    error, usual = ((x - right).norm() / right.norm() for x in (of_package, of_eager))
    assert 0 < usual < 0.2
    assert error < 1.25 * usual
