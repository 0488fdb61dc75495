"""The Llama block in torch. It knows no cache format: keys and values go through a `Cache`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from smollm2.cache import Cache
from smollm2.latent import LatentLayout

# (q [B, S, heads, head_dim], layer) -> [B, S, heads, head_dim]: reads the cache, however it likes.
Attention = Callable[[torch.Tensor, int], torch.Tensor]


@dataclass(frozen=True)
class Config:
    """The geometry of a Llama model, as a GGUF states it."""

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rope_base: float
    norm_eps: float


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Interleaved RoPE: dims 2i and 2i+1 of x [B, S, heads, d] turn by cos, sin [B, S, 1, d].

    sin carries the signs (-, +, -, + ...), so that a pair's other half is all that is looked up.
    """
    other = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    turned: torch.Tensor = x * cos + other * sin
    return turned.to(x.dtype)


class Block(torch.nn.Module):
    """One layer: attention through the cache, then the gated MLP, both on a residual stream."""

    is_value: torch.Tensor

    def __init__(
        self, config: Config, weights: dict[str, torch.Tensor], layer: int, dtype: torch.dtype
    ) -> None:
        super().__init__()

        def weight(*names: str) -> torch.nn.Parameter:
            parts = [weights[f"blk.{layer}.{name}.weight"] for name in names]
            return torch.nn.Parameter(torch.cat(parts).to(dtype), requires_grad=False)

        self.layer = layer
        self.eps = config.norm_eps
        self.kv_layout = LatentLayout(config.num_heads, config.num_kv_heads, config.head_dim)
        is_value = torch.arange(config.num_heads + 2 * config.num_kv_heads) >= (
            config.num_heads + config.num_kv_heads
        )
        self.register_buffer("is_value", is_value.unsqueeze(-1), persistent=False)
        self.attn_norm = weight("attn_norm")
        self.qkv = weight("attn_q", "attn_k", "attn_v")
        self.attn_out = weight("attn_output")
        self.ffn_norm = weight("ffn_norm")
        self.gate_up = weight("ffn_gate", "ffn_up")
        self.down = weight("ffn_down")

    def forward(
        self,
        x: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        cache: Cache,
        slots: torch.Tensor,
        attention: Attention,
    ) -> torch.Tensor:
        """x [B, S, hidden]: its tokens are written to slots [B, S], then read back to attend."""
        num_heads = self.kv_layout.num_heads
        normed = F.rms_norm(x, x.shape[-1:], self.attn_norm, self.eps)
        qkv = F.linear(normed, self.qkv).unflatten(-1, (-1, self.kv_layout.head_dim))
        qkv = torch.where(self.is_value, qkv, rotate(qkv, *angles))
        kv_c, k_pe = self.kv_layout.pack(qkv[..., num_heads:, :])
        cache.write(kv_c, k_pe, slots.flatten(), self.layer)
        attended = attention(qkv[..., :num_heads, :], self.layer)
        x = x + F.linear(attended.flatten(-2), self.attn_out)
        normed = F.rms_norm(x, x.shape[-1:], self.ffn_norm, self.eps)
        gate, up = F.linear(normed, self.gate_up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, self.down)


class Llama(torch.nn.Module):
    """SmolLM2: embeddings tied to the output, a row of blocks, RMSNorm, interleaved RoPE."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(
        self, config: Config, weights: dict[str, torch.Tensor], *, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.config = config
        self.kv_layout = LatentLayout(config.num_heads, config.num_kv_heads, config.head_dim)
        embedding, norm = weights["token_embd.weight"].to(dtype), weights["output_norm.weight"]
        self.embedding = torch.nn.Parameter(embedding, requires_grad=False)
        self.norm = torch.nn.Parameter(norm.to(dtype), requires_grad=False)
        self.blocks = torch.nn.ModuleList(
            [Block(config, weights, layer, dtype) for layer in range(config.num_layers)]
        )
        turns = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
        positions = torch.arange(config.max_positions, dtype=torch.float64)
        angles = torch.outer(positions, config.rope_base**-turns).repeat_interleave(2, dim=-1)
        signs = torch.tensor([-1.0, 1.0]).repeat(config.head_dim // 2)
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", (angles.sin() * signs).float(), persistent=False)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        cache: Cache,
        slots: torch.Tensor,
        attention: Attention,
    ) -> torch.Tensor:
        """tokens, positions, slots [B, S] -> the last hidden state [B, S, hidden], normed.

        Each layer first writes its tokens to the cache and then reads every key and value, those
        of the very same tokens included, back from it: what is computed is what the cache kept.
        """
        angles = self.cos[positions].unsqueeze(2), self.sin[positions].unsqueeze(2)
        x = F.embedding(tokens, self.embedding)
        for block in self.blocks:
            x = block(x, angles, cache, slots, attention)
        return F.rms_norm(x, x.shape[-1:], self.norm, self.config.norm_eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [..., hidden] -> fp32 [..., vocabulary]."""
        return F.linear(hidden, self.embedding).float()
