"""The decoder of examples/deepseek in eager code: the model that it says it is, in any batch."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F

from decoder_cases import (
    BLOCK_SIZE,
    CONFIG,
    NUM_BLOCKS,
    make_decoder,
    records_but_at,
    shaped_steps,
)
from deepseek.batch import Pages, Request, Traffic
from deepseek.cache import BFloat16Cache, NvFp4Cache
from deepseek.layers import Step

if TYPE_CHECKING:
    from torch import Tensor

    from deepseek.model import Decoder

ALL_SELECTED = replace(CONFIG, topk=64)
CACHES = pytest.mark.parametrize("cache", [NvFp4Cache, BFloat16Cache])


def one_by_one(step: Step) -> list[Step]:
    """The step's tokens in steps of one a request."""
    steps = []
    for i in range(step.tokens.shape[1]):
        tokens, positions, slots = (tensor[:, i : i + 1] for tensor in step[:3])
        lengths = torch.where(slots[:, 0] < 0, 0, positions[:, 0] + 1).int()
        steps.append(Step(tokens, positions, slots, step.block_table, lengths))
    return steps


def whole_heads(decoder: Any, tokens: Tensor) -> Tensor:
    """The logits of a prompt [S] without a cache, its heads' keys and values made in full."""
    config = decoder.config
    angles = torch.arange(len(tokens))[:, None] * (
        config.rope_base ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    )

    def turned(x: Tensor) -> Tensor:  # [S, heads, 64], its pairs as complex numbers
        pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
        turns = torch.polar(torch.ones_like(angles), angles)[:, None]
        return torch.view_as_real(pairs * turns).flatten(-2).float()

    def stored(x: Tensor) -> Tensor:
        return x.bfloat16().float()

    x = decoder.embedding(tokens)
    for block in decoder.blocks:
        attention = block.attention
        nope = config.qk_nope_head_dim
        norm = F.rms_norm(x, x.shape[-1:], block.attention_norm.weight, config.norm_eps)
        q = attention.q_a_proj(norm)
        q = F.rms_norm(q, q.shape[-1:], attention.q_a_norm.weight, config.norm_eps)
        q = attention.q_b_proj(q).unflatten(-1, (config.num_heads, -1))
        q = torch.cat([q[..., :nope], turned(q[..., nope:])], dim=-1)
        kv = attention.kv_a_proj(norm)
        latent = F.rms_norm(kv[:, :512], (512,), attention.kv_a_norm.weight, config.norm_eps)
        heads = torch.einsum("sk,hdk->shd", stored(latent), attention.kv_b)
        k_pe = stored(turned(kv[:, None, 512:])).expand(-1, config.num_heads, -1)
        k, v = torch.cat([heads[..., :nope], k_pe], dim=-1), heads[..., nope:]
        q, k, v = (part.transpose(0, 1) for part in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + attention.o_proj(out.transpose(0, 1).flatten(1))
        norm = F.rms_norm(x, x.shape[-1:], block.mlp_norm.weight, config.norm_eps)
        gate, up = block.mlp.gate_up(norm).chunk(2, dim=-1)
        x = x + block.mlp.down(F.silu(gate) * up)
    x = F.rms_norm(x, x.shape[-1:], decoder.norm.weight, config.norm_eps)
    logits: Tensor = decoder.lm_head(x)
    return logits


def test_absorbed_projections_are_attention_of_whole_heads(device: torch.device) -> None:
    decoder = make_decoder(device, BFloat16Cache, dtype=torch.float32, config=ALL_SELECTED)
    prompts = [Request(list(range(first, first + 20))) for first in (0, 30)]
    pages = Pages(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    step = pages.next_step(prompts, batch=3, new_tokens=20, max_blocks=6, device=device)
    got = decoder.prefill(*step)
    twin = make_decoder(torch.device("cpu"), dtype=torch.float32, config=ALL_SELECTED)
    for row, prompt in enumerate(prompts):
        want = whole_heads(twin, torch.tensor(prompt.tokens))
        torch.testing.assert_close(got[row].cpu(), want, rtol=1e-2, atol=1e-2)


@CACHES
def test_a_chunk_is_its_tokens_one_by_one(
    cache: type[NvFp4Cache | BFloat16Cache], device: torch.device
) -> None:
    chunked, single = (make_decoder(device, cache, dtype=torch.float32) for _ in range(2))
    (step,) = shaped_steps([(4, 9, 6)], device)
    assert (step.slot_mapping >= 0).sum() > 9
    got = chunked.prefill(*step)
    want = torch.cat([single(*one) for one in one_by_one(step)], dim=1)
    real = step.slot_mapping >= 0
    # Not all bits are equal, and where a 4-bit code differs a little more does.
    error = (got - want)[real].norm() / want[real].norm()
    assert error < (0.05 if cache is NvFp4Cache else 1e-3)


@CACHES
@pytest.mark.parametrize("prefill", [False, True])
def test_padding_changes_nothing(
    cache: type[NvFp4Cache | BFloat16Cache], prefill: bool, device: torch.device
) -> None:
    """Requests of slot -1, length 0 and block -1, between others."""
    decoder, twin = make_decoder(device, cache), make_decoder(device, cache)
    (step,) = shaped_steps([(6, 5, 6)], device)
    rows = step.seq_lens.nonzero().flatten()
    assert 2 <= len(rows) < 6
    order = torch.randperm(6, generator=torch.Generator().manual_seed(0)).to(device)
    padded = Step(*(tensor[order] for tensor in step))
    alone = Step(*(tensor[rows] for tensor in step))

    def run(model: Decoder, inputs: Step) -> Tensor:
        logits: Tensor = (model.prefill if prefill else model)(*inputs)
        return logits

    before = records_but_at(decoder.cache.pool, step.slot_mapping).clone()
    got, want = run(decoder, padded), run(twin, alone)
    assert got.isfinite().all()
    assert torch.equal(records_but_at(decoder.cache.pool, step.slot_mapping), before)
    real = alone.slot_mapping >= 0
    difference = (got[order.argsort()[rows]] - want)[real]
    assert difference.norm() / want[real].norm() < 0.05


def test_the_indexer_selects_the_best_visible_tokens(
    device: torch.device, generator: torch.Generator
) -> None:
    decoder = make_decoder(device, dtype=torch.float32)
    (step,) = shaped_steps([(4, 3, 6)], device)
    indexer: Any = decoder.get_submodule("blocks.0.attention.indexer")
    x = torch.randn(4, 3, CONFIG.hidden, generator=generator).to(device)
    q_lora = torch.randn(4, 3, CONFIG.q_lora_rank, generator=generator).to(device)
    no_turn = decoder.cos_sin[torch.zeros_like(step.positions)]
    got, count = indexer(x, q_lora, no_turn, decoder.keys, step)
    q = indexer.q_proj(q_lora).unflatten(-1, (CONFIG.index_heads, -1))
    keys = decoder.keys.gather(step.block_table, 0)
    for row in range(4):
        for i in range(3):
            visible = min(int(step.positions[row, i]) + 1, int(step.seq_lens[row]))
            scores = (keys[row, :visible] @ q[row, i].T).relu() @ indexer.head_weights(x[row, i])
            want = scores.topk(min(visible, CONFIG.topk)).values
            selected = got[row, i, : len(want)]
            assert count[row, i] == len(want) == len(selected.unique())
            torch.testing.assert_close(scores[selected], want)  # equal scores are in any order
            assert (got[row, i, len(want) :] == -1).all()


def test_a_seed_is_a_model_whatever_its_cache() -> None:
    packed, plain = (
        make_decoder(torch.device("cpu")),
        make_decoder(torch.device("cpu"), BFloat16Cache),
    )
    assert len(list(packed.parameters())) > 20
    for one, other in zip(packed.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


def test_requests_share_no_block_and_stay_in_their_table() -> None:
    pages = Pages(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    traffic = Traffic(pages, batch=5, max_blocks=4, vocab=CONFIG.vocab, context=20)
    sizes = set()
    for _ in range(300):
        step = traffic.next_step(new_tokens=3)
        used = step.block_table[step.block_table >= 0].tolist() + pages.free
        assert sorted(used) == list(range(NUM_BLOCKS))
        slots = step.slot_mapping[step.slot_mapping >= 0].tolist()
        assert len(set(slots)) == len(slots)
        assert int(step.seq_lens.max()) <= 4 * BLOCK_SIZE
        sizes.add(int((step.seq_lens > 0).sum()))
    assert {3, 4, 5} <= sizes


def test_the_demo_prints_a_row_a_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Uncompiled: that is for test_decoder_compile.py."""
    pytest.importorskip("rich")
    from deepseek import run

    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    monkeypatch.setattr("sys.argv", ["run.py", "--steps", "7", "--batch", "3"])
    assert run.main() == 0
    printed = capsys.readouterr().out
    for number in range(7):
        assert re.search(rf"^\W+{number}\b", printed, flags=re.M)
    assert "A token takes 352 bytes a layer, and 1152 in bf16." in printed
