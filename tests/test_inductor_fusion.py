"""The pass inside Inductor: how it is turned on, and what compiled programs then write.

A compiled program with the pass must write the op's bytes, and those of the program without it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.utils import ReinplaceCounters, counters
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.utils import run_and_get_code

import nvfp4_dsmla
from compare import assert_latents_equal, assert_records_equal
from fusion_cases import (
    EPS,
    cast_lookup,
    deepseek_norm,
    halves_rotation,
    hugging_face_norm,
    indexed,
    narrow_norm,
    narrow_rotation,
    stacked_rotation,
)
from fusion_steps import (
    Arguments,
    chain_of,
    copied,
    pool_of_the_op,
    random_arguments,
    share_of_different_bytes,
    step_of,
)
from nvfp4_dsmla import inductor
from nvfp4_dsmla.layout import NOPE_DIM, ROPE_DIM

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from fusion_cases import Lookup, Norm, Rotation

pytestmark = pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")

OP = "fused_rmsnorm_rope_concat_and_cache_nvfp4_ds_mla"
# A copy of the pool in Inductor's code, as in test_compile.py.
COPIES = re.compile(r"fused\w*_(?:clone|copy)_|\b(?:clone|copy_)\(|aten\.(?:clone|copy)")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    ReinplaceCounters.clear()
    with config.patch(joint_custom_pre_pass=None):
        yield
    torch._dynamo.reset()


class UserPass(CustomGraphPass):
    """A pass that notes which graphs it saw, and that they were not fused yet."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.unfused: list[bool] = []

    def __call__(self, graph: fx.Graph) -> None:
        self.unfused.append(OP not in str(graph))

    def uuid(self) -> str:
        return self.name


# ---- on and off --------------------------------------------------------------------------------


def test_off_until_it_is_enabled() -> None:
    assert config.joint_custom_pre_pass is None


def test_enabled_twice_is_enabled_once() -> None:
    inductor.enable_fusion()
    first = config.joint_custom_pre_pass
    inductor.enable_fusion()
    assert config.joint_custom_pre_pass is first
    assert isinstance(first, inductor.FusionPass)
    inductor.disable_fusion()
    assert config.joint_custom_pre_pass is None
    inductor.disable_fusion()
    assert config.joint_custom_pre_pass is None


@pytest.mark.parametrize("several", [False, True], ids=["one", "list"])
def test_a_users_pass_runs_first_and_comes_back(several: bool) -> None:
    users = [UserPass("a"), UserPass("b")] if several else [UserPass("a")]
    slot: Any = users if several else users[0]
    with config.patch(joint_custom_pre_pass=slot):
        inductor.enable_fusion()
        fusion = config.joint_custom_pre_pass
        assert isinstance(fusion, inductor.FusionPass)
        graph = fx.symbolic_trace(lambda x: x + 1).graph
        fusion(graph)
        assert [user.unfused for user in users] == [[True]] * len(users)
        inductor.disable_fusion()
        assert config.joint_custom_pre_pass is slot


def test_a_pass_of_its_own_is_left_alone() -> None:
    """Whoever sets the slot after enable_fusion has the last word."""
    inductor.enable_fusion()
    user = UserPass("a")
    config.joint_custom_pre_pass = user
    inductor.disable_fusion()
    assert config.joint_custom_pre_pass is user


def test_uuid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = inductor.FusionPass().uuid()
    assert alone is not None
    assert inductor.FusionPass().uuid() == alone
    behind = [inductor.FusionPass(after=UserPass(name)).uuid() for name in ("a", "b")]
    assert len({alone, *behind}) == 3
    # What Inductor cannot know again is not cached.
    assert inductor.FusionPass(after=lambda _: None).uuid() is None
    assert inductor.FusionPass(after=[UserPass("a"), lambda _: None]).uuid() is None
    # Another source is another pass.
    source = tmp_path / "source.py"
    monkeypatch.setattr("nvfp4_dsmla.inductor.fusion.SOURCES", (str(source),))
    uuids = set()
    for text in ("a = 1", "a = 2"):
        source.write_text(text)
        get_hash_for_files.cache_clear()
        uuids.add(inductor.FusionPass().uuid())
    assert len(uuids | {alone}) == 3


# ---- compiled ----------------------------------------------------------------------------------


class Layers(torch.nn.Module):
    """Two layers: the second one's tokens are what the first one wrote.

    With `call_the_op` it is written with the op, else with the chain that the pass looks for.
    """

    table: Tensor
    pool: Tensor

    def __init__(self, arguments: Arguments, *, call_the_op: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(arguments["weight"].clone(), requires_grad=False)
        self.register_buffer("table", arguments["table"])
        self.register_buffer("pool", arguments["pool"].clone())
        self.call_the_op = call_the_op

    def forward(self, x: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        for layer in range(2):
            self.write(x, positions, slots, layer)
            x = nvfp4_dsmla.gather_and_upconvert_nvfp4_ds_mla(
                kv_cache=self.pool, slots=slots, dtype=x.dtype, layer=layer
            )
        return x

    def write(self, x: Tensor, positions: Tensor, slots: Tensor, layer: int) -> None:
        kv_c, k_pe = x.split([NOPE_DIM, ROPE_DIM], dim=-1)
        if self.call_the_op:
            nvfp4_dsmla.fused_rmsnorm_rope_concat_and_cache_nvfp4_ds_mla(
                kv_c=kv_c,
                k_pe=k_pe,
                norm_weight=self.weight,
                eps=EPS,
                positions=positions,
                cos_sin_cache=self.table,
                is_neox=True,
                kv_cache=self.pool,
                slot_mapping=slots,
                layer=layer,
            )
        else:
            nvfp4_dsmla.concat_and_cache_nvfp4_ds_mla(
                kv_c=deepseek_norm(kv_c, self.weight),
                k_pe=halves_rotation(k_pe, self.table[positions]),
                kv_cache=self.pool,
                slot_mapping=slots,
                layer=layer,
            )


def inputs_of(arguments: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    return arguments["x"], arguments["positions"], arguments["slots"]


def random_inputs(
    tokens: int, device: torch.device, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    return inputs_of(random_arguments(generator, device, shape=(tokens,)))


def check_as_the_op(
    call: Callable[..., Tensor],
    pool: Tensor,
    eager: Layers,
    all_inputs: Sequence[tuple[Tensor, ...]],
) -> None:
    for inputs in all_inputs:
        assert_latents_equal(call(*inputs), eager(*inputs))
        assert_records_equal(pool, eager.pool)


def both_layers(device: torch.device, generator: torch.Generator) -> tuple[Layers, Layers]:
    """With the chain, and with the op."""
    arguments = random_arguments(generator, device)
    return Layers(arguments, call_the_op=False), Layers(arguments, call_the_op=True)


def fused_since(before: inductor.Counts) -> int:
    now = inductor.fusion_counts()
    assert now.writes - before.writes == now.fused - before.fused
    return now.fused - before.fused


@pytest.mark.slow
def test_compiled_for_any_number_of_tokens(
    device: torch.device, generator: torch.Generator
) -> None:
    inductor.enable_fusion()
    before = inductor.fusion_counts()
    layers, eager = both_layers(device, generator)
    all_inputs = [random_inputs(tokens, device, generator) for tokens in (7, 12)]
    for tensor in all_inputs[0]:
        torch._dynamo.mark_dynamic(tensor, 0)
    compiled = torch.compile(layers, fullgraph=True)
    _, codes = run_and_get_code(check_as_the_op, compiled, layers.pool, eager, all_inputs)
    assert fused_since(before) == 2
    (code,) = codes
    assert code.count(f"torch.ops.nvfp4_dsmla.{OP}.default(") == 2
    assert "concat_and_cache_nvfp4_ds_mla.default(" not in code.replace(OP, "")
    assert COPIES.findall(code) == []
    assert ReinplaceCounters.get_total_missed() == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("norm", "rotation", "lookup"),
    [
        (hugging_face_norm, stacked_rotation, cast_lookup),
        (narrow_norm, narrow_rotation, indexed),
    ],
    ids=["cast_before_the_weight", "narrow"],
)
def test_what_inductor_makes_of_the_chain_itself(
    device: torch.device,
    norm: Norm,
    rotation: Rotation,
    lookup: Lookup,
    generator: torch.Generator,
) -> None:
    """It leaves out roundings inside a kernel, as the op does and eager code does not."""
    step = step_of(chain_of(norm, rotation, lookup))
    arguments = random_arguments(generator, device, shape=(70,))
    plain, fused = copied(arguments), copied(arguments)
    torch.compile(step, fullgraph=True)(**plain)
    torch._dynamo.reset()
    inductor.enable_fusion()
    before = inductor.fusion_counts()
    torch.compile(step, fullgraph=True)(**fused)
    assert fused_since(before) == 1
    assert_records_equal(fused["pool"], pool_of_the_op(arguments, norm, rotation, lookup))
    assert share_of_different_bytes(fused["pool"], plain["pool"], arguments) < 0.002
    step(**arguments)
    assert share_of_different_bytes(arguments["pool"], plain["pool"], arguments) > 0.002


@pytest.mark.slow
def test_cpp_wrapper(device: torch.device, generator: torch.Generator) -> None:
    """With the pass for this one function."""
    before = inductor.fusion_counts()
    layers, eager = both_layers(device, generator)
    compiled = torch.compile(
        layers,
        fullgraph=True,
        options={"cpp_wrapper": True, "joint_custom_pre_pass": inductor.FusionPass()},
    )
    inputs = random_inputs(7, device, generator)
    check_as_the_op(compiled, layers.pool, eager, [inputs])
    assert fused_since(before) == 2


@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
@pytest.mark.slow
def test_aot_inductor(device: torch.device, generator: torch.Generator, tmp_path: Path) -> None:
    inductor.enable_fusion()
    before = inductor.fusion_counts()
    layers, eager = both_layers(device, generator)
    all_inputs = [random_inputs(tokens, device, generator) for tokens in (7, 12)]
    rows = {0: torch.export.Dim("tokens", min=2, max=80)}
    exported = torch.export.export(layers, all_inputs[0], dynamic_shapes=(rows, rows, rows))
    path = torch._inductor.aoti_compile_and_package(
        exported,
        package_path=str(tmp_path / "layers.pt2"),
        inductor_configs=nvfp4_dsmla.aoti.c_shims(),
    )
    assert fused_since(before) == 2
    package = torch._inductor.aoti_load_package(path)
    package.load_constants(
        layers.state_dict(),
        check_full_update=True,
        user_managed=True,
    )
    check_as_the_op(package, layers.pool, eager, all_inputs)


@pytest.mark.cuda
@pytest.mark.slow
def test_cuda_graphs(device: torch.device, generator: torch.Generator) -> None:
    if device.type == "cpu":
        pytest.skip("CUDA graphs are CUDA's")
    inductor.enable_fusion()
    before = inductor.fusion_counts()
    layers, eager = both_layers(device, generator)
    compiled = torch.compile(layers, fullgraph=True, mode="reduce-overhead")
    skipped = counters["inductor"]["cudagraph_skips"]
    for _ in range(4):  # a warm-up, the capture, replays
        inputs = random_inputs(7, device, generator)
        torch.compiler.cudagraph_mark_step_begin()
        got = compiled(*inputs).clone()
        assert_latents_equal(got, eager(*inputs))
        assert_records_equal(layers.pool, eager.pool)
    assert counters["inductor"]["cudagraph_skips"] == skipped
    assert fused_since(before) == 2
