"""What sparse_mla_decode must give: an oracle in float64, and how near to it a result has to be."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

import nvfp4_dsmla
from cases import BF16, FP16, assert_memory_equal, copies_of
from compare import assert_latents_equal
from nvfp4_dsmla import reference
from nvfp4_dsmla.layout import NOPE_DIM, RECORD_BYTES

Arguments = dict[str, Any]

ROUNDING = {BF16: 2.0**-8, FP16: 2.0**-11}  # half a step of out, relative


class Attention(NamedTuple):
    out: Tensor
    lse: Tensor
    magnitude: Tensor  # sum of weight * |value|: what errors of the weights are relative to


def attention(
    q: Tensor,
    kv_cache: Tensor,
    indices: Tensor,
    softmax_scale: float,
    topk_length: Tensor | None,
    attn_sink: Tensor | None,
    layer: int,
) -> Attention:
    """In float64, a row at a time, over the tokens of that row alone."""
    records = (kv_cache if kv_cache.dim() == 3 else kv_cache[layer]).reshape(-1, RECORD_BYTES)
    latents = reference.decode(records, torch.float32).double()
    batch, s_q, heads, _ = q.shape
    out = torch.zeros(batch, s_q, heads, NOPE_DIM, dtype=torch.float64)
    lse = torch.full((batch, s_q, heads), -math.inf, dtype=torch.float64)
    magnitude = torch.zeros_like(out)
    for b in range(batch):
        for s in range(s_q):
            slots = indices[b, s]
            if topk_length is not None:
                length = topk_length[b] if topk_length.dim() == 1 else topk_length[b, s]
                slots = slots[: max(int(length), 0)]
            keys = latents[slots[(slots >= 0) & (slots < len(latents))].long()]
            if len(keys) == 0:
                continue
            scores = q[b, s].double() @ keys.T * softmax_scale
            lse[b, s] = scores.logsumexp(dim=-1)
            weights = scores.softmax(dim=-1)
            if attn_sink is not None:
                weights = weights * torch.sigmoid(lse[b, s] - attn_sink.double())[:, None]
            out[b, s] = weights @ keys[:, :NOPE_DIM]
            magnitude[b, s] = weights @ keys[:, :NOPE_DIM].abs()
    return Attention(out, lse, magnitude)


def assert_attention(got: tuple[Tensor, Tensor], want: Attention, device: torch.device) -> None:
    """Out is rounded once to its dtype, after weights with errors of their own.

    On the CPU the weights are fp32: a score is a sum of 576 products and so off by a few 2^-24 of
    the sum of their magnitudes, which here is below 100; that is what a weight is off by,
    relatively. CUDA rounds the weights to float16, by 2^-11; eight times that is let pass.
    """
    out, lse = (part.cpu() for part in got)
    on_cpu = device.type == "cpu"
    weight_error = 2.0**-16 if on_cpu else 2.0**-8
    lse_error = 2.0**-16 if on_cpu else 2.0**-12
    bound = ROUNDING[out.dtype] * want.out.abs() + weight_error * want.magnitude + 1e-7
    excess = (out.double() - want.out).abs() - bound
    assert not (excess > 0).any(), f"out is off by {excess.max():g} more than its bound"
    assert not out.isnan().any()
    torch.testing.assert_close(lse.double(), want.lse, rtol=lse_error, atol=lse_error)
    empty = want.lse.isneginf()
    assert not out[empty].view(torch.int16).any(), "a row without a token is not +0"


def decode(arguments: Arguments) -> tuple[Tensor, Tensor]:
    # NaN where an allocator is likely to put the outputs.
    q = arguments["q"]
    torch.full((*q.shape[:-1], NOPE_DIM), torch.nan, dtype=q.dtype, device=q.device)
    torch.full(q.shape[:-1], torch.nan, device=q.device)
    return nvfp4_dsmla.sparse_mla_decode(**arguments)


def check(arguments: Arguments) -> tuple[Tensor, Tensor]:
    """Right values, in new contiguous tensors; no argument changes."""
    before = copies_of(arguments)
    q = arguments["q"]
    got = decode(arguments)
    assert_attention(got, attention(**before), q.device)
    for part, dtype in zip(got, (q.dtype, torch.float32), strict=True):
        assert part.is_contiguous()
        assert (part.dtype, part.device) == (dtype, q.device)
    for name, argument in arguments.items():
        if isinstance(argument, Tensor):
            assert_memory_equal(argument, before[name], name)
    return got


def assert_same(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    for got_part, want_part in zip(got, want, strict=True):
        assert_latents_equal(got_part, want_part)
