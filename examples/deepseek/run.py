"""Decodes batches of changing composition from the packed cache, beside the same model over bf16.

    python examples/deepseek/run.py
    python examples/deepseek/run.py --steps 200 --batch 12

One compilation serves every step, however many requests it has. The weights are random: what is
compared is what the cache does to the logits, and no text. Needs `pip install rich`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

if not __package__:  # run as a script: make this folder the package that its modules know
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch._dynamo.utils import counters

from deepseek.batch import Pages, Traffic
from deepseek.cache import BFloat16Cache, NvFp4Cache
from deepseek.config import Config
from deepseek.layers import Step
from deepseek.model import Decoder

BLOCK_SIZE = 16
MAX_BLOCKS = 16
COLUMNS = ("step", "requests", "tokens in the cache", "compilations", "ms", "KL to bf16, nats")


def main() -> int:
    """Runs the steps and prints what each did."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=24, help="default: 24")
    # One would be compiled apart, and as many as blocks a request would be taken for that number.
    parser.add_argument(
        "--batch",
        type=int,
        choices=range(2, MAX_BLOCKS),
        metavar="BATCH",
        default=6,
        help=f"most requests, 2 to {MAX_BLOCKS - 1}; default: 6",
    )
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    num_blocks = options.batch * MAX_BLOCKS
    packed, plain = (
        Decoder(Config(), cache, num_blocks=num_blocks, block_size=BLOCK_SIZE, device=device)
        for cache in (NvFp4Cache, BFloat16Cache)
    )
    traffic = Traffic(
        Pages(num_blocks=num_blocks, block_size=BLOCK_SIZE),
        batch=options.batch,
        max_blocks=MAX_BLOCKS,
        vocab=packed.config.vocab,
    )
    compiled = torch.compile(packed, fullgraph=True)
    table = Table(*COLUMNS, title=f"a decoder of {packed.config.num_layers} layers on {device}")
    for column in table.columns:
        column.justify = "right"
    with torch.no_grad():
        for number in range(options.steps):
            step = traffic.next_step(device=device)
            rows = max(2, len(traffic.requests))  # a batch of one would be compiled apart
            step = Step(*(tensor[:rows] for tensor in step))
            if number == 0:
                step.mark_varying()
            logits, milliseconds = timed(compiled, step)
            table.add_row(
                str(number),
                str(len(traffic.requests)),
                str(int(step.seq_lens.sum())),
                str(counters["stats"]["unique_graphs"]),
                f"{milliseconds:,.1f}",
                f"{divergence(logits, plain(*step), step):.4f}",
            )
    console = Console()
    console.print(table)
    sizes = [cache.pool[0, 0, 0].nbytes for cache in (packed.cache, plain.cache)]
    console.print(f"A token takes {sizes[0]} bytes a layer, and {sizes[1]} in bf16.")
    return 0


def timed(function: Callable[..., Tensor], step: Step) -> tuple[Tensor, float]:
    """The logits, and the milliseconds until they were there."""
    start = time.perf_counter()
    logits = function(*step)
    if logits.is_cuda:
        torch.cuda.synchronize()
    return logits, (time.perf_counter() - start) * 1e3


def divergence(got: Tensor, want: Tensor, step: Step) -> float:
    """Kullback-Leibler divergence of the next token's probabilities, the mean of the requests'."""
    real = step.slot_mapping >= 0
    log_got, log_want = (logits[real].log_softmax(-1) for logits in (got, want))
    return float((log_want.exp() * (log_want - log_got)).sum(-1).mean())


if __name__ == "__main__":
    sys.exit(main())
