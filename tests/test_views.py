"""Views as written arguments of a traced region: what PyTorch would move is refused, the rest runs.

Inductor writes to `pool[layer]` at the start of the pool where the offset is symbolic, and says
nothing (pytorch issue 198068).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import nvfp4_dsmla
from compare import assert_latents_equal, assert_records_equal
from nvfp4_dsmla.layout import HEAD_DIM, NOPE_DIM, RECORD_BYTES
from refusals import CP_GATHER, FUSED, WRITE, good_arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")

LAYERS, BLOCKS, BLOCK_SIZE, TOKENS = 5, 13, 3, 7


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make_pool(device: torch.device, blocks: int = BLOCKS) -> Tensor:
    return torch.zeros(LAYERS, blocks, BLOCK_SIZE, RECORD_BYTES, dtype=torch.uint8, device=device)


def make_tokens(generator: torch.Generator, device: torch.device) -> tuple[Tensor, Tensor]:
    x = torch.randn(TOKENS, HEAD_DIM, generator=generator).to(device)
    return x, torch.randperm(BLOCKS * BLOCK_SIZE, generator=generator)[:TOKENS].to(device)


def write(cache: Tensor, x: Tensor, slots: Tensor) -> None:
    nvfp4_dsmla.concat_and_cache_nvfp4_ds_mla(
        kv_c=x[:, :NOPE_DIM], k_pe=x[:, NOPE_DIM:], kv_cache=cache, slot_mapping=slots
    )


def write_layer(pool: Tensor, layer: int, x: Tensor, slots: Tensor) -> None:
    write(pool[layer], x, slots)


REFUSED = r"kv_cache: wanted a whole tensor, .* 198068\)\. Pass the whole pool, and layer="


# Whatever the backend: it is said while the region is traced, and nothing has been written.
def compile_(function: Callable[..., Any], *, dynamic: bool | None) -> Callable[..., Any]:
    return torch.compile(function, backend="eager", fullgraph=True, dynamic=dynamic)


def test_a_view_at_a_symbolic_offset_is_refused(
    device: torch.device, generator: torch.Generator
) -> None:
    pool = make_pool(device)
    with pytest.raises(RuntimeError, match=REFUSED):
        compile_(write_layer, dynamic=True)(pool, 2, *make_tokens(generator, device))
    assert not pool.any()


def test_it_is_refused_when_the_layer_becomes_dynamic(
    device: torch.device, generator: torch.Generator
) -> None:
    pool = make_pool(device)
    compiled = compile_(write_layer, dynamic=None)
    tokens = make_tokens(generator, device)
    compiled(pool, 2, *tokens)
    with pytest.raises(RuntimeError, match=REFUSED):
        compiled(pool, 3, *tokens)
    assert pool.flatten(1).any(1).tolist() == [False, False, True, False, False]


class WriteLayer(torch.nn.Module):
    def forward(self, pool: Tensor, x: Tensor, slots: Tensor) -> None:
        write_layer(pool, 2, x, slots)


@pytest.mark.parametrize("strict", [False, True], ids=["non_strict", "strict"])
def test_export_refuses_it(device: torch.device, strict: bool, generator: torch.Generator) -> None:
    blocks = {1: torch.export.Dim("blocks", min=2)}
    with torch.no_grad(), pytest.raises((ValueError, RuntimeError), match=REFUSED):
        torch.export.export(
            WriteLayer(),
            (make_pool(device), *make_tokens(generator, device)),
            dynamic_shapes={"pool": blocks, "x": None, "slots": None},
            strict=strict,
        )


@pytest.mark.parametrize(
    ("op", "name"), [(WRITE, "kv_cache"), (FUSED, "kv_cache"), (CP_GATHER, "dst")]
)
def test_every_op_that_writes_refuses_it(device: torch.device, op: str, name: str) -> None:
    arguments = good_arguments(op, device)
    stacked = torch.stack([arguments.pop(name)] * 3)
    del arguments["layer"]

    def call(stacked: Tensor, index: int) -> None:
        getattr(nvfp4_dsmla, op)(**arguments, **{name: stacked[index]})

    with pytest.raises(RuntimeError, match=f"{name}: wanted a whole tensor, "):
        compile_(call, dynamic=True)(stacked, 2)


# ---- what is right stays so, and costs no compile more -----------------------------------------


def inductor(function: Callable[..., Any], dynamic: bool | None) -> tuple[Any, Any]:
    counter = CompileCounterWithBackend("inductor")
    return torch.compile(function, backend=counter, fullgraph=True, dynamic=dynamic), counter


@pytest.mark.slow
def test_a_view_at_a_fixed_offset_is_written(
    device: torch.device, generator: torch.Generator
) -> None:
    pool, want = make_pool(device), make_pool(device)
    tokens = make_tokens(generator, device)
    compiled, counter = inductor(write_layer, dynamic=False)
    for layer in (2, 3):
        compiled(pool, layer, *tokens)
        write_layer(want, layer, *tokens)
    assert_records_equal(pool, want)
    assert counter.frame_count == 2


@pytest.mark.slow
@pytest.mark.parametrize(("dynamic", "compiles"), [(True, 1), (None, 2)])
def test_layers_as_inputs_are_written(
    device: torch.device, dynamic: bool | None, compiles: int, generator: torch.Generator
) -> None:
    """They are views of one pool too, made outside."""

    def write_all(caches: list[Tensor], x: Tensor, slots: Tensor) -> None:
        for number, cache in enumerate(caches):
            write(cache, x + number, slots)

    compiled, counter = inductor(write_all, dynamic)
    for blocks in (BLOCKS, BLOCKS + 4, BLOCKS):
        pool, want = make_pool(device, blocks), make_pool(device, blocks)
        tokens = make_tokens(generator, device)
        compiled(list(pool[1:4]), *tokens)
        write_all(list(want[1:4]), *tokens)
        assert_records_equal(pool, want)
    assert counter.frame_count == compiles


@pytest.mark.slow
def test_a_slice_of_a_workspace_is_written(
    device: torch.device, generator: torch.Generator
) -> None:
    def gather(pool: Tensor, table: Tensor, starts: Tensor, x: Tensor, first: int) -> Tensor:
        workspace = torch.zeros_like(x)
        nvfp4_dsmla.cp_gather_and_upconvert_nvfp4_kv_cache(
            src_cache=pool,
            dst=workspace[first:],
            block_table=table,
            workspace_starts=starts,
            batch_size=1,
        )
        return workspace

    x, slots = make_tokens(generator, device)
    pool = make_pool(device)[0]
    write(pool, x, slots)
    table = torch.arange(BLOCKS, dtype=torch.int32, device=device)[None]
    compiled, counter = inductor(gather, dynamic=True)
    for first in (4, 2):
        arguments = pool, table, table[0, :1], x, first
        assert_latents_equal(compiled(*arguments), gather(*arguments))
    assert counter.frame_count == 1
