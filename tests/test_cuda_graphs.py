"""The decoder's decode step in CUDA graphs: captured by hand, and by mode="reduce-overhead".

Batches are of changing composition, with requests of padding among them. What a graph computes is
compared to the bit with what the same kernels compute outside of it. Kernels that Inductor fuses
are not eager code's, so there is, as in test_decoder_compile.py, a step without fused kernels,
which is compared with eager code, and one with them, whose records must be those of its latents.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import nvfp4_dsmla
from compare import assert_latents_equal, assert_records_equal
from decoder_cases import (
    BLOCK_SIZE,
    CONFIG,
    NUM_BLOCKS,
    UNFUSED,
    TwinCache,
    make_decoder,
    records_but_at,
)
from deepseek.batch import Pages, Traffic
from deepseek.layers import Step
from nvfp4_dsmla.layout import HEAD_DIM, NOPE_DIM

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from deepseek.model import Decoder

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled"),
]

BATCH = 8
MAX_BLOCKS = 6


@pytest.fixture(scope="module")
def gpu(device: torch.device) -> torch.device:
    if device.type == "cpu":
        pytest.skip("CUDA graphs are CUDA's")
    return device


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


@pytest.fixture
def graph_calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often a CUDA graph was captured ("capture_end"), and replayed ("replay")."""
    calls = {"capture_end": 0, "replay": 0}

    def counted(name: str) -> Callable[[torch.cuda.CUDAGraph], None]:
        method = getattr(torch.cuda.CUDAGraph, name)

        def call(graph: torch.cuda.CUDAGraph) -> None:
            calls[name] += 1
            method(graph)

        return call

    for name in calls:
        monkeypatch.setattr(torch.cuda.CUDAGraph, name, counted(name))
    return calls


class Captured:
    """A step's CUDA graph, and the tensors that it reads. Making it computes padding alone."""

    def __init__(
        self,
        step_of: Callable[..., Tensor],
        *,
        device: torch.device,
        batch: int = BATCH,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        self.inputs = padding(device, batch=batch)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                step_of(*self.inputs)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            self.logits = step_of(*self.inputs)

    def __call__(self, *step: Tensor) -> Tensor:
        for mine, new in zip(self.inputs, step, strict=True):
            mine.copy_(new)
        self.graph.replay()
        return self.logits


def padding(device: torch.device, *, batch: int = BATCH) -> Step:
    """A step of no request: slots and blocks -1, lengths 0."""
    pages = Pages(num_blocks=0, block_size=BLOCK_SIZE)
    return pages.next_step([], batch=batch, new_tokens=1, max_blocks=MAX_BLOCKS, device=device)


def random_steps(
    count: int, device: torch.device, *, batch: int = BATCH, blocks: range = range(NUM_BLOCKS)
) -> list[Step]:
    """Steps of one traffic, of full batches and of others."""
    pages = Pages(num_blocks=len(blocks), block_size=BLOCK_SIZE)
    pages.free = [blocks[number] for number in pages.free]
    traffic = Traffic(
        pages,
        batch=batch,
        max_blocks=MAX_BLOCKS,
        vocab=CONFIG.vocab,
        context=MAX_BLOCKS * BLOCK_SIZE // 2,
    )
    steps = [traffic.next_step(device=device) for _ in range(count)]
    requests = {int((step.seq_lens > 0).sum()) for step in steps}
    assert {batch - 1, batch} <= requests
    return steps


def slots_of(steps: Sequence[Step]) -> Tensor:
    return torch.cat([step.slot_mapping.flatten() for step in steps])


def run_steps(step_of: Callable[..., Tensor], steps: Sequence[Step]) -> list[Tensor]:
    """The logits of all steps, copied: a graph overwrites its own."""
    return [step_of(*step).clone() for step in steps]


def assert_same_caches(got: Decoder, want: Decoder) -> None:
    """Equal in every bit, but for the block that takes what has no slot."""
    assert_records_equal(got.cache.pool, want.cache.pool)
    assert_latents_equal(got.keys.pool[:, :NUM_BLOCKS], want.keys.pool[:, :NUM_BLOCKS])


def assert_same_logits(
    got: Sequence[Tensor], want: Sequence[Tensor], steps: Sequence[Step]
) -> None:
    """Equal in every bit, and finite where a request is padding."""
    assert torch.cat([logits.flatten() for logits in got]).isfinite().all()
    real = [step.slot_mapping >= 0 for step in steps]
    pairs = [torch.cat([x[r] for x, r in zip(xs, real, strict=True)]) for xs in (got, want)]
    assert_latents_equal(*pairs)


def assert_as_eager(step_of: Callable[..., Tensor], decoder: Decoder, steps: list[Step]) -> None:
    """`step_of`, over the caches of `decoder`, does what eager code does over the same ones."""
    twin = make_decoder(steps[0].tokens.device)
    got, want = run_steps(step_of, steps), run_steps(twin, steps)
    assert_same_logits(got, want, steps)
    assert_same_caches(decoder, twin)


def assert_records_are_of_latents(decoder: Decoder, before: Tensor, steps: Sequence[Step]) -> None:
    """The latents that a TwinCache keeps make its records; no slot but the steps' has changed."""
    cache = decoder.cache
    assert isinstance(cache, TwinCache)
    assert_records_equal(cache.pool, cache.records_of_twin())
    slots = slots_of(steps)
    assert_records_equal(records_but_at(cache.pool, slots), records_but_at(before, slots))


# ---- captured by hand --------------------------------------------------------------------------


def test_warm_up_and_capture_write_nothing(gpu: torch.device) -> None:
    """Nor does a replay of padding; one of real requests writes where they say."""
    decoder, before = make_decoder(gpu), make_decoder(gpu)
    captured = Captured(decoder, device=gpu)
    assert_same_caches(decoder, before)
    assert captured(*padding(gpu)).isfinite().all()
    assert_same_caches(decoder, before)
    step = random_steps(9, gpu)[-1]
    captured(*step)
    slots = step.slot_mapping.flatten()
    after, old = decoder.cache.pool, before.cache.pool
    assert_records_equal(records_but_at(after, slots), records_but_at(old, slots))
    written = (pool.flatten(1, 2)[:, slots[slots >= 0]] for pool in (after, old))
    assert torch.ne(*written).any(dim=-1).all()


def test_an_eager_step_captured(gpu: torch.device) -> None:
    decoder = make_decoder(gpu)
    captured = Captured(decoder, device=gpu)
    assert_as_eager(captured, decoder, random_steps(300, gpu))


@pytest.mark.slow
def test_a_compiled_step_captured(gpu: torch.device) -> None:
    """Against the same compiled code without a graph, over the same caches again."""
    decoder = make_decoder(gpu, TwinCache)
    before = {name: buffer.clone() for name, buffer in decoder.named_buffers()}
    compiled = torch.compile(decoder, dynamic=False, fullgraph=True)
    steps = random_steps(200, gpu)
    captured = Captured(compiled, device=gpu)
    got = run_steps(captured, steps)
    assert_records_are_of_latents(decoder, before["cache.pool"], steps)
    pool = decoder.cache.pool.clone()
    for name, buffer in decoder.named_buffers():
        buffer.copy_(before[name])
    with torch._dynamo.config.patch(error_on_recompile=True):
        want = run_steps(compiled, steps)
    assert_same_logits(got, want, steps)
    assert_records_equal(pool, decoder.cache.pool)


def test_captured_on_one_stream_and_replayed_on_another(gpu: torch.device) -> None:
    decoder = make_decoder(gpu)
    captured = Captured(decoder, device=gpu, stream=torch.cuda.Stream())
    steps = random_steps(100, gpu)
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        assert_as_eager(captured, decoder, steps)
    torch.cuda.current_stream().wait_stream(other)


def test_graphs_of_several_batches_over_one_pool(gpu: torch.device) -> None:
    """As an engine has them: a step takes the smallest graph that its requests fit in."""
    decoder = make_decoder(gpu)
    graphs = {batch: Captured(decoder, device=gpu, batch=batch) for batch in (2, 4, 8)}
    steps = []
    for number, step in enumerate(random_steps(150, gpu)):
        batch = (2, 8, 4)[number % 3]  # the requests beyond it wait
        steps.append(Step(*(tensor[:batch] for tensor in step)))
    assert_as_eager(lambda *step: graphs[len(step[0])](*step), decoder, steps)


def test_two_graphs_at_once_on_two_streams(gpu: torch.device) -> None:
    """Each of its own requests, over one pool."""
    decoder, twin = make_decoder(gpu), make_decoder(gpu)
    streams = [torch.cuda.Stream() for _ in range(2)]
    # Each captured on a stream of its own, with which goes a workspace of its own for products.
    graphs = [Captured(decoder, device=gpu, batch=4, stream=stream) for stream in streams]
    half = NUM_BLOCKS // 2
    traffics = [
        random_steps(100, gpu, batch=4, blocks=blocks)
        for blocks in (range(half), range(half, NUM_BLOCKS))
    ]
    torch.cuda.synchronize()
    got: list[list[Tensor]] = [[], []]
    for steps in zip(*traffics, strict=True):
        for step, graph, stream, logits in zip(steps, graphs, streams, got, strict=True):
            with torch.cuda.stream(stream):
                logits.append(graph(*step).clone())
    torch.cuda.synchronize()
    for logits, traffic in zip(got, traffics, strict=True):
        assert_same_logits(logits, run_steps(twin, traffic), traffic)
    assert_same_caches(decoder, twin)


# ---- by torch.compile --------------------------------------------------------------------------


@pytest.mark.slow
def test_a_thousand_steps_of_one_graph(gpu: torch.device, graph_calls: dict[str, int]) -> None:
    """Every bit of caches and logits is eager code's; nothing is skipped or made anew."""
    decoder, before = make_decoder(gpu), make_decoder(gpu)
    with torch._inductor.config.patch(UNFUSED):
        compiled = torch.compile(decoder, mode="reduce-overhead", dynamic=False, fullgraph=True)
        # One call that compiles and runs, one that captures: PyTorch's warm-up, here of padding.
        run_steps(compiled, [padding(gpu)] * 3)
    assert_same_caches(decoder, before)
    steps = random_steps(1000, gpu)
    made = dict(graph_calls)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_as_eager(compiled, decoder, steps)
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert graph_calls["capture_end"] == made["capture_end"] > 0
    assert graph_calls["replay"] == made["replay"] + 1000


@pytest.mark.slow
def test_fused_kernels_in_one_graph(gpu: torch.device, graph_calls: dict[str, int]) -> None:
    decoder = make_decoder(gpu, TwinCache)
    before = decoder.cache.pool.clone()
    compiled = torch.compile(decoder, mode="reduce-overhead", dynamic=False, fullgraph=True)
    run_steps(compiled, [padding(gpu)] * 3)
    steps = random_steps(300, gpu)
    replayed = graph_calls["replay"]
    with torch._dynamo.config.patch(error_on_recompile=True):
        got = run_steps(compiled, steps)
    assert torch.stack(got).isfinite().all()
    assert_records_are_of_latents(decoder, before, steps)
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert graph_calls["replay"] == replayed + 300


@pytest.mark.parametrize("marked", [True, False])
def test_a_pool_that_is_an_argument_needs_its_mark(gpu: torch.device, marked: bool) -> None:
    """Else PyTorch makes no graph: it would have to copy the pool for each replay."""
    pool = make_decoder(gpu).cache.pool.clone()
    twin = pool.clone()

    def step(pool: Tensor, latents: Tensor, slots: Tensor) -> Tensor:
        nvfp4_dsmla.concat_and_cache_nvfp4_ds_mla(
            kv_c=latents[:, :NOPE_DIM],
            k_pe=latents[:, NOPE_DIM:],
            kv_cache=pool,
            slot_mapping=slots,
            layer=1,
        )
        return nvfp4_dsmla.gather_and_upconvert_nvfp4_ds_mla(kv_cache=pool, slots=slots, layer=1)

    if marked:
        nvfp4_dsmla.mark_static_pools(twin)
    compiled = torch.compile(step, mode="reduce-overhead", dynamic=False, fullgraph=True)
    for first in range(0, 40, 10):
        slots = torch.arange(first, first + 3, device=gpu)
        latents = torch.randn(3, HEAD_DIM, device=gpu, dtype=torch.bfloat16)
        got, want = compiled(twin, latents, slots).clone(), step(pool, latents, slots)
        assert_latents_equal(got, want)
        assert_records_equal(twin, pool)
    assert (counters["inductor"]["cudagraph_skips"] == 0) == marked
