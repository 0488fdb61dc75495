"""What the marks of `nvfp4_dsmla.compile` do to a step that is compiled, and what they refuse."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import nvfp4_dsmla
from compare import assert_latents_equal, assert_records_equal
from decode_cases import random_tokens
from nvfp4_dsmla.layout import HEAD_DIM, NOPE_DIM

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")

LAYERS, BLOCKS, BLOCK_SIZE = 3, 29, 5


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def step(pool: Tensor, x: Tensor, block_table: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Each request writes its newest token and attends to its newest three."""
    selected = lengths[:, None] - 1 - torch.arange(3, device=x.device)
    slots = nvfp4_dsmla.slot_mapping_from_block_table(
        block_table=block_table, positions=selected, block_size=BLOCK_SIZE
    )
    nvfp4_dsmla.concat_and_cache_nvfp4_ds_mla(
        kv_c=x[:, :NOPE_DIM],
        k_pe=x[:, NOPE_DIM:],
        kv_cache=pool,
        slot_mapping=slots[:, 0],
        layer=1,
    )
    return nvfp4_dsmla.sparse_mla_decode(
        q=x[:, None, None], kv_cache=pool, indices=slots[:, None].int(), softmax_scale=0.1, layer=1
    )


def random_pool(generator: torch.Generator, device: torch.device) -> Tensor:
    records = random_tokens(LAYERS * BLOCKS * BLOCK_SIZE, generator)
    return records.view(LAYERS, BLOCKS, BLOCK_SIZE, -1).to(device)


def random_step(
    batch: int, max_blocks: int, generator: torch.Generator, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """The first request is padding."""
    x = torch.randn(batch, HEAD_DIM, generator=generator).to(device, torch.bfloat16)
    order = torch.randperm(BLOCKS, generator=generator)[: batch * max_blocks]
    table = order.int().view(batch, max_blocks)
    lengths = torch.randint(max_blocks * BLOCK_SIZE + 1, (batch,), generator=generator)
    table[:1], lengths[:1] = -1, 0
    return x, table.to(device), lengths.to(device)


def check_steps(
    compiled: Callable[..., Any],
    sizes: list[tuple[int, int]],
    generator: torch.Generator,
    device: torch.device,
    mark: Callable[[Tensor, Tensor, Tensor, Tensor], None],
) -> None:
    """Steps of (batch, max_blocks), the first of them marked, are as eager code's."""
    pool = random_pool(generator, device)
    twin = pool.clone()
    for number, (batch, max_blocks) in enumerate(sizes):
        inputs = random_step(batch, max_blocks, generator, device)
        if number == 0:
            mark(twin, *inputs)
        got, want = compiled(twin, *inputs), step(pool, *inputs)
        for got_part, want_part in zip(got, want, strict=True):
            assert_latents_equal(got_part, want_part)
        assert_records_equal(twin, pool)


def mark_batch_and_width(pool: Tensor, x: Tensor, block_table: Tensor, lengths: Tensor) -> None:
    nvfp4_dsmla.mark_static_pools(pool)
    nvfp4_dsmla.mark_varying_sizes(
        batch=[(x, 0), (block_table, 0), (lengths, 0)], max_blocks=[(block_table, 1)]
    )


@pytest.mark.parametrize("dynamic", [None, True])
def test_marked_once_compiled_once(
    dynamic: bool | None, device: torch.device, generator: torch.Generator
) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, backend=counter, dynamic=dynamic, fullgraph=True)
    sizes = [(3, 4), (5, 2), (2, 9), (4, 4), (3, 4)]
    check_steps(compiled, sizes, generator, device, mark_batch_and_width)
    assert counter.frame_count == 1


def test_dimensions_may_be_counted_from_the_end(
    device: torch.device, generator: torch.Generator
) -> None:
    def mark(_: Tensor, x: Tensor, block_table: Tensor, lengths: Tensor) -> None:
        nvfp4_dsmla.mark_varying_sizes(
            batch=[(x, -2), (block_table, -2), (lengths, -1)], max_blocks=[(block_table, -1)]
        )

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, backend=counter, fullgraph=True)
    check_steps(compiled, [(3, 4), (5, 2)], generator, device, mark)
    assert counter.frame_count == 1


def test_unmarked_compiles_again(device: torch.device, generator: torch.Generator) -> None:
    """Else the tests above would show nothing."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, backend=counter, fullgraph=True)
    check_steps(compiled, [(3, 4), (5, 2)], generator, device, lambda *_: None)
    assert counter.frame_count == 2


def test_a_static_pool_has_no_size_in_the_graph(
    device: torch.device, generator: torch.Generator
) -> None:
    pool, other = random_pool(generator, device), random_pool(generator, device)
    inputs = random_step(3, 4, generator, device)
    sizes: list[bool] = []

    def backend(graph: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        tensors = (node.meta.get("example_value") for node in graph.graph.nodes)
        pools = [t for t in tensors if isinstance(t, Tensor) and t.dtype == torch.uint8]
        sizes.append(all(isinstance(size, int) for size in pools[0].shape))
        return graph

    compiled = torch.compile(step, backend=backend, dynamic=True, fullgraph=True)
    nvfp4_dsmla.mark_static_pools(pool)
    compiled(pool, *inputs)
    torch._dynamo.reset()
    compiled(other, *inputs)
    assert sizes == [True, False]


WITH_CACHES = """
import torch
from torch._dynamo.utils import counters

import nvfp4_dsmla

def write(pool, x, slots):
    nvfp4_dsmla.concat_and_cache_nvfp4_ds_mla(
        kv_c=x[:, :512], k_pe=x[:, 512:], kv_cache=pool, slot_mapping=slots
    )

for marked in (False, True):
    pool = nvfp4_dsmla.allocate_kv_cache(num_blocks=2, block_size=4)
    if marked:
        nvfp4_dsmla.mark_static_pools(pool)
    torch._dynamo.reset()
    torch.compile(write, fullgraph=True)(pool, torch.randn(3, 576), torch.arange(3))
print(*(counters["aot_autograd"][f"autograd_cache_{what}"] for what in ("hit", "miss")))
"""


def test_compile_caches_tell_a_static_pool_from_another(tmp_path: Path) -> None:
    """Not before PyTorch 2.13: there the second call finds the first one's graph."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    del environment["TORCHINDUCTOR_FORCE_DISABLE_CACHES"]
    command = [sys.executable, "-c", WITH_CACHES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == (["0", "2"] if torch.__version__ >= "2.13" else ["1", "1"])


def test_unbacked_sizes_may_be_0_and_1_and_equal(
    device: torch.device, generator: torch.Generator
) -> None:
    """PyTorch's own mark, which makes one graph of all: no op and no helper stands in the way."""

    def mark(_: Tensor, x: Tensor, block_table: Tensor, lengths: Tensor) -> None:
        for tensor in (x, block_table, lengths):
            torch._dynamo.decorators.mark_unbacked(tensor, 0)
        torch._dynamo.decorators.mark_unbacked(block_table, 1)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, backend=counter, fullgraph=True)
    sizes = [(3, 3), (1, 1), (0, 2), (4, 7)]
    check_steps(compiled, sizes, generator, device, mark)
    assert counter.frame_count == 1


def test_what_cannot_vary_is_refused() -> None:
    a, b = torch.zeros(3, 7), torch.zeros(4, 3)
    mark = nvfp4_dsmla.mark_varying_sizes
    with pytest.raises(ValueError, match=r"^batch: wanted dimensions of one size, got \[3, 4\]$"):
        mark(batch=[(a, 0), (b, 0)])
    with pytest.raises(ValueError, match=r"^batch: wanted dimensions of one size, got \[\]$"):
        mark(batch=[])
    with pytest.raises(ValueError, match=r"^n: wanted a size of at least 2 in .* 0 and 1, got 1$"):
        mark(n=[(torch.zeros(1), 0)])
    with pytest.raises(ValueError, match=r"^n: wanted a size in .* that batch does not .* got 3$"):
        mark(batch=[(a, 0)], n=[(b, 1)])
    assert not hasattr(a, "_dynamo_dynamic_indices")  # refused before anything is marked
