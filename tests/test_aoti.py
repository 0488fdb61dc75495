"""AOTInductor packages of every op: eager code's bits, in caches that the caller keeps.

With and without the C entry points, which `aoti.c_shims` makes the package call.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

import nvfp4_dsmla
from compare import assert_latents_equal, assert_records_equal
from decode_cases import random_tokens
from fused_cases import cos_sin_table
from nvfp4_dsmla.layout import HEAD_DIM, NOPE_DIM

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.filterwarnings("ignore:.isinstance.treespec:FutureWarning"),  # PyTorch's own
    pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled"),
    pytest.mark.slow,
]

LAYERS, BLOCKS, BLOCK_SIZE, HEADS, TOPK = 3, 13, 5, 3, 7
CAPACITY = BLOCKS * BLOCK_SIZE
OPS = torch.ops.nvfp4_dsmla
# Before 2.12 a package hands an op that is dispatched another dtype than asked (pytorch#169157).
WIDE = torch.float32 if torch.__version__ >= "2.12" else None


class EveryOp(torch.nn.Module):
    """Writes to caches of three formats and reads them back in every way."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        records = random_tokens(LAYERS * CAPACITY, generator)
        self.register_buffer("nvfp4", records.view(LAYERS, BLOCKS, BLOCK_SIZE, -1))
        for name, dtype, width in (
            ("fp8", torch.uint8, 656),
            ("bf16", torch.bfloat16, HEAD_DIM),
            ("converted", torch.uint8, 656),
        ):
            cache = torch.zeros(LAYERS, BLOCKS, BLOCK_SIZE, width, dtype=dtype)
            self.register_buffer(name, cache)
        self.register_buffer("table", torch.randperm(BLOCKS, generator=generator)[None].int())
        self.register_buffer("starts", torch.tensor([0], dtype=torch.int32))
        self.register_buffer("seq_starts", torch.tensor([3], dtype=torch.int32))
        self.register_buffer("sink", torch.randn(HEADS, generator=generator))
        self.register_buffer("norm_weight", torch.randn(NOPE_DIM, generator=generator).bfloat16())
        self.register_buffer("cos_sin", cos_sin_table(70, torch.bfloat16))

    def forward(
        self, x: Tensor, slots: Tensor, more_slots: Tensor, q: Tensor, indices: Tensor
    ) -> tuple[Tensor, ...]:
        kv_c, k_pe = x.split([NOPE_DIM, HEAD_DIM - NOPE_DIM], dim=1)
        OPS.concat_and_cache_nvfp4_ds_mla(kv_c, k_pe, self.nvfp4, slots, 1)
        OPS.concat_and_cache_fp8_ds_mla(kv_c, k_pe, self.fp8, slots, 2)
        OPS.concat_and_cache_bfloat16(kv_c, k_pe, self.bf16, slots, 2)
        OPS.fused_rmsnorm_rope_concat_and_cache_nvfp4_ds_mla(
            kv_c,
            k_pe,
            self.norm_weight,
            1e-6,
            slots,
            self.cos_sin,
            False,
            self.nvfp4,
            more_slots,
            1,
            round_to_input=False,
        )
        OPS.convert_kv_cache(self.nvfp4, self.converted)
        by_request, from_fp8 = torch.empty_like(x), torch.empty_like(x)
        of_requests = (self.table, self.starts, 1)
        OPS.cp_gather_and_upconvert_nvfp4_kv_cache(
            self.nvfp4, by_request, *of_requests, self.seq_starts, 1
        )
        OPS.cp_gather_and_upconvert_fp8_kv_cache(self.fp8, from_fp8, *of_requests, None, 2)
        by_slot = OPS.gather_and_upconvert_nvfp4_ds_mla(self.nvfp4, slots, WIDE, 1)
        by_slot_fp8 = OPS.gather_and_upconvert_fp8_ds_mla(self.fp8, slots, None, 2)
        a = OPS.sparse_mla_decode(q, self.nvfp4, indices, 0.05, None, None, 1)
        b = OPS.sparse_mla_decode(q, self.nvfp4, indices, 0.07, None, self.sink, 0)
        merged = OPS.merge_attention_states(*a, *b)
        return by_request, from_fp8, by_slot, by_slot_fp8, *b, *merged


CACHES = ("nvfp4", "fp8", "bf16", "converted")
Inputs = tuple[Tensor, ...]


def make_inputs(batch: int, generator: torch.Generator, device: torch.device) -> Inputs:
    order = torch.randperm(CAPACITY, generator=generator)
    inputs = (
        torch.randn(batch, HEAD_DIM, generator=generator).bfloat16(),
        order[:batch],
        order[batch : 2 * batch],
        torch.randn(batch, 1, HEADS, HEAD_DIM, generator=generator).bfloat16(),
        torch.randint(-2, CAPACITY, (batch, 1, TOPK), generator=generator).int(),
    )
    return tuple(tensor.to(device) for tensor in inputs)


def package(path: Path, device: torch.device, options: dict[str, Any]) -> Path:
    batch = {0: torch.export.Dim("batch", max=CAPACITY // 2)}
    with torch.no_grad():
        exported = torch.export.export(
            EveryOp().to(device),
            make_inputs(4, torch.Generator(), device),
            dynamic_shapes=[batch] * 5,
        )
    options = {"aot_inductor.compile_wrapper_opt_level": "O0", **options}
    torch._inductor.aoti_compile_and_package(
        exported, package_path=str(path), inductor_configs=options
    )
    return path


@pytest.fixture(scope="module")
def packages(device: torch.device, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("packages")
    return {
        "dispatched": package(folder / "dispatched.pt2", device, {}),
        "direct": package(folder / "direct.pt2", device, nvfp4_dsmla.aoti.c_shims()),
    }


def source_of(package: Path) -> str:
    with zipfile.ZipFile(package) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("wrapper.cpp"))
        return archive.read(name).decode()


KINDS = pytest.mark.parametrize("kind", ["dispatched", "direct"])


def test_the_entry_points_are_called_for_every_op_and_only_if_asked(
    device: torch.device, packages: dict[str, Path]
) -> None:
    calls = [f"aoti_torch_{device.type}_{op._schema.name.partition('::')[2]}(" for op in direct()]
    assert len(calls) == len(set(calls)) == 11
    for kind, package in packages.items():
        body = source_of(package).partition("::run_impl(")[2]
        assert all((call in body) == (kind == "direct") for call in calls)
        assert ("aoti_torch_proxy_executor_call_function(" in body) == (kind == "dispatched")


def direct() -> list[torch._ops.OpOverload]:
    (shims,) = nvfp4_dsmla.aoti.c_shims().values()
    return list(shims)


def test_every_op_has_entry_points() -> None:
    names = torch._C._dispatch_get_all_op_names()
    assert {op._schema.name for op in direct()} == {n for n in names if "nvfp4_dsmla::" in n}


@KINDS
def test_a_package_gives_eager_bits_in_the_callers_caches(
    device: torch.device, packages: dict[str, Path], kind: str, generator: torch.Generator
) -> None:
    model = torch._inductor.aoti_load_package(str(packages[kind]))
    eager = EveryOp().to(device)
    mine = {name: buffer.clone() for name, buffer in eager.named_buffers()}
    # The others are in the code: AOTInductor puts tensors of a few elements there.
    constants = {name: mine[name] for name in model.get_constant_fqns()}
    assert set(constants) >= set(CACHES)
    model.load_constants(constants, check_full_update=True, user_managed=True)
    for batch in (4, 1, 30):
        inputs = make_inputs(batch, generator, device)
        for got, want in zip(model(*inputs), eager(*inputs), strict=True):
            assert_latents_equal(got, want)
        for name in CACHES:
            assert torch.equal(mine[name], eager.get_buffer(name)), name


def test_a_package_without_the_ops_says_what_it_wants(packages: dict[str, Path]) -> None:
    """For direct calls see test_example_aoti_cpp.py."""
    code = f"import torch; torch._inductor.aoti_load_package({str(packages['dispatched'])!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "Could not find schema for nvfp4_dsmla::" in done.stderr


def test_cpp_wrapper_calls_the_entry_points_too(
    device: torch.device, generator: torch.Generator
) -> None:
    def write(x: Tensor, pool: Tensor, slots: Tensor) -> None:
        OPS.concat_and_cache_nvfp4_ds_mla(x[:, :NOPE_DIM], x[:, NOPE_DIM:], pool, slots, 2)

    x, slots, *_ = make_inputs(4, generator, device)
    pool, want = (EveryOp().to(device).get_buffer("nvfp4") for _ in range(2))
    options = {**nvfp4_dsmla.aoti.c_shims(), "cpp_wrapper": True}
    compiled = torch.compile(write, options=options)
    _, (code,) = run_and_get_code(compiled, x, pool, slots)
    assert f"(aoti_torch_{device.type}_concat_and_cache_nvfp4_ds_mla(" in code
    write(x, want, slots)
    assert_records_equal(pool, want)


@KINDS
def test_a_refusal_ends_the_call_and_says_why(
    device: torch.device,
    packages: dict[str, Path],
    kind: str,
    generator: torch.Generator,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if device.type == "cuda":
        pytest.skip("CUDA skips a slot out of range")
    model = torch._inductor.aoti_load_package(str(packages[kind]))
    x, slots, *others = make_inputs(4, generator, device)
    slots[2] = CAPACITY
    if kind == "dispatched" and torch.__version__ < "2.13":  # where a package looks at no error
        model(x, slots, *others)
        said = ""
    else:
        with pytest.raises((RuntimeError, IndexError)) as refused:
            model(x, slots, *others)
        said = str(refused.value)
    said += capfd.readouterr().err
    assert "slot_mapping[2]: wanted a slot below the cache's capacity of 65, got 65" in said
