"""torch.library.opcheck of every op with every sample, and what it does not see."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cases import CP_GATHERS, GATHERS, WRITES, Case, memory_of

OPS = torch.ops.nvfp4_dsmla
CASES = {
    "concat_and_cache_nvfp4_ds_mla": WRITES,
    "cp_gather_and_upconvert_nvfp4_kv_cache": CP_GATHERS,
    "gather_and_upconvert_nvfp4_ds_mla": GATHERS,
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
    memory = memory_of(arguments["kv_cache" if "kv_cache" in arguments else "src_cache"])
    memory[(memory & 0x7F) == 0x7F] = 0x7E  # opcheck finds a NaN unequal to itself
    torch.library.opcheck(op, positional(op, arguments))


@pytest.mark.parametrize("case", GATHERS, ids=lambda case: case.name)
def test_a_fake_output_is_as_the_real_one(
    device: torch.device, case: Case, generator: torch.Generator
) -> None:
    op = OPS.gather_and_upconvert_nvfp4_ds_mla.default
    arguments = case.make(generator, device)
    real = op(**arguments)
    with FakeTensorMode() as mode:
        fakes = {n: mode.from_tensor(x) if torch.is_tensor(x) else x for n, x in arguments.items()}
        fake = op(**fakes)
    assert (fake.shape, fake.stride()) == (real.shape, real.stride())
    assert (fake.dtype, fake.device) == (real.dtype, real.device)


@pytest.mark.parametrize("name", CASES)
def test_ops_that_mutate_say_so_and_return_nothing(name: str) -> None:
    schema = getattr(OPS, name).default._schema
    mutated = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    want = {
        "concat_and_cache_nvfp4_ds_mla": ["kv_cache"],
        "cp_gather_and_upconvert_nvfp4_kv_cache": ["dst"],
        "gather_and_upconvert_nvfp4_ds_mla": [],
    }
    assert mutated == want[name]
    assert len(schema.returns) == (0 if mutated else 1)


@pytest.mark.parametrize("name", CASES)
def test_ints_are_symbolic(name: str) -> None:
    """An int would be a compile for every value of it."""
    text = str(getattr(OPS, name).default._schema)
    assert "SymInt layer=0" in text
    assert " int " not in text.replace("(int", "( int")
