"""Sample inputs of the fused write, as cases.py has them for the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from cases import DTYPES, INT32, MARGIN, Case, inside, write_case
from nvfp4_dsmla.layout import HEAD_DIM, NOPE_DIM, ROPE_DIM

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

BF16, FP16, FP32 = DTYPES


def cos_sin_table(max_positions: int, dtype: torch.dtype) -> Tensor:
    """[max_positions, 64], as an engine makes it: 32 cosines, 32 sines."""
    half = ROPE_DIM // 2
    frequencies = 10_000.0 ** (-torch.arange(half).double() / half)
    angles = torch.arange(max_positions).double()[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1).to(dtype)


def _fused(
    name: str,
    *,
    tokens: int,
    dtype: torch.dtype,
    is_neox: bool,
    weight_dtype: torch.dtype | None = None,
    table_dtype: torch.dtype | None = None,
    max_positions: int = 70,
    table_stride: int = ROPE_DIM,
    offset: int = MARGIN,
    position_dtype: torch.dtype = torch.int64,
    position_stride: int = 1,
    eps: float = 1e-6,
    round_to_input: bool = True,
    skipped: Sequence[int] = (),
    **of_the_write: Any,
) -> Case:
    """As a write; a special number spoils its whole row, so they are fewer here."""
    write = write_case(
        name,
        tokens=tokens,
        dtype=dtype,
        offset=offset,
        skipped=skipped,
        specials_share=0.0003,
        **of_the_write,
    )

    def make(generator: torch.Generator, device: torch.device) -> dict[str, Any]:
        arguments = write.make(generator, device)
        weight = (1 + torch.randn(NOPE_DIM, generator=generator) / 4).to(weight_dtype or dtype)
        table = cos_sin_table(max_positions, table_dtype or dtype)
        positions = torch.randint(max_positions, (tokens,), generator=generator)
        # A skipped token's position is not looked at.
        positions[list(skipped)] = torch.tensor([-1, INT32.max, max_positions])[: len(skipped)]
        return arguments | {
            "norm_weight": inside(weight, generator, device, offset=offset),
            "eps": eps,
            "positions": inside(
                positions.to(position_dtype), generator, device, strides=[position_stride]
            ),
            "cos_sin_cache": inside(
                table, generator, device, strides=[table_stride, 1], offset=offset
            ),
            "is_neox": is_neox,
            "round_to_input": round_to_input,
        }

    return Case(name, make)


FUSED_WRITES = [
    _fused("one_token", tokens=1, dtype=BF16, is_neox=True, num_blocks=1, block_size=1),
    _fused("bfloat16", tokens=9, dtype=BF16, is_neox=True, skipped=[1, 4]),
    _fused("interleaved", tokens=9, dtype=BF16, is_neox=False, eps=0.0),
    _fused(
        "float16", tokens=9, dtype=FP16, is_neox=True, position_dtype=torch.int32, skipped=[0, 1, 2]
    ),
    _fused("float32", tokens=9, dtype=FP32, is_neox=False, position_stride=3, eps=1e-5),
    _fused(
        "float32_weight", tokens=9, dtype=BF16, is_neox=False, weight_dtype=FP32, table_stride=65
    ),
    _fused("float32_table", tokens=9, dtype=BF16, is_neox=True, table_dtype=FP32),
    _fused(
        "float16_among_float32",
        tokens=9,
        dtype=FP16,
        is_neox=False,
        weight_dtype=FP32,
        table_dtype=FP32,
        table_stride=80,
    ),
    _fused("unrounded", tokens=9, dtype=BF16, is_neox=True, round_to_input=False),
    _fused(
        "unrounded_float16",
        tokens=9,
        dtype=FP16,
        is_neox=False,
        weight_dtype=FP32,
        round_to_input=False,
    ),
    _fused(
        "unrounded_float32",
        tokens=9,
        dtype=FP32,
        is_neox=True,
        table_stride=64,
        round_to_input=False,
    ),
    _fused(
        "fused_projection",
        tokens=7,
        dtype=BF16,
        is_neox=True,
        fused_width=1536 + HEAD_DIM,
        layout="odd_strides",
    ),
    _fused("unaligned", tokens=6, dtype=BF16, is_neox=False, offset=MARGIN + 1, layout="unaligned"),
    _fused(
        "unaligned_float16",
        tokens=6,
        dtype=FP16,
        is_neox=True,
        fused_width=HEAD_DIM + 1,
        offset=MARGIN + 3,
        round_to_input=False,
    ),
    _fused("unaligned_float32", tokens=6, dtype=FP32, is_neox=False, offset=MARGIN + 1),
    _fused("more_rows", tokens=3, dtype=BF16, is_neox=True, more_rows=4, slot_stride=2),
    _fused("no_tokens", tokens=0, dtype=BF16, is_neox=True, more_rows=2),
    _fused(
        "permuted_pool",
        tokens=5,
        dtype=BF16,
        is_neox=True,
        num_layers=3,
        layer=2,
        layout="blocks_first",
        slot_dtype=torch.int32,
    ),
]
