"""What an op costs the host in a package of AOTInductor: called through PyTorch, and directly.

The op is a write of one token that the slot mapping leaves out, so nearly all of it is the call.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import nvfp4_dsmla
from benchmarks.comparison import HostCost
from benchmarks.host import LAYERS, OP, cost_of_one
from benchmarks.timing import time_loops
from nvfp4_dsmla.layout import HEAD_DIM, NOPE_DIM, ROPE_DIM

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

DIRECT = "nvfp4_dsmla, C entry point"


class Writes(torch.nn.Module):
    """One write after another."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, kv_c: Tensor, k_pe: Tensor, pool: Tensor, slots: Tensor) -> Tensor:
        write = torch.ops.nvfp4_dsmla.concat_and_cache_nvfp4_ds_mla.default
        for layer in range(self.count):
            write(kv_c, k_pe, pool, slots, layer)
        return kv_c[:1]


def run(device: torch.device) -> Iterator[HostCost]:
    """Measures both ways, in turns; each needs two packages, which take a while to compile."""
    pool = nvfp4_dsmla.allocate_kv_cache(
        num_layers=LAYERS, num_blocks=4, block_size=64, device=device
    )
    token = torch.zeros(1, HEAD_DIM, dtype=torch.bfloat16, device=device)
    kv_c, k_pe = (part.contiguous() for part in token.split([NOPE_DIM, ROPE_DIM], dim=1))
    arguments = (kv_c, k_pe, pool, torch.full((1,), -1, device=device))
    ways: dict[str, dict[str, Any]] = {OP: {}, DIRECT: nvfp4_dsmla.aoti.c_shims()}
    with torch.no_grad():
        timings = time_loops(
            {
                f"{subject}, {count}": partial(_package(count, arguments, options), *arguments)
                for subject, options in ways.items()
                for count in (1, LAYERS)
            }
        )
    for subject in ways:
        times = {count: timings[f"{subject}, {count}"] for count in (1, LAYERS)}
        timing = cost_of_one(times.__getitem__)
        yield HostCost("write", subject, "packaged", 1, device.type, timing)


def _package(
    count: int, arguments: tuple[Tensor, ...], options: dict[str, Any]
) -> Callable[..., Tensor]:
    exported = torch.export.export(Writes(count), arguments)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "writes.pt2")
        torch._inductor.aoti_compile_and_package(
            exported, package_path=path, inductor_configs=options
        )
        package: Callable[..., Tensor] = torch._inductor.aoti_load_package(path)
    return package
