"""Loads the op libraries, once a process, and says what is wrong where that cannot be done.

The libraries lie beside the compiled module `_C`. In an editable install that is not the folder of
this file.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import torch

_LIBRARY = "libnvfp4_dsmla.so"
_CUDA_LIBRARY = "libnvfp4_dsmla_cuda.so"
_AN_OP = "concat_and_cache_nvfp4_ds_mla"
_REBUILD = (
    "Install the package again with the Python and the torch that are to use it: "
    "`pip install --no-build-isolation .` in a checkout."
)

_loaded: list[Path] = []


def loaded_libraries() -> tuple[Path, ...]:
    """The files the ops come from: the CPU library and, where torch has CUDA, the CUDA one.

    A program without Python, such as one that runs an AOTInductor package, loads these with
    `dlopen` before it loads the package.
    """
    return tuple(_loaded)


def load() -> None:
    """Registers the ops with torch.

    Raises:
        ImportError: a library is missing or cannot be loaded.
        RuntimeError: another copy of the library has registered the ops already.
    """
    folder = _built_folder()
    _load_library(folder / _LIBRARY)
    cuda_library = folder / _CUDA_LIBRARY
    if torch.version.cuda is not None and cuda_library.is_file():
        _load_library(cuda_library)


def _built_folder() -> Path:
    try:
        from nvfp4_dsmla import _C
    except ImportError as error:
        from nvfp4_dsmla import __path__ as looked_in

        raise ImportError(
            f"nvfp4_dsmla: the compiled module _C for Python {sys.version_info.major}."
            f"{sys.version_info.minor} was looked for in {', '.join(looked_in)} and cannot be "
            f"imported: {error}. {_REBUILD}"
        ) from error
    return Path(_C.__file__).parent


def _load_library(path: Path) -> None:
    if not path.is_file():
        raise ImportError(
            f"nvfp4_dsmla: {path.name} was looked for in {path.parent}, beside the compiled module "
            f"_C, and is not there. {_REBUILD}"
        )
    mapped = _mapped_copies(path.name)
    # A second copy would register the ops again, and end the process for that. The same copy may be
    # there by a reload of this package, or by a program that loads it first. What is mapped is told
    # without the links that led to it.
    if path.resolve() not in mapped and (
        mapped or (path.name == _LIBRARY and hasattr(torch.ops.nvfp4_dsmla, _AN_OP))
    ):
        raise RuntimeError(
            f"nvfp4_dsmla: the ops are registered already, by "
            f"{', '.join(map(str, mapped)) or 'a library of another name'}; loading {path} as well "
            f"would end the process. Keep one copy of the library: uninstall the other package, "
            f"or load no copy of your own before the import."
        )
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise ImportError(
            f"nvfp4_dsmla: {path} is there but cannot be loaded into torch {torch.__version__} "
            f"(2.10 or newer is needed): {error}. {_REBUILD}"
        ) from error
    # By their names, as code that AOTInductor made looks for them; torch loads them without.
    ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    _loaded.append(path)


def _mapped_copies(name: str) -> list[Path]:
    """The files called `name` that are loaded in this process; a replaced one ends in (deleted)."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape")
    files = (line.split(maxsplit=5)[5:] for line in lines.splitlines())
    paths = (Path(file[0]) for file in files if file)
    return list(dict.fromkeys(p for p in paths if p.name.removesuffix(" (deleted)") == name))
