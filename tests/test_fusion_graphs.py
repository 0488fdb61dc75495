"""The pass on graphs of torch.compile and torch.export: functionalized, of any batch, of a model.

Without Inductor: a graph is run as it is after the pass.
"""

from __future__ import annotations

import operator
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, fx
from torch._inductor import config

import nvfp4_dsmla
from compare import assert_latents_equal, assert_records_equal
from fusion_cases import (
    assigned_rotation,
    complex_rotation,
    computed,
    deepseek_norm,
    divided_norm,
    embedded,
    gptj_rotation,
    halves_rotation,
    hugging_face_norm,
    indexed,
    inverse_norm,
    llama_rotation,
    narrow_norm,
    narrow_rotation,
    rms_norm,
    stacked_rotation,
    transformers_deepseek_rotation,
)
from fusion_steps import (
    FusingBackend,
    chain_of,
    copied,
    fused_ops,
    pool_of_the_op,
    random_arguments,
    share_of_different_bytes,
    step_of,
)
from nvfp4_dsmla.inductor import Counts
from nvfp4_dsmla.inductor.rewrite import FUSED_WRITE, fuse_writes
from nvfp4_dsmla.inductor.values import is_tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from deepseek.batch import Pages, Request
from deepseek.cache import NvFp4Cache
from deepseek.config import Config
from deepseek.model import Decoder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fusion_cases import Norm, Rotation

pytestmark = pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


PAIRS = [
    pytest.param(norm, rotation, id=f"{norm.__name__}-{rotation.__name__}")
    for norm, rotation in (
        (rms_norm, gptj_rotation),
        (hugging_face_norm, llama_rotation),
        (narrow_norm, narrow_rotation),
        (inverse_norm, complex_rotation),
        (divided_norm, assigned_rotation),
    )
]


@pytest.mark.parametrize(("norm", "rotation"), PAIRS)
def test_any_number_of_tokens(norm: Norm, rotation: Rotation, generator: torch.Generator) -> None:
    backend = FusingBackend()
    compiled = torch.compile(
        step_of(chain_of(norm, rotation, indexed)), backend=backend, fullgraph=True
    )
    for tokens in (7, 12):
        arguments = random_arguments(generator, CPU, shape=(tokens,))
        want = pool_of_the_op(arguments, norm, rotation, indexed)
        for name in ("x", "positions", "slots"):
            torch._dynamo.mark_dynamic(arguments[name], 0)
        compiled(**arguments)
        assert_records_equal(arguments["pool"], want)
    assert backend.counts == [Counts(1, 1)]


def storage_of(node: fx.Node) -> object:
    """Of a node's fake tensor: two nodes with one storage are views of each other."""
    value: Tensor = node.meta["val"]
    return value.untyped_storage()._cdata


@pytest.mark.parametrize(
    "rotation", [stacked_rotation, transformers_deepseek_rotation], ids=["whole", "copied"]
)
def test_tokens_of_requests(rotation: Rotation, generator: torch.Generator) -> None:
    """[requests, tokens, ...] up to the write, both of any number."""
    backend = FusingBackend()
    step = step_of(chain_of(deepseek_norm, rotation, embedded))
    compiled = torch.compile(step, backend=backend, fullgraph=True)
    for shape in ((2, 5), (3, 6)):
        arguments = random_arguments(generator, CPU, shape=shape)
        want = pool_of_the_op(arguments, deepseek_norm, rotation, embedded)
        for name in ("x", "positions"):
            torch._dynamo.mark_dynamic(arguments[name], [0, 1])
        torch._dynamo.mark_dynamic(arguments["slots"], 0)
        compiled(**arguments)
        assert_records_equal(arguments["pool"], want)
    assert backend.counts == [Counts(1, 1)]
    (graph,) = backend.graphs
    (op,) = (node for node in graph.nodes if FUSED_WRITE in node.args)
    inputs = {storage_of(x) for x in graph.nodes if x.op == "placeholder" and is_tensor(x)}
    assert storage_of(op.kwargs["kv_c"]) in inputs
    assert (storage_of(op.kwargs["k_pe"]) in inputs) == (rotation is stacked_rotation)


def test_one_token(generator: torch.Generator) -> None:
    backend = FusingBackend()
    arguments = random_arguments(generator, CPU, shape=(1,))
    want = pool_of_the_op(arguments, deepseek_norm, halves_rotation, indexed)
    step = step_of(chain_of(deepseek_norm, halves_rotation, indexed))
    torch.compile(step, backend=backend, fullgraph=True)(**arguments)
    assert backend.counts == [Counts(1, 1)]
    assert_records_equal(arguments["pool"], want)


def test_what_else_is_read_stays(generator: torch.Generator) -> None:
    """A prefill attends to the normalised latent and the rotated key too."""
    chain = chain_of(deepseek_norm, halves_rotation, indexed)

    def step(
        x: Tensor, weight: Tensor, table: Tensor, positions: Tensor, pool: Tensor, slots: Tensor
    ) -> tuple[Tensor, Tensor]:
        kv_c, k_pe = chain(x, weight, table, positions)
        nvfp4_dsmla.concat_and_cache_nvfp4_ds_mla(
            kv_c=kv_c, k_pe=k_pe, kv_cache=pool, slot_mapping=slots, layer=1
        )
        return kv_c, k_pe

    backend = FusingBackend()
    arguments = random_arguments(generator, CPU)
    want = pool_of_the_op(arguments, deepseek_norm, halves_rotation, indexed)
    got = torch.compile(step, backend=backend, fullgraph=True)(**arguments)
    assert backend.counts == [Counts(1, 1)]
    assert_records_equal(arguments["pool"], want)
    x, weight, table, positions = list(arguments.values())[:4]
    for got_part, want_part in zip(got, chain(x, weight, table, positions), strict=True):
        assert_latents_equal(got_part, want_part)


def test_nothing_of_the_chain_is_left(generator: torch.Generator) -> None:
    backend = FusingBackend()
    step = step_of(chain_of(deepseek_norm, halves_rotation, indexed))
    torch.compile(step, backend=backend, fullgraph=True)(**random_arguments(generator, CPU))
    (graph,) = backend.graphs
    calls = [node.target for node in graph.nodes if node.op == "call_function"]
    # The split of x, the op, and what gives the pool back.
    split, first, second, op, pool = calls
    assert split is torch.ops.aten.split_with_sizes.default
    assert op is torch.ops.higher_order.auto_functionalized_v2
    assert {first, second, pool} == {operator.getitem}


def test_angles_without_a_table_are_put_together_once(generator: torch.Generator) -> None:

    def step(
        x: Tensor, weight: Tensor, table: Tensor, positions: Tensor, pool: Tensor, slots: Tensor
    ) -> None:
        rows = computed(table, positions)
        chain = chain_of(deepseek_norm, halves_rotation, lambda *_: rows)
        for layer in range(3):
            kv_c, k_pe = chain(x + layer, weight, table, positions)
            nvfp4_dsmla.concat_and_cache_nvfp4_ds_mla(
                kv_c=kv_c, k_pe=k_pe, kv_cache=pool, slot_mapping=slots, layer=layer
            )

    backend = FusingBackend()
    arguments = random_arguments(generator, CPU)
    want = copied(arguments)
    torch.compile(step, backend=backend, fullgraph=True)(**arguments)
    assert backend.counts == [Counts(3, 3)]
    (graph,) = backend.graphs
    targets = [node.target for node in graph.nodes]
    assert targets.count(torch.ops.prims.iota.default) == 2  # one of them is the frequencies'
    step(**want)
    assert share_of_different_bytes(arguments["pool"], want["pool"], arguments) < 0.01


def test_functionalized_as_export_does_it(generator: torch.Generator) -> None:
    """And as the older auto_functionalized does."""
    arguments = random_arguments(generator, CPU)
    want = pool_of_the_op(arguments, deepseek_norm, halves_rotation, indexed)
    step = step_of(chain_of(deepseek_norm, halves_rotation, indexed))
    backend = FusingBackend()
    with config.patch(enable_auto_functionalized_v2=False):
        torch.compile(step, backend=backend, fullgraph=True)(**arguments)
    (graph,) = backend.graphs
    assert any(n.target is torch.ops.higher_order.auto_functionalized for n in graph.nodes)
    assert fused_ops(graph) == 1
    assert_records_equal(arguments["pool"], want)


class Layer(torch.nn.Module):
    """A step as a module, which torch.export takes."""

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        table: Tensor,
        positions: Tensor,
        pool: Tensor,
        slots: Tensor,
    ) -> None:
        step_of(chain_of(rms_norm, halves_rotation, indexed))(
            x, weight, table, positions, pool, slots
        )


@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
@pytest.mark.parametrize("decomposed", [False, True], ids=["as_exported", "decomposed"])
def test_exported(decomposed: bool, generator: torch.Generator) -> None:
    """Before decomposition the norm is one node, and the write mutates."""
    arguments = random_arguments(generator, CPU)
    want = pool_of_the_op(arguments, rms_norm, halves_rotation, indexed)
    exported = torch.export.export(Layer(), tuple(arguments.values()))
    if decomposed:
        exported = exported.run_decompositions()
    assert fuse_writes(exported.graph) == Counts(1, 1)
    exported.graph_module.recompile()
    exported.module()(*arguments.values())
    assert_records_equal(arguments["pool"], want)


# ---- a model -----------------------------------------------------------------------------------


@pytest.mark.parametrize("prefill", [False, True], ids=["decode", "prefill"])
def test_every_layer_of_a_decoder(prefill: bool) -> None:
    """DeepSeek's shape: a norm that rounds before the weight, neighbours turned, shared rows.

    In fp32, where no rounding differs, so that the decoder must say the same.
    """
    model = Config(num_layers=2, vocab=64)
    decoders = [
        Decoder(model, NvFp4Cache, num_blocks=16, block_size=8, dtype=torch.float32)
        for _ in range(2)
    ]
    requests = [Request(list(range(5, 20))), Request(list(range(40, 60)))]
    pages = Pages(num_blocks=16, block_size=8)
    step = pages.next_step(requests, batch=3, new_tokens=4, max_blocks=6)
    backend = FusingBackend()
    plain, fused = (decoder.prefill if prefill else decoder.forward for decoder in decoders)
    got = torch.compile(fused, backend=backend, fullgraph=True)(*step)
    want = plain(*step)
    assert backend.counts == [Counts(2, 2)]
    torch.testing.assert_close(got[:2], want[:2], rtol=0.02, atol=0.02)
    different = (decoders[0].cache.pool != decoders[1].cache.pool).sum()
    assert different <= 0.01 * 2 * 8 * 352
