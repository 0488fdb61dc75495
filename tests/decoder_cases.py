"""The decoder of examples/deepseek in a size for tests, full of random tokens, and its steps."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import nvfp4_dsmla
from decode_cases import random_tokens
from nvfp4_dsmla.layout import HEAD_DIM, NOPE_DIM

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from deepseek.batch import Pages, Traffic
from deepseek.cache import BFloat16Cache, NvFp4Cache
from deepseek.config import Config
from deepseek.layers import Step
from deepseek.model import Decoder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

# Two layers, so that one's cache is another's neighbour. Fewer tokens are selected than there are.
CONFIG = Config(
    num_layers=2,
    hidden=64,
    num_heads=4,
    q_lora_rank=48,
    qk_nope_head_dim=32,
    v_head_dim=16,
    index_heads=2,
    topk=6,
    intermediate=96,
    vocab=80,
    max_positions=128,
)
# Inductor with its passes, its scheduling and its reuse of memory, and PyTorch's own kernels in the
# place of fused ones: what it computes is then eager code's to the bit.
UNFUSED = {"fallback_by_default": True, "selective_decompose": True}

# Sizes that nothing else has: what is as large as a pool in compiled code is a copy of one.
NUM_BLOCKS = 61
BLOCK_SIZE = 7


class TwinCache(NvFp4Cache):
    """Keeps the latents too that its records are made of, in their dtype, of `make_decoder`.

    In a wider one Inductor's kernels keep what they have before they round it for the write. A
    block more than there are, for what has no slot.
    """

    twin: Tensor

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        layers, blocks, block_size, _ = self.pool.shape
        shape = (layers, blocks + 1, block_size, HEAD_DIM)
        self.register_buffer("twin", torch.zeros(shape, device=self.pool.device))

    def write(self, kv_c: Tensor, k_pe: Tensor, slots: Tensor, layer: int) -> None:
        super().write(kv_c, k_pe, slots, layer)
        _, blocks, block_size, _ = self.pool.shape
        slot = torch.where(slots < 0, blocks * block_size, slots)
        place = (torch.full_like(slot, layer), slot // block_size, slot % block_size)
        self.twin.index_put_(place, torch.cat([kv_c, k_pe], dim=-1))

    def records_of_twin(self) -> Tensor:
        """The pool that the latents make."""
        pool = torch.zeros_like(self.pool)
        capacity = pool.shape[1] * pool.shape[2]
        for layer, latents in enumerate(self.twin.flatten(1, 2)):
            nvfp4_dsmla.concat_and_cache_nvfp4_ds_mla(
                kv_c=latents[:, :NOPE_DIM],
                k_pe=latents[:, NOPE_DIM:],
                kv_cache=pool,
                slot_mapping=torch.arange(capacity, device=pool.device),
                layer=layer,
            )
        return pool


def make_decoder(
    device: torch.device,
    cache: type[NvFp4Cache | BFloat16Cache] = NvFp4Cache,
    *,
    dtype: torch.dtype = torch.bfloat16,
    config: Config = CONFIG,
) -> Decoder:
    """The same weights and the same random tokens in every block, each time."""
    decoder = Decoder(
        config, cache, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=dtype, device=device
    )
    if isinstance(decoder.cache, TwinCache):
        decoder.cache.twin = decoder.cache.twin.to(dtype)
    generator = torch.Generator().manual_seed(1)
    for pool in decoder.buffers():
        if pool.dim() == 4 and pool.dtype != torch.uint8:
            pool.copy_(torch.randn(pool.shape, generator=generator))
    if isinstance(decoder.cache, TwinCache):
        decoder.cache.pool.copy_(decoder.cache.records_of_twin())
    elif isinstance(decoder.cache, NvFp4Cache):
        records = random_tokens(decoder.cache.pool[..., 0].numel(), generator)
        decoder.cache.pool.copy_(records.view(decoder.cache.pool.shape))
    return decoder


def shaped_steps(
    sizes: Sequence[tuple[int, int, int]], device: torch.device, *, seed: int = 0
) -> Iterator[Step]:
    """Steps of one traffic, each of its (batch, new_tokens, max_blocks)."""
    pages = Pages(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, seed=seed)
    least = min(width for _, _, width in sizes)
    longest = least * BLOCK_SIZE - sum(new_tokens for _, new_tokens, _ in sizes)
    traffic = Traffic(
        pages, batch=2, max_blocks=least, vocab=CONFIG.vocab, context=longest, seed=seed
    )
    for batch, new_tokens, max_blocks in sizes:
        traffic.batch, traffic.max_blocks = batch, max_blocks
        yield traffic.next_step(new_tokens=new_tokens, device=device)


def records_but_at(pool: Tensor, slots: Tensor) -> Tensor:
    """A pool's records [num_layers, slots, ...] without those at `slots`."""
    records = pool.flatten(1, 2)
    others = torch.ones(records.shape[1], dtype=torch.bool, device=pool.device)
    others[slots[slots >= 0]] = False
    return records[:, others]
