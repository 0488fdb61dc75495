"""The geometry of the decoder."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """Sizes of a model; by default one that decodes on a CPU while one looks on.

    What the cache stores of a token has DeepSeek-V3.2's size in every model: 512 latent dims and 64
    rotated ones.
    """

    num_layers: int = 4
    hidden: int = 256
    num_heads: int = 16
    q_lora_rank: int = 128
    qk_nope_head_dim: int = 32
    v_head_dim: int = 32
    index_heads: int = 8
    index_head_dim: int = 128
    topk: int = 64
    intermediate: int = 512
    vocab: int = 2048
    max_positions: int = 4096
    rope_base: float = 10_000.0
    norm_eps: float = 1e-6

    @property
    def softmax_scale(self) -> float:
        """Of the scores of whole heads, which absorbing the up-projection leaves as they are."""
        return float((self.qk_nope_head_dim + 64) ** -0.5)
