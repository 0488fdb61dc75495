"""RMSNorm, RoPE and the write of `nvfp4_ds_mla` records in plain PyTorch: the fused op's oracle.

From a latent as its projection gives it to its record, all in fp32, each operation rounded to
nearest on its own; x is the input as fp32:

1. squares = x * x. Their sum is taken in pairs of neighbours, the sums in pairs of neighbours
   again, and so on: one order, which every device can keep.
2. r = 1 / sqrt(sum / 512 + eps), a true root and a true division.
3. y = (x * r) * weight. Then one rounding to the dtype of x: torch.nn.RMSNorm and DeepSeek's own
   code round here and only here. (The RMSNorm of some models rounds x * r as well.)
4. A pair (a, b) of the key becomes (a * cos - b * sin, b * cos + a * sin), rounded once to the
   dtype of x. Pair i is dims i and i + 32 ("neox") or dims 2i and 2i + 1, and its angle is the
   token's position times a frequency, of which the table has cosine and sine.
5. The record of y and the rotated key, as reference.py says.

The roundings of 3 and 4 are what an engine has that stores both in its own dtype before it writes
them. `round_to_input=False` leaves them out.

Like reference.py this shares no arithmetic with the C++ sources, and was written to be read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4_dsmla import reference

__all__ = ["concat_and_cache", "rms_norm", "rope"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Steps 1 to 3 without the last rounding.

    Args:
        x: bf16, fp16 or fp32 [..., n], n a power of two.
        weight: of any of these dtypes, [n].
        eps: rounded to fp32.

    Returns:
        fp32, of x's shape.
    """
    x = x.float()
    mean = _sum_of_pairs(_product(x, x)) / x.shape[-1]
    root = (mean + eps).double().sqrt().float()  # by way of fp64, as in reference.py
    inverse = (1.0 / root.double()).float()
    return _product(_product(x, inverse), weight.float())


def rope(x: Tensor, positions: Tensor, cos_sin_cache: Tensor, *, is_neox: bool) -> Tensor:
    """Step 4 without the rounding.

    Args:
        x: bf16, fp16 or fp32 [T, n].
        positions: int64 or int32 [T], in [0, max_positions).
        cos_sin_cache: of any of these dtypes, [max_positions, n]: cosines, then sines.
        is_neox: whether pairs are dims i and i + n / 2, else they are neighbours.

    Returns:
        fp32 [T, n].
    """
    cos, sin = cos_sin_cache[positions].float().chunk(2, dim=-1)
    pairs = (2, -1) if is_neox else (-1, 2)
    at = -2 if is_neox else -1
    a, b = x.float().unflatten(-1, pairs).unbind(at)
    first = _product(a, cos) - _product(b, sin)
    second = _product(b, cos) + _product(a, sin)
    return torch.stack([first, second], dim=at).flatten(-2)


def concat_and_cache(
    kv_c: Tensor,
    k_pe: Tensor,
    norm_weight: Tensor,
    eps: float,
    positions: Tensor,
    cos_sin_cache: Tensor,
    is_neox: bool,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    layer: int = 0,
    round_to_input: bool = True,
) -> None:
    """Normalise, rotate, and write the records of tokens to their slots.

    A token whose slot is outside [0, num_blocks * block_size), or whose position is outside
    [0, max_positions), is skipped. (The CPU op raises IndexError for a slot beyond the capacity
    and, if a token has a slot, for its position.)

    Args:
        kv_c: bf16, fp16 or fp32 [T', 512].
        k_pe: of that dtype [T', 64].
        norm_weight: of that dtype or fp32 [512].
        eps: of the norm.
        positions: int64 or int32 [T'].
        cos_sin_cache: of kv_c's dtype or fp32 [max_positions, 64].
        is_neox: as in `rope`.
        kv_cache: the cache or pool, as in `reference.concat_and_cache`; changed in place.
        slot_mapping: int64 or int32 [T], T <= T'.
        layer: layer of the pool to write, 0 for the cache of one layer.
        round_to_input: whether what is encoded has been rounded to kv_c's dtype.

    Raises:
        ValueError: `kv_cache` or `layer` is not as above.
    """
    tokens, max_positions = slot_mapping.shape[0], cos_sin_cache.shape[0]
    stored = kv_c.dtype if round_to_input else torch.float32
    normalised = rms_norm(kv_c[:tokens], norm_weight, eps).to(stored)
    position = positions[:tokens]
    known = (position >= 0) & (position < max_positions)
    if max_positions == 0:
        cos_sin_cache = cos_sin_cache.new_zeros(1, cos_sin_cache.shape[1])
    position = torch.where(known, position, 0)
    rotated = rope(k_pe[:tokens], position, cos_sin_cache, is_neox=is_neox).to(stored)
    slots = torch.where(known, slot_mapping, -1)
    reference.concat_and_cache(normalised, rotated, kv_cache, slots, layer)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """fp32, rounded on its own: a compiler may fuse a product and a sum into one rounding."""
    return (a.double() * b.double()).float()


def _sum_of_pairs(x: Tensor) -> Tensor:
    """[..., n] -> [..., 1], in the order of step 1."""
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x
