"""The decoder's parts, written as models write them: plain PyTorch, nothing made for a compiler."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nvfp4_dsmla
from deepseek.cache import IndexKeys, LatentCache, masked_softmax
from deepseek.config import Config
from nvfp4_dsmla.layout import HEAD_DIM, NOPE_DIM, ROPE_DIM


class Step(NamedTuple):
    """What one step is to compute, S tokens of each of B requests: the model's arguments.

    What a request has no token for is padding: slot -1, position 0. A request of padding has
    seq_len 0, and its blocks may be -1; its logits mean nothing, and it changes nothing.
    """

    tokens: Tensor  # int64 [B, S]
    positions: Tensor  # int64 [B, S], in their requests
    slot_mapping: Tensor  # int64 [B, S]
    block_table: Tensor  # int32 [B, max_blocks]
    seq_lens: Tensor  # int32 [B]: tokens of each request, those of this step included

    def mark_varying(self) -> None:
        """Says to torch.compile, before its first call, which sizes other steps have otherwise.

        One token a request is a size of its own to it: for a step of one, S does not vary.
        """
        sizes = {
            "batch": [(tensor, 0) for tensor in self],
            "max_blocks": [(self.block_table, 1)],
        }
        if self.tokens.shape[1] > 1:
            by_token = (self.tokens, self.positions, self.slot_mapping)
            sizes["new_tokens"] = [(tensor, 1) for tensor in by_token]
        nvfp4_dsmla.mark_varying_sizes(**sizes)


class RMSNorm(nn.Module):
    """x over its root mean square, in fp32, times a weight."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def cos_sin_table(config: Config) -> Tensor:
    """fp32 [max_positions, 64]: the cosines of a position's 32 angles, then their sines."""
    turns = torch.arange(0, ROPE_DIM, 2, dtype=torch.float64) / ROPE_DIM
    positions = torch.arange(config.max_positions, dtype=torch.float64)
    angles = torch.outer(positions, config.rope_base**-turns)
    return torch.cat([angles.cos(), angles.sin()], dim=-1).float()


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Interleaved RoPE: dims 2i and 2i + 1 of x [..., 64] turn by angle i of cos_sin [..., 64]."""
    cos, sin = cos_sin.chunk(2, dim=-1)
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
    return turned.flatten(-2).to(x.dtype)


class Indexer(nn.Module):
    """The lightning indexer of sparse attention: which tokens a query attends to."""

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.config = config
        self.q_proj = nn.Linear(
            config.q_lora_rank, config.index_heads * config.index_head_dim, bias=False
        )
        self.k_proj = nn.Linear(config.hidden, config.index_head_dim, bias=False)
        self.k_norm = nn.LayerNorm(config.index_head_dim, config.norm_eps)
        self.head_weights = nn.Linear(config.hidden, config.index_heads, bias=False)

    def forward(
        self, x: Tensor, q_lora: Tensor, cos_sin: Tensor, keys: IndexKeys, step: Step
    ) -> tuple[Tensor, Tensor]:
        """The positions int64 [B, S, topk] that each query selects, and how many of them count.

        The best come first; those beyond the count, int32 [B, S], are -1.
        """
        rest = self.config.index_head_dim - ROPE_DIM
        q_pe, q_rest = (
            self.q_proj(q_lora)
            .unflatten(-1, (self.config.index_heads, -1))
            .split([ROPE_DIM, rest], dim=-1)
        )
        q = torch.cat([rotate(q_pe, cos_sin[:, :, None]), q_rest], dim=-1)
        k_pe, k_rest = self.k_norm(self.k_proj(x)).split([ROPE_DIM, rest], dim=-1)
        k = torch.cat([rotate(k_pe, cos_sin), k_rest], dim=-1)
        keys.write(k.flatten(0, 1), step.slot_mapping.flatten(), self.layer)

        context = keys.gather(step.block_table, self.layer)
        agreement = torch.einsum("bshd,btd->bsht", q, context).relu()
        scores = (agreement.float() * self.head_weights(x).float()[..., None]).sum(dim=2)
        visible = torch.minimum(step.positions + 1, step.seq_lens[:, None])
        place = torch.arange(context.shape[1], device=x.device)
        scores = scores.masked_fill(place >= visible[..., None], -torch.inf)
        # So that there are topk columns to choose from, however short the block table.
        scores = F.pad(scores, (0, self.config.topk), value=-torch.inf)
        chosen = scores.topk(self.config.topk, dim=-1).indices
        count = visible.clamp(max=self.config.topk)
        place = torch.arange(self.config.topk, device=x.device)
        return chosen.masked_fill(place >= count[..., None], -1), count.int()


class Attention(nn.Module):
    """MLA with absorbed projections: the heads' queries and outputs are latents of 512 dims."""

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.config = config
        nope, v = config.qk_nope_head_dim, config.v_head_dim
        self.q_a_proj = nn.Linear(config.hidden, config.q_lora_rank, bias=False)
        self.q_a_norm = RMSNorm(config.q_lora_rank, config.norm_eps)
        self.q_b_proj = nn.Linear(
            config.q_lora_rank, config.num_heads * (nope + ROPE_DIM), bias=False
        )
        self.kv_a_proj = nn.Linear(config.hidden, HEAD_DIM, bias=False)
        self.kv_a_norm = RMSNorm(NOPE_DIM, config.norm_eps)
        # What would make a head's key and value of a latent: [heads, nope + v, 512].
        self.kv_b = nn.Parameter(torch.empty(config.num_heads, nope + v, NOPE_DIM))
        self.o_proj = nn.Linear(config.num_heads * v, config.hidden, bias=False)
        self.indexer = Indexer(config, layer)

    def forward(
        self,
        x: Tensor,
        cos_sin: Tensor,
        cache: LatentCache,
        keys: IndexKeys,
        step: Step,
        *,
        prefill: bool,
    ) -> Tensor:
        nope, v = self.config.qk_nope_head_dim, self.config.v_head_dim
        w_uk, w_uv = self.kv_b.split([nope, v], dim=1)
        q_lora = self.q_a_norm(self.q_a_proj(x))
        q_nope, q_pe = (
            self.q_b_proj(q_lora)
            .unflatten(-1, (self.config.num_heads, -1))
            .split([nope, ROPE_DIM], dim=-1)
        )
        q_latent = torch.einsum("bshn,hnk->bshk", q_nope, w_uk)
        q = torch.cat([q_latent, rotate(q_pe, cos_sin[:, :, None])], dim=-1)

        kv_c, k_pe = self.kv_a_proj(x).split([NOPE_DIM, ROPE_DIM], dim=-1)
        kv_c, k_pe = self.kv_a_norm(kv_c), rotate(k_pe, cos_sin)
        slots = step.slot_mapping.flatten()
        cache.write(kv_c.flatten(0, 1), k_pe.flatten(0, 1), slots, self.layer)

        selected, count = self.indexer(x, q_lora, cos_sin, keys, step)
        if prefill:
            out = self.attend_to_context(q, selected, cache, step)
        else:
            slots = slots_of(step.block_table, selected, cache)
            scale = self.config.softmax_scale
            out = cache.attend(q, slots.int(), count, scale, self.layer)
        projected: Tensor = self.o_proj(torch.einsum("bshk,hvk->bshv", out, w_uv).flatten(2))
        return projected

    def attend_to_context(
        self, q: Tensor, selected: Tensor, cache: LatentCache, step: Step
    ) -> Tensor:
        """A prefill's attention: each request's context is read once, and masked for each query."""
        length = step.block_table.shape[1] * cache.pool.shape[2]
        place = torch.arange(length, device=q.device)
        context = torch.where(place < step.seq_lens[:, None], place, -1)
        latents = cache.gather(slots_of(step.block_table, context, cache), self.layer, q.dtype)
        # The column past the context takes what selects nothing.
        wanted = torch.where(selected < 0, length, selected)
        mask = torch.zeros(*q.shape[:2], length + 1, dtype=torch.bool, device=q.device)
        mask = mask.scatter(-1, wanted, True)[..., :-1]
        scores = torch.einsum("bshd,btd->bsht", q, latents)
        weights = masked_softmax(scores, mask, self.config.softmax_scale)
        return torch.einsum("bsht,btd->bshd", weights, latents[..., :NOPE_DIM])


def slots_of(block_table: Tensor, positions: Tensor, cache: LatentCache) -> Tensor:
    """The slots of positions [B, ...] in their requests, of the same shape."""
    slots = nvfp4_dsmla.slot_mapping_from_block_table(
        block_table=block_table, positions=positions.flatten(1), block_size=cache.pool.shape[2]
    )
    return slots.view(positions.shape)


class Mlp(nn.Module):
    """The gated MLP."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.hidden, 2 * config.intermediate, bias=False)
        self.down = nn.Linear(config.intermediate, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        down: Tensor = self.down(F.silu(gate) * up)
        return down


class Block(nn.Module):
    """One layer: attention through the cache, then the MLP, both on a residual stream."""

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden, config.norm_eps)
        self.attention = Attention(config, layer)
        self.mlp_norm = RMSNorm(config.hidden, config.norm_eps)
        self.mlp = Mlp(config)

    def forward(
        self,
        x: Tensor,
        cos_sin: Tensor,
        cache: LatentCache,
        keys: IndexKeys,
        step: Step,
        *,
        prefill: bool,
    ) -> Tensor:
        normed = self.attention_norm(x)
        x = x + self.attention(normed, cos_sin, cache, keys, step, prefill=prefill)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out
