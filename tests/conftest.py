"""Devices and seeds: a test of an op takes `device`, so the GPU's tests are the CPU's tests.

NVFP4_DSMLA_REQUIRE_CUDA=1 makes a test that would be skipped for want of a GPU fail instead.
"""

from __future__ import annotations

import logging
import os
import zlib

# Read when torch is imported: a cached graph of an older build would hide a changed op.
os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"

import pytest
import torch
from hypothesis import settings

import nvfp4_dsmla

# What the compiler writes about itself, hundreds of lines that pytest shows after a failure.
logging.getLogger("torch.__trace").propagate = False

settings.register_profile("project", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("project")


def why_no_cuda() -> str | None:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if len(nvfp4_dsmla.loaded_libraries()) < 2:
        return "nvfp4_dsmla is built without its CUDA library"
    return None


# Of the session, so that hypothesis may use it too.
@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cpu":
        return torch.device("cpu")
    why = why_no_cuda()
    if why is not None and os.environ.get("NVFP4_DSMLA_REQUIRE_CUDA") == "1":
        pytest.fail(f"NVFP4_DSMLA_REQUIRE_CUDA is 1, but {why}")
    if why is not None:
        pytest.skip(why)
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def generator(request: pytest.FixtureRequest) -> torch.Generator:
    """Seeded by the test's name: one test has the same data on every device and in every run."""
    name = request.node.originalname
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))
