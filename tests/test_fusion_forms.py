"""Which chains the pass fuses, which it leaves, and why: on graphs, without Inductor.

A chain that is fused must write, byte for byte, what the op writes when it is called with the
chain's inputs. A graph in which nothing is fused must stay as it was, to the letter.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, fx
from torch._inductor import config
from torch.fx.experimental.proxy_tensor import make_fx

import nvfp4_dsmla
from cases import DTYPES
from compare import assert_records_equal
from fusion_cases import (
    EXACT_NORMS,
    EXACT_ROTATIONS,
    LOOKUPS,
    NEAR_MISSES,
    ROUNDED_NORMS,
    ROUNDED_ROTATIONS,
    NearMiss,
    deepseek_norm,
    gptj_rotation,
    halves_rotation,
    indexed,
    stacked_rotation,
)
from fusion_steps import (
    Arguments,
    Chain,
    chain_of,
    copied,
    fused_ops,
    pool_of_the_op,
    random_arguments,
    share_of_different_bytes,
    step_of,
)
from nvfp4_dsmla.inductor import Counts
from nvfp4_dsmla.inductor.rewrite import fuse_writes
from nvfp4_dsmla.layout import HEAD_DIM, NOPE_DIM, ROPE_DIM

if TYPE_CHECKING:
    from collections.abc import Callable

    from fusion_cases import Lookup, Norm, Rotation

CPU = torch.device("cpu")
# Of a chain and the op, whose sums of squares are in another order; of one that is rounded earlier.
SAME, NEARLY = 0.002, 0.05


def name_of(form: Callable[..., Any]) -> str:
    return form.__name__


def traced(step: Callable[..., None], arguments: Arguments) -> fx.GraphModule:
    """The graph of a step's ATen ops, in which the write mutates the pool."""
    return make_fx(step, tracing_mode="fake")(*arguments.values())


# ---- what is fused -----------------------------------------------------------------------------


def check_fused(
    arguments: Arguments, norm: Norm, rotation: Rotation, lookup: Lookup, *, other_bytes: float
) -> None:
    """The op's bytes, and nearly those of the chain."""
    step = step_of(chain_of(norm, rotation, lookup))
    module = traced(step, arguments)
    assert fuse_writes(module.graph) == Counts(1, 1)
    module.graph.lint()
    module.recompile()
    assert fused_ops(module.graph) == 1
    got, unfused = copied(arguments), copied(arguments)
    module(*got.values())
    assert_records_equal(got["pool"], pool_of_the_op(arguments, norm, rotation, lookup))
    step(**unfused)
    assert share_of_different_bytes(got["pool"], unfused["pool"], arguments) <= other_bytes


@pytest.mark.parametrize("norm", EXACT_NORMS + ROUNDED_NORMS, ids=name_of)
def test_norms(device: torch.device, norm: Norm, generator: torch.Generator) -> None:
    other_bytes = SAME if norm in EXACT_NORMS else NEARLY
    arguments = random_arguments(generator, device)
    check_fused(arguments, norm, halves_rotation, indexed, other_bytes=other_bytes)


@pytest.mark.parametrize("rotation", EXACT_ROTATIONS | ROUNDED_ROTATIONS, ids=name_of)
def test_rotations(device: torch.device, rotation: Rotation, generator: torch.Generator) -> None:
    other_bytes = SAME if rotation in EXACT_ROTATIONS else NEARLY
    arguments = random_arguments(generator, device)
    check_fused(arguments, deepseek_norm, rotation, indexed, other_bytes=other_bytes)


@pytest.mark.parametrize("lookup", LOOKUPS, ids=name_of)
def test_lookups(device: torch.device, lookup: Lookup, generator: torch.Generator) -> None:
    arguments = random_arguments(generator, device)
    check_fused(arguments, deepseek_norm, stacked_rotation, lookup, other_bytes=SAME)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> None:
    arguments = random_arguments(generator, device, dtype=dtype)
    check_fused(arguments, deepseek_norm, gptj_rotation, indexed, other_bytes=SAME)


def test_what_is_not_rounded_stays_so(device: torch.device, generator: torch.Generator) -> None:
    """A chain that hands fp32 to the write becomes the op without its roundings."""

    def unrounded(
        x: Tensor, weight: Tensor, table: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        return chain_of(deepseek_norm, halves_rotation, indexed)(
            x.float(), weight, table, positions
        )

    arguments = random_arguments(generator, device)
    module = traced(step_of(unrounded), arguments)
    assert fuse_writes(module.graph) == Counts(1, 1)
    module.recompile()
    got = copied(arguments)
    module(*got.values())
    forms = (deepseek_norm, halves_rotation, indexed)
    assert_records_equal(got["pool"], pool_of_the_op(arguments, *forms, round_to_input=False))
    assert not torch.equal(got["pool"], pool_of_the_op(arguments, *forms))


# ---- what is not -------------------------------------------------------------------------------


def check_left(
    chain: Chain, arguments: Arguments, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The graph stays as it is, and the log says why."""
    module = traced(step_of(chain), arguments)
    before = str(module.graph)
    caplog.clear()
    with caplog.at_level(logging.DEBUG, logger="nvfp4_dsmla.inductor"):
        assert fuse_writes(module.graph) == Counts(1, 0)
    assert str(module.graph) == before
    (said,) = [r.getMessage() for r in caplog.records if r.name == "nvfp4_dsmla.inductor"]
    assert said.startswith(f"concat_and_cache_nvfp4_ds_mla not fused{why}")


@pytest.mark.parametrize("miss", NEAR_MISSES.values(), ids=NEAR_MISSES)
def test_near_misses(
    miss: NearMiss, generator: torch.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    chain = chain_of(miss.norm, miss.rotation, miss.lookup)
    check_left(chain, random_arguments(generator, CPU), f": {miss.why}", caplog)


def plain(x: Tensor, weight: Tensor, table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    return chain_of(deepseek_norm, halves_rotation, indexed)(x, weight, table, positions)


def written_between(x: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
    chain = plain(x, *others)
    x.mul_(2)
    return chain


def half_precision_table(
    x: Tensor, weight: Tensor, table: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    return plain(x, weight, table.half(), positions)


def key_of_another_type(x: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
    return plain(x, *others)[0], plain(x.half(), *others)[1]


def one_rounded(x: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
    return plain(x, *others)[0].float(), plain(x.float(), *others)[1]


LEFT = {
    written_between: "wanted nothing written between chain and write, got mul_",
    half_precision_table: "cos_sin_cache: wanted",
    key_of_another_type: "k_pe: wanted the type of the latent",
    one_rounded: "k_pe: wanted the rounding of kv_c",
}


@pytest.mark.parametrize("chain", LEFT, ids=name_of)
def test_left(chain: Chain, generator: torch.Generator, caplog: pytest.LogCaptureFixture) -> None:
    check_left(chain, random_arguments(generator, CPU), f": {LEFT[chain]}", caplog)


def test_requests_in_another_order(
    generator: torch.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    """The latents' axes of requests and tokens are exchanged, the keys' are not."""

    def chain(x: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        kv_c, k_pe = plain(x, *others)
        return kv_c.transpose(0, 1), k_pe

    arguments = random_arguments(generator, CPU, shape=(2, 5))
    check_left(chain, arguments, ": kv_c: wanted x / sqrt", caplog)


@pytest.mark.parametrize("norm", ROUNDED_NORMS, ids=name_of)
def test_early_roundings_that_inductor_is_told_to_keep(
    norm: Norm,
    generator: torch.Generator,
    caplog: pytest.LogCaptureFixture,
) -> None:
    chain = chain_of(norm, halves_rotation, indexed)
    arguments = random_arguments(generator, CPU)
    with config.patch(emulate_precision_casts=True):
        check_left(chain, arguments, ": kv_c: wanted one rounding at the end", caplog)


def test_a_bug_of_the_pass_breaks_no_compilation(
    generator: torch.Generator, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_node: fx.Node) -> None:
        raise KeyError("surprise")

    monkeypatch.setattr("nvfp4_dsmla.inductor.rewrite.find_norm", fail)
    check_left(plain, random_arguments(generator, CPU), ", which is a bug", caplog)


def test_other_writes_are_none_of_its_business(generator: torch.Generator) -> None:
    def step(x: Tensor, pool: Tensor, slots: Tensor) -> None:
        kv_c, k_pe = x.split([NOPE_DIM, ROPE_DIM], dim=-1)
        nvfp4_dsmla.concat_and_cache_bfloat16(
            kv_c=kv_c, k_pe=k_pe, kv_cache=pool, slot_mapping=slots
        )

    arguments = random_arguments(generator, CPU)
    pool = torch.zeros(20, 4, HEAD_DIM, dtype=torch.bfloat16)
    module = make_fx(step, tracing_mode="fake")(arguments["x"], pool, arguments["slots"])
    before = str(module.graph)
    assert fuse_writes(module.graph) == Counts(0, 0)
    assert str(module.graph) == before
