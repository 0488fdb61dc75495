"""Requests that come and go, their blocks, and the step that serves them all."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from deepseek.layers import Step


@dataclass
class Request:
    """A request's tokens so far, those in the cache first, and the blocks that they lie in."""

    tokens: list[int]
    cached: int = 0
    blocks: list[int] = field(default_factory=list)


class Pages:
    """The blocks of a cache, and who has which."""

    def __init__(self, *, num_blocks: int, block_size: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.block_size = block_size
        self.free: list[int] = torch.randperm(num_blocks, generator=generator).tolist()

    def grow(self, request: Request, length: int) -> None:
        """Gives a request the blocks for `length` tokens."""
        while len(request.blocks) * self.block_size < length:
            request.blocks.append(self.free.pop())

    def release(self, request: Request) -> None:
        """Takes a request's blocks back."""
        self.free = request.blocks + self.free
        request.blocks = []

    def next_step(
        self,
        requests: Sequence[Request],
        *,
        batch: int,
        new_tokens: int,
        max_blocks: int,
        device: torch.device | str = "cpu",
    ) -> Step:
        """The step that computes each request's next tokens, at most `new_tokens` of them.

        The step is of `batch` requests and `max_blocks` blocks each, so that every one has the same
        shapes; what is beyond the requests is padding. The tokens count as cached afterwards.
        """
        tokens = torch.zeros(batch, new_tokens, dtype=torch.int64)
        positions = torch.zeros(batch, new_tokens, dtype=torch.int64)
        slots = torch.full((batch, new_tokens), -1, dtype=torch.int64)
        block_table = torch.full((batch, max_blocks), -1, dtype=torch.int32)
        seq_lens = torch.zeros(batch, dtype=torch.int32)
        for row, request in enumerate(requests):
            new = request.tokens[request.cached :][:new_tokens]
            place = torch.arange(request.cached, request.cached + len(new))
            request.cached += len(new)
            self.grow(request, request.cached)
            blocks = torch.tensor(request.blocks)
            tokens[row, : len(new)] = torch.tensor(new)
            positions[row, : len(new)] = place
            slots[row, : len(new)] = (
                blocks[place // self.block_size] * self.block_size + place % self.block_size
            )
            block_table[row, : len(blocks)] = blocks
            seq_lens[row] = request.cached
        step = Step(tokens, positions, slots, block_table, seq_lens)
        return Step(*(tensor.to(device) for tensor in step))


class Traffic:
    """Requests that arrive at random, grow, and leave: no two batches are alike.

    Their tokens are random too: what a step computes does not choose the next one. A request brings
    up to `context` tokens along that the cache is to have already, whatever lies in its blocks.
    """

    def __init__(
        self,
        pages: Pages,
        *,
        batch: int,
        max_blocks: int,
        vocab: int,
        context: int = 0,
        seed: int = 0,
    ) -> None:
        self.pages = pages
        self.batch = batch
        self.max_blocks = max_blocks
        self.vocab = vocab
        self.context = context
        self.random = random.Random(seed)
        self.requests: list[Request] = []

    def next_step(self, *, new_tokens: int = 1, device: torch.device | str = "cpu") -> Step:
        """The next step, of up to `new_tokens` tokens of each request."""
        longest = self.max_blocks * self.pages.block_size
        for request in list(self.requests):
            if len(request.tokens) + new_tokens > longest or self.random.random() < 0.1:
                self.pages.release(request)
                self.requests.remove(request)
        for _ in range(self.batch - len(self.requests)):
            if not self.requests or self.random.random() < 0.5:
                cached = self.random.randint(0, self.context)
                self.requests.append(Request([0] * cached, cached))
        for request in self.requests:
            count = self.random.randint(1, new_tokens)
            request.tokens += self.random.choices(range(self.vocab), k=count)
        return self.pages.next_step(
            self.requests[: self.batch],
            batch=self.batch,
            new_tokens=new_tokens,
            max_blocks=self.max_blocks,
            device=device,
        )
