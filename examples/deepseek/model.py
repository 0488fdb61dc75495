"""The decoder, and the two steps of it that an engine runs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepseek.cache import BFloat16Cache, IndexKeys, NvFp4Cache
from deepseek.config import Config
from deepseek.layers import Block, RMSNorm, Step, cos_sin_table


class Decoder(nn.Module):
    """DeepSeek-V3.2 in small: random weights, and the caches of `num_blocks` blocks.

    One seed gives one model, whatever the cache: two of them differ in what the cache keeps alone.
    Nothing in a step depends on data but values, so that it can be traced and captured.
    """

    cos_sin: Tensor

    def __init__(
        self,
        config: Config,
        cache: type[NvFp4Cache | BFloat16Cache],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        super().__init__()
        device = torch.device(device)
        self.config = config
        with device:
            self.embedding = nn.Embedding(config.vocab, config.hidden)
            self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
            self.norm = RMSNorm(config.hidden, config.norm_eps)
            self.lm_head = nn.Linear(config.hidden, config.vocab, bias=False)
        self.to(dtype).requires_grad_(requires_grad=False)
        self.register_buffer("cos_sin", cos_sin_table(config).to(device))
        pages = {"num_layers": config.num_layers, "num_blocks": num_blocks}
        self.cache = cache(**pages, block_size=block_size, device=device)
        self.keys = IndexKeys(
            **pages,
            block_size=block_size,
            index_head_dim=config.index_head_dim,
            dtype=dtype,
            device=device,
        )
        # Drawn on the CPU: a seed's weights are the same on every device.
        generator = torch.Generator().manual_seed(seed)
        for weight in self.parameters():
            if weight.dim() == 1:  # of a norm, or a bias
                weight.add_((torch.randn(weight.shape, generator=generator) / 8).to(device))
            else:
                drawn = torch.empty(weight.shape, dtype=dtype)
                weight.copy_(drawn.normal_(std=weight.shape[-1] ** -0.5, generator=generator))

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
    ) -> Tensor:
        """A decode step, one token a request or a few: logits, fp32 [B, S, vocab].

        Each layer first writes its tokens and then reads what its queries select, those of the very
        same tokens included: what is computed is what the cache kept.
        """
        step = Step(tokens, positions, slot_mapping, block_table, seq_lens)
        return self.run(step, prefill=False)

    def prefill(
        self,
        tokens: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
    ) -> Tensor:
        """A chunk of each request's prompt: logits, fp32 [B, S, vocab].

        The same as a decode step of so many tokens, but that each request's context is read once
        for all its queries.
        """
        step = Step(tokens, positions, slot_mapping, block_table, seq_lens)
        return self.run(step, prefill=True)

    def run(self, step: Step, *, prefill: bool) -> Tensor:
        """What both steps are."""
        cos_sin = F.embedding(step.positions, self.cos_sin)
        x = self.embedding(step.tokens)
        for block in self.blocks:
            x = block(x, cos_sin, self.cache, self.keys, step, prefill=prefill)
        logits: Tensor = self.lm_head(self.norm(x))
        return logits.float()
