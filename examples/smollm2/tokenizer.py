"""Text to token ids and back, with the vocabulary, merges and chat format of the GGUF itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from smollm2.weights import ModelFile

# What the model's own chat template says when the conversation brings no system turn.
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

# GGUF's token type for tokens that stand for no text (<|im_start|> and the like).
_CONTROL = 3


@dataclass(frozen=True)
class ChatTokenizer:
    """A byte-level BPE tokenizer and the id that ends an answer."""

    bpe: Tokenizer
    end_of_turn: int

    @classmethod
    def from_gguf(cls, file: ModelFile) -> ChatTokenizer:
        """Built from `tokenizer.ggml.*`. Raises ValueError for a vocabulary of another kind."""
        kind = (file.field("tokenizer.ggml.model"), file.field("tokenizer.ggml.pre"))
        if kind != ("gpt2", "smollm"):
            raise ValueError(f"tokenizer.ggml model and pre: wanted ('gpt2', 'smollm'), got {kind}")
        tokens = cast("list[str]", file.field("tokenizer.ggml.tokens"))
        types = cast("list[int]", file.field("tokenizer.ggml.token_type"))
        merges = cast("list[str]", file.field("tokenizer.ggml.merges"))
        vocabulary = {token: index for index, token in enumerate(tokens)}
        pairs = [cast("tuple[str, str]", tuple(merge.split(" "))) for merge in merges]
        bpe = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
        # "smollm" splits every digit off before the usual GPT-2 pattern.
        bpe.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        bpe.decoder = decoders.ByteLevel()
        control = [token for token, type_ in zip(tokens, types, strict=True) if type_ == _CONTROL]
        bpe.add_special_tokens([AddedToken(token, special=True) for token in control])
        return cls(bpe=bpe, end_of_turn=cast(int, file.field("tokenizer.ggml.eos_token_id")))

    def encode(self, text: str) -> list[int]:
        """The ids of plain text; nothing is added before or after it."""
        return list(self.bpe.encode(text, add_special_tokens=False).ids)

    def encode_chat(self, prompt: str) -> list[int]:
        """The ids of one question in the model's chat format, up to where its answer begins."""
        turns = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{prompt}<|im_end|>\n"
        return self.encode(turns + "<|im_start|>assistant\n")

    def decode(self, ids: list[int]) -> str:
        """The text of ids; control tokens are left out."""
        return str(self.bpe.decode(ids, skip_special_tokens=True))
