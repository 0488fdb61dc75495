"""The caches that are compared: one small class a format, the same calls for the model.

A cache holds all layers in one pool, a module buffer: `[layers, blocks, block_size, ...]`. The
model names a layer by its index and a token by its slot (block * block_size + offset); a negative
slot is no token. Adding a format means one more subclass: its pool, its write, its two gathers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F

import nvfp4_dsmla
from nvfp4_dsmla.layout import HEAD_DIM, NOPE_DIM


class Cache(torch.nn.Module, ABC):
    """A paged cache of 576-wide rows for every layer of a model."""

    name: ClassVar[str]
    reads_by: str  # what attends, for the table
    pool: torch.Tensor

    def __init__(self, pool: torch.Tensor, *, num_blocks: int, block_size: int) -> None:
        super().__init__()
        # A buffer is static to torch.compile: no copy of it is made, and its address may be kept.
        self.register_buffer("pool", pool, persistent=False)
        self.num_slots = num_blocks * block_size
        self.block_size = block_size

    @property
    def bytes_per_token(self) -> int:
        """The bytes that one token takes in one layer."""
        return self.pool[0, 0, 0].nbytes

    @abstractmethod
    def write(
        self, kv_c: torch.Tensor, k_pe: torch.Tensor, slots: torch.Tensor, layer: int
    ) -> None:
        """Store kv_c [T, 512] and k_pe [T, 64] at slots [T] of a layer."""

    @abstractmethod
    def gather(self, slots: torch.Tensor, layer: int, dtype: torch.dtype) -> torch.Tensor:
        """The rows at slots [...], as dtype [..., 576]; any finite row where a slot is negative."""

    @abstractmethod
    def gather_requests(
        self, block_table: torch.Tensor, length: int, layer: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """The first tokens of each row of block_table [B, n], as dtype [B, length, 576]."""

    def attend(
        self, q: torch.Tensor, slots: torch.Tensor, scale: float, layer: int
    ) -> torch.Tensor:
        """Attention of q [B, S, H, 576] over the rows at slots, int32 [B, S, K]: [B, S, H, 512].

        The value of a row is its first 512 numbers. At least one slot a query must be a token.
        """
        rows = self.gather(slots, layer, q.dtype)
        # Multi-query attention as PyTorch sees it: the heads are the queries of one sequence.
        mask = (slots >= 0).unsqueeze(2)
        return F.scaled_dot_product_attention(q, rows, rows, mask, scale=scale)[..., :NOPE_DIM]


# The baseline's two accesses are ops of their own, so that its step compiles to the same graph as a
# packed format's: left to Inductor, each layer's offset would become a kernel of its own.
@torch.library.custom_op(
    "smollm2::write_rows",
    mutates_args=("pool",),
    schema="(Tensor kv_c, Tensor k_pe, Tensor(a!) pool, Tensor slots, int layer) -> ()",
)
def _write_rows(
    kv_c: torch.Tensor, k_pe: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor, layer: int
) -> None:
    rows = torch.cat([kv_c, k_pe], dim=-1).to(pool.dtype)
    records = pool[layer].view(-1, HEAD_DIM)
    # index_copy_ has no "no token": what has no slot goes to the spare block at the end.
    records.index_copy_(0, torch.where(slots < 0, len(records) - 1, slots), rows)


@torch.library.custom_op(
    "smollm2::gather_rows",
    mutates_args=(),
    schema="(Tensor pool, Tensor slots, int layer) -> Tensor",
)
def _gather_rows(pool: torch.Tensor, slots: torch.Tensor, layer: int) -> torch.Tensor:
    rows = pool[layer].view(-1, HEAD_DIM).index_select(0, slots.clamp(min=0).flatten())
    return rows.view(*slots.shape, HEAD_DIM)


@_gather_rows.register_fake
def _(pool: torch.Tensor, slots: torch.Tensor, layer: int) -> torch.Tensor:
    del layer
    return pool.new_empty(*slots.shape, HEAD_DIM)


class BFloat16Cache(Cache):
    """The baseline: rows as they are, in bf16, with PyTorch's own index_copy_ and index_select."""

    name = "bf16"
    reads_by = "index_select and PyTorch's attention"

    def __init__(
        self, *, num_layers: int, num_blocks: int, block_size: int, device: torch.device
    ) -> None:
        # One block more than the block tables know of, for rows that have no slot.
        shape = (num_layers, num_blocks + 1, block_size, HEAD_DIM)
        pool = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        super().__init__(pool, num_blocks=num_blocks, block_size=block_size)

    def write(
        self, kv_c: torch.Tensor, k_pe: torch.Tensor, slots: torch.Tensor, layer: int
    ) -> None:
        _write_rows(kv_c, k_pe, self.pool, slots, layer)

    def gather(self, slots: torch.Tensor, layer: int, dtype: torch.dtype) -> torch.Tensor:
        rows: torch.Tensor = _gather_rows(self.pool, slots, layer)
        return rows.to(dtype)

    def gather_requests(
        self, block_table: torch.Tensor, length: int, layer: int, dtype: torch.dtype
    ) -> torch.Tensor:
        positions = torch.arange(length, device=block_table.device).expand(len(block_table), -1)
        slots = nvfp4_dsmla.slot_mapping_from_block_table(
            block_table=block_table, positions=positions, block_size=self.block_size
        )
        return self.gather(slots, layer, dtype)


class PackedCache(Cache):
    """Records of a quantised format, written and read by this library's ops."""

    write_op: ClassVar[Callable[..., None]]
    gather_op: ClassVar[Callable[..., torch.Tensor]]
    gather_requests_op: ClassVar[Callable[..., None]]
    reads_by = "a gather and PyTorch's attention"

    def __init__(
        self, *, num_layers: int, num_blocks: int, block_size: int, device: torch.device
    ) -> None:
        spec = nvfp4_dsmla.get_kv_cache_spec(kv_cache_dtype=self.name, block_size=block_size)
        shape = (num_layers, *spec.shape(num_blocks))
        pool = torch.zeros(shape, dtype=spec.storage_dtype, device=device)
        super().__init__(pool, num_blocks=num_blocks, block_size=block_size)

    def write(
        self, kv_c: torch.Tensor, k_pe: torch.Tensor, slots: torch.Tensor, layer: int
    ) -> None:
        type(self).write_op(
            kv_c=kv_c, k_pe=k_pe, kv_cache=self.pool, slot_mapping=slots, layer=layer
        )

    def gather(self, slots: torch.Tensor, layer: int, dtype: torch.dtype) -> torch.Tensor:
        return type(self).gather_op(kv_cache=self.pool, slots=slots, dtype=dtype, layer=layer)

    def gather_requests(
        self, block_table: torch.Tensor, length: int, layer: int, dtype: torch.dtype
    ) -> torch.Tensor:
        batch = len(block_table)
        rows = torch.empty(batch, length, HEAD_DIM, dtype=dtype, device=block_table.device)
        starts = torch.arange(batch, dtype=torch.int32, device=block_table.device) * length
        type(self).gather_requests_op(
            src_cache=self.pool,
            dst=rows.view(-1, HEAD_DIM),
            block_table=block_table,
            workspace_starts=starts,
            batch_size=batch,
            layer=layer,
        )
        return rows


class Fp8Cache(PackedCache):
    """`fp8_ds_mla`: 656-byte records, what such models are served from today."""

    name = "fp8_ds_mla"
    write_op = nvfp4_dsmla.concat_and_cache_fp8_ds_mla
    gather_op = nvfp4_dsmla.gather_and_upconvert_fp8_ds_mla
    gather_requests_op = nvfp4_dsmla.cp_gather_and_upconvert_fp8_kv_cache


class NvFp4Cache(PackedCache):
    """`nvfp4_ds_mla`: 352-byte records, which attention reads as they are."""

    name = "nvfp4_ds_mla"
    write_op = nvfp4_dsmla.concat_and_cache_nvfp4_ds_mla
    gather_op = nvfp4_dsmla.gather_and_upconvert_nvfp4_ds_mla
    gather_requests_op = nvfp4_dsmla.cp_gather_and_upconvert_nvfp4_kv_cache

    def __init__(
        self, *, num_layers: int, num_blocks: int, block_size: int, device: torch.device
    ) -> None:
        super().__init__(
            num_layers=num_layers, num_blocks=num_blocks, block_size=block_size, device=device
        )
        # Attention straight from the records, in builds that have it for this device.
        refusal = nvfp4_dsmla.supports_combination(
            op="sparse_mla_decode", device_type=device.type, block_size=block_size
        )
        self.has_fused_attention = refusal is None
        if self.has_fused_attention:
            self.reads_by = "sparse_mla_decode"

    def attend(
        self, q: torch.Tensor, slots: torch.Tensor, scale: float, layer: int
    ) -> torch.Tensor:
        if not self.has_fused_attention:
            return super().attend(q, slots, scale, layer)
        half = q.dtype if q.dtype in (torch.bfloat16, torch.float16) else torch.float16
        out, _ = nvfp4_dsmla.sparse_mla_decode(
            q=q.to(half), kv_cache=self.pool, indices=slots, softmax_scale=scale, layer=layer
        )
        return out.to(q.dtype)


# In the order of the table, the baseline first.
FORMATS: dict[str, type[BFloat16Cache] | type[PackedCache]] = {
    cache.name: cache for cache in (BFloat16Cache, Fp8Cache, NvFp4Cache)
}
