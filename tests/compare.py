"""Comparisons that say which byte or coordinate differs, what it is, and both values.

The values of codes are worked out here in Python numbers, by the bit fields of the two formats, so
that a message does not rest on the code under test.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from nvfp4_dsmla import layout

if TYPE_CHECKING:
    from torch import Tensor

SHOWN = 8  # differences that a message lists


def _value(bits: int, *, exponent_bits: int, mantissa_bits: int, bias: int) -> float:
    """Of a small float: sign, exponent and mantissa bits, and no infinity."""
    sign = -1.0 if bits >> (exponent_bits + mantissa_bits) else 1.0
    exponent = (bits >> mantissa_bits) % 2**exponent_bits
    fraction = bits % 2**mantissa_bits / 2**mantissa_bits
    if exponent == 0:
        return sign * math.ldexp(fraction, 1 - bias)
    return sign * math.ldexp(1 + fraction, exponent - bias)


E2M1_VALUES = np.array(
    [_value(code, exponent_bits=2, mantissa_bits=1, bias=1) for code in range(16)]
)
E4M3_VALUES = np.array(
    [_value(byte, exponent_bits=4, mantissa_bits=3, bias=7) for byte in range(256)]
)
E4M3_VALUES[[0x7F, 0xFF]] = math.nan


def assert_records_equal(got: Tensor, want: Tensor) -> None:
    """Every byte of uint8 [..., 352] tensors is equal."""
    _assert_alike(got, want)
    assert got.dtype == torch.uint8, f"records must be uint8, got {got.dtype}"
    width = layout.RECORD_BYTES
    assert got.shape[-1] == width, f"records must be [..., {width}], got {list(got.shape)}"
    got_bytes, want_bytes = got.cpu().numpy(), want.cpu().numpy()
    different = got_bytes != want_bytes
    if not different.any():
        return
    places = np.argwhere(different)
    records = different.any(axis=-1)
    lines = [f"{records.sum()} of {records.size} records differ, in {len(places)} bytes:"]
    for *record, byte in places[:SHOWN].tolist():
        what = describe_byte(byte)
        got_text = _byte_text(got_bytes[tuple(record)], byte)
        want_text = _byte_text(want_bytes[tuple(record)], byte)
        lines.append(f"  record {record}, byte {byte}, {what}: got {got_text}, want {want_text}")
    raise AssertionError("\n".join(_with_ellipsis(lines, len(places))))


def assert_latents_equal(got: Tensor, want: Tensor) -> None:
    """Every value of two bf16, fp16 or fp32 tensors has the same bits.

    A NaN equals any NaN: their sign and payload are unspecified. The zeros differ by their sign.
    """
    _assert_alike(got, want)
    got, want = got.cpu().contiguous(), want.cpu().contiguous()
    one_nan = (got.isnan() != want.isnan()).numpy()
    if one_nan.any():
        raise AssertionError(_values_text("are NaN on one side only", one_nan, got, want))
    bits = {2: torch.int16, 4: torch.int32}[got.element_size()]
    different = ((got.view(bits) != want.view(bits)) & ~want.isnan()).numpy()
    if different.any():
        raise AssertionError(_values_text("differ", different, got, want))


def describe_byte(byte: int) -> str:
    """What a byte of a record holds."""
    if byte < layout.ROPE_OFFSET:
        dim = 2 * (byte - layout.CODES_OFFSET)
        return f"codes of NoPE dims {dim}, {dim + 1} of block {dim // layout.BLOCK_DIM}"
    if byte < layout.SCALES_OFFSET:
        dim = byte - layout.ROPE_OFFSET
        return f"RoPE dim {dim}, which is dim {layout.NOPE_DIM + dim}"
    return f"scale of block {layout.SCALE_ORDER[byte - layout.SCALES_OFFSET]}"


def _byte_text(record: np.ndarray, byte: int) -> str:
    value = int(record[byte])
    if byte >= layout.ROPE_OFFSET:
        return f"0x{value:02x} = {E4M3_VALUES[value]:g}"
    block = 2 * (byte - layout.CODES_OFFSET) // layout.BLOCK_DIM
    place = layout.SCALES_OFFSET + layout.SCALE_ORDER.index(block)
    low, high = E2M1_VALUES[value & 0xF], E2M1_VALUES[value >> 4]
    return f"0x{value:02x} = ({low:g}, {high:g}) * {E4M3_VALUES[record[place]]:g}"


def _values_text(what: str, different: np.ndarray, got: Tensor, want: Tensor) -> str:
    places = np.argwhere(different)
    lines = [f"{len(places)} of {got.numel()} values {what}:"]
    for place in places[:SHOWN].tolist():
        got_text, want_text = _value_text(got[tuple(place)]), _value_text(want[tuple(place)])
        lines.append(f"  at {place}: got {got_text}, want {want_text}")
    return "\n".join(_with_ellipsis(lines, len(places)))


def _value_text(value: Tensor) -> str:
    digits = 2 * value.element_size()
    bits = int(value.view({2: torch.int16, 4: torch.int32}[value.element_size()]))
    return f"{value.item():g} (0x{bits % 16**digits:0{digits}x})"


def _with_ellipsis(lines: list[str], found: int) -> list[str]:
    return lines if found <= SHOWN else [*lines, f"  and {found - SHOWN} more"]


def _assert_alike(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype, f"dtype: got {got.dtype}, want {want.dtype}"
    assert got.shape == want.shape, f"shape: got {list(got.shape)}, want {list(want.shape)}"
