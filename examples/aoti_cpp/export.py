"""Exports a decode step of the decoder in examples/deepseek and packages it for decode.cpp.

    python examples/aoti_cpp/export.py build/aoti_cpp [--device cuda] [--steps 1000]

The folder then has model.pt2, which takes any batch, any width of the block table and caches of any
number of blocks; sizes.txt, of the run that decode.cpp is to do; and latents.bin, the cache's bytes
after the same run here, which it has to arrive at.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

if not __package__:  # run as a script: make this folder's parent a place of packages
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

import nvfp4_dsmla
from deepseek.cache import NvFp4Cache
from deepseek.config import Config
from deepseek.model import Decoder

CONFIG = Config(num_layers=2, hidden=128, num_heads=4, index_heads=2, topk=16, vocab=256)


@dataclass(frozen=True)
class Run:
    """Requests that decode token by token, in steps that each leave some of them out."""

    steps: int = 40
    requests: int = 6
    block_size: int = 16

    @property
    def blocks_a_request(self) -> int:
        """Enough for a request that takes part in every step."""
        return self.steps // self.block_size + 1

    def caches(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Empty: the latents, and the indexer's keys, which need a block more."""
        blocks = self.requests * self.blocks_a_request
        latents = nvfp4_dsmla.allocate_kv_cache(
            num_layers=CONFIG.num_layers,
            num_blocks=blocks,
            block_size=self.block_size,
            device=device,
        )
        shape = (CONFIG.num_layers, blocks + 1, self.block_size, CONFIG.index_head_dim)
        return latents, torch.zeros(shape, dtype=torch.bfloat16, device=device)

    def inputs(
        self, step: int, tokens: list[list[int]], device: torch.device
    ) -> tuple[list[int], list[Tensor]]:
        """Who takes part in a step, and the step's tensors. A request's blocks are its own."""
        active = [r for r in range(self.requests) if r == 0 or step // r % 3 != 2]
        positions = [len(tokens[r]) - 1 for r in active]
        width = max(positions) // self.block_size + 1
        table = [[r * self.blocks_a_request + b for b in range(width)] for r in active]
        first_slot = self.blocks_a_request * self.block_size
        columns = [
            torch.tensor([[tokens[r][-1]] for r in active]),
            torch.tensor([[p] for p in positions]),
            torch.tensor([[r * first_slot + p] for r, p in zip(active, positions, strict=True)]),
            torch.tensor(table, dtype=torch.int32),
            torch.tensor([p + 1 for p in positions], dtype=torch.int32),
        ]
        return active, [column.to(device) for column in columns]


class DecodeStep(torch.nn.Module):
    """The decoder with its caches as arguments, so that their sizes may be dynamic."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(
        self,
        latents: Tensor,
        keys: Tensor,
        tokens: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
    ) -> Tensor:
        caches = {"cache.pool": latents, "keys.pool": keys}
        step = (tokens, positions, slot_mapping, block_table, seq_lens)
        logits: Tensor = torch.func.functional_call(self.decoder, caches, step)
        return logits


def make_step(device: torch.device) -> DecodeStep:
    """The decoder of this example; its own caches, of two blocks, are not used."""
    decoder = Decoder(CONFIG, NvFp4Cache, num_blocks=2, block_size=16, device=device)
    return DecodeStep(decoder)


def package(step: DecodeStep, path: Path, device: torch.device) -> None:
    """Exports the step with every size dynamic that varies, and compiles it."""
    # No two sizes are equal: export would take them for one.
    small = Run(requests=3, steps=70)
    _, columns = small.inputs(1, [[0] * 18, [1] * 70, [2] * 70], device)
    batch, width = torch.export.Dim("batch", max=1024), torch.export.Dim("width", max=4096)
    blocks = torch.export.Dim("blocks", max=2**20)
    of_batch = {0: batch}
    with torch.no_grad():
        exported = torch.export.export(
            step,
            (*small.caches(device), *columns),
            dynamic_shapes={
                "latents": {1: blocks},
                "keys": {1: blocks + 1},
                "tokens": of_batch,
                "positions": of_batch,
                "slot_mapping": of_batch,
                "block_table": {0: batch, 1: width},
                "seq_lens": of_batch,
            },
        )
    torch._inductor.aoti_compile_and_package(
        exported, package_path=str(path), inductor_configs=nvfp4_dsmla.aoti.c_shims()
    )


def main(folder: Path, device: torch.device, steps: int) -> None:
    """Writes the three files, and prints what decode.cpp is to print."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.pt2"
    package(make_step(device), path, device)
    model = torch._inductor.aoti_load_package(str(path))

    run = Run(steps=steps)
    latents, keys = run.caches(device)
    tokens = [[request] for request in range(run.requests)]
    for step in range(run.steps):
        active, columns = run.inputs(step, tokens, device)
        logits = model(latents, keys, *columns)
        for request, token in zip(active, logits[:, -1].argmax(-1).tolist(), strict=True):
            tokens[request].append(token)
    for request, text in enumerate(tokens):
        print(f"request {request}:", *text)

    latents.cpu().numpy().tofile(folder / "latents.bin")
    sizes = (run.steps, run.requests, run.blocks_a_request, run.block_size)
    of_caches = (CONFIG.num_layers, CONFIG.index_head_dim)
    (folder / "sizes.txt").write_text(" ".join(map(str, (*sizes, *of_caches))) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--steps", type=int, default=40)
    main(**vars(parser.parse_args()))
