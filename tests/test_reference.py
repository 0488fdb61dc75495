"""The reference against golden records, against number-by-number oracles, and its properties."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compare import E2M1_VALUES, E4M3_VALUES, assert_latents_equal, assert_records_equal
from nvfp4_dsmla import layout, reference

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

GOLDEN = Path(__file__).parent / "golden" / "nvfp4_ds_mla.npz"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]

E2M1 = E2M1_VALUES[:8]  # magnitudes
E4M3 = E4M3_VALUES[:0x7F]  # finite magnitudes


# ---- number-by-number oracles: numpy, by search among all values of a format


def oracle_scale(amax: NDArray[Any]) -> NDArray[Any]:
    """The least e4m3 number, of 2^-9 to 448, that is not below the fp32 quotient amax / 6."""
    quotient = amax.astype(np.float32) / np.float32(6)
    place: NDArray[np.int64] = np.searchsorted(E4M3, quotient.astype(np.float64), side="left")
    return place.clip(1, 0x7E)


def oracle_nearest(values: NDArray[Any], magnitude: NDArray[Any]) -> NDArray[Any]:
    """The index of the value nearest to each magnitude, of two the even one."""
    distance = np.abs(values - np.minimum(magnitude, values[-1])[..., None].astype(np.float64))
    nearest = distance == distance.min(axis=-1, keepdims=True)
    first: NDArray[np.int64] = nearest.argmax(axis=-1)
    last: NDArray[np.int64] = len(values) - 1 - nearest[..., ::-1].argmax(axis=-1)
    return np.where(first % 2 == 0, first, last)


def oracle_codes(blocks: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Scale bytes [n] and codes [n, 16] of finite fp32 blocks [n, 16]."""
    scale = oracle_scale(np.abs(blocks).max(axis=-1))
    inverse = np.float32(1) / E4M3[scale].astype(np.float32)
    codes = oracle_nearest(E2M1, np.abs(blocks) * inverse[:, None])
    return scale, codes | (np.signbit(blocks) * 8)


# ---- from blocks and RoPE dims to records and back


def encode_blocks(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 [n, 16] -> scale bytes [n] and codes [n, 16], by way of whole records."""
    short = -len(blocks) % layout.NUM_SCALES
    padded = torch.cat([blocks, blocks.new_zeros(short, layout.BLOCK_DIM)])
    kv_c = padded.reshape(-1, layout.NOPE_DIM)
    records = reference.encode(kv_c, kv_c.new_zeros(len(kv_c), layout.ROPE_DIM))
    scale, codes = unpack(records)
    return scale.flatten()[: len(blocks)], codes.reshape(-1, layout.BLOCK_DIM)[: len(blocks)]


def unpack(records: Tensor) -> tuple[Tensor, Tensor]:
    """Records [..., 352] -> scale bytes [..., 32] in block order, and codes [..., 512]."""
    place = [320 + 8 * (s & 3) + (s >> 2) for s in range(32)]
    packed = records[..., :256]
    codes = torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)
    return records[..., place].cpu(), codes.cpu()


def encode_rope(x: Tensor) -> Tensor:
    """fp32 [n], n a multiple of 64 -> e4m3 bytes [n]."""
    k_pe = x.reshape(-1, layout.ROPE_DIM)
    return reference.encode(k_pe.new_zeros(len(k_pe), layout.NOPE_DIM), k_pe)[:, 256:320].flatten()


def golden(device: torch.device) -> tuple[Tensor, Tensor]:
    with np.load(GOLDEN) as file:
        latent = torch.from_numpy(file["latent_bf16_bits"].view(np.int16)).view(torch.bfloat16)
        return latent.to(device), torch.from_numpy(file["record"]).to(device)


def encode(latent: Tensor) -> Tensor:
    return reference.encode(latent[..., : layout.NOPE_DIM], latent[..., layout.NOPE_DIM :])


def random_latent(num_tokens: int, *, seed: int, device: torch.device | str = "cpu") -> Tensor:
    """fp32 [num_tokens, 576], each token of its own magnitude, 2^-12 to 2^8."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, layout.HEAD_DIM, generator=generator)
    return (x * torch.exp2(torch.linspace(-12, 8, num_tokens))[:, None]).to(device)


# ---- golden records


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_encode_gives_every_byte_of_the_golden_records(
    device: torch.device, dtype: torch.dtype
) -> None:
    latent, records = golden(device)
    assert_records_equal(encode(latent.to(dtype)), records)


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_of_the_golden_records_is_code_times_scale(
    device: torch.device, dtype: torch.dtype
) -> None:
    _, records = golden(device)
    scale, codes = unpack(records)
    values = E2M1_VALUES[codes.numpy()] * E4M3_VALUES[scale.numpy()].repeat(16, axis=-1)
    rope = E4M3_VALUES[records[:, 256:320].cpu().numpy()]
    want = torch.from_numpy(np.concatenate([values, rope], axis=-1)).to(dtype)
    assert_latents_equal(reference.decode(records, dtype).cpu(), want)


# ---- the seed criteria


def test_seed_scale_within_one_ulp_of_an_independent_scale() -> None:
    latent = random_latent(256, seed=0)
    amax = latent[:, :512].reshape(-1, 32, 16).abs().amax(dim=-1).double()
    independent = (amax / 6).clamp(2.0**-9, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    scale, _ = unpack(encode(latent))
    assert (scale.int() - independent.int()).abs().max() <= 1


def test_seed_dequantised_within_one_and_a_half_scales() -> None:
    latent = random_latent(256, seed=1)[:, :512]
    records = encode(random_latent(256, seed=1))
    scale = layout.scales_by_block(records).double().repeat_interleave(16, dim=-1)
    error = (reference.decode(records, torch.float32)[:, :512].double() - latent.double()).abs()
    assert (error <= 1.5 * scale).all()


def test_seed_rope_within_an_eighth_relative_and_2_to_minus_9() -> None:
    latent = random_latent(256, seed=2).clamp(-448, 448)
    error = (reference.decode(encode(latent), torch.float32) - latent)[:, 512:].abs()
    assert (error <= latent[:, 512:].abs() * 2.0**-3 + 2.0**-9).all()


# ---- every code, every midpoint


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_with_every_scale_decodes_to_their_product(
    device: torch.device, dtype: torch.dtype
) -> None:
    records = torch.zeros(8, 352, dtype=torch.uint8)
    records[:, :256] = torch.tensor([0x10 * (2 * i + 1) + 2 * i for i in range(8)]).repeat(32)
    scale_of_block = torch.arange(256).reshape(8, 32)
    records[:, [320 + 8 * (s & 3) + (s >> 2) for s in range(32)]] = scale_of_block.byte()
    got = reference.decode(records.to(device), dtype)[:, :512].reshape(256, 16).cpu()
    want = torch.from_numpy(np.outer(E4M3_VALUES, E2M1_VALUES))
    assert_latents_equal(got, want.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_rope_byte_decodes_and_encodes_back(device: torch.device, dtype: torch.dtype) -> None:
    records = torch.zeros(4, 352, dtype=torch.uint8, device=device)
    every_byte = torch.arange(256, dtype=torch.uint8, device=device)
    records[:, 256:320] = every_byte.reshape(4, 64)
    values = reference.decode(records, dtype)[:, 512:]
    assert_latents_equal(values.flatten().cpu(), torch.from_numpy(E4M3_VALUES).to(dtype))
    every_byte[0xFF] = 0x7F  # a NaN has no sign
    assert encode_rope(values.flatten()).tolist() == every_byte.tolist()


def neighbours(x: NDArray[Any]) -> NDArray[Any]:
    """fp32 [n] -> [n, 3]: one ulp below, itself, one ulp above."""
    x = x.astype(np.float32)
    return np.stack([np.nextafter(x, np.float32(0)), x, np.nextafter(x, np.float32(1e9))], axis=-1)


def test_e2m1_midpoints_and_one_ulp_either_side(device: torch.device) -> None:
    midpoints = (E2M1[:-1] + E2M1[1:]) / 2
    blocks = np.full((7, 16), 6, np.float32)  # a 6 makes the scale 1, and so y is x
    blocks[:, 1:4] = neighbours(midpoints)
    blocks[:, 4:7] = -neighbours(midpoints)
    scale, codes = encode_blocks(torch.from_numpy(blocks).to(device))
    assert scale.tolist() == [0x38] * 7
    at = np.array([0, 2, 2, 4, 4, 6, 6])  # the even neighbour
    want = np.stack([np.arange(7), at, np.arange(1, 8)], axis=-1)
    assert codes[:, 1:4].tolist() == want.tolist()
    assert codes[:, 4:7].tolist() == (want | 8).tolist()


def test_e2m1_midpoints_under_every_scale(device: torch.device) -> None:
    scales = E4M3[1:]
    points = neighbours(np.outer(scales, (E2M1[:-1] + E2M1[1:]) / 2)).reshape(len(scales), 21)
    blocks = np.zeros((len(scales), 3, 16), np.float32)
    blocks[:, :, 15] = 6 * scales[:, None]
    blocks[:, 0, :15], blocks[:, 1, :15] = points[:, :15], -points[:, :15]
    blocks[:, 2, :6], blocks[:, 2, 6:12] = points[:, 15:], -points[:, 15:]
    flat = blocks.reshape(-1, 16)
    want_scale, want_codes = oracle_codes(flat)
    scale, codes = encode_blocks(torch.from_numpy(flat).to(device))
    assert scale.tolist() == want_scale.tolist()
    assert codes.tolist() == want_codes.tolist()
    # The sample tells x * (1 / scale) from x / scale, which rounds some ties to other codes.
    divided = oracle_nearest(E2M1, np.abs(flat / E4M3[want_scale].astype(np.float32)[:, None]))
    assert (divided != want_codes % 8).any()


def test_e4m3_midpoints_and_one_ulp_either_side(device: torch.device) -> None:
    points = neighbours((E4M3[:-1] + E4M3[1:]) / 2)  # [126, 3]
    byte = np.arange(126)
    want = np.stack([byte, byte + byte % 2, byte + 1], axis=-1)
    x = torch.zeros(768)
    x[:378], x[384:762] = torch.from_numpy(points).flatten(), torch.from_numpy(-points).flatten()
    got = encode_rope(x.to(device)).cpu()
    assert got[:378].tolist() == want.flatten().tolist()
    assert got[384:762].tolist() == (want.flatten() | 0x80).tolist()


def test_scale_is_rounded_up_one_ulp_above_each_value(device: torch.device) -> None:
    amax = neighbours(6 * E4M3[1:0x7E])  # of every scale but the largest
    blocks = np.zeros((amax.size, 16), np.float32)
    blocks[:, 3] = amax.flatten()
    scale, _ = encode_blocks(torch.from_numpy(blocks).to(device))
    byte = np.arange(1, 0x7E)
    assert scale.reshape(-1, 3).tolist() == np.stack([byte, byte, byte + 1], axis=-1).tolist()


def test_random_blocks_agree_with_the_search(device: torch.device) -> None:
    latent = random_latent(256, seed=3, device=device)
    want_scale, want_codes = oracle_codes(latent[:, :512].cpu().numpy().reshape(-1, 16))
    scale, codes = unpack(encode(latent))
    assert scale.flatten().tolist() == want_scale.tolist()
    assert codes.flatten().tolist() == want_codes.flatten().tolist()


# ---- zeros, NaN, infinities, saturation


INF, NAN = math.inf, math.nan
SPECIAL_BLOCKS = [  # elements (then zeros), scale byte, codes of those elements
    pytest.param([0.0, -0.0], 0x01, [0x0, 0x8], id="zeros keep their sign"),
    pytest.param([1e-30, -1e-30, 1e-42, -1e-42], 0x01, [0, 8, 0, 8], id="rounded to zero"),
    pytest.param([2.0**-9 * 6], 0x01, [0x7], id="the smallest scale"),
    pytest.param([NAN, -NAN], 0x01, [0x7, 0x7], id="a NaN has no part in the scale"),
    pytest.param([NAN, 12.0, -1.0], 0x40, [0x7, 0x7, 0x9], id="NaN beside numbers"),
    pytest.param([INF, -INF, 448.0, 1.0], 0x7E, [0x7, 0xF, 0x2, 0x0], id="infinities"),
    pytest.param([2688.0, 1344.0], 0x7E, [0x7, 0x5], id="the largest scale"),
    pytest.param([1e38, -3e38, 2700.0], 0x7E, [0x7, 0xF, 0x7], id="saturated"),
]


@pytest.mark.parametrize(("elements", "want_scale", "want_codes"), SPECIAL_BLOCKS)
def test_special_numbers_in_a_block(
    device: torch.device, elements: list[float], want_scale: int, want_codes: list[int]
) -> None:
    block = torch.zeros(1, 16)
    block[0, : len(elements)] = torch.tensor(elements)
    scale, codes = encode_blocks(block.to(device))
    assert scale.tolist() == [want_scale]
    assert codes[0, : len(elements)].tolist() == want_codes


def test_special_numbers_in_rope(device: torch.device) -> None:
    x = [0.0, -0.0, INF, -INF, NAN, -NAN, 448.0, -449.0, 464.0, 1e38, 1e-42, -1e-42]
    bytes_ = encode_rope(torch.tensor(x + [0.0] * 52, device=device))[: len(x)]
    want = [0x00, 0x80, 0x7E, 0xFE, 0x7F, 0x7F, 0x7E, 0xFE, 0x7E, 0x7E, 0x00, 0x80]
    assert bytes_.tolist() == want


def test_flushed_subnormal_numbers_change_nothing() -> None:
    latent = random_latent(64, seed=4)
    latent[::2] *= 2.0**-120  # about half the numbers become subnormal
    want = encode(latent)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    try:
        got, decoded = encode(latent), reference.decode(want, torch.float32)
    finally:
        torch.set_flush_denormal(False)
    assert_records_equal(got, want)
    assert_latents_equal(decoded, reference.decode(want, torch.float32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs_are_encoded_as_their_fp32_values(
    device: torch.device, dtype: torch.dtype
) -> None:
    latent = random_latent(64, seed=5, device=device).to(dtype)
    assert_records_equal(encode(latent), encode(latent.float()))


# ---- properties

finite_blocks = st.lists(st.floats(-3000, 3000, width=32), min_size=16, max_size=16).map(
    lambda block: torch.tensor([block])
)
near_the_floor = st.lists(st.floats(-0.125, 0.125, width=32), min_size=16, max_size=16).map(
    lambda block: torch.tensor([block])
)


def decode_blocks(scale: Tensor, codes: Tensor) -> Tensor:
    return torch.from_numpy(E2M1_VALUES[codes.numpy()] * E4M3_VALUES[scale.numpy(), None]).float()


@settings(max_examples=150)
@given(st.one_of(finite_blocks, near_the_floor))
def test_writing_what_was_read_gives_the_block_back_unless_its_scale_shrinks(block: Tensor) -> None:
    """A block that holds a code of magnitude 6 reads back with the amax its scale came from.

    Every scale of 6 * 2^-9 and up implies such a code: the step down from it is less than a sixth,
    so amax / scale is above 5. Below, where e4m3 is coarse, the largest code may be lower; then
    the second scale is the next smaller one, and a value moves by half the widest step of e2m1 at
    most. The smallest scale has none below it.
    """
    scale, codes = encode_blocks(block)
    largest = int((codes & 7).max())
    again_scale, again_codes = encode_blocks(decode_blocks(scale, codes))
    assert largest == 7 or scale < 6
    if largest == 7 or scale == 1:
        assert again_scale.tolist() == scale.tolist()
        assert again_codes.tolist() == codes.tolist()
    else:
        assert scale - 1 <= again_scale <= scale
        moved = decode_blocks(scale, codes) - decode_blocks(again_scale, again_codes)
        assert moved.abs().max() <= E4M3_VALUES[int(again_scale)]


def test_a_block_near_the_floor_need_not_survive_a_second_writing() -> None:
    block = torch.zeros(1, 16)
    block[0, 0] = 20 * 2.0**-9  # scale 4 * 2^-9, code 4; read back as 16 * 2^-9
    scale, codes = encode_blocks(block)
    again_scale, _ = encode_blocks(decode_blocks(scale, codes))
    assert (scale.tolist(), again_scale.tolist()) == ([4], [3])


@settings(max_examples=100)
@given(st.one_of(finite_blocks, near_the_floor))
def test_negation_flips_sign_bits_and_nothing_else(block: Tensor) -> None:
    scale, codes = encode_blocks(block)
    negated_scale, negated_codes = encode_blocks(-block)
    assert negated_scale.tolist() == scale.tolist()
    assert negated_codes.tolist() == (codes ^ 8).tolist()


@settings(max_examples=100)
@given(finite_blocks, st.integers(-6, 6))
def test_a_power_of_two_moves_the_scale_alone(block: Tensor, power: int) -> None:
    """As long as both scales are normal e4m3 numbers that were not cut off at 448."""
    block[0, 0] = 3.0  # amax in [3, 3000], so that most draws stay in that range
    block = block.clamp(-6, 6)
    scale, codes = encode_blocks(block)
    scaled_scale, scaled_codes = encode_blocks(block * 2.0**power)
    assert 0x08 <= scaled_scale < 0x7E
    assert scaled_scale.tolist() == (scale + 8 * power).tolist()
    assert scaled_codes.tolist() == codes.tolist()
