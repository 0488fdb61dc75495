"""The decoder's steps under torch.compile: one graph, no copy of a pool, few compilations.

Fused kernels round elsewhere than eager code does, and a 4-bit cache makes much of a little: a code
that falls to the other side changes all that comes after it. So two things are shown of them.

With PyTorch's own kernels in the place of fused ones ("unfused"), and everything else of Inductor
as it is, its passes, its scheduling, its reuse of memory, every byte of the caches is eager code's,
and so is every logit, whatever the sizes.

With fused kernels, the records are to the bit what the write makes of the very latents that the
step computed, which this test's cache keeps too. They and the logits are close to eager code's.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._dynamo.utils import ReinplaceCounters, counters
from torch._inductor.utils import run_and_get_code

from compare import assert_latents_equal, assert_records_equal
from decoder_cases import (
    CONFIG,
    NUM_BLOCKS,
    UNFUSED,
    TwinCache,
    make_decoder,
    records_but_at,
    shaped_steps,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from deepseek.config import Config
    from deepseek.layers import Step

pytestmark = [
    pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled"),
    pytest.mark.slow,
]

# With dynamic=True a module's floats would be inputs, and all analysed twice.
FLOATS_ARE_CONSTANTS = torch._dynamo.config.patch(specialize_float=True)

# (batch, new_tokens, max_blocks): of a call that compiles no two are equal, and none is 0 or 1.
DECODES = [(4, 1, 6), (4, 1, 6), (5, 1, 8), (3, 1, 6), (9, 1, 7), (6, 1, 6)]
VERIFICATIONS = [(4, 3, 6), (5, 2, 8), (3, 3, 9), (7, 4, 7), (4, 3, 6)]  # of several tokens each
PREFILLS = [(3, 11, 6), (4, 9, 8), (2, 5, 7)]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    ReinplaceCounters.clear()
    yield
    torch._dynamo.reset()


def compile_step(
    function: Callable[..., Tensor], *, dynamic: bool | None = None
) -> Callable[..., Tensor]:
    return torch.compile(function, dynamic=dynamic, fullgraph=True)


def run_steps(
    step_of: Callable[..., Tensor], steps: Sequence[Step], *, warm_up: int
) -> list[Tensor]:
    """The logits of all steps; those after the warm-up must not compile anything."""
    logits = [step_of(*step) for step in steps[:warm_up]]
    with torch._dynamo.config.patch(error_on_recompile=True):
        return logits + [step_of(*step) for step in steps[warm_up:]]


def copies_of_a_pool(code: str) -> list[str]:
    """What Inductor allocates as large as a pool, in Python or in C++, or copies at a call."""
    blocks = {str(NUM_BLOCKS), str(NUM_BLOCKS + 1)}  # of the latents and of the indexer's keys
    shapes = re.findall(r"(?:empty_strided\w*\(\(|int_array_\d+\[\] = \{)([^)}]*)", code)
    assert shapes
    large = [shape for shape in shapes if blocks & set(re.findall(r"\d+", shape))]
    calls = r"aten\.(?:clone|copy_?)\.\w+\(|aoti_torch_\w*(?:clone|copy_)\w*\("
    return large + re.findall(calls, code)


@pytest.mark.parametrize("cpp_wrapper", [False, True])
def test_a_copy_of_a_pool_would_be_seen(cpp_wrapper: bool, device: torch.device) -> None:
    pool = torch.zeros(2, NUM_BLOCKS, 3, device=device)
    with torch._inductor.config.patch(cpp_wrapper=cpp_wrapper):
        compiled = torch.compile(lambda x: x.clone().sin_(), fullgraph=True)
        _, codes = run_and_get_code(compiled, pool)
    assert copies_of_a_pool("".join(codes))


# ---- unfused: the bits of eager code -----------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "sizes", "dynamic", "warm_up"),
    [
        # The first two calls are alike, which is the static mode: one compilation for their sizes.
        # The third compiles once more, for all others.
        pytest.param("forward", DECODES, None, 3, id="decode-automatic"),
        pytest.param("prefill", PREFILLS, True, 1, id="prefill-dynamic"),
    ],
)
def test_unfused_is_eager_to_the_bit(
    kind: str,
    sizes: Sequence[tuple[int, int, int]],
    dynamic: bool | None,
    warm_up: int,
    device: torch.device,
) -> None:
    decoder, twin = make_decoder(device), make_decoder(device)
    steps = list(shaped_steps(sizes, device))
    compiled = compile_step(getattr(twin, kind), dynamic=dynamic)
    with torch.no_grad(), torch._inductor.config.patch(UNFUSED), FLOATS_ARE_CONSTANTS:
        got = run_steps(compiled, steps, warm_up=warm_up)
        eager = getattr(decoder, kind)
        want = [eager(*step) for step in steps]
    assert counters["stats"]["unique_graphs"] == (2 if warm_up > 1 else 1)
    assert ReinplaceCounters.get_total_missed() == 0
    assert_records_equal(twin.cache.pool, decoder.cache.pool)
    assert_latents_equal(twin.keys.pool[:, :NUM_BLOCKS], decoder.keys.pool[:, :NUM_BLOCKS])
    for got_logits, want_logits, step in zip(got, want, steps, strict=True):
        real = step.slot_mapping >= 0
        assert real.any()
        assert_latents_equal(got_logits[real], want_logits[real])


# ---- fused -------------------------------------------------------------------------------------

# All tokens are selected: a score that rounds otherwise does not select another.
ALL_SELECTED = replace(CONFIG, topk=64)


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


def check_fused(
    kind: str,
    sizes: Sequence[tuple[int, int, int]],
    device: torch.device,
    *,
    config: Config = ALL_SELECTED,
    dtype: torch.dtype = torch.bfloat16,
    options: dict[str, Any],
) -> None:
    decoder, twin = (make_decoder(device, TwinCache, dtype=dtype, config=config) for _ in range(2))
    before = decoder.cache.pool.clone()
    steps = list(shaped_steps(sizes, device))
    steps[0].mark_varying()
    compiled = compile_step(getattr(twin, kind))
    with torch._inductor.config.patch(options):
        got, codes = run_and_get_code(run_steps, compiled, steps, warm_up=1)
    eager = getattr(decoder, kind)
    want = [eager(*step) for step in steps]

    assert ReinplaceCounters.get_total_missed() == 0
    assert counters["stats"]["unique_graphs"] == 1
    assert copies_of_a_pool("".join(codes)) == []
    # No slot but the steps', and those are the steps' latents, whose places are eager code's.
    slots = torch.cat([step.slot_mapping.flatten() for step in steps])
    for cache in (decoder.cache, twin.cache):
        assert isinstance(cache, TwinCache)
        assert_records_equal(records_but_at(cache.pool, slots), records_but_at(before, slots))
        assert_records_equal(cache.pool, cache.records_of_twin())
    for layer in range(config.num_layers):
        for name in ("cache.twin", "keys.pool"):
            pools = [model.get_buffer(name)[layer, :NUM_BLOCKS] for model in (twin, decoder)]
            assert relative_error(*pools) < 0.01
    for got_logits, want_logits, step in zip(got, want, steps, strict=True):
        real = step.slot_mapping >= 0
        assert relative_error(got_logits[real], want_logits[real]) < 0.1


def test_fused_decode(device: torch.device) -> None:
    with torch.no_grad():
        check_fused("forward", VERIFICATIONS, device, options={})


def test_fused_prefill_frozen_in_fp16_by_the_cpp_wrapper(device: torch.device) -> None:
    """What else there is to choose, at once and on one layer: each compilation takes long."""
    with torch.inference_mode():
        check_fused(
            "prefill",
            PREFILLS,
            device,
            config=replace(ALL_SELECTED, num_layers=1),
            dtype=torch.float16,
            options={"cpp_wrapper": True, "freezing": True},
        )
