"""A whole decode step of examples/deepseek, over the packed cache and over one in bfloat16.

Eager, compiled, and as a CUDA graph, the compiled step captured by hand. Over the packed cache also
with norms and rotations fused into the writes, and by reduce-overhead. A compilation of its own for
each of the three, and for each batch, is where the time of this goes.

The two caches differ in the latents' write and in attention; the rest of the step is the same. On a
GPU the sizes are those of DeepSeek-V3.2's layers on one of eight tensor-parallel ranks, with dense
MLPs.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.comparison import StepTime
from benchmarks.timing import count_launches, time_calls
from nvfp4_dsmla.inductor import FusionPass
from nvfp4_dsmla.layout import HEAD_DIM, NOPE_DIM

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from deepseek.batch import Pages, Traffic
from deepseek.cache import BFloat16Cache, NvFp4Cache
from deepseek.config import Config
from deepseek.model import Decoder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from benchmarks.timing import Call
    from deepseek.layers import Step

    StepFunction = Callable[..., Tensor]

CACHES: dict[str, type[NvFp4Cache | BFloat16Cache]] = {
    "nvfp4_ds_mla": NvFp4Cache,
    "bfloat16": BFloat16Cache,
}
EAGER = "eager"
COMPILED = "compiled"
FUSED = "compiled, fused"
GRAPH = "compiled, captured"
FUSED_GRAPH = "compiled, fused, captured"
REDUCE_OVERHEAD = "reduce-overhead"

BLOCK_SIZE = 64
STEPS = 8
RANK = Config(
    num_layers=2,
    hidden=7168,
    num_heads=16,
    q_lora_rank=1536,
    qk_nope_head_dim=128,
    v_head_dim=128,
    index_heads=64,
    topk=2048,
    intermediate=2304,
    vocab=16160,
    max_positions=8192,
)


@dataclass(frozen=True)
class StepCase:
    """A model, a batch, and the longest context of its requests, in tokens."""

    config: Config
    batch: int
    context: int


def cases(device: torch.device, *, quick: bool) -> list[StepCase]:
    """What `step` measures."""
    if device.type == "cpu":
        return [StepCase(Config(), batch=4, context=256)]
    return [StepCase(RANK, batch, context=8192) for batch in ((64,) if quick else (8, 64))]


def run(device: torch.device, *, quick: bool) -> Iterator[StepTime]:
    """Measures every case; each cache's times are there when they are measured."""
    for case in cases(device, quick=quick):
        for name in CACHES:
            yield from measure(case, name, device, seconds=0.3 if quick else 1.0)


def measure(
    case: StepCase, cache: str, device: torch.device, *, seconds: float
) -> Iterator[StepTime]:
    """All ways to run the steps of one cache, taking turns, from the call to its end."""
    torch.manual_seed(0)
    decoder = filled_decoder(case, cache, device)
    steps = random_steps(case, device)
    on_gpu = device.type == "cuda"
    with torch.no_grad():
        functions = ways(decoder, steps[0])
        check(case, functions, steps[0])
        calls: dict[str, list[Call]] = {
            how: [lambda step=step, function=function: function(*step) for step in steps]  # type: ignore[misc]
            for how, function in functions.items()
        }
        timings = time_calls(
            calls, finish=torch.cuda.synchronize if on_gpu else None, seconds=seconds
        )
        launches = {how: count_launches(c[0]) if on_gpu else None for how, c in calls.items()}
    of_case = (case.config.num_layers, case.batch, case.context, device.type)
    for how, timing in timings.items():
        yield StepTime(cache, how, *of_case, timing, launches[how])


def filled_decoder(case: StepCase, cache: str, device: torch.device) -> Decoder:
    """A model whose caches are full of random tokens."""
    blocks = case.batch * (case.context // BLOCK_SIZE)
    decoder = Decoder(
        case.config, CACHES[cache], num_blocks=blocks, block_size=BLOCK_SIZE, device=device
    )
    decoder.keys.pool.normal_()
    slots = torch.arange(blocks * BLOCK_SIZE, device=device)
    latents = torch.randn(len(slots), HEAD_DIM, dtype=torch.bfloat16, device=device)
    for layer in range(case.config.num_layers):
        decoder.cache.write(latents[:, :NOPE_DIM], latents[:, NOPE_DIM:], slots, layer)
    return decoder


def random_steps(case: StepCase, device: torch.device) -> list[Step]:
    """Steps that follow one another, of requests up to the longest context."""
    max_blocks = case.context // BLOCK_SIZE
    traffic = Traffic(
        Pages(num_blocks=case.batch * max_blocks, block_size=BLOCK_SIZE),
        batch=case.batch,
        max_blocks=max_blocks,
        vocab=case.config.vocab,
        context=case.context - STEPS,
    )
    return [traffic.next_step(device=device) for _ in range(STEPS)]


def ways(decoder: Decoder, step: Step) -> dict[str, StepFunction]:
    """The step's function, each way; those with graphs on a GPU alone."""
    torch.compiler.reset()
    compiled: dict[str, StepFunction] = {
        COMPILED: torch.compile(decoder, dynamic=False, fullgraph=True)
    }
    if isinstance(decoder.cache, NvFp4Cache):
        compiled[FUSED] = torch.compile(
            decoder,
            dynamic=False,
            fullgraph=True,
            options={"joint_custom_pre_pass": FusionPass()},
        )
    if not step.tokens.is_cuda:
        return {EAGER: decoder, **compiled}
    graphs = {
        name: captured(compiled[how], step)
        for name, how in ((GRAPH, COMPILED), (FUSED_GRAPH, FUSED))
        if how in compiled
    }
    if isinstance(decoder.cache, NvFp4Cache):
        graphs[REDUCE_OVERHEAD] = torch.compile(
            decoder, mode="reduce-overhead", dynamic=False, fullgraph=True
        )
    return {EAGER: decoder, **compiled, **graphs}


def captured(function: StepFunction, step: Step) -> StepFunction:
    """A CUDA graph of the function, and the copies into the tensors that it reads."""
    inputs = [tensor.clone() for tensor in step]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function(*inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = function(*inputs)

    def replay(*step: Tensor) -> Tensor:
        for mine, new in zip(inputs, step, strict=True):
            mine.copy_(new)
        graph.replay()
        return logits

    return replay


def check(case: StepCase, functions: dict[str, StepFunction], step: Step) -> None:
    """All ways give the same logits, to what a token makes of them that rounding selects elsewhere.

    Such a token moves them by up to half of their norm; unrelated logits are 1.4 of it apart.

    Raises:
        AssertionError: they do not.
    """
    real = step.slot_mapping >= 0
    want = functions[EAGER](*step)[real]
    for how, function in functions.items():
        for _ in range(3):  # the third is the first that reduce-overhead replays only
            got = function(*step)[real].clone()
        error = float((got - want).norm() / want.norm())
        if not error < 1:
            raise AssertionError(
                f"{case}: {how} and {EAGER} differ by {error:g} of the norm of the logits; its "
                "time means nothing"
            )
