"""Every refusal: the exception, the name, wanted and got in it, and that nothing was written.

What only the data can show (slots, positions, starts and block ids out of range) is in test_write,
test_fused_write and test_gather.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import nvfp4_dsmla
from cases import INT32, assert_memory_equal, copies_of
from nvfp4_dsmla.layout import RECORD_BYTES
from refusals import (
    CACHE_SHAPE,
    CP_GATHER,
    CP_GATHER_CASES,
    DECODE,
    DECODE_CASES,
    FUSED,
    FUSED_CASES,
    GATHER,
    GATHER_CASES,
    MERGE,
    MERGE_CASES,
    WRITE,
    WRITE_CASES,
    Arguments,
    Refusal,
    good_arguments,
)

if TYPE_CHECKING:
    from collections.abc import Callable

OPS = (WRITE, FUSED, CP_GATHER, GATHER, DECODE, MERGE)
REFUSALS = [
    *WRITE_CASES,
    *FUSED_CASES,
    *CP_GATHER_CASES,
    *GATHER_CASES,
    *DECODE_CASES,
    *MERGE_CASES,
]


def assert_refused(
    call: Callable[..., object], arguments: Arguments, message: str, device: torch.device
) -> None:
    before = copies_of(arguments)
    where = re.escape(message)
    if "strides" in message:
        where += f".* on {device}"
    with pytest.raises(ValueError, match=where):
        call(**arguments)
    for name, argument in arguments.items():
        if torch.is_tensor(argument) and argument.device.type != "meta":
            assert_memory_equal(argument, before[name], name)


@pytest.mark.parametrize(
    "refusal",
    REFUSALS,
    ids=lambda refusal: refusal.name,
)
def test_a_bad_argument(device: torch.device, refusal: Refusal) -> None:
    arguments = good_arguments(refusal.op, device)
    refusal.change(arguments)
    for ops in (nvfp4_dsmla, torch.ops.nvfp4_dsmla):
        assert_refused(getattr(ops, refusal.op), arguments, refusal.message, device)


@pytest.mark.parametrize("op", OPS)
def test_the_good_arguments_are_good(device: torch.device, op: str) -> None:
    """Else the tests above would prove nothing."""
    getattr(nvfp4_dsmla, op)(**good_arguments(op, device))


TENSORS = [
    (WRITE, "kv_cache", ("kv_c", "k_pe", "slot_mapping")),
    (
        FUSED,
        "kv_cache",
        ("kv_c", "k_pe", "norm_weight", "positions", "cos_sin_cache", "slot_mapping"),
    ),
    (CP_GATHER, "src_cache", ("dst", "block_table", "workspace_starts", "seq_starts")),
    (GATHER, "kv_cache", ("slots",)),
    (DECODE, "kv_cache", ("q", "indices", "topk_length", "attn_sink")),
    (MERGE, "out_a", ("lse_a", "out_b", "lse_b")),
]
ELSEWHERE = [
    pytest.param(op, cache, name, id=f"{op}-{name}")
    for op, cache, names in TENSORS
    for name in names
]
OPTIONAL = {"seq_starts", "topk_length", "attn_sink"}
ALL_TENSORS = [
    pytest.param(op, name, id=f"{op}-{name}")
    for op, cache, names in TENSORS
    for name in (cache, *names)
]


@pytest.mark.parametrize(("op", "cache", "name"), ELSEWHERE)
def test_a_meta_tensor_among_real_ones(
    device: torch.device, op: str, cache: str, name: str
) -> None:
    """PyTorch would run nothing at all and say nothing."""
    arguments = good_arguments(op, device)
    arguments[name] = arguments[name].to("meta")
    untouched = {n: x.clone() for n, x in arguments.items() if torch.is_tensor(x) and n != name}
    message = f"{op}: {name}: wanted the device of {cache} ({device}), got meta"
    for ops in (nvfp4_dsmla, torch.ops.nvfp4_dsmla):
        with pytest.raises(ValueError, match=re.escape(message)):
            getattr(ops, op)(**arguments)
    for n, x in untouched.items():
        torch.testing.assert_close(arguments[n], x, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("wrong", [None, [1, 2], np.zeros(CACHE_SHAPE, np.uint8)], ids=type)
@pytest.mark.parametrize(("op", "name"), ALL_TENSORS)
def test_what_is_no_tensor(device: torch.device, op: str, name: str, wrong: Any) -> None:
    arguments = good_arguments(op, device)
    arguments[name] = wrong
    if wrong is None and name in OPTIONAL:
        getattr(nvfp4_dsmla, op)(**arguments)
        return
    message = f"{op}: {name}: wanted a tensor, got {type(wrong).__name__}"
    with pytest.raises(ValueError, match=re.escape(message)):
        getattr(nvfp4_dsmla, op)(**arguments)


@pytest.mark.parametrize(("op", "cache", "name"), ELSEWHERE)
def test_a_tensor_of_another_device(device: torch.device, op: str, cache: str, name: str) -> None:
    if device.type == "cpu":
        pytest.skip("the CPU is the only device here: see the meta and the fake tensors")
    arguments = good_arguments(op, device)
    arguments[name] = arguments[name].cpu()
    message = re.escape(f"{op}: {name}: wanted the device of {cache} ({device}), got ")
    for ops in (nvfp4_dsmla, torch.ops.nvfp4_dsmla):
        with pytest.raises(ValueError, match=message + ".* on cpu"):
            getattr(ops, op)(**arguments)


@pytest.mark.parametrize(("op", "cache", "name"), ELSEWHERE)
def test_a_tensor_of_another_device_while_tracing(op: str, cache: str, name: str) -> None:
    """Said before anything is compiled; a GPU is not needed for it."""
    with FakeTensorMode():
        arguments = good_arguments(op, torch.device("cpu"))
        arguments[name] = torch.empty_like(arguments[name], device="cuda:0")
        message = f"{op}: {name}: wanted the device of {cache} (cpu), got cuda:0"
        with pytest.raises(ValueError, match=re.escape(message)):
            getattr(nvfp4_dsmla, op)(**arguments)


@pytest.mark.parametrize(
    ("op", "name"), [case for case in ALL_TENSORS if case.values[1] not in OPTIONAL]
)
def test_what_is_no_tensor_while_tracing(op: str, name: str) -> None:
    with FakeTensorMode():
        arguments = good_arguments(op, torch.device("cpu"))
        arguments[name] = None
        message = f"{op}: {name}: wanted a tensor, got NoneType"
        with pytest.raises(ValueError, match=re.escape(message)):
            getattr(nvfp4_dsmla, op)(**arguments)


def test_a_capacity_that_cuda_cannot_count(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("the CPU counts in 64 bits")
    cache = torch.zeros(1, 1, RECORD_BYTES, dtype=torch.uint8, device=device)
    message = rf"{GATHER}: num_blocks \* block_size: wanted at most {INT32.max} on this device, got"
    with pytest.raises(ValueError, match=message):
        nvfp4_dsmla.gather_and_upconvert_nvfp4_ds_mla(
            kv_cache=cache.expand(2**31, 1, RECORD_BYTES),
            slots=torch.zeros(1, device=device).long(),
        )


def test_a_topk_that_cuda_cannot_count(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("the CPU counts in 64 bits")
    arguments = good_arguments("sparse_mla_decode", device)
    indices = arguments["indices"][:, :, :1]
    arguments["indices"] = indices.expand(*indices.shape[:2], INT32.max - 1022)
    with pytest.raises(ValueError, match=f"topk: wanted at most {INT32.max - 1023} on this device"):
        nvfp4_dsmla.sparse_mla_decode(**arguments)


@pytest.mark.parametrize("op", OPS)
def test_arguments_are_given_by_name(device: torch.device, op: str) -> None:
    with pytest.raises(TypeError, match="positional"):
        getattr(nvfp4_dsmla, op)(*good_arguments(op, device).values())
