"""merge_attention_states: by its reference, and parts of an attention against the whole of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import nvfp4_dsmla
from cases import BF16, DTYPES, FP16, FP32, Case, assert_memory_equal, copies_of
from compare import assert_latents_equal
from decode_cases import MERGES, decode_arguments
from nvfp4_dsmla import reference
from nvfp4_dsmla.layout import NOPE_DIM

# A step of each dtype, relative. Two roundings of one number may end a step apart where it lies at
# the middle between two, which fp32 arithmetic in another order may move it over.
STEP = {BF16: 2.0**-7, FP16: 2.0**-10, FP32: 2.0**-20}


def merge(arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return nvfp4_dsmla.merge_attention_states(**arguments)


def side(
    device: torch.device, lse: float, out: Tensor | float, dtype: torch.dtype = BF16
) -> tuple[Tensor, Tensor]:
    """One row of one side; `out` a tensor of 512 or a number for all of it."""
    row = torch.as_tensor(out, dtype=dtype).expand(1, NOPE_DIM).to(device)
    return row, torch.tensor([lse], device=device)


def merge_sides(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return merge({"out_a": a[0], "lse_a": a[1], "out_b": b[0], "lse_b": b[1]})


@pytest.mark.parametrize("case", MERGES, ids=lambda case: case.name)
def test_sample(device: torch.device, case: Case, generator: torch.Generator) -> None:
    arguments = case.make(generator, device)
    before = copies_of(arguments)
    out, lse = merge(arguments)
    want_out, want_lse = reference.merge(**before)
    torch.testing.assert_close(out.cpu(), want_out, rtol=STEP[out.dtype], atol=2e-6)
    torch.testing.assert_close(lse.cpu(), want_lse, rtol=2e-6, atol=2e-6)
    assert out.is_contiguous()
    assert lse.is_contiguous()
    assert (out.device, lse.device) == (arguments["out_a"].device,) * 2
    for name, argument in arguments.items():
        assert_memory_equal(argument, before[name], name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_empty_side_leaves_the_other_as_it_is(
    device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """To the bit, the sign of zero included, and whatever the empty side's out is."""
    values = torch.randn(NOPE_DIM, generator=generator)
    values[:6] = torch.tensor([0.0, -0.0, 1e-42, -3e-8, 6e4, -math.inf])
    for lse in (-1e30, 0.0, 3.4e38):
        kept = side(device, lse, values, dtype)
        for garbage in (math.nan, math.inf, 1.0):
            empty = side(device, -math.inf, garbage, dtype)
            for got in (merge_sides(kept, empty), merge_sides(empty, kept)):
                assert_latents_equal(got[0], kept[0])
                assert_latents_equal(got[1], kept[1])


def test_two_empty_sides(device: torch.device) -> None:
    out, lse = merge_sides(side(device, -math.inf, math.nan), side(device, -math.inf, -5.0))
    assert_latents_equal(out, torch.zeros(1, NOPE_DIM, dtype=BF16))
    assert lse.tolist() == [-math.inf]


def test_a_nan_of_either_side(device: torch.device) -> None:
    """As sparse_mla_decode gives it: the row's out and lse are NaN. Another's with no token."""
    good, empty = side(device, 1.0, 2.0), side(device, -math.inf, 0.0)
    bad = side(device, math.nan, math.nan)
    for a, b in ((good, bad), (bad, good), (empty, bad), (bad, empty), (bad, bad)):
        out, lse = merge_sides(a, b)
        assert out.isnan().all()
        assert lse.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounding(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> None:
    """With equal lse the weights are 1/2 without error, so out is the mean, rounded to nearest."""
    bits = torch.randint(-(2**15), 2**15, (2, 4000, NOPE_DIM), generator=generator)
    if dtype == FP32:
        a, b = torch.randn(2, 4000, NOPE_DIM, generator=generator)
    else:
        a, b = bits.to(torch.int16).view(dtype)
    lse = torch.zeros(4000)
    out, got_lse = merge(
        {
            "out_a": a.to(device),
            "lse_a": lse.to(device),
            "out_b": b.to(device),
            "lse_b": lse.to(device),
        }
    )
    assert_latents_equal(out, (0.5 * a.float() + 0.5 * b.float()).to(dtype))
    torch.testing.assert_close(got_lse.cpu(), lse + math.log(2), rtol=1e-6, atol=0)


@pytest.mark.parametrize("difference", [1.0, 20.0, 90.0, 1e30])
def test_far_apart(device: torch.device, difference: float) -> None:
    """No overflow, and where a side's share is below fp32's last bit, the other as it is."""
    out, lse = merge_sides(
        side(device, -difference / 2, 1.0, FP32), side(device, difference / 2, 3.0, FP32)
    )
    share = 1 / (1 + math.exp(min(difference, 700)))
    torch.testing.assert_close(
        out.cpu(), torch.full((1, NOPE_DIM), 3 - 2 * share), rtol=1e-6, atol=0
    )
    want_lse = difference / 2 + math.log1p(math.exp(-min(difference, 700)))
    torch.testing.assert_close(lse.cpu(), torch.tensor([want_lse]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("cut", [0, 1, 300, 499, 500])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_the_parts_of_an_attention_merge_to_the_whole(
    device: torch.device, dtype: torch.dtype, cut: int, generator: torch.Generator
) -> None:
    arguments = decode_arguments(
        generator, device, heads=5, topk=500, dtype=dtype, num_blocks=20, block_size=64
    )
    whole_out, whole_lse = nvfp4_dsmla.sparse_mla_decode(**arguments)
    indices = arguments["indices"]
    a = nvfp4_dsmla.sparse_mla_decode(**{**arguments, "indices": indices[..., :cut]})
    b = nvfp4_dsmla.sparse_mla_decode(**{**arguments, "indices": indices[..., cut:]})
    out, lse = merge_sides(a, b)
    # Each side is rounded before, and the values may cancel each other.
    rounded = a[0].float().abs() + b[0].float().abs() + whole_out.float().abs()
    weight_error = 0 if device.type == "cpu" else 2.0**-8
    bound = STEP[dtype] / 2 * rounded + weight_error * rounded.max() + 1e-6
    assert ((out.float() - whole_out.float()).abs() <= bound).all()
    torch.testing.assert_close(lse, whole_lse, rtol=1e-4, atol=1e-4)
    if cut in (0, 500):
        assert_latents_equal(out, whole_out)
        assert_latents_equal(lse, whole_lse)


def test_a_sink_after_the_last_merge(device: torch.device, generator: torch.Generator) -> None:
    """As the docstring says it is done."""
    sink = [0.5, -math.inf, 4.0]
    arguments = decode_arguments(generator, device, heads=3, topk=40, sink=sink)
    whole, _ = nvfp4_dsmla.sparse_mla_decode(**arguments)
    plain = {**arguments, "attn_sink": None}
    halves = [
        nvfp4_dsmla.sparse_mla_decode(**{**plain, "indices": half})
        for half in arguments["indices"].split(20, dim=-1)
    ]
    out, lse = merge_sides(*halves)
    scaled = out * torch.sigmoid(lse - arguments["attn_sink"])[..., None]
    torch.testing.assert_close(scaled, whole.float(), rtol=2e-2, atol=4e-3)
