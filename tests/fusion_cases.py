"""The chain before a write as people write it, and chains that are nearly it.

A norm is a function of x [..., 512] and a weight, a rotation one of x [..., 64] and cos_sin
[..., 64], the row of the table that each token has; EXACT ones round once, at their end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_cases import cos_sin_table
from nvfp4_dsmla.layout import HEAD_DIM, NOPE_DIM, ROPE_DIM

Norm = Callable[[Tensor, Tensor], Tensor]
Rotation = Callable[[Tensor, Tensor], Tensor]
Lookup = Callable[[Tensor, Tensor], Tensor]

EPS = 1e-6
HALF = ROPE_DIM // 2
TABLE = cos_sin_table(97, torch.float32)


# ---- norms -------------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (NOPE_DIM,), weight, EPS)


def deepseek_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    return (weight * wide).type_as(x)


def hugging_face_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    return weight * (wide * torch.rsqrt(variance + EPS)).to(x.dtype)


def divided_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    mean = (wide * wide).sum(dim=-1, keepdim=True) / NOPE_DIM
    return (wide / torch.sqrt(mean + EPS) * weight.float()).to(x.dtype)


def inverse_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    inverse = 1.0 / torch.sqrt(EPS + torch.mean(wide**2, dim=-1))
    return (wide * (inverse[..., None] * weight)).to(x.dtype)


def power_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (weight * (wide * (wide.pow(2).mean(-1, True) + EPS) ** -0.5)).to(x.dtype)


def gemma_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return (wide * (1 + weight.float())).to(x.dtype)


def norm_of_a_sum(x: Tensor, weight: Tensor) -> Tensor:
    return deepseek_norm(x + 2 * weight, weight)


def norm_of_a_product(x: Tensor, weight: Tensor) -> Tensor:
    return deepseek_norm(x * weight[:1], weight)


def second_norm(x: Tensor, weight: Tensor) -> Tensor:
    return deepseek_norm(deepseek_norm(x, weight), weight)


def narrow_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def narrow_inverse_norm(x: Tensor, weight: Tensor) -> Tensor:
    mean = x.float().pow(2).mean(-1, keepdim=True)
    return x * torch.rsqrt(mean + EPS).to(x.dtype) * weight


def norm_with_narrow_root(x: Tensor, weight: Tensor) -> Tensor:
    """Rounds nothing but 1 / rms."""
    wide = x.float()
    root = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return (wide * root.to(x.dtype) * weight.float()).to(x.dtype)


def norm_with_narrow_mean(x: Tensor, weight: Tensor) -> Tensor:
    """Rounds nothing but the mean."""
    wide = x.float()
    mean = wide.pow(2).mean(-1, keepdim=True).to(x.dtype)
    return (wide * torch.rsqrt(mean.float() + EPS) * weight.float()).to(x.dtype)


# What the norm is of, and by, where it is not x and weight.
NORM_INPUTS: dict[Norm, Norm] = {
    norm_of_a_sum: lambda x, weight: x + 2 * weight,
    norm_of_a_product: lambda x, weight: x * weight[:1],
    second_norm: deepseek_norm,
}
WEIGHTS: dict[Norm, Callable[[Tensor], Tensor]] = {gemma_norm: lambda weight: 1 + weight.float()}

EXACT_NORMS = [
    deepseek_norm,
    divided_norm,
    inverse_norm,
    power_norm,
    gemma_norm,
    norm_of_a_sum,
    norm_of_a_product,
    second_norm,
]
ROUNDED_NORMS = [
    hugging_face_norm,
    narrow_norm,
    narrow_inverse_norm,
    norm_with_narrow_root,
    norm_with_narrow_mean,
]


# ---- rotations ---------------------------------------------------------------------------------


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def llama_rotation(x: Tensor, cos_sin: Tensor) -> Tensor:
    cos, sin = (part.repeat(*[1] * (x.dim() - 1), 2) for part in cos_sin.chunk(2, dim=-1))
    wide = x.float()
    return (wide * cos + rotate_half(wide) * sin).to(x.dtype)


def halves_rotation(x: Tensor, cos_sin: Tensor) -> Tensor:
    cos, sin = cos_sin.chunk(2, dim=-1)
    first, second = x[..., :HALF].float(), x[..., HALF:].float()
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(turned, dim=-1).to(x.dtype)


def heads_rotation(x: Tensor, cos_sin: Tensor) -> Tensor:
    """A head's axis of one, before the tokens' as in transformers."""
    cos, sin = (torch.cat((part, part), dim=-1)[None] for part in cos_sin.chunk(2, dim=-1))
    wide = x.view(-1, 1, ROPE_DIM).transpose(0, 1).float()
    turned = wide * cos + rotate_half(wide) * sin
    return turned.transpose(0, 1).reshape(x.shape).to(x.dtype)


def flipped_rotation(x: Tensor, cos_sin: Tensor) -> Tensor:
    cos, sin = cos_sin.unflatten(-1, (2, HALF))[..., None, :].unbind(-3)
    pairs = x.float().unflatten(-1, (2, HALF))
    signs = torch.cat((-pairs[..., :1, :], pairs[..., 1:, :]), dim=-2)
    turned: Tensor = pairs * cos + signs.flip(-2) * sin * -1
    return turned.flatten(-2).to(x.dtype)


def gptj_rotation(x: Tensor, cos_sin: Tensor) -> Tensor:
    cos, sin = (part.repeat_interleave(2, dim=-1) for part in cos_sin.chunk(2, dim=-1))
    wide = x.float()
    other = torch.stack((-wide[..., 1::2], wide[..., ::2]), dim=-1).flatten(-2)
    return (wide * cos + other * sin).to(x.dtype)


def stacked_rotation(x: Tensor, cos_sin: Tensor) -> Tensor:
    cos, sin = cos_sin.chunk(2, dim=-1)
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
    return turned.flatten(-2).to(x.dtype)


def assigned_rotation(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Into a tensor of its own, in place."""
    cos, sin = cos_sin.chunk(2, dim=-1)
    even, odd = x[..., ::2].float(), x[..., 1::2].float()
    turned = torch.empty_like(x)
    turned[..., ::2] = even * cos - odd * sin
    turned[..., 1::2] = odd * cos + even * sin
    return turned


def complex_rotation(x: Tensor, cos_sin: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    angles = torch.view_as_complex(cos_sin.unflatten(-1, (2, HALF)).transpose(-1, -2).contiguous())
    return torch.view_as_real(pairs * angles).flatten(-2).to(x.dtype)


def polar_rotation(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Angles that are complex numbers to begin with."""
    cos, sin = cos_sin.chunk(2, dim=-1)
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(-2).to(x.dtype)


def transformers_deepseek_rotation(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Neighbours are brought apart, then turned as halves."""
    apart = x.unflatten(-1, (HALF, 2)).transpose(-1, -2).reshape(x.shape)
    return llama_rotation(apart, cos_sin)


def rotation_of_a_sum(x: Tensor, cos_sin: Tensor) -> Tensor:
    return halves_rotation(x + 0.5, cos_sin)


def second_rotation(x: Tensor, cos_sin: Tensor) -> Tensor:
    return halves_rotation(stacked_rotation(x, cos_sin), cos_sin)


def narrow_rotation(x: Tensor, cos_sin: Tensor) -> Tensor:
    """As vLLM's native one: the table is cast, and every step is rounded."""
    cos, sin = cos_sin.to(x.dtype).chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


ROTATION_INPUTS: dict[Rotation, Rotation] = {
    rotation_of_a_sum: lambda x, _: x + 0.5,
    second_rotation: stacked_rotation,
    transformers_deepseek_rotation: lambda x, _: torch.cat((x[..., ::2], x[..., 1::2]), dim=-1),
}

# With whether the op turns halves.
EXACT_ROTATIONS: dict[Rotation, bool] = {
    llama_rotation: True,
    halves_rotation: True,
    heads_rotation: True,
    flipped_rotation: True,
    rotation_of_a_sum: True,
    transformers_deepseek_rotation: True,
    second_rotation: True,
    gptj_rotation: False,
    stacked_rotation: False,
    complex_rotation: False,
    polar_rotation: False,
}
ROUNDED_ROTATIONS: dict[Rotation, bool] = {narrow_rotation: True}
# With an assignment, which only a functionalized graph can be read with.
ASSIGNED_ROTATIONS: dict[Rotation, bool] = {assigned_rotation: False}
ROTATIONS = EXACT_ROTATIONS | ROUNDED_ROTATIONS | ASSIGNED_ROTATIONS


# ---- rows of a table ---------------------------------------------------------------------------


def indexed(table: Tensor, positions: Tensor) -> Tensor:
    return table[positions]


def embedded(table: Tensor, positions: Tensor) -> Tensor:
    return F.embedding(positions, table)


def selected(table: Tensor, positions: Tensor) -> Tensor:
    return table.index_select(0, positions)


def halves_looked_up(table: Tensor, positions: Tensor) -> Tensor:
    cos, sin = table[:, :HALF], table[:, HALF:]
    return torch.cat((cos[positions], sin[positions]), dim=-1)


def cast_lookup(table: Tensor, positions: Tensor) -> Tensor:
    return table[positions].double().float()


def computed(_table: Tensor, positions: Tensor) -> Tensor:
    """No table: the angles of the positions."""
    frequencies = 10_000.0 ** -(torch.arange(HALF, device=positions.device) / HALF)
    angles = positions[:, None].float() * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return torch.cat((angles.cos()[:, :HALF], angles.sin()[:, HALF:]), dim=-1)


LOOKUPS = [indexed, embedded, selected, halves_looked_up, cast_lookup, computed]


# ---- chains that are nearly it -----------------------------------------------------------------


class NearMiss(NamedTuple):
    """A chain with one thing different, and what the pass says about it."""

    norm: Norm
    rotation: Rotation
    lookup: Lookup
    why: str


def _norm_miss(norm: Norm, why: str) -> NearMiss:
    return NearMiss(norm, halves_rotation, indexed, why)


def _rotation_miss(rotation: Rotation, why: str, lookup: Lookup = indexed) -> NearMiss:
    return NearMiss(deepseek_norm, rotation, lookup, why)


def _normed(x: Tensor, statistic: Tensor, eps: float = EPS) -> Tensor:
    """x over the root of a mean of squares."""
    return x.float() * torch.rsqrt(statistic.float().pow(2).mean(-1, keepdim=True) + eps)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return halves_rotation(x, torch.cat((cos, sin), dim=-1))


def layer_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.layer_norm(x, (NOPE_DIM,), weight, eps=EPS)


def eps_outside_the_root(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    root = wide.pow(2).mean(-1, keepdim=True).sqrt()
    return (wide / (root + EPS) * weight).to(x.dtype)


def mean_by_another_count(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    mean = wide.pow(2).sum(-1, keepdim=True) / HEAD_DIM
    return (wide * torch.rsqrt(mean + EPS) * weight).to(x.dtype)


def eps_that_is_a_tensor(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    mean = wide.pow(2).mean(-1, keepdim=True)
    return (wide * torch.rsqrt(mean + weight[0].float()) * weight).to(x.dtype)


A_FACTOR, A_TURN = "kv_c: wanted a factor", "k_pe: wanted pairs"
NEAR_MISSES = {
    "layer_norm": _norm_miss(layer_norm, A_FACTOR),
    "no_norm": _norm_miss(lambda x, weight: x * weight, A_FACTOR),
    "eps_outside_the_root": _norm_miss(eps_outside_the_root, A_FACTOR),
    "mean_by_another_count": _norm_miss(mean_by_another_count, A_FACTOR),
    "eps_that_is_a_tensor": _norm_miss(eps_that_is_a_tensor, A_FACTOR),
    "mean_of_absolutes": _norm_miss(
        lambda x, w: (x * torch.rsqrt(x.float().abs().mean(-1, True) + EPS) * w).type_as(x),
        A_FACTOR,
    ),
    "no_weight": _norm_miss(lambda x, _: _normed(x, x).to(x.dtype), "kv_c: wanted one weight"),
    "two_weights": _norm_miss(lambda x, w: (_normed(x, x) * w * w[:1]).type_as(x), "kv_c: wanted"),
    "a_weight_a_token": _norm_miss(
        lambda x, w: (_normed(x, x) * (w * x[:, :1])).type_as(x), "kv_c: wanted x / sqrt"
    ),
    "a_weight_for_all": _norm_miss(
        lambda x, w: (_normed(x, x) * w[0]).type_as(x), "norm_weight: wanted"
    ),
    "mean_of_another": _norm_miss(
        lambda x, w: (_normed(x, x * 2) * w).type_as(x), "kv_c: wanted x / sqrt"
    ),
    "mean_of_a_half": _norm_miss(
        lambda x, w: (_normed(x, x[..., : NOPE_DIM // 2]) * w).type_as(x), "kv_c: wanted"
    ),
    "mean_of_more_columns": _norm_miss(
        lambda x, w: (_normed(x, torch.cat((x, 2 * x[:, :HALF]), dim=-1)) * w).type_as(x),
        "kv_c: wanted the mean over the same 512 columns",
    ),
    "mean_of_all_tokens": _norm_miss(
        lambda x, w: (x.float() * torch.rsqrt(x.float().pow(2).mean() + EPS) * w).type_as(x),
        A_FACTOR,
    ),
    "mean_of_the_tokens_too": _norm_miss(
        lambda x, w: (
            x.float() * torch.rsqrt(x.float().pow(2).mean((0, 1), keepdim=True) + EPS) * w
        ).type_as(x),
        A_FACTOR,
    ),
    "every_other_column": _norm_miss(
        # What is side by side is their copy in fp32, and the key is not in fp32.
        lambda x, w: deepseek_norm(torch.cat((x, x), dim=-1).sigmoid()[:, ::2], w),
        "k_pe: wanted the type of the latent",
    ),
    "negative": _norm_miss(lambda x, w: -deepseek_norm(x, w), "kv_c: wanted x / sqrt"),
    "plus_a_bias": _norm_miss(
        lambda x, w: (_normed(x, x) * w + w).type_as(x), "kv_c: wanted x / sqrt"
    ),
    "times_a_scale": _norm_miss(
        lambda x, w: (_normed(x, x) * w * 0.5).type_as(x), "kv_c: wanted x / sqrt"
    ),
    "columns_in_another_order": _norm_miss(
        lambda x, w: deepseek_norm(x, w).flip(-1), "kv_c: wanted its 512 columns side by side"
    ),
    "tokens_in_another_order": _norm_miss(
        lambda x, w: deepseek_norm(x, w).flip(0), "kv_c: wanted x / sqrt"
    ),
    "a_neighbours_mean": _norm_miss(
        lambda x, w: (x.float() * _normed(x, x).roll(1, 0) * w).type_as(x), "kv_c: wanted"
    ),
    "rounded_to_another_type": _norm_miss(
        lambda x, w: deepseek_norm(x, w).half(), "kv_c: wanted torch.bfloat16"
    ),
    "bits_as_another_type": _norm_miss(
        lambda x, w: deepseek_norm(x, w).view(torch.float16), "kv_c: wanted x / sqrt"
    ),
    "no_rotation": _rotation_miss(lambda x, _: x * 2, A_TURN),
    "the_other_direction": _rotation_miss(
        lambda x, cs: _turned(x, cs[:, :HALF], -cs[:, HALF:]), A_TURN
    ),
    "the_other_direction_rounded": _rotation_miss(
        lambda x, cs: _turned(x, cs[:, :HALF], (-cs[:, HALF:]).to(x.dtype)), A_TURN
    ),
    "nothing_subtracted": _rotation_miss(
        lambda x, cs: (
            x * cs[:, :HALF].repeat(1, 2) + x.roll(HALF, -1) * cs[:, HALF:].repeat(1, 2)
        ).to(x.dtype),
        A_TURN,
    ),
    "half_of_the_dims": _rotation_miss(
        lambda x, cs: torch.cat((halves_rotation(x, cs)[:, :HALF], x[:, HALF:]), dim=-1),
        "k_pe: wanted",
    ),
    "scaled": _rotation_miss(lambda x, cs: halves_rotation(x, cs) * 0.5, A_TURN),
    "neighbours_to_halves": _rotation_miss(
        lambda x, cs: stacked_rotation(x, cs).unflatten(-1, (-1, 2)).transpose(1, 2).flatten(1),
        "k_pe: wanted its 64 columns side by side",
    ),
    "angles_of_other_columns": _rotation_miss(
        lambda x, cs: (
            x * torch.cat((cs[:, :HALF], cs[:, HALF:]), -1).to(x.dtype)
            + rotate_half(x) * cs.to(x.dtype)
        ),
        A_TURN,
    ),
    "one_position_for_all": _rotation_miss(
        halves_rotation, "positions: wanted 1 columns", lambda t, p: t[p[:1]]
    ),
    "tokens_rolled": _rotation_miss(lambda x, cs: halves_rotation(x, cs).roll(1, 0), A_TURN),
}
