"""A million tokens of every distribution of the golden file: the GPU's bytes are the CPU's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

import nvfp4_dsmla
from compare import assert_records_equal
from nvfp4_dsmla import reference
from nvfp4_dsmla.layout import BLOCK_DIM, HEAD_DIM, NOPE_DIM, RECORD_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

TOKENS = 1_000_000
BLOCK_SIZE = 64


def scaled(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * factor


def with_an_outlier(x: Tensor) -> Tensor:
    x[:, ::BLOCK_DIM] *= 1000.0
    return x


def zeros_and_denormals(x: Tensor) -> Tensor:
    return torch.where(x > 0, x * 2.0**-130, x * 0.0)  # -0.0 too


def exact_ties(x: Tensor) -> Tensor:
    """Each block a 6 times some e4m3 scale and midpoints of e2m1 times the same."""
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0], device=x.device)
    picked = midpoints[(x.abs() * 1000).long() % 8].copysign(x)
    blocks = picked.view(len(x), -1, BLOCK_DIM)
    blocks[..., 0] = 6.0
    mantissa = 1 + (x[:, ::BLOCK_DIM].abs() * 100).long() % 8 / 8.0
    exponent = (x[:, 1::BLOCK_DIM] * 3).round().clamp(-8, 8)
    return (blocks * torch.ldexp(mantissa, exponent)[..., None]).view_as(x)


def with_special_values(x: Tensor) -> Tensor:
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, -torch.nan, 1e4, -1e4, 500.0, 0.0])
    hit = (x[:, :1].abs() > 1) & (x > 1.5)
    return torch.where(hit, special.to(x.device)[(x * 1000).long() % 8], x)


def at_the_ceiling(x: Tensor) -> Tensor:
    return 2688.0 + 64.0 * x


DISTRIBUTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": scaled(1.0),
    "small_1e-2": scaled(1e-2),
    "tiny_1e-4": scaled(1e-4),
    "below_floor_1e-6": scaled(1e-6),
    "large_1e3": scaled(1e3),
    "huge_1e30": scaled(1e30),
    "lognormal_rows": lambda x: x * torch.exp(4 * x[:, :1]),
    "lognormal_elems": lambda x: torch.exp(4 * x).copysign(x.roll(1)),
    "one_outlier": with_an_outlier,
    "zeros_and_denormals": zeros_and_denormals,
    "exact_ties": exact_ties,
    "inf_nan_saturation": with_special_values,
    "scale_ceiling": at_the_ceiling,
}


@pytest.mark.slow
@pytest.mark.cuda
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_million_tokens_have_the_bytes_of_the_cpu(name: str, device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("compares a GPU with the CPU")
    generator = torch.Generator(device).manual_seed(7)
    normal = torch.randn(TOKENS, HEAD_DIM, device=device, generator=generator)
    latent = DISTRIBUTIONS[name](normal).bfloat16()
    slots = torch.randperm(TOKENS, device=device, generator=generator)
    records = []
    for where in (device, torch.device("cpu")):
        cache = nvfp4_dsmla.allocate_kv_cache(
            num_blocks=TOKENS // BLOCK_SIZE + 1, block_size=BLOCK_SIZE, device=where
        )
        tokens = latent.to(where)
        nvfp4_dsmla.concat_and_cache_nvfp4_ds_mla(
            kv_c=tokens[:, :NOPE_DIM],
            k_pe=tokens[:, NOPE_DIM:],
            kv_cache=cache,
            slot_mapping=slots.to(where),
        )
        records.append(cache.view(-1, RECORD_BYTES))
    on_gpu, on_cpu = records
    assert torch.equal(on_gpu.cpu(), on_cpu)

    out = nvfp4_dsmla.gather_and_upconvert_nvfp4_ds_mla(
        kv_cache=on_gpu[None], slots=torch.arange(TOKENS, device=device)
    )
    want = nvfp4_dsmla.gather_and_upconvert_nvfp4_ds_mla(
        kv_cache=on_cpu[None], slots=torch.arange(TOKENS)
    )
    got = out.cpu()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num().view(torch.int16), want.nan_to_num().view(torch.int16))


def test_the_sweep_has_the_golden_files_distributions() -> None:
    with np.load(Path(__file__).parent / "golden" / "nvfp4_ds_mla.npz") as golden:
        assert set(golden["label"].tolist()) == set(DISTRIBUTIONS)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_few_tokens_have_the_bytes_of_the_reference(name: str, device: torch.device) -> None:
    normal = torch.randn(200, HEAD_DIM, generator=torch.Generator().manual_seed(7)).to(device)
    latent = DISTRIBUTIONS[name](normal).bfloat16()
    kv_c, k_pe = latent[:, :NOPE_DIM], latent[:, NOPE_DIM:]
    cache = nvfp4_dsmla.allocate_kv_cache(num_blocks=4, block_size=BLOCK_SIZE, device=device)
    slots = torch.arange(200, device=device)
    nvfp4_dsmla.concat_and_cache_nvfp4_ds_mla(
        kv_c=kv_c, k_pe=k_pe, kv_cache=cache, slot_mapping=slots
    )
    assert_records_equal(cache.view(-1, RECORD_BYTES)[:200], reference.encode(kv_c, k_pe))
