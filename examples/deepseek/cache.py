"""What the decoder keeps of its tokens: latents, packed or in bf16, and the indexer's keys.

Each is one pool of all layers, a module buffer, so that torch.compile takes its address as fixed
and writes it in place. A token is named by its slot, `block * block_size + offset`; a negative slot
is no token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

import nvfp4_dsmla
from nvfp4_dsmla.layout import HEAD_DIM, NOPE_DIM


class LatentCache(torch.nn.Module, ABC):
    """A paged cache of every layer's latents, [num_layers, num_blocks, block_size, ...]."""

    pool: Tensor

    def __init__(self, pool: Tensor) -> None:
        super().__init__()
        self.register_buffer("pool", pool)

    @abstractmethod
    def write(self, kv_c: Tensor, k_pe: Tensor, slots: Tensor, layer: int) -> None:
        """Stores kv_c [T, 512] and k_pe [T, 64] at slots [T] of a layer."""

    @abstractmethod
    def gather(self, slots: Tensor, layer: int, dtype: torch.dtype) -> Tensor:
        """The latents at slots [...], as dtype [..., 576]; finite where there is no token."""

    def attend(self, q: Tensor, slots: Tensor, lengths: Tensor, scale: float, layer: int) -> Tensor:
        """Each query's attention to the tokens it selected, as [B, S, H, 512] of q's dtype.

        Args:
            q: [B, S, H, 576].
            slots: int32 [B, S, K]: the selected tokens of each query.
            lengths: int32 [B, S]: how many of them count, from the first on.
            scale: of the scores.
            layer: the layer to read.
        """
        latents = self.gather(slots, layer, q.dtype)
        selected = torch.arange(slots.shape[-1], device=q.device) < lengths[..., None]
        scores = torch.einsum("bshd,bskd->bshk", q, latents)
        weights = masked_softmax(scores, selected, scale)
        return torch.einsum("bshk,bskd->bshd", weights, latents[..., :NOPE_DIM])


def masked_softmax(scores: Tensor, selected: Tensor, scale: float) -> Tensor:
    """The weights of scores [B, S, H, K] in fp32, in the scores' dtype; [B, S, K] of them count.

    The others' weight is 0, or 1 / K where none counts: not NaN.
    """
    lowest = torch.finfo(torch.float32).min
    masked = (scores.float() * scale).masked_fill(~selected[:, :, None], lowest)
    return masked.softmax(dim=-1).to(scores.dtype)


class NvFp4Cache(LatentCache):
    """Records of 352 bytes. Decode attends to them where they lie."""

    def __init__(
        self, *, num_layers: int, num_blocks: int, block_size: int, device: torch.device
    ) -> None:
        super().__init__(
            nvfp4_dsmla.allocate_kv_cache(
                num_layers=num_layers, num_blocks=num_blocks, block_size=block_size, device=device
            )
        )

    def write(self, kv_c: Tensor, k_pe: Tensor, slots: Tensor, layer: int) -> None:
        """See the base class."""
        nvfp4_dsmla.concat_and_cache_nvfp4_ds_mla(
            kv_c=kv_c, k_pe=k_pe, kv_cache=self.pool, slot_mapping=slots, layer=layer
        )

    def gather(self, slots: Tensor, layer: int, dtype: torch.dtype) -> Tensor:
        """See the base class; zeros where there is no token."""
        return nvfp4_dsmla.gather_and_upconvert_nvfp4_ds_mla(
            kv_cache=self.pool, slots=slots, dtype=dtype, layer=layer
        )

    def attend(self, q: Tensor, slots: Tensor, lengths: Tensor, scale: float, layer: int) -> Tensor:
        """See the base class."""
        out, _ = nvfp4_dsmla.sparse_mla_decode(
            q=q.half() if q.dtype == torch.float32 else q,
            kv_cache=self.pool,
            indices=slots,
            softmax_scale=scale,
            topk_length=lengths,
            layer=layer,
        )
        return out.to(q.dtype)


class BFloat16Cache(LatentCache):
    """The baseline: latents as they are, in bf16, read by PyTorch's indexing."""

    def __init__(
        self, *, num_layers: int, num_blocks: int, block_size: int, device: torch.device
    ) -> None:
        shape = (num_layers, num_blocks, block_size, HEAD_DIM)
        super().__init__(torch.zeros(shape, dtype=torch.bfloat16, device=device))

    def write(self, kv_c: Tensor, k_pe: Tensor, slots: Tensor, layer: int) -> None:
        """See the base class."""
        nvfp4_dsmla.concat_and_cache_bfloat16(
            kv_c=kv_c, k_pe=k_pe, kv_cache=self.pool, slot_mapping=slots, layer=layer
        )

    def gather(self, slots: Tensor, layer: int, dtype: torch.dtype) -> Tensor:
        """See the base class; slot 0 where there is no token."""
        block_size = self.pool.shape[2]
        slot = slots.clamp(min=0)
        return self.pool[layer, slot // block_size, slot % block_size].to(dtype)


class IndexKeys(torch.nn.Module):
    """The indexer's own keys, [num_layers, num_blocks + 1, block_size, index_head_dim].

    The last block is no request's: what has no slot is written there.
    """

    pool: Tensor

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        index_head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        shape = (num_layers, num_blocks + 1, block_size, index_head_dim)
        self.register_buffer("pool", torch.zeros(shape, dtype=dtype, device=device))

    def write(self, keys: Tensor, slots: Tensor, layer: int) -> None:
        """Stores keys [T, index_head_dim] at slots [T] of a layer."""
        _, num_blocks, block_size, _ = self.pool.shape
        slot = torch.where(slots < 0, (num_blocks - 1) * block_size, slots)
        place = (torch.full_like(slot, layer), slot // block_size, slot % block_size)
        self.pool.index_put_(place, keys)

    def gather(self, block_table: Tensor, layer: int) -> Tensor:
        """The keys of each request's blocks, [B, max_blocks * block_size, index_head_dim]."""
        blocks = torch.where(block_table < 0, self.pool.shape[1] - 1, block_table)
        return self.pool[layer, blocks].flatten(1, 2)
