"""What a cache costs in quality: a real text, teacher-forced through each format's cache.

The text goes through in chunks. A chunk is first written to the cache, and then each of its
positions attends to what the cache kept of every earlier token and of itself, exactly what decoding
it token by token would see.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from smollm2.cache import Cache
from smollm2.generate import prefill
from smollm2.model import Llama

TEXT = Path(__file__).with_name("pride_and_prejudice.txt")
TEXT_SOURCE = "Jane Austen, Pride and Prejudice (1813), chapter 1"


@dataclass
class Quality:
    """Sums over the predicted positions of a text, and the figures they give."""

    positions: int = 0
    negative_log_likelihood: float = 0.0
    divergence: float = 0.0
    same_top1: int = 0

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-likelihood of the text's next tokens."""
        return float(torch.tensor(self.negative_log_likelihood / self.positions).exp())

    @property
    def mean_kl(self) -> float:
        """Mean KL(baseline || this cache) of the next-token distributions, in nats."""
        return self.divergence / self.positions

    @property
    def top1_agreement(self) -> float:
        """The share of positions where both caches make the same token the likeliest."""
        return self.same_top1 / self.positions


@torch.inference_mode()
def evaluate(
    model: Llama,
    caches: Sequence[Cache],
    block_table: torch.Tensor,
    tokens: torch.Tensor,
    *,
    chunk_size: int = 128,
    on_chunk: Callable[[int], None] | None = None,
) -> list[Quality]:
    """The quality of each cache on tokens [1, N]; the first one is the baseline of the others.

    on_chunk(positions done) is called after each chunk.
    """
    results = [Quality() for _ in caches]
    predicted = tokens.shape[1] - 1  # the last token predicts nothing that is known
    for start in range(0, predicted, chunk_size):
        end = min(start + chunk_size, predicted)
        targets = tokens[0, start + 1 : end + 1]
        baseline: torch.Tensor | None = None
        for cache, result in zip(caches, results, strict=True):
            hidden = prefill(model, cache, block_table, tokens[:, start:end], start=start)
            log_probs = model.logits(hidden[0]).log_softmax(dim=-1)
            if baseline is None:
                baseline = log_probs
            _add(result, log_probs, baseline, targets)
        if on_chunk is not None:
            on_chunk(end)
    return results


def _add(
    result: Quality, log_probs: torch.Tensor, baseline: torch.Tensor, targets: torch.Tensor
) -> None:
    result.positions += len(targets)
    result.negative_log_likelihood -= log_probs.gather(1, targets[:, None]).sum().item()
    result.divergence += (baseline.exp() * (baseline - log_probs)).sum().item()
    result.same_top1 += int((log_probs.argmax(-1) == baseline.argmax(-1)).sum())
