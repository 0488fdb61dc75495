"""Whether this build serves a combination, and that a reason is what the op itself says."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

import nvfp4_dsmla
from nvfp4_dsmla import _C, support
from nvfp4_dsmla.formats import CACHE_FORMATS
from nvfp4_dsmla.support import supports_combination

# ---- arguments ---------------------------------------------------------------------------------


@pytest.mark.parametrize("op", support.OPS)
def test_every_op_of_the_table_is_there_and_its_defaults_are_served(op: str) -> None:
    assert hasattr(torch.ops.nvfp4_dsmla, op)
    about = support._OPS[op]
    assert (
        supports_combination(
            op=op, kv_cache_dtype=about.format_name or "nvfp4_ds_mla", device_type="cpu"
        )
        is None
    )


def test_the_table_has_every_op() -> None:
    """By the schemas that are registered, so that a new op is not forgotten."""
    schemas = torch._C._jit_get_all_schemas()
    registered = {s.name.split("::")[1] for s in schemas if s.name.startswith("nvfp4_dsmla::")}
    assert registered == set(support.OPS)


REFUSED = [
    ("concat_and_cache_nvfp4_ds_mla", {"head_size": 640}),
    ("concat_and_cache_nvfp4_ds_mla", {"dtype": torch.float64}),
    ("concat_and_cache_nvfp4_ds_mla", {"block_size": 0}),
    ("cp_gather_and_upconvert_nvfp4_kv_cache", {"head_size": 512}),
    ("cp_gather_and_upconvert_nvfp4_kv_cache", {"dtype": torch.int8}),
    ("gather_and_upconvert_nvfp4_ds_mla", {"dtype": torch.float64}),
    ("sparse_mla_decode", {"dtype": torch.float32}),
    ("sparse_mla_decode", {"head_size": 640}),
    ("merge_attention_states", {"dtype": torch.int32}),
    ("concat_and_cache_fp8_ds_mla", {"head_size": 640}),
    ("concat_and_cache_bfloat16", {"dtype": torch.float64}),
    ("cp_gather_and_upconvert_fp8_kv_cache", {"head_size": 512}),
    ("gather_and_upconvert_fp8_ds_mla", {"block_size": 0}),
    ("convert_kv_cache", {"block_size": 0}),
]


@pytest.mark.parametrize(("op", "asked"), REFUSED)
def test_a_reason_is_the_text_that_the_op_raises(op: str, asked: dict[str, Any]) -> None:
    name = support.OPS[op] or "nvfp4_ds_mla"
    reason = supports_combination(op=op, kv_cache_dtype=name, device_type="cpu", **asked)
    assert reason is not None
    question = support._Question(cache_format=CACHE_FORMATS[name], **asked)
    with pytest.raises(ValueError, match="wanted") as caught:
        support._OPS[op].probe(getattr(torch.ops.nvfp4_dsmla, op).default, question)
    assert str(caught.value).startswith(reason)
    assert reason.startswith(f"{op}: ")
    assert " on cpu" not in reason


def test_without_an_op_all_that_serving_needs_is_asked() -> None:
    assert supports_combination(device_type="cpu") is None
    reason = supports_combination(device_type="cpu", head_size=640)
    assert reason is not None
    assert reason.startswith("concat_and_cache_nvfp4_ds_mla: kv_c: wanted")


@pytest.mark.parametrize("name", ["fp8_ds_mla", "bfloat16"])
def test_a_format_without_attention_is_not_served_but_its_ops_are(name: str) -> None:
    reason = supports_combination(kv_cache_dtype=name, device_type="cpu")
    assert reason == (
        "sparse_mla_decode: wanted kv_cache_dtype nvfp4_ds_mla, the format it is for, got " + name
    )
    for op in [op for op, of in support.OPS.items() if of in (name, None)]:
        assert supports_combination(op=op, kv_cache_dtype=name, device_type="cpu") is None


def test_a_head_size_that_an_op_does_not_see_is_refused_all_the_same() -> None:
    assert (
        supports_combination(
            op="gather_and_upconvert_nvfp4_ds_mla", device_type="cpu", head_size=512
        )
        == "gather_and_upconvert_nvfp4_ds_mla: wanted head_size 576, the dims of a record, got 512"
    )


@pytest.mark.parametrize("num_heads", [1, 16, 128])
@pytest.mark.parametrize("has_sink", [False, True])
def test_any_heads_and_sinks(num_heads: int, has_sink: bool) -> None:
    assert (
        supports_combination(
            op="sparse_mla_decode", device_type="cpu", num_heads=num_heads, has_sink=has_sink
        )
        is None
    )


def test_dense_attention_is_not_served() -> None:
    want = "wanted sparse attention, over the tokens that its indices name, got dense"
    assert supports_combination(device_type="cpu", use_sparse=False) == f"sparse_mla_decode: {want}"


def test_an_op_of_another_format() -> None:
    assert supports_combination(
        op="concat_and_cache_nvfp4_ds_mla", kv_cache_dtype="fp8", device_type="cpu"
    ) == (
        "concat_and_cache_nvfp4_ds_mla: wanted kv_cache_dtype nvfp4_ds_mla, the format it is for, "
        "got fp8_ds_mla"
    )


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match="op: wanted one of concat_and_cache_nvfp4_ds_mla, "):
        supports_combination(op="concat_and_cache")
    with pytest.raises(ValueError, match="kv_cache_dtype: wanted one of"):
        supports_combination(kv_cache_dtype="fp4")


# ---- devices: what this build has, and what it would have if it were another -------------------

WRITE = "concat_and_cache_nvfp4_ds_mla"


def test_another_device() -> None:
    reason = supports_combination(op=WRITE, device_type="xpu")
    assert reason == f"{WRITE}: wanted a device of type cpu or cuda, got xpu"


def test_this_build_on_cuda() -> None:
    """On a machine without CUDA there is a reason, on one with it there is none."""
    works = torch.cuda.is_available() and len(nvfp4_dsmla.loaded_libraries()) > 1
    reason = supports_combination(op=WRITE)
    assert (reason is None) == works, reason


@pytest.fixture
def cuda_build(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As if torch had CUDA, our CUDA library were loaded, and no device were there."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(support, "loaded_libraries", lambda: ("a", "b"))
    monkeypatch.setattr(support, "_has_cuda_kernel", lambda _: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(_C, "CUDA_ARCHS", ("sm_80", "sm_90a", "sm_100f", "compute_120"))
    return monkeypatch


def test_torch_without_cuda(cuda_build: pytest.MonkeyPatch) -> None:
    cuda_build.setattr(torch.version, "cuda", None)
    reason = supports_combination(op=WRITE, compute_capability=(9, 0))
    assert reason == f"{WRITE}: wanted a torch with CUDA, got {torch.__version__}, built without it"


def test_a_build_without_the_cuda_library(cuda_build: pytest.MonkeyPatch) -> None:
    cuda_build.setattr(support, "loaded_libraries", lambda: ("a",))
    reason = supports_combination(op=WRITE, compute_capability=(9, 0))
    assert reason == support.no_cuda_library(WRITE)
    assert reason.startswith(f"{WRITE}: wanted the CUDA library, got a build without it")


def test_an_op_without_a_cuda_kernel(cuda_build: pytest.MonkeyPatch) -> None:
    cuda_build.setattr(support, "_has_cuda_kernel", lambda op: op == WRITE)
    assert supports_combination(op=WRITE, compute_capability=(9, 0)) is None
    op = "sparse_mla_decode"
    reason = supports_combination(op=op, compute_capability=(9, 0))
    assert reason == f"{op}: wanted a kernel for CUDA, got an op that has one for the CPU alone"


def test_the_kernels_that_are_registered_are_seen() -> None:
    if len(nvfp4_dsmla.loaded_libraries()) > 1:
        assert support._has_cuda_kernel(WRITE)
    elif torch.version.cuda is None:
        assert not support._has_cuda_kernel(WRITE)


def test_no_device(cuda_build: pytest.MonkeyPatch) -> None:
    del cuda_build
    reason = supports_combination(op=WRITE)
    assert reason == f"{WRITE}: wanted a CUDA device, got a machine on which torch sees none"


@pytest.mark.parametrize(
    ("capability", "served"),
    [
        ((7, 5), False),
        ((8, 0), True),
        ((8, 6), True),  # sm_80's code runs on every 8.x
        ((8, 9), True),
        ((9, 0), True),
        ((9, 1), False),  # sm_90a is for 9.0 alone
        ((10, 0), True),
        ((10, 3), True),  # the family of sm_100f
        ((11, 0), False),
        ((12, 0), True),  # PTX
        ((12, 1), True),
        ((13, 0), True),
    ],
)
@pytest.mark.usefixtures("cuda_build")
def test_which_gpus_run_what_is_compiled(capability: tuple[int, int], served: bool) -> None:
    reason = supports_combination(op=WRITE, compute_capability=capability)
    want = (
        f"{WRITE}: wanted a GPU that this build has the op's code for (sm_80, sm_90a, sm_100f, "
        f"compute_120), got compute capability {capability[0]}.{capability[1]}"
    )
    assert reason == (None if served else want)


def test_an_op_may_need_a_newer_gpu(cuda_build: pytest.MonkeyPatch) -> None:
    """And PTX of an older target has no kernel for it either."""
    cuda_build.setattr(_C, "CUDA_ARCHS", ("sm_75", "compute_75", "sm_90a"))
    for capability in ((7, 5), (8, 0), (9, 0)):
        assert supports_combination(op=WRITE, compute_capability=capability) is None
    op = "sparse_mla_decode"
    assert supports_combination(op=op, compute_capability=(9, 0)) is None
    for capability in ((7, 5), (8, 0)):
        reason = supports_combination(op=op, compute_capability=capability)
        assert reason == (
            f"{op}: wanted a GPU that this build has the op's code for (sm_75, compute_75, "
            f"sm_90a), got compute capability {capability[0]}.{capability[1]}"
        )


def test_without_the_cuda_library_an_op_says_so_too() -> None:
    """In a process of its own, since a registration stays."""
    program = f"""
import torch
import nvfp4_dsmla
from nvfp4_dsmla import support

torch.version.cuda = "13.0"
support.loaded_libraries = lambda: ("one",)
support.explain_missing_cuda()
op = torch.ops.nvfp4_dsmla.{WRITE}.default
cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
x = torch.empty(0, 512)
try:
    op.redispatch(cuda, x, x, x, x, 0)
except NotImplementedError as error:
    assert str(error) == support.supports_combination(compute_capability=(9, 0)), error
    print("said so")
"""
    if len(nvfp4_dsmla.loaded_libraries()) > 1:
        pytest.skip("this build has the CUDA library")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "said so\n", done.stderr
