"""Makes fp8_ds_mla.npz: `python make_fp8_ds_mla.py`, where CUDA's headers and a C++ compiler are.

The tokens are drawn here, the records made by ../cpp/fp8_golden.cpp from them.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

HERE = Path(__file__).parent
NOPE_DIM, HEAD_DIM, BLOCK_DIM = 512, 576, 128


def tokens() -> list[tuple[str, Tensor]]:
    """Labels, and bfloat16 [n, 576] for each."""
    generator = torch.Generator().manual_seed(656)

    def normal(n: int, exponent: float = 0.0) -> Tensor:
        values: Tensor = torch.randn(n, HEAD_DIM, generator=generator) * 2.0**exponent
        return values

    outlier = normal(4)
    outlier[:, 5::BLOCK_DIM] = 1000.0
    heavy = normal(8) / normal(8).abs().clamp(min=1e-3)
    zeros = torch.zeros(2, HEAD_DIM)
    zeros[1] = -0.0
    subnormal = normal(4, -126)
    subnormal[:, :BLOCK_DIM] *= 2.0**-7
    sorts = [
        ("normal", normal(16)),
        *((f"normal 2^{e}", normal(4, e)) for e in (-100, -40, -14, -6, 6, 14, 40, 100)),
        ("scale at its floor", normal(4, -122)),
        ("subnormal", subnormal),
        ("one outlier", outlier),
        ("heavy tails", heavy),
        ("zeros", zeros),
        ("ties at power-of-two scales", ties(torch.exp2(torch.arange(-20.0, 20.0, 10.0)))),
        ("near ties at any scale", ties(torch.rand(6, generator=generator) + 0.5)),
        ("infinity and NaN", specials(normal(6))),
    ]
    return [(label, values.bfloat16()) for label, values in sorts]


def ties(scales: Tensor) -> Tensor:
    """Tokens of the points halfway between neighbours of e4m3, times a scale, and of 448 scales."""
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halfway = (values[1:] + values[:-1]) / 2  # 126 of them
    signs = torch.tensor([1.0, -1.0]).repeat(63)
    block = torch.cat([halfway * signs, torch.tensor([448.0, -448.0])])
    row = torch.cat([block, -block, block.flip(0), -block.flip(0), halfway[:64]])
    return row * scales[:, None]


def specials(values: Tensor) -> Tensor:
    inf, nan = torch.inf, torch.nan
    for row, special in enumerate((inf, -inf, nan, -nan)):
        values[row, 7] = special
        values[row, 500:540] = special
    values[4, :BLOCK_DIM] = nan
    values[5, BLOCK_DIM : 2 * BLOCK_DIM : 2] = inf
    values[5, BLOCK_DIM + 1 : 2 * BLOCK_DIM : 2] = nan
    return values


def main() -> None:
    sorts = tokens()
    latent = torch.cat([values for _, values in sorts]).view(torch.int16).numpy().view(np.uint16)
    headers = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "fp8_golden"
        source = HERE.parent / "cpp" / "fp8_golden.cpp"
        subprocess.run(["c++", "-O1", f"-I{headers}", str(source), "-o", str(program)], check=True)
        done = subprocess.run(
            [str(program)], input=latent.tobytes(), capture_output=True, check=True
        )
    record = np.frombuffer(done.stdout, dtype=np.uint8).reshape(len(latent), -1)
    label = np.array([name for name, values in sorts for _ in range(len(values))])
    np.savez_compressed(
        HERE / "fp8_ds_mla.npz", latent_bf16_bits=latent, record=record, label=label
    )
    print(len(latent), "tokens")


if __name__ == "__main__":
    main()
