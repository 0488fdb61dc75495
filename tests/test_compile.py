"""The ops in traced regions: the same bits as eager code, no copy of the cache, few compiles.

Layer counts, block counts, block sizes and token counts are all different, and none is 0 or 1:
Inductor takes equal sizes for one, and compiles apart for 0 and 1. The arithmetic between the ops
is such that compiled and eager code agree to the bit: matrix products that Inductor leaves to
PyTorch, and single additions in fp32.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import ReinplaceCounters
from torch._inductor.utils import run_and_get_code

import nvfp4_dsmla
from cases import DTYPES, memory_of, noise
from compare import assert_latents_equal, assert_records_equal
from nvfp4_dsmla.layout import HEAD_DIM, NOPE_DIM, RECORD_BYTES, ROPE_DIM

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [
    # What conftest asks for: no cache of an older build's graphs.
    pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled"),
    pytest.mark.slow,
]

LAYERS = 5
BLOCK_SIZE = 3

Arguments = dict[str, Any]

# A copy of the pool in Inductor's code: a kernel with clone or copy in its name, or a call of one.
COPIES = re.compile(r"fused\w*_(?:clone|copy)_|\b(?:clone|copy_)\(|aten\.(?:clone|copy)")


class Sizes(NamedTuple):
    tokens: int
    blocks: int
    layer: int


# The first and the last are alike, so that what was compiled first is met again.
VARIED = [Sizes(7, 13, 2), Sizes(8, 17, 4), Sizes(40, 19, 3), Sizes(7, 13, 2)]
STATIC = [Sizes(7, 13, 2)] * 2

# dynamic= of torch.compile, the sizes of the calls, and how many compiles they may take: one with
# dynamic shapes; without, one for the first sizes, and one that generalises over all others.
MODES = [
    pytest.param(False, STATIC, 1, id="static"),
    pytest.param(True, VARIED, 1, id="dynamic"),
    pytest.param(None, VARIED, 2, id="automatic"),
]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    ReinplaceCounters.clear()
    yield
    torch._dynamo.reset()


def random_pool(generator: torch.Generator, device: torch.device, blocks: int) -> Tensor:
    shape = (LAYERS, blocks, BLOCK_SIZE, RECORD_BYTES)
    pool = noise(LAYERS * blocks * BLOCK_SIZE * RECORD_BYTES, generator, device).view(shape)
    pool[(pool & 0x7F) == 0x7F] = 0x7E  # a NaN would soon be everywhere
    return pool


def random_arguments(
    generator: torch.Generator, device: torch.device, sizes: Sizes, dtype: torch.dtype
) -> Arguments:
    tokens, blocks, layer = sizes
    capacity = blocks * BLOCK_SIZE
    order = torch.randperm(capacity, generator=generator)
    table = torch.randperm(blocks, generator=generator)[: blocks // 2 * 2].view(2, -1)
    half = tokens // 2
    return {
        "x": torch.randn(tokens, HEAD_DIM, generator=generator).to(device, dtype),
        "pool": random_pool(generator, device, blocks),
        "slots": order[:tokens].to(device),
        "read": order.flip(0)[:tokens].to(device),
        "layer": layer,
        "block_table": table.to(device, torch.int32),
        "starts": torch.tensor([0, half], dtype=torch.int32, device=device),
        "dst": torch.full((tokens, HEAD_DIM), torch.nan, dtype=dtype, device=device),
        "weight": (torch.randn(2 * HEAD_DIM, HEAD_DIM, generator=generator) / 32).to(device, dtype),
    }


def write(x: Tensor, pool: Tensor, slots: Tensor, layer: int) -> None:
    nvfp4_dsmla.concat_and_cache_nvfp4_ds_mla(
        kv_c=x[:, :NOPE_DIM],
        k_pe=x[:, NOPE_DIM:],
        kv_cache=pool,
        slot_mapping=slots,
        layer=layer,
    )


def gather(pool: Tensor, slots: Tensor, layer: int, dtype: torch.dtype) -> Tensor:
    return nvfp4_dsmla.gather_and_upconvert_nvfp4_ds_mla(
        kv_cache=pool, slots=slots, dtype=dtype, layer=layer
    )


# ---- programs: each takes what it needs of random_arguments ------------------------------------


def program_write(x: Tensor, pool: Tensor, slots: Tensor, layer: int) -> None:
    write(x, pool, slots, layer)


def program_norm_rope_write(x: Tensor, pool: Tensor, slots: Tensor, layer: int) -> None:
    nvfp4_dsmla.fused_rmsnorm_rope_concat_and_cache_nvfp4_ds_mla(
        kv_c=x[:, :NOPE_DIM],
        k_pe=x[:, NOPE_DIM:],
        norm_weight=x[0, :NOPE_DIM],
        eps=1e-6,
        positions=torch.arange(len(x), device=x.device).flip(0),
        cos_sin_cache=x[:, -ROPE_DIM:],
        is_neox=True,
        kv_cache=pool,
        slot_mapping=slots,
        layer=layer,
    )


def program_gather(x: Tensor, pool: Tensor, read: Tensor, layer: int) -> Tensor:
    return gather(pool, read, layer, x.dtype)


def program_cp_gather(
    x: Tensor, pool: Tensor, dst: Tensor, block_table: Tensor, starts: Tensor, layer: int
) -> Tensor:
    """Into a workspace that the caller gives, and into one of the region's own."""
    own = torch.empty_like(x)
    for workspace in (dst, own):
        nvfp4_dsmla.cp_gather_and_upconvert_nvfp4_kv_cache(
            src_cache=pool,
            dst=workspace,
            block_table=block_table,
            workspace_starts=starts,
            batch_size=2,
            layer=layer,
        )
    return own


def program_write_then_gather(
    x: Tensor, pool: Tensor, slots: Tensor, read: Tensor, layer: int
) -> tuple[Tensor, Tensor]:
    write(x, pool, slots, layer)
    return gather(pool, slots, layer, x.dtype), gather(pool, read, layer, x.dtype)


def program_layers(x: Tensor, pool: Tensor, slots: Tensor, read: Tensor, weight: Tensor) -> Tensor:
    """A decoder's shape: each layer reads the old tokens, writes its own and reads them back.

    Products alone: of addmm Inductor makes a product and an addition on CUDA, rounded twice.
    """
    for layer in range(LAYERS):
        x = torch.mm(torch.cat((x, gather(pool, read, layer, x.dtype)), dim=1), weight)
        write(x, pool, slots, layer)
        x = torch.mm(torch.cat((x, gather(pool, slots, layer, x.dtype)), dim=1), weight)
    return x


def program_fused(x: Tensor, pool: Tensor, slots: Tensor, read: Tensor) -> Tensor:
    """Arithmetic that Inductor compiles itself, between the ops of two layers."""
    for layer in range(2):
        x = x + gather(pool, read, layer, x.dtype)
        write(x, pool, slots, layer)
    return x + gather(pool, slots, 0, x.dtype)


PROGRAMS = [
    program_write,
    program_norm_rope_write,
    program_gather,
    program_cp_gather,
    program_write_then_gather,
    program_layers,
]


# ---- eager against compiled --------------------------------------------------------------------


def chosen(program: Callable[..., Any], arguments: Arguments) -> Arguments:
    return {name: arguments[name] for name in program.__annotations__ if name in arguments}


def outputs(result: Tensor | tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
    if result is None:
        return ()
    return (result,) if isinstance(result, Tensor) else result


def compare_calls(
    program: Callable[..., Any],
    compiled: Callable[..., Any],
    all_arguments: list[Arguments],
) -> None:
    for arguments in all_arguments:
        got = {n: x.clone() if isinstance(x, Tensor) else x for n, x in arguments.items()}
        got_outputs = outputs(compiled(**got))
        want_outputs = outputs(program(**arguments))
        assert_records_equal(got["pool"], arguments["pool"])
        for name in ("x", "dst"):
            if name in arguments:
                assert_latents_equal(got[name], arguments[name])
        for got_output, want_output in zip(got_outputs, want_outputs, strict=True):
            assert_latents_equal(got_output, want_output)


def check_compiled(
    program: Callable[..., Any],
    all_arguments: list[Arguments],
    *,
    dynamic: bool | None,
    compiles: int,
) -> None:
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(program, backend=counter, dynamic=dynamic, fullgraph=True)
    chosen_arguments = [chosen(program, arguments) for arguments in all_arguments]
    _, codes = run_and_get_code(compare_calls, program, compiled, chosen_arguments)
    assert counter.frame_count == compiles
    assert ReinplaceCounters.get_total_missed() == 0
    assert len(codes) == compiles
    for code in codes:
        assert "torch.ops.nvfp4_dsmla." in code
        assert COPIES.findall(code) == []


@pytest.mark.parametrize(("dynamic", "all_sizes", "compiles"), MODES)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__[8:])
def test_compiled_is_as_eager(
    device: torch.device,
    program: Callable[..., Any],
    dynamic: bool | None,
    all_sizes: list[Sizes],
    compiles: int,
    generator: torch.Generator,
) -> None:
    dtype = torch.float32 if program is program_layers else torch.bfloat16
    all_arguments = [random_arguments(generator, device, s, dtype) for s in all_sizes]
    check_compiled(program, all_arguments, dynamic=dynamic, compiles=compiles)


def test_compiled_arithmetic_between_the_ops(
    device: torch.device, generator: torch.Generator
) -> None:
    sizes = [*VARIED[:2], VARIED[0]]
    all_arguments = [random_arguments(generator, device, s, torch.float32) for s in sizes]
    check_compiled(program_fused, all_arguments, dynamic=True, compiles=1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compiled_in_every_dtype(
    device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> None:
    all_arguments = [random_arguments(generator, device, sizes, dtype) for sizes in VARIED[:2]]
    check_compiled(program_write_then_gather, all_arguments, dynamic=True, compiles=1)


@pytest.mark.parametrize("tokens", [0, 1])
def test_compiled_for_no_token_and_for_one(
    device: torch.device, tokens: int, generator: torch.Generator
) -> None:
    all_arguments = [
        random_arguments(generator, device, Sizes(tokens, blocks, 0), torch.bfloat16)
        for blocks in (13, 17)
    ]
    check_compiled(program_write_then_gather, all_arguments, dynamic=True, compiles=1)


# ---- the pool as a module's buffer -------------------------------------------------------------


class Layer(torch.nn.Module):
    """Writes tokens into the pool that it owns and reads others."""

    pool: Tensor

    def __init__(self, pool: Tensor, layer: int) -> None:
        super().__init__()
        self.register_buffer("pool", pool)
        self.layer = layer

    def forward(self, x: Tensor, slots: Tensor, read: Tensor) -> Tensor:
        write(x, self.pool, slots, self.layer)
        return gather(self.pool, read, self.layer, x.dtype)


def layer_arguments(arguments: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    return arguments["x"], arguments["slots"], arguments["read"]


def check_as_layer(
    layer: Layer, call: Callable[..., Tensor], pool: Tensor, all_arguments: list[Arguments]
) -> None:
    """`call` does to `pool` what `layer` does to its own, call after call."""
    for arguments in all_arguments:
        got = call(*layer_arguments(arguments))
        want = layer(*layer_arguments(arguments))
        assert_latents_equal(got, want)
        assert_records_equal(pool, layer.pool)


def test_compiled_with_the_pool_as_a_buffer(
    device: torch.device, generator: torch.Generator
) -> None:
    pool = random_pool(generator, device, 13)
    layer, twin = Layer(pool, 3), Layer(pool.clone(), 3)
    sizes = [Sizes(7, 13, 3), Sizes(8, 13, 3), Sizes(30, 13, 3)]
    all_arguments = [random_arguments(generator, device, s, torch.bfloat16) for s in sizes]
    compiled = torch.compile(twin, dynamic=True, fullgraph=True)
    _, codes = run_and_get_code(check_as_layer, layer, compiled, twin.pool, all_arguments)
    assert ReinplaceCounters.get_total_missed() == 0
    assert len(codes) == 1
    assert COPIES.findall(codes[0]) == []


def test_exported_with_any_number_of_tokens(
    device: torch.device, generator: torch.Generator
) -> None:
    pool = random_pool(generator, device, 13)
    layer = Layer(pool, 3)
    sizes = [Sizes(tokens, 13, 3) for tokens in (7, 2, 30)]
    all_arguments = [random_arguments(generator, device, s, torch.bfloat16) for s in sizes]
    tokens = torch.export.Dim("tokens", min=2, max=1000)
    rows = {0: tokens}
    exported = torch.export.export(
        Layer(pool.clone(), 3),
        layer_arguments(all_arguments[0]),
        dynamic_shapes={"x": rows, "slots": rows, "read": rows},
    )
    targets = [node.target for node in exported.graph.nodes]
    assert torch.ops.nvfp4_dsmla.gather_and_upconvert_nvfp4_ds_mla.default in targets
    module = exported.module()
    exported_pool = dict(module.named_buffers())["pool"]
    check_as_layer(layer, module, exported_pool, all_arguments)


# ---- CUDA graphs and streams -------------------------------------------------------------------


@pytest.mark.cuda
def test_captured_in_a_cuda_graph(device: torch.device, generator: torch.Generator) -> None:
    if device.type == "cpu":
        pytest.skip("CUDA graphs are CUDA's")
    arguments = random_arguments(generator, device, Sizes(8, 13, 4), torch.bfloat16)
    programs = (program_cp_gather, program_write_then_gather, program_norm_rope_write)

    def run(values: Arguments) -> list[Tensor]:
        return [o for p in programs for o in outputs(p(**chosen(p, values)))]

    run(arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(arguments)
    for _ in range(2):
        new = random_arguments(generator, device, Sizes(8, 13, 4), torch.bfloat16)
        for name, value in new.items():
            if isinstance(value, Tensor):
                arguments[name].copy_(value)
        graph.replay()
        for got, want in zip(captured, run(new), strict=True):
            assert_latents_equal(got, want)
        assert_latents_equal(arguments["dst"], new["dst"])
        assert_records_equal(arguments["pool"], new["pool"])


@pytest.mark.cuda
def test_the_current_stream_is_the_one_used(
    device: torch.device, generator: torch.Generator
) -> None:
    """On another stream the write would overtake the slow work that makes its input."""
    if device.type == "cpu":
        pytest.skip("streams are CUDA's")
    arguments = random_arguments(generator, device, Sizes(8, 13, 4), torch.bfloat16)
    x, pool, slots = arguments["x"], arguments["pool"], arguments["slots"]
    late = torch.zeros_like(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)
        late.copy_(x)
        write(late, pool, slots, 4)
        got = gather(pool, slots, 4, x.dtype)
    torch.cuda.synchronize()
    write(x, pool, slots, 3)
    assert_latents_equal(got, gather(pool, slots, 3, x.dtype))
    assert memory_of(late).any()
