"""torch.library.opcheck of every op with every sample, and what it does not see."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cases import CP_GATHERS, GATHERS, WRITES, Case, memory_of
from decode_cases import DECODES, MERGES
from fused_cases import FUSED_WRITES

OPS = torch.ops.nvfp4_dsmla
CASES = {
    "concat_and_cache_nvfp4_ds_mla": WRITES,
    "fused_rmsnorm_rope_concat_and_cache_nvfp4_ds_mla": FUSED_WRITES,
    "cp_gather_and_upconvert_nvfp4_kv_cache": CP_GATHERS,
    "gather_and_upconvert_nvfp4_ds_mla": GATHERS,
    "sparse_mla_decode": DECODES,
    "merge_attention_states": MERGES,
}
RETURNS = {
    "concat_and_cache_nvfp4_ds_mla": 0,
    "fused_rmsnorm_rope_concat_and_cache_nvfp4_ds_mla": 0,
    "cp_gather_and_upconvert_nvfp4_kv_cache": 0,
    "gather_and_upconvert_nvfp4_ds_mla": 1,
    "sparse_mla_decode": 2,
    "merge_attention_states": 2,
}
SAMPLES = [
    pytest.param(name, case, id=f"{name}-{case.name}")
    for name, cases in CASES.items()
    for case in cases
]


def positional(op: torch._ops.OpOverload, arguments: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(arguments[a.name] for a in op._schema.arguments if a.name in arguments)


@pytest.mark.parametrize(("name", "case"), SAMPLES)
def test_opcheck(device: torch.device, name: str, case: Case, generator: torch.Generator) -> None:
    op = getattr(OPS, name).default
    arguments = case.make(generator, device)
    for cache in arguments.keys() & {"kv_cache", "src_cache"}:
        memory = memory_of(arguments[cache])
        memory[(memory & 0x7F) == 0x7F] = 0x7E  # opcheck finds a NaN unequal to itself
    torch.library.opcheck(op, positional(op, arguments))


@pytest.mark.parametrize(
    ("name", "case"), [sample for sample in SAMPLES if RETURNS[str(sample.values[0])] > 0]
)
def test_a_fake_output_is_as_the_real_one(
    device: torch.device, name: str, case: Case, generator: torch.Generator
) -> None:
    op = getattr(OPS, name).default
    arguments = case.make(generator, device)
    real = op(**arguments)
    with FakeTensorMode() as mode:
        fakes = {n: mode.from_tensor(x) if torch.is_tensor(x) else x for n, x in arguments.items()}
        fake = op(**fakes)
    pairs = zip(fake, real, strict=True) if RETURNS[name] > 1 else [(fake, real)]
    for a, b in pairs:
        assert (a.shape, a.stride()) == (b.shape, b.stride())
        assert (a.dtype, a.device) == (b.dtype, b.device)


@pytest.mark.parametrize("name", CASES)
def test_ops_that_mutate_say_so_and_return_nothing(name: str) -> None:
    schema = getattr(OPS, name).default._schema
    mutated = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    want = {
        "concat_and_cache_nvfp4_ds_mla": ["kv_cache"],
        "fused_rmsnorm_rope_concat_and_cache_nvfp4_ds_mla": ["kv_cache"],
        "cp_gather_and_upconvert_nvfp4_kv_cache": ["dst"],
    }
    assert mutated == want.get(name, [])
    assert len(schema.returns) == RETURNS[name]
    assert (RETURNS[name] == 0) == bool(mutated)


@pytest.mark.parametrize("name", CASES)
def test_ints_are_symbolic(name: str) -> None:
    """An int would be a compile for every value of it."""
    text = str(getattr(OPS, name).default._schema)
    assert "SymInt layer=0" in text or "cache" not in text
    assert " int " not in text.replace("(int", "( int")
