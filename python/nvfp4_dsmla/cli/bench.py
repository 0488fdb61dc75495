"""The way to the benchmarks, which lie in a checkout and not in an installed package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nvfp4_dsmla


def checkout() -> Path | None:
    """The checkout this package runs from, or that the current folder is; None for neither."""
    candidates = (Path(nvfp4_dsmla.__file__).resolve().parents[2], Path.cwd())
    return next((c for c in candidates if (c / "benchmarks" / "__main__.py").is_file()), None)


def run(arguments: list[str]) -> int:
    """Runs the benchmarks' own command line; its exit status.

    Raises:
        ValueError: there is no checkout.
    """
    root = checkout()
    if root is None:
        raise ValueError(
            "bench: wanted a checkout of the project, whose benchmarks/ this command runs, got an "
            f"installed package in {Path(nvfp4_dsmla.__file__).parent} and none in {Path.cwd()}"
        )
    return subprocess.run([sys.executable, "-m", "benchmarks", *arguments], cwd=root).returncode
