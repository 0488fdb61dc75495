"""The C++ codec, driven over buffers: every 16-bit input up, every code down, every tie."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest
import torch

from cases import golden
from compare import (
    E2M1_VALUES,
    E4M3_VALUES,
    assert_latents_equal,
    assert_records_equal,
)
from nvfp4_dsmla import _C, layout, reference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray
    from torch import Tensor

GOLDEN = Path(__file__).parent / "golden" / "nvfp4_ds_mla.npz"
HalfName = Literal["bfloat16", "float16"]
HALVES: tuple[HalfName, ...] = ("bfloat16", "float16")
ElementName = Literal["bfloat16", "float16", "float32"]
ELEMENTS: tuple[ElementName, ...] = (*HALVES, "float32")
EVERY_HALF = np.arange(2**16, dtype=np.uint16)

E2M1 = E2M1_VALUES[:8]  # magnitudes
E4M3 = E4M3_VALUES[:0x7F]  # finite magnitudes


# ---- the codec as functions of arrays ----------------------------------------------------------


def encode_e2m1(x: NDArray[Any]) -> NDArray[Any]:
    out = np.full(x.shape, 0xEE, dtype=np.uint8)
    _C.encode_e2m1(x, out)
    return out


def encode_e4m3(x: NDArray[Any]) -> NDArray[Any]:
    out = np.full(x.shape, 0xEE, dtype=np.uint8)
    _C.encode_e4m3(x, out)
    return out


def encode_scales(amax: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    scale = np.full(amax.shape, 0xEE, dtype=np.uint8)
    inverse = np.full(amax.shape, np.nan, dtype=np.float32)
    _C.encode_scales(amax, scale, inverse)
    return scale, inverse


def widen(bits: NDArray[Any], dtype: HalfName) -> NDArray[Any]:
    out = np.zeros(bits.shape, dtype=np.float32)
    _C.widen(bits, dtype, out)
    return out


def bits_of(latent: Tensor) -> NDArray[Any]:
    """What the codec takes as a latent: fp32, or the bits of the 16-bit types."""
    if latent.dtype == torch.float32:
        return latent.numpy()
    return latent.view(torch.int16).numpy().view(np.uint16)


def encode_tokens(latent: Tensor) -> Tensor:
    records = torch.full((len(latent), layout.RECORD_BYTES), 0xEE, dtype=torch.uint8)
    _C.encode_tokens(bits_of(latent), name_of(latent.dtype), records.numpy())
    return records


def decode_tokens(records: Tensor, dtype: torch.dtype) -> Tensor:
    latent = torch.full((len(records), layout.HEAD_DIM), 77.0, dtype=dtype)
    _C.decode_tokens(records.contiguous().numpy(), name_of(dtype), bits_of(latent))
    return latent


def name_of(dtype: torch.dtype) -> ElementName:
    names: dict[torch.dtype, ElementName] = {
        torch.bfloat16: "bfloat16",
        torch.float16: "float16",
        torch.float32: "float32",
    }
    return names[dtype]


# ---- oracles: by search among all the values of a type -----------------------------------------


def nearest(values: NDArray[Any], x: NDArray[Any]) -> NDArray[Any]:
    """The code nearest to each |x|, of two the even one; x is not NaN."""
    magnitude = np.minimum(np.abs(x.astype(np.float64)), values[-1])
    above = np.searchsorted(values, magnitude).clip(1, len(values) - 1)
    below = above - 1
    midpoint = (values[below] + values[above]) / 2
    even = np.where(below % 2 == 0, below, above)
    side = np.where(magnitude < midpoint, below, above)
    code: NDArray[Any] = np.where(magnitude == midpoint, even, side)
    return code


def oracle(values: NDArray[Any], x: NDArray[Any], sign_bit: int, nan: int) -> NDArray[Any]:
    code = nearest(values, np.where(np.isnan(x), 0, x)) | (np.signbit(x) * sign_bit)
    return np.where(np.isnan(x), nan, code).astype(np.uint8)


def around(x: NDArray[Any]) -> NDArray[Any]:
    """fp32 x of both signs, and the numbers next to them."""
    x = x.astype(np.float32)
    up, down = np.nextafter(x, np.float32(np.inf)), np.nextafter(x, np.float32(-np.inf))
    return np.concatenate([x, up, down, -x, -up, -down])


def interesting_floats() -> NDArray[Any]:
    """Random bit patterns, denormals, powers of two, and all around each value and each tie."""
    random = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    denormal = np.random.default_rng(1).integers(0, 2**23, 1_000, dtype=np.uint32)
    powers = np.arange(2**8, dtype=np.uint32) << 23
    bits = np.concatenate([random, denormal, denormal | 2**31, powers, powers | 2**31])
    ties = [(v[1:] + v[:-1]) / 2 for v in (E2M1, E4M3)]
    return np.concatenate([bits.view(np.float32), around(np.concatenate([*ties, E2M1, E4M3]))])


# ---- elements ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES)
def test_widen_is_exact_for_every_input(dtype: HalfName) -> None:
    got = torch.from_numpy(widen(EVERY_HALF, dtype))
    halves = torch.from_numpy(EVERY_HALF.view(np.int16).copy()).view(getattr(torch, dtype))
    assert_latents_equal(got, halves.float())


@pytest.mark.parametrize("dtype", HALVES)
def test_e2m1_of_every_half(dtype: HalfName) -> None:
    x = widen(EVERY_HALF, dtype)
    np.testing.assert_array_equal(encode_e2m1(x), oracle(E2M1, x, 0x8, 0x7))


@pytest.mark.parametrize("dtype", HALVES)
def test_e4m3_of_every_half(dtype: HalfName) -> None:
    x = widen(EVERY_HALF, dtype)
    got = encode_e4m3(x)
    np.testing.assert_array_equal(got, oracle(E4M3, x, 0x80, 0x7F))
    # PyTorch's own conversion, which does not saturate.
    finite = torch.from_numpy(x[~np.isnan(x)]).clamp(-448, 448)
    np.testing.assert_array_equal(
        got[~np.isnan(x)], finite.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    )


def test_e2m1_and_e4m3_of_interesting_floats() -> None:
    x = interesting_floats()
    np.testing.assert_array_equal(encode_e2m1(x), oracle(E2M1, x, 0x8, 0x7))
    np.testing.assert_array_equal(encode_e4m3(x), oracle(E4M3, x, 0x80, 0x7F))


@pytest.mark.parametrize(
    ("encode", "values", "sign_bit"),
    [
        pytest.param(encode_e2m1, E2M1, 0x8, id="e2m1"),
        pytest.param(encode_e4m3, E4M3, 0x80, id="e4m3"),
    ],
)
def test_a_tie_goes_to_the_even_code_and_an_ulp_decides(
    encode: Callable[[NDArray[Any]], NDArray[Any]], values: NDArray[Any], sign_bit: int
) -> None:
    below = np.arange(len(values) - 1)
    tie = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    less, more = np.nextafter(tie, np.float32(0)), np.nextafter(tie, np.float32(np.inf))
    np.testing.assert_array_equal(encode(tie), below + below % 2)
    np.testing.assert_array_equal(encode(less), below)
    np.testing.assert_array_equal(encode(more), below + 1)
    np.testing.assert_array_equal(encode(-tie), below + below % 2 + sign_bit)
    np.testing.assert_array_equal(encode(-less), below + sign_bit)
    np.testing.assert_array_equal(encode(-more), below + 1 + sign_bit)


def test_special_values() -> None:
    payload = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF], dtype=np.uint32)
    nan = payload.view(np.float32)
    inf = np.array([np.inf, -np.inf, 3.4e38, -3.4e38], dtype=np.float32)
    small = np.array([0.0, -0.0, 1e-45, -1e-45, 1e-30, -1e-30], dtype=np.float32)
    assert encode_e2m1(nan).tolist() == [0x7] * 4
    assert encode_e4m3(nan).tolist() == [0x7F] * 4
    assert encode_e2m1(inf).tolist() == [0x7, 0xF] * 2
    assert encode_e4m3(inf).tolist() == [0x7E, 0xFE] * 2
    assert encode_e2m1(small).tolist() == [0x0, 0x8] * 3
    assert encode_e4m3(small).tolist() == [0x00, 0x80] * 3


def test_every_e2m1_code_down_and_up_again() -> None:
    codes = np.arange(16, dtype=np.uint8)
    values = np.full(16, np.nan, dtype=np.float32)
    _C.decode_e2m1(codes, values)
    assert_latents_equal(torch.from_numpy(values), torch.tensor(E2M1_VALUES, dtype=torch.float32))
    np.testing.assert_array_equal(encode_e2m1(values), codes)


def test_every_e4m3_code_down_and_up_again() -> None:
    codes = np.arange(256, dtype=np.uint8)
    values = np.zeros(256, dtype=np.float32)
    _C.decode_e4m3(codes, values)
    assert_latents_equal(torch.from_numpy(values), torch.tensor(E4M3_VALUES, dtype=torch.float32))
    np.testing.assert_array_equal(encode_e4m3(values), np.where(codes == 0xFF, 0x7F, codes))


# ---- scales ------------------------------------------------------------------------------------


def assert_scales_right(amax: NDArray[Any]) -> None:
    scale, inverse = encode_scales(amax)
    quotient = np.maximum(amax / np.float32(6), np.float32(2**-9))
    rounded = nearest(E4M3, quotient)
    up = (E4M3[rounded] < quotient) & (rounded < 0x7E)
    np.testing.assert_array_equal(scale, rounded + up)
    want = np.float32(1) / E4M3[scale].astype(np.float32)
    np.testing.assert_array_equal(inverse.view(np.uint32), want.view(np.uint32))


def test_scales_of_every_bfloat16_amax() -> None:
    assert_scales_right(widen(np.arange(0x7F81, dtype=np.uint16), "bfloat16"))


def test_scales_of_every_float16_amax() -> None:
    assert_scales_right(widen(np.arange(0x7C01, dtype=np.uint16), "float16"))


def test_scales_of_interesting_floats() -> None:
    floats = np.concatenate([interesting_floats(), around(6 * E4M3), around(3 * E4M3)])
    assert_scales_right(np.abs(floats[~np.isnan(floats)]))


def test_a_scale_is_rounded_up_and_never_zero() -> None:
    six_times = (6 * E4M3[1:]).astype(np.float32)
    scale, _ = encode_scales(six_times)
    np.testing.assert_array_equal(scale, np.arange(1, 0x7F))
    scale, _ = encode_scales(np.nextafter(six_times, np.float32(np.inf)))
    np.testing.assert_array_equal(scale, [*range(2, 0x7F), 0x7E])
    assert encode_scales(np.zeros(1, dtype=np.float32))[0].tolist() == [0x01]


# ---- tokens ------------------------------------------------------------------------------------


def test_golden_records_up() -> None:
    latent, records = golden(GOLDEN)
    assert_records_equal(encode_tokens(latent), records)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_golden_records_down(dtype: torch.dtype) -> None:
    _, records = golden(GOLDEN)
    assert_latents_equal(decode_tokens(records, dtype), reference.decode(records, dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_tokens_of_random_bits_up(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(2)
    width = torch.finfo(dtype).bits // 8
    bits = rng.integers(0, 256, (500, layout.HEAD_DIM * width), dtype=np.uint8)
    latent = torch.from_numpy(bits).view(dtype)
    # Random exponents leave few blocks of one magnitude: tame the second half of the tokens.
    latent[250:] = torch.from_numpy(rng.normal(size=(250, layout.HEAD_DIM))).to(dtype)
    kv_c, k_pe = latent.split([layout.NOPE_DIM, layout.ROPE_DIM], dim=1)
    assert_records_equal(encode_tokens(latent), reference.encode(kv_c, k_pe))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_tokens_of_random_bytes_down(dtype: torch.dtype) -> None:
    bytes_ = np.random.default_rng(3).integers(0, 256, (500, layout.RECORD_BYTES), dtype=np.uint8)
    records = torch.from_numpy(bytes_)
    assert_latents_equal(decode_tokens(records, dtype), reference.decode(records, dtype))


def test_scale_offsets_are_the_transpose_of_the_format() -> None:
    want = [320 + 8 * (block & 3) + (block >> 2) for block in range(32)]
    assert [_C.scale_offset(block) for block in range(32)] == want


# ---- denormals flushed to zero -----------------------------------------------------------------


@pytest.fixture
def flushing() -> Iterator[None]:
    """This thread treats denormals as zero, results and operands both, as servers often do."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    tiny = np.array([1e-40], dtype=np.float32)
    try:
        assert (tiny * np.float32(2)).item() == 0.0, "the mode is not in force"
        yield
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.usefixtures("flushing")
def test_flushed_denormals_change_nothing_in_elements() -> None:
    x = interesting_floats()
    got = [*(widen(EVERY_HALF, d).view(np.uint32) for d in HALVES)]
    got += [encode_e2m1(x), encode_e4m3(x)]
    amax = np.abs(x[~np.isnan(x)])
    got += [encode_scales(amax)[0], encode_scales(amax)[1].view(np.uint32)]
    torch.set_flush_denormal(False)
    want = [*(widen(EVERY_HALF, d).view(np.uint32) for d in HALVES)]
    want += [encode_e2m1(x), encode_e4m3(x)]
    want += [encode_scales(amax)[0], encode_scales(amax)[1].view(np.uint32)]
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(g, w)


@pytest.mark.usefixtures("flushing")
def test_flushed_denormals_change_nothing_in_tokens() -> None:
    latent, records = golden(GOLDEN)
    got = encode_tokens(latent)
    down = [decode_tokens(records, dtype) for dtype in (torch.bfloat16, torch.float16)]
    torch.set_flush_denormal(False)
    assert_records_equal(got, records)
    for latent in down:
        assert_latents_equal(latent, reference.decode(records, latent.dtype))


# ---- refusals ----------------------------------------------------------------------------------


def floats(count: int) -> NDArray[Any]:
    return np.zeros(count, dtype=np.float32)


def bytes_(count: int) -> NDArray[Any]:
    return np.zeros(count, dtype=np.uint8)


def halves(count: int) -> NDArray[Any]:
    return np.zeros(count, dtype=np.uint16)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: _C.encode_e2m1(floats(3), bytes_(4)), "out: wanted a buffer of 3 elements, got 4"),
        (
            lambda: _C.encode_e2m1(bytes_(4), bytes_(4)),
            "in: wanted elements of 4 bytes, got 1",
        ),
        (
            lambda: _C.decode_e4m3(bytes_(4)[::2], floats(2)),
            "in: wanted a contiguous buffer, got one with gaps",
        ),
        (
            lambda: _C.encode_scales(floats(2), bytes_(2), floats(1)),
            "inverse: wanted a buffer of 2 elements, got 1",
        ),
        (
            lambda: _C.encode_scales(floats(2), bytes_(3), floats(2)),
            "scale: wanted a buffer of 2 elements, got 3",
        ),
        (
            lambda: _C.widen(halves(1), "float64", floats(1)),  # type: ignore[arg-type]
            "dtype: wanted bfloat16, float16 or float32, got float64",
        ),
        (
            lambda: _C.encode_tokens(halves(575), "bfloat16", bytes_(352)),
            "latent: wanted a buffer of 576 elements, got 575",
        ),
        (
            lambda: _C.encode_tokens(halves(576), "bfloat16", bytes_(353)),
            "records: wanted a buffer of 352 elements, got 353",
        ),
        (
            lambda: _C.decode_tokens(bytes_(704), "float32", floats(1151)),
            "latent: wanted a buffer of 1152 elements, got 1151",
        ),
        (
            lambda: _C.decode_tokens(bytes_(351), "float32", floats(0)),
            "records: wanted a buffer of 0 elements, got 351",
        ),
    ],
)
def test_a_wrong_buffer_is_refused(call: Callable[[], None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_a_read_only_output_is_refused() -> None:
    out = bytes_(2)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        _C.encode_e2m1(floats(2), out)
    assert out.tolist() == [0, 0]
