"""Where things lie in a record, and what the comparisons say about a byte that differs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch

from compare import assert_latents_equal, assert_records_equal
from nvfp4_dsmla import _C, layout

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def test_constants_are_those_of_the_format() -> None:
    assert (layout.NOPE_DIM, layout.ROPE_DIM, layout.HEAD_DIM) == (512, 64, 576)
    assert (layout.BLOCK_DIM, layout.NUM_SCALES, layout.RECORD_BYTES) == (16, 32, 352)
    assert (layout.CODES_OFFSET, layout.ROPE_OFFSET, layout.SCALES_OFFSET) == (0, 256, 320)


def test_scale_order_is_the_transpose_of_the_format() -> None:
    byte_of_block = [320 + 8 * (s & 3) + (s >> 2) for s in range(32)]
    block_of_byte = [4 * (p & 7) + (p >> 3) for p in range(32)]
    assert [_C.scale_offset(s) for s in range(32)] == byte_of_block
    assert list(layout.SCALE_ORDER) == block_of_byte


@pytest.mark.parametrize(
    ("view", "first", "end"),
    [(layout.codes, 0, 256), (layout.rope_bytes, 256, 320), (layout.scale_bytes, 320, 352)],
)
@pytest.mark.parametrize("leading", [(), (3,), (4, 2), (2, 4, 3)])
def test_a_view_is_its_bytes_of_each_record_and_shares_them(
    device: torch.device,
    view: Callable[[Tensor], Tensor],
    first: int,
    end: int,
    leading: tuple[int, ...],
) -> None:
    # Byte i of a record is i % 251, inside wider pages, so that no stride is the plain one.
    pages = (torch.arange(360, device=device) % 251).byte().expand(*leading, 360).clone()
    cache = pages[..., :352]
    got = view(cache)
    want = (torch.arange(first, end) % 251).expand(*leading, end - first)
    assert got.tolist() == want.tolist()
    got.fill_(255)
    assert (pages == 255).sum() == (end - first) * math.prod(leading)


def test_scales_by_block_are_values_in_block_order(device: torch.device) -> None:
    cache = torch.zeros(2, 3, 352, dtype=torch.uint8, device=device)
    for block in range(32):
        cache[1, 2, 320 + 8 * (block & 3) + (block >> 2)] = 0x38 + block  # 0x38 is 1, 0x40 is 2
    scales = layout.scales_by_block(cache)
    assert (scales.dtype, list(scales.shape)) == (torch.float32, [2, 3, 32])
    want = [2.0 ** (block // 8) * (1 + block % 8 / 8) for block in range(32)]
    assert scales[1, 2].tolist() == want
    assert not scales[0].any()


@pytest.mark.parametrize(
    "view", [layout.codes, layout.rope_bytes, layout.scale_bytes, layout.scales_by_block]
)
@pytest.mark.parametrize(
    ("cache", "got"),
    [
        (torch.zeros(2, 351, dtype=torch.uint8), r"torch.uint8 \[2, 351\]"),
        (torch.zeros(2, 352), r"torch.float32 \[2, 352\]"),
        (torch.tensor(0, dtype=torch.uint8), r"torch.uint8 \[\]"),
    ],
)
def test_a_view_of_something_else_is_refused(
    view: Callable[[Tensor], Tensor], cache: Tensor, got: str
) -> None:
    with pytest.raises(ValueError, match=r"cache: wanted uint8 \[\.\.\., 352\], got " + got):
        view(cache)


# ---- the comparisons of this suite


def message_of(got: Tensor, want: Tensor) -> str:
    compare = assert_records_equal if got.dtype == torch.uint8 else assert_latents_equal
    with pytest.raises(AssertionError) as failure:
        compare(got, want)
    return str(failure.value)


def test_equal_records_and_latents_pass() -> None:
    records = torch.arange(352).byte().expand(2, 352)
    assert_records_equal(records, records.clone())
    assert_latents_equal(torch.tensor([1.0, math.nan]), torch.tensor([1.0, -math.nan]))


def test_different_bytes_are_named_with_their_values() -> None:
    want = torch.zeros(2, 3, 352, dtype=torch.uint8)
    want[..., 320:] = 0x40  # every scale is 2
    got = want.clone()
    got[0, 2, 9] = 0xA7  # high nibble 0xA = -1, low nibble 0x7 = 6
    got[0, 2, 258] = 0x38
    got[1, 0, 320 + 8 * 3 + 1] = 0x7F
    text = (
        "2 of 6 records differ, in 3 bytes:\n"
        "  record [0, 2], byte 9, codes of NoPE dims 18, 19 of block 1: "
        "got 0xa7 = (6, -1) * 2, want 0x00 = (0, 0) * 2\n"
        "  record [0, 2], byte 258, RoPE dim 2, which is dim 514: got 0x38 = 1, want 0x00 = 0\n"
        "  record [1, 0], byte 345, scale of block 7: got 0x7f = nan, want 0x40 = 2"
    )
    assert message_of(got, want) == text


def test_only_the_first_differences_are_listed() -> None:
    want = torch.zeros(20, 352, dtype=torch.uint8)
    lines = message_of(want + 1, want).splitlines()
    assert lines[0] == f"20 of 20 records differ, in {20 * 352} bytes:"
    assert lines[-1] == f"  and {20 * 352 - 8} more"
    assert len(lines) == 10


@pytest.mark.parametrize(
    ("dtype", "got_bits", "want_bits"),
    [
        (torch.bfloat16, "0x3f80", "0x8000"),
        (torch.float16, "0x3c00", "0x8000"),
        (torch.float32, "0x3f800000", "0x80000000"),
    ],
)
def test_different_values_are_named_with_their_bits(
    dtype: torch.dtype, got_bits: str, want_bits: str
) -> None:
    got, want = torch.zeros(2, 576, dtype=dtype), torch.zeros(2, 576, dtype=dtype)
    got[1, 17], want[1, 17] = 1.0, -0.0
    text = f"1 of 1152 values differ:\n  at [1, 17]: got 1 ({got_bits}), want -0 ({want_bits})"
    assert message_of(got, want) == text


def test_nan_on_one_side_comes_before_other_differences() -> None:
    got, want = torch.zeros(3), torch.zeros(3)
    got[0], want[2] = 1.0, math.nan
    text = message_of(got, want)
    assert text.startswith("1 of 3 values are NaN on one side only:\n  at [2]: got 0 (0x00000000)")


def test_other_shapes_and_dtypes_are_refused() -> None:
    records = torch.zeros(2, 352, dtype=torch.uint8)
    assert "shape: got [1, 352], want [2, 352]" in message_of(records[:1], records)
    assert "dtype: got torch.float32" in message_of(torch.zeros(2), torch.zeros(2).half())
    assert "records must be [..., 352]" in message_of(records[:, :8], records[:, :8])
