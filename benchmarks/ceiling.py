"""The ceiling on a GPU: ceiling.cu's copy, empty and read kernels, built on first use."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.timing import Timing, time_graph

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.timing import Call

SOURCE = Path(__file__).with_name("ceiling.cu")
BUILD = SOURCE.parents[1] / "build" / "benchmarks"
WORD_BYTES = 16
# A buffer set is cold if this many times L2 has passed through since it was used.
COLD = 4
FEWEST_SETS = 4
MOST_SETS = 64


def find_nvcc() -> str:
    """The CUDA compiler.

    Raises:
        FileNotFoundError: there is none where one is looked for.
    """
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    found = shutil.which("nvcc", path=os.pathsep.join(f"{home}/bin" for home in homes if home))
    found = found or shutil.which("nvcc")
    if found is None:
        raise FileNotFoundError(
            "nvcc was looked for in $CUDA_HOME/bin, $CUDA_PATH/bin, /usr/local/cuda/bin and PATH: "
            "the copy that a GPU's kernels are measured against is built with it"
        )
    return found


def build(capability: tuple[int, int]) -> Path:
    """Compiles ceiling.cu for a GPU, unless that was done since it changed."""
    arch = f"sm_{capability[0]}{capability[1]}"
    library = BUILD / f"libceiling_{arch}.so"
    if library.is_file() and library.stat().st_mtime >= SOURCE.stat().st_mtime:
        return library
    BUILD.mkdir(parents=True, exist_ok=True)
    options = ["-std=c++17", "-O3", f"-arch={arch}", "-shared", "-Xcompiler=-fPIC"]
    subprocess.run([find_nvcc(), *options, str(SOURCE), "-o", str(library)], check=True)
    return library


class Ceiling:
    """Kernels of one GPU, on the current stream, and how its caches are kept cold."""

    def __init__(self, device: torch.device) -> None:
        properties = torch.cuda.get_device_properties(device)
        self._device = device
        self._library = _load(build((properties.major, properties.minor)))
        self._copies: dict[int, Timing] = {}
        self.l2_bytes: int = properties.L2_cache_size
        self._scrub = torch.zeros(COLD * self.l2_bytes, dtype=torch.uint8, device=device)

    def sets_for(self, traffic: int) -> int:
        """How many buffer sets of `traffic` bytes each to rotate over."""
        return min(max(COLD * self.l2_bytes // traffic + 1, FEWEST_SETS), MOST_SETS)

    def time(self, calls: list[Call], traffic: int) -> Timing:
        """Device time of calls of `traffic` bytes each, from memory that is not in L2."""
        cold_by_rotation = len(calls) * traffic >= COLD * self.l2_bytes
        return time_graph(calls, before=None if cold_by_rotation else self.read)

    def copy_time(self, traffic: int) -> Timing:
        """The fastest copy that reads half of `traffic` bytes and writes the other half."""
        if traffic not in self._copies:
            words = max(traffic // 2 // WORD_BYTES, 1)
            pairs = [
                (self._noise(words), self._noise(words)) for _ in range(self.sets_for(traffic))
            ]
            timings = [
                self.time([self._copy(which, dst, src) for dst, src in pairs], traffic)
                for which in range(self._library.ceiling_num_copies())
            ]
            self._copies[traffic] = min(timings, key=lambda timing: timing.us)
        return self._copies[traffic]

    def empty_time(self) -> Timing:
        """A kernel of one warp that does nothing."""
        call = self._call(self._library.ceiling_empty)
        return time_graph([call] * MOST_SETS, before=self.read)

    def read(self) -> None:
        """Fills L2 with other data, none of which has to be written back."""
        words = self._scrub.numel() // WORD_BYTES
        self._call(self._library.ceiling_read, self._scrub.data_ptr(), words)()

    def _noise(self, words: int) -> torch.Tensor:
        # Of its own allocation, so that it starts at a multiple of what memory moves at once.
        size = words * WORD_BYTES
        return torch.empty(size, dtype=torch.uint8, device=self._device).random_()

    def _copy(self, which: int, dst: torch.Tensor, src: torch.Tensor) -> Call:
        words = src.numel() // WORD_BYTES
        return self._call(self._library.ceiling_copy, which, dst.data_ptr(), src.data_ptr(), words)

    def _call(self, function: Callable[..., int], *arguments: int) -> Call:
        def call() -> None:
            error = function(*arguments, torch.cuda.current_stream(self._device).cuda_stream)
            if error != 0:
                raise RuntimeError(f"a kernel of {SOURCE.name} failed: CUDA error {error}")

        return call


def _load(library: Path) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(library))
    pointer = ctypes.c_void_p
    loaded.ceiling_copy.argtypes = [ctypes.c_int, pointer, pointer, ctypes.c_int64, pointer]
    loaded.ceiling_read.argtypes = [pointer, ctypes.c_int64, pointer]
    loaded.ceiling_empty.argtypes = [pointer]
    return loaded
