"""Sparse decode in traced regions and CUDA graphs: as test_compile.py does it for the other ops.

A step writes its tokens, attends to two sets of slots and merges. Every output comes from an op, so
compiled code gives eager code's bits. No two sizes of a call are equal, and none is 0 or 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import ReinplaceCounters
from torch._inductor.utils import run_and_get_code

import nvfp4_dsmla
from compare import assert_latents_equal, assert_records_equal
from decode_cases import random_tokens
from nvfp4_dsmla.layout import HEAD_DIM, NOPE_DIM, RECORD_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [
    pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled"),
    pytest.mark.slow,
]

LAYERS = 11
BLOCK_SIZE = 16
HEADS = 9


class Sizes(NamedTuple):
    batch: int
    topk: int
    blocks: int
    layer: int


VARIED = [Sizes(5, 70, 7, 3), Sizes(6, 33, 8, 4), Sizes(20, 300, 10, 3), Sizes(5, 70, 7, 3)]
MODES = [
    pytest.param(False, VARIED[:1] * 2, 1, id="static"),
    pytest.param(True, VARIED, 1, id="dynamic"),
    pytest.param(None, VARIED, 2, id="automatic"),
]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    ReinplaceCounters.clear()
    yield
    torch._dynamo.reset()


def random_arguments(
    generator: torch.Generator, device: torch.device, sizes: Sizes
) -> dict[str, Any]:
    batch, topk, blocks, layer = sizes
    capacity = blocks * BLOCK_SIZE
    pool = random_tokens(LAYERS * capacity, generator)
    q = torch.randn(batch, 2, HEADS, HEAD_DIM, generator=generator)
    return {
        "q": q.to(device, torch.bfloat16),
        "x": torch.randn(batch, HEAD_DIM, generator=generator).to(device, torch.bfloat16),
        "pool": pool.view(LAYERS, blocks, BLOCK_SIZE, RECORD_BYTES).to(device),
        "slots": torch.randperm(capacity, generator=generator)[:batch].to(device),
        "indices": torch.randint(
            -9, capacity, (batch, 2, topk), dtype=torch.int32, generator=generator
        ).to(device),
        "lengths": torch.randint(topk + 1, (batch, 2), dtype=torch.int32, generator=generator).to(
            device
        ),
        "sink": torch.randn(HEADS, generator=generator).to(device),
        "layer": layer,
    }


def step(
    q: Tensor,
    x: Tensor,
    pool: Tensor,
    slots: Tensor,
    indices: Tensor,
    lengths: Tensor,
    sink: Tensor,
    layer: int,
) -> tuple[Tensor, ...]:
    nvfp4_dsmla.concat_and_cache_nvfp4_ds_mla(
        kv_c=x[:, :NOPE_DIM],
        k_pe=x[:, NOPE_DIM:],
        kv_cache=pool,
        slot_mapping=slots,
        layer=layer,
    )

    def attend(topk_length: Tensor | None, attn_sink: Tensor | None) -> tuple[Tensor, Tensor]:
        return nvfp4_dsmla.sparse_mla_decode(
            q=q,
            kv_cache=pool,
            indices=indices,
            softmax_scale=0.05,  # a global float would be an input, and analysed twice
            topk_length=topk_length,
            attn_sink=attn_sink,
            layer=layer,
        )

    a, b, with_sink = attend(lengths, None), attend(None, None), attend(lengths, sink)
    merged = nvfp4_dsmla.merge_attention_states(out_a=a[0], lse_a=a[1], out_b=b[0], lse_b=b[1])
    return (*merged, *with_sink)


def assert_same(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for got_part, want_part in zip(got, want, strict=True):
        assert got_part.stride() == want_part.stride()
        assert_latents_equal(got_part, want_part)


def compare_steps(compiled: Callable[..., Any], calls: list[dict[str, Any]]) -> None:
    for arguments in calls:
        twin = {**arguments, "pool": arguments["pool"].clone()}
        assert_same(compiled(**twin), step(**arguments))
        assert_records_equal(twin["pool"], arguments["pool"])


@pytest.mark.parametrize(("dynamic", "all_sizes", "compiles"), MODES)
def test_compiled_is_as_eager(
    device: torch.device,
    dynamic: bool | None,
    all_sizes: list[Sizes],
    compiles: int,
    generator: torch.Generator,
) -> None:
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(step, backend=counter, dynamic=dynamic, fullgraph=True)
    calls = [random_arguments(generator, device, sizes) for sizes in all_sizes]
    _, codes = run_and_get_code(compare_steps, compiled, calls)
    assert counter.frame_count == compiles
    assert ReinplaceCounters.get_total_missed() == 0
    for code in codes:
        assert code.count("torch.ops.nvfp4_dsmla.sparse_mla_decode.default(") == 3
        assert "clone" not in code


class Step(torch.nn.Module):
    def forward(
        self,
        q: Tensor,
        x: Tensor,
        pool: Tensor,
        slots: Tensor,
        indices: Tensor,
        lengths: Tensor,
        sink: Tensor,
    ) -> tuple[Tensor, ...]:
        return step(q, x, pool, slots, indices, lengths, sink, 3)


def test_exported_with_any_batch_and_topk(device: torch.device, generator: torch.Generator) -> None:
    calls = [random_arguments(generator, device, Sizes(b, k, 7, 3)) for b, k in ((5, 70), (4, 19))]
    for arguments in calls:
        del arguments["layer"]
    batch, topk = torch.export.Dim("batch", max=1000), torch.export.Dim("topk", max=4096)
    of_batch = {0: batch}
    exported = torch.export.export(
        Step(),
        tuple(calls[0].values()),
        dynamic_shapes={
            **dict.fromkeys(("q", "x", "slots", "lengths"), of_batch),
            "indices": {0: batch, 2: topk},
            "pool": None,
            "sink": None,
        },
    )
    module = exported.module()
    for arguments in calls:
        twin = {**arguments, "pool": arguments["pool"].clone()}
        assert_same(module(*twin.values()), step(**arguments, layer=3))
        assert_records_equal(twin["pool"], arguments["pool"])


@pytest.mark.cuda
def test_captured_in_a_cuda_graph(device: torch.device, generator: torch.Generator) -> None:
    if device.type == "cpu":
        pytest.skip("CUDA graphs are CUDA's")
    sizes = Sizes(5, 300, 7, 3)
    arguments = random_arguments(generator, device, sizes)
    step(**arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(**arguments)
    for _ in range(2):
        new = random_arguments(generator, device, sizes)
        for name, value in new.items():
            if isinstance(value, Tensor):
                arguments[name].copy_(value)
        graph.replay()
        assert_same(captured, step(**new))
        assert_records_equal(arguments["pool"], new["pool"])
