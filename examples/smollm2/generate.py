"""Prefill a batch of prompts, then decode all of them, one compiled step a token.

The step is the unit of compilation: the loop is Python, every shape in the step is fixed, and only
values change from call to call. As in an engine, the slots are worked out before the step, once for
all layers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import nan
from statistics import median

import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

from nvfp4_dsmla import slot_mapping_from_block_table
from smollm2.cache import Cache
from smollm2.model import Llama


def shuffled_block_table(
    *, batch: int, blocks_per_request: int, seed: int, device: torch.device
) -> torch.Tensor:
    """int32 [batch, blocks_per_request]: every block of a pool once, in no order at all."""
    order = torch.randperm(
        batch * blocks_per_request, generator=torch.Generator().manual_seed(seed)
    )
    return order.view(batch, -1).to(device=device, dtype=torch.int32)


def slots_of(block_table: torch.Tensor, positions: torch.Tensor, cache: Cache) -> torch.Tensor:
    """The slots of positions [B, S]; -1 for a negative position."""
    return slot_mapping_from_block_table(
        block_table=block_table, positions=positions, block_size=cache.block_size
    )


@torch.inference_mode()
def prefill(
    model: Llama,
    cache: Cache,
    block_table: torch.Tensor,
    tokens: torch.Tensor,
    *,
    start: int = 0,
    lengths: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run a chunk of every request, tokens [B, S] at positions start ..., through the cache.

    lengths [B] says how many of the S are real where requests differ; the rest is padding, which is
    neither written nor seen. Returns hidden [B, S, hidden]. Chunks must come in order.
    """
    batch, size = tokens.shape
    offsets = torch.arange(size, device=tokens.device).expand(batch, -1)
    real = offsets < (size if lengths is None else lengths.unsqueeze(1))
    positions = offsets + start
    slots = slots_of(block_table, torch.where(real, positions, -1), cache)
    context = start + size
    causal = torch.arange(context, device=tokens.device) <= positions[0].unsqueeze(1)

    def attention(q: torch.Tensor, layer: int) -> torch.Tensor:
        rows = cache.gather_requests(block_table, context, layer, q.dtype)
        k, v = (part.transpose(1, 2) for part in model.kv_layout.unpack(rows))
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k, v, attn_mask=causal, enable_gqa=True
        )
        return out.transpose(1, 2)

    hidden: torch.Tensor = model(tokens, positions, cache, slots, attention)
    return hidden


class DecodeStep(torch.nn.Module):
    """One token for each request: write it to the cache, attend over the top-k of its context."""

    block_table: torch.Tensor

    def __init__(
        self, model: Llama, cache: Cache, block_table: torch.Tensor, *, max_context: int, topk: int
    ) -> None:
        super().__init__()
        self.model = model
        self.cache = cache
        self.register_buffer("block_table", block_table, persistent=False)
        self.max_context = max_context
        self.topk = topk

    def slots(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The slot [B, 1] of positions [B], and all up to it, int32 [B, 1, max_context].

        The context is padded with "no token" to a fixed length, so every step has one shape.
        """
        positions = positions.unsqueeze(1)
        context = torch.arange(self.max_context, device=positions.device)
        context = slots_of(
            self.block_table, torch.where(context <= positions, context, -1), self.cache
        )
        slot = slots_of(self.block_table, positions, self.cache)
        return slot, context.unsqueeze(1).to(torch.int32)

    def logits(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slot: torch.Tensor,
        context: torch.Tensor,
    ) -> torch.Tensor:
        """tokens, positions [B] -> fp32 [B, vocabulary] of the next token."""
        model, cache = self.model, self.cache

        def attention(q: torch.Tensor, layer: int) -> torch.Tensor:
            wide = model.kv_layout.widen_query(q)
            scale = q.shape[-1] ** -0.5
            slots = self._select(wide, context, scale, layer)
            return model.kv_layout.head_output(cache.attend(wide, slots, scale, layer))

        hidden = model(tokens.unsqueeze(1), positions.unsqueeze(1), cache, slot, attention)
        return model.logits(hidden[:, 0])

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slot: torch.Tensor,
        context: torch.Tensor,
    ) -> torch.Tensor:
        """tokens, positions [B] -> the likeliest next tokens [B]."""
        return self.logits(tokens, positions, slot, context).argmax(dim=-1)

    def _select(
        self, q: torch.Tensor, context: torch.Tensor, scale: float, layer: int
    ) -> torch.Tensor:
        """The topk slots of context [B, 1, N] that matter most to q [B, 1, H, 576]: [B, 1, topk].

        A DSA model has a small indexer that guesses scores; here they are exact: the attention
        that a token gets, summed over the heads. With topk tokens or fewer all are chosen, the
        rest of the list being -1.
        """
        if self.topk >= self.max_context:
            return context
        keys = self.cache.gather(context, layer, q.dtype)
        scores = torch.einsum("bshd,bskd->bshk", q, keys).float() * scale
        scores = scores.masked_fill((context < 0).unsqueeze(2), float("-inf"))
        received = scores.softmax(dim=-1).sum(dim=2)
        # "No token" must lose against a token whose attention underflowed to zero.
        received = received.masked_fill(context < 0, -1.0)
        return context.gather(-1, received.topk(self.topk, dim=-1).indices)


class Decoder:
    """A compiled step: on a GPU also captured, so that a token costs one launch of a CUDA graph."""

    def __init__(self, step: DecodeStep, *, backend: str = "inductor") -> None:
        self._step = step
        self._compiled = torch.compile(step, fullgraph=True, backend=backend)
        self._graph: torch.cuda.CUDAGraph | None = None

    @torch.inference_mode()
    def warm_up(self, tokens: torch.Tensor, positions: torch.Tensor) -> None:
        """Compile (and capture) with the arguments of the first step.

        The step really runs, and writes its tokens' keys and values to the cache. The first call of
        the loop writes the same bytes there once more, so nothing has to be undone.
        """
        # The graph reads its input from these two, in place; everything else it reads is a buffer.
        self._tokens, self._positions = tokens.clone(), positions.clone()
        self._run()
        if tokens.device.type == "cuda":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._next = self._run()
            self._graph = graph

    @torch.inference_mode()
    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """tokens, positions [B] -> the next tokens [B]; on a GPU overwritten by the next call."""
        self._tokens.copy_(tokens)
        self._positions.copy_(positions)
        if self._graph is None:
            return self._run()
        self._graph.replay()
        return self._next

    def _run(self) -> torch.Tensor:
        slot, context = self._step.slots(self._positions)
        tokens: torch.Tensor = self._compiled(self._tokens, self._positions, slot, context)
        return tokens


@dataclass
class Answers:
    """What a decode loop produced: the ids of each request, and what it took."""

    ids: list[list[int]]
    step_seconds: list[float] = field(default_factory=list)
    recompiles: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Of all requests, finished ones included, by the median step; nan without a step."""
        return len(self.ids) / median(self.step_seconds) if self.step_seconds else nan


def graphs_compiled() -> int:
    """How many graphs torch.compile has made in this process."""
    return int(counters["stats"]["unique_graphs"])


def decode(
    decoder: Decoder,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    *,
    max_new_tokens: int,
    end_of_turn: int,
    on_token: Callable[[list[list[int]]], None],
) -> Answers:
    """Greedy decoding of a warmed-up decoder until every request has ended its turn.

    tokens [B] are the first tokens of the answers (prefill chose them) and positions [B] their
    places. on_token(ids so far) is called after each step. A recompile raises RuntimeError.
    """
    answers = Answers(ids=[[token] for token in tokens.tolist()])
    open_requests = {b for b, ids in enumerate(answers.ids) if ids[-1] != end_of_turn}
    graphs = graphs_compiled()
    with torch.inference_mode(), torch.compiler.set_stance("fail_on_recompile"):
        for _ in range(max_new_tokens - 1):
            if not open_requests:
                break
            began = time.perf_counter()
            tokens = decoder(tokens, positions)
            positions = positions + 1
            new = tokens.tolist()
            answers.step_seconds.append(time.perf_counter() - began)
            for b in sorted(open_requests):
                answers.ids[b].append(new[b])
                if new[b] == end_of_turn:
                    open_requests.remove(b)
            on_token(answers.ids)
    answers.recompiles = graphs_compiled() - graphs
    return answers
