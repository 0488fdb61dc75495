"""Allocation, and slot numbers from block tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from nvfp4_dsmla import reference
from nvfp4_dsmla.cache import allocate_kv_cache, slot_mapping_from_block_table

if TYPE_CHECKING:
    from torch import Tensor


def test_a_layer_and_a_pool_are_zeros_of_the_documented_shape(device: torch.device) -> None:
    layer = allocate_kv_cache(num_blocks=3, block_size=4, device=device)
    pool = allocate_kv_cache(num_blocks=3, block_size=4, num_layers=2, device=device)
    assert list(layer.shape) == [3, 4, 352]
    assert list(pool.shape) == [2, 3, 4, 352]
    for cache in (layer, pool):
        assert cache.dtype == torch.uint8
        assert cache.device.type == device.type
        assert cache.is_contiguous()
        assert not cache.any()
    assert not reference.decode(layer).any()


def test_a_cache_may_have_no_blocks_and_lies_on_the_default_device() -> None:
    cache = allocate_kv_cache(num_blocks=0, block_size=1)
    assert list(cache.shape) == [0, 1, 352]
    assert cache.device == torch.empty(0).device


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_blocks": -1, "block_size": 4}, "num_blocks: wanted 0 or more, got -1"),
        ({"num_blocks": 1, "block_size": 0}, "block_size: wanted 1 or more, got 0"),
        (
            {"num_blocks": 1, "block_size": 4, "num_layers": 0},
            "num_layers: wanted 1 or more, got 0",
        ),
    ],
)
def test_sizes_out_of_range_are_refused(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        allocate_kv_cache(**sizes)


BLOCK_SIZE = 4
TABLE = [[7, 2, -1], [2**31 - 1, 0, 5]]


def slot(request: int, position: int) -> int:
    column = position // BLOCK_SIZE
    if position < 0 or column >= 3 or TABLE[request][column] < 0:
        return -1
    return TABLE[request][column] * BLOCK_SIZE + position % BLOCK_SIZE


@pytest.mark.parametrize(
    "positions",
    [
        pytest.param([0, 5], id="one token a request"),
        pytest.param([-1, 12], id="before and past the table"),
        pytest.param([[0, 3, 4, 7, 8, 11], [11, 8, 3, 0, -3, 12]], id="several tokens a request"),
        pytest.param([[2**31 - 1, -(2**31)], [1, 2]], id="far out"),
        pytest.param([[], []], id="no token a request"),
        pytest.param([3], id="fewer requests than rows of the table"),
        pytest.param([], id="no request"),
    ],
)
@pytest.mark.parametrize("position_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("table_dtype", [torch.int32, torch.int64])
def test_slots_are_block_times_size_plus_offset(
    device: torch.device,
    positions: list[Any],
    position_dtype: torch.dtype,
    table_dtype: torch.dtype,
) -> None:
    want = [
        [slot(request, p) for p in row] if isinstance(row, list) else slot(request, row)
        for request, row in enumerate(positions)
    ]
    wide = torch.zeros(2, 8, dtype=table_dtype, device=device)
    wide[:, :3] = torch.tensor(TABLE)
    for table in (wide[:, :3], wide[:, :3].t().contiguous().t()):
        got = slot_mapping_from_block_table(
            block_table=table,
            positions=torch.tensor(positions, dtype=position_dtype, device=device),
            block_size=BLOCK_SIZE,
        )
        assert got.dtype == torch.int64
        assert got.tolist() == want


def test_a_table_without_columns_has_no_slots(device: torch.device) -> None:
    got = slot_mapping_from_block_table(
        block_table=torch.zeros(2, 0, dtype=torch.int32, device=device),
        positions=torch.zeros(2, 3, dtype=torch.int64, device=device),
        block_size=BLOCK_SIZE,
    )
    assert got.tolist() == [[-1] * 3] * 2


@pytest.mark.parametrize("dynamic", [False, True])
def test_slot_mapping_traces_as_one_graph(device: torch.device, dynamic: bool) -> None:
    torch.compiler.reset()

    def mapping(block_table: Tensor, positions: Tensor) -> Tensor:
        return slot_mapping_from_block_table(
            block_table=block_table, positions=positions, block_size=BLOCK_SIZE
        )

    table = torch.tensor(TABLE, dtype=torch.int32, device=device)
    positions = torch.tensor([[0, 5, -1], [4, 11, 12]], device=device)
    compiled = torch.compile(mapping, fullgraph=True, dynamic=dynamic, backend="eager")
    assert compiled(table, positions).tolist() == mapping(table, positions).tolist()


def test_tokens_written_by_slot_are_read_by_block_table(device: torch.device) -> None:
    cache = allocate_kv_cache(num_blocks=6, block_size=BLOCK_SIZE, device=device)
    table = torch.tensor([[4, 1], [0, 5]], dtype=torch.int32, device=device)
    latent = torch.randn(2, 7, 576, device=device).bfloat16()
    slots = slot_mapping_from_block_table(
        block_table=table,
        positions=torch.arange(7, device=device).expand(2, 7),
        block_size=BLOCK_SIZE,
    )
    flat = latent.flatten(0, 1)
    reference.concat_and_cache(flat[:, :512], flat[:, 512:], cache, slots.flatten())
    workspace = torch.empty(14, 576, dtype=torch.bfloat16, device=device)
    starts = torch.tensor([0, 7], dtype=torch.int32, device=device)
    reference.cp_gather(cache, workspace, table, starts, 2)
    want = reference.decode(reference.encode(flat[:, :512], flat[:, 512:]))
    assert workspace.tolist() == want.tolist()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"block_size": 0}, "block_size: wanted 1 or more, got 0"),
        (
            {"block_table": torch.zeros(2, 3)},
            "block_table: wanted int32 or int64, got torch.float32",
        ),
        ({"positions": torch.zeros(2)}, "positions: wanted int32 or int64, got torch.float32"),
        (
            {"block_table": torch.zeros(2, dtype=torch.int32)},
            r"block_table: wanted \[B, max_blocks\], got 1 dimensions",
        ),
        (
            {"positions": torch.zeros(2, 1, 1, dtype=torch.int64)},
            r"positions: wanted \[B\] or \[B, S\], got 3 dimensions",
        ),
        (
            {"positions": torch.zeros(3, dtype=torch.int64)},
            "block_table: wanted a row for each request of positions, 3, got 2",
        ),
        (
            {"positions": torch.zeros(2, dtype=torch.int64, device="meta")},
            r"positions: wanted the device of block_table \(cpu\), got meta",
        ),
    ],
)
def test_arguments_of_the_wrong_kind_are_refused(changed: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "block_table": torch.zeros(2, 3, dtype=torch.int32),
        "positions": torch.zeros(2, dtype=torch.int64),
        "block_size": BLOCK_SIZE,
    }
    with pytest.raises(ValueError, match=message):
        slot_mapping_from_block_table(**arguments | changed)
