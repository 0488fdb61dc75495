"""Whether the ops of this installation give the right bits on the devices of this machine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nvfp4_dsmla import _C, format_ops, ops, reference, reference_formats, reference_fused
from nvfp4_dsmla.formats import (
    CACHE_FORMATS,
    CacheFormat,
    get_cache_format,
    get_kv_cache_spec,
)
from nvfp4_dsmla.layout import HEAD_DIM, NOPE_DIM, ROPE_DIM
from nvfp4_dsmla.support import supports_combination

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from nvfp4_dsmla.cli.screen import Screen

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_BLOCK_SIZE = 64
_GATHERS = {
    "fp8_ds_mla": format_ops.gather_and_upconvert_fp8_ds_mla,
    "nvfp4_ds_mla": ops.gather_and_upconvert_nvfp4_ds_mla,
}
_CP_GATHERS = {
    "fp8_ds_mla": format_ops.cp_gather_and_upconvert_fp8_kv_cache,
    "nvfp4_ds_mla": ops.cp_gather_and_upconvert_nvfp4_kv_cache,
}

GOLDEN = Path(_C.__file__).parent / "golden"
"""The folder of the golden records, installed beside the compiled module."""


@dataclass(frozen=True)
class _Check:
    device: str
    format: str
    what: str
    tokens: int
    differences: Callable[[], tuple[int, str]]  # how many, and the first in words


def gather(screen: Screen, *, tokens: int, seed: int, device: str | None) -> dict[str, Any]:
    """The report: every check with the number of bytes or values that differ."""
    checks = [check for d in _devices(device) for check in _checks(d, tokens, seed)]
    done = []
    failed = 0
    with screen.progress("verifying", len(checks)) as step:
        for check in checks:
            step(f"{check.device} {check.what}")
            count, first = check.differences()
            done.append(
                {
                    "device": check.device,
                    "format": check.format,
                    "check": check.what,
                    "tokens": check.tokens,
                    "differences": count,
                    "first": first,
                }
            )
            failed += count > 0
    return {"seed": seed, "checks": done, "failed": failed, "passed": failed == 0}


def draw(screen: Screen, report: dict[str, Any]) -> None:
    """The screen."""
    rows = []
    for check in report["checks"]:
        count = check["differences"]
        verdict = screen.verdict(count == 0, "right" if count == 0 else f"{count:,} wrong")
        cells = [check["device"], check["format"], check["check"], f"{check['tokens']:,}"]
        rows.append([*cells, verdict])
    screen.table(["device", "format", "check", ">tokens", ">result"], rows)
    for check in report["checks"]:
        if check["differences"] > 0:
            screen.note(f"{check['device']}, {check['check']}: {check['first']}")
    passed, count = report["passed"], len(report["checks"])
    text = (
        f"all {count} checks passed" if passed else f"{report['failed']} of {count} checks FAILED"
    )
    screen.gap()
    screen.console.print(screen.verdict(passed, text))


def _devices(only: str | None) -> list[torch.device]:
    """The CPU, and every GPU that the ops run on; or the one that was asked for."""
    write = "concat_and_cache_nvfp4_ds_mla"  # what runs one op runs them all, but for attention
    if only is not None:
        try:
            device = torch.device(only)
        except RuntimeError:
            raise ValueError(f"--device: wanted cpu, cuda or cuda:1, got {only!r}") from None
        if reason := _why_not(write, device):
            raise ValueError(f"--device: {reason}")
        return [device]
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return [torch.device("cpu"), *(gpu for gpu in gpus if _why_not(write, gpu) is None)]


def _why_not(op: str, device: torch.device) -> str | None:
    """None if the op runs there, else why not."""
    index = device.index or 0
    if device.type == "cuda" and index >= torch.cuda.device_count():
        return (
            f"{device} is not one of the {torch.cuda.device_count()} CUDA devices that torch sees"
        )
    capability = torch.cuda.get_device_capability(index) if device.type == "cuda" else None
    return supports_combination(op=op, device_type=device.type, compute_capability=capability)


def _checks(device: torch.device, tokens: int, seed: int) -> Iterator[_Check]:
    generator = torch.Generator().manual_seed(seed)
    sweep = random_latents(tokens, generator)
    any_bytes = {
        name: torch.randint(
            256, (tokens, f.bytes_per_token), dtype=torch.uint8, generator=generator
        ).view(f.storage_dtype)
        for name, f in CACHE_FORMATS.items()
    }
    for name, cache_format in reversed(CACHE_FORMATS.items()):
        codec = reference_formats.CODECS[name]
        check = partial(_Check, str(device), name)
        if cache_format.is_quantized:
            latent, records = golden(name)
            run = partial(_written, device, cache_format, latent, records)
            yield check("golden records written", len(latent), run)
            want = codec.decode(records, torch.bfloat16)
            run = partial(_gathered, device, cache_format, records, want)
            yield check("golden records gathered", len(latent), run)
        for kind, dtype in DTYPES.items():
            latent = sweep.to(dtype)
            records = codec.encode(latent[:, :NOPE_DIM], latent[:, NOPE_DIM:])
            run = partial(_written, device, cache_format, latent, records)
            yield check(f"random {kind} written", tokens, run)
        if not cache_format.is_quantized:
            continue
        stored = any_bytes[name]
        for kind, dtype in DTYPES.items():
            run = partial(_gathered, device, cache_format, stored, codec.decode(stored, dtype))
            yield check(f"any bytes gathered to {kind}", tokens, run)
        want = codec.decode(stored, torch.bfloat16)
        run = partial(_gathered_by_request, device, cache_format, stored, want)
        yield check("any bytes gathered by request", tokens, run)
    for have, want_name in permutations(CACHE_FORMATS, 2):
        run = partial(_converted, device, any_bytes[have], have, want_name)
        yield _Check(str(device), have, f"any bytes to {want_name}", tokens, run)

    check = partial(_Check, str(device), "nvfp4_ds_mla")
    for kind, dtype in DTYPES.items():
        run = partial(_fused, device, sweep.to(dtype), seed)
        yield check(f"random {kind} fused write", tokens, run)
    if _why_not("sparse_mla_decode", device) is not None:
        return
    attended = max(tokens, 64)  # so many that no row is left without one
    for parts, what in ((1, "sparse attention"), (2, "attention merged of two")):
        run = partial(_attended, device, attended, seed, parts)
        yield check(f"{what}, within 0.5%", attended, run)


def golden(name: str) -> tuple[Tensor, Tensor]:
    """The golden tokens, bfloat16 [n, 576], and their records, uint8 [n, bytes a token]."""
    with np.load(GOLDEN / f"{name}.npz") as file:
        bits = torch.from_numpy(file["latent_bf16_bits"].view(np.int16).copy())
        return bits.view(torch.bfloat16), torch.from_numpy(file["record"].copy())


def random_latents(tokens: int, generator: torch.Generator) -> Tensor:
    """fp32 [tokens, 576]: each row normal at a magnitude of its own, with a few specials in it."""
    values = torch.randn(tokens, HEAD_DIM, generator=generator)
    exponents = torch.randint(-14, 12, (tokens, 1), generator=generator)
    specials = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, 3e38, 6.0])
    which = torch.randint(len(specials), values.shape, generator=generator)
    rare = torch.rand(values.shape, generator=generator) < 0.001
    return torch.where(rare, specials[which], values * torch.exp2(exponents.float()))


def _shuffled_slots(tokens: int) -> tuple[int, Tensor]:
    """Blocks enough for the tokens and some more, and a slot for each token, in no order."""
    num_blocks = -(-tokens // _BLOCK_SIZE) + 1
    generator = torch.Generator().manual_seed(tokens)
    return num_blocks, torch.randperm(num_blocks * _BLOCK_SIZE, generator=generator)[:tokens]


def _written(
    device: torch.device, cache_format: CacheFormat, latent: Tensor, want: Tensor
) -> tuple[int, str]:
    num_blocks, slots = _shuffled_slots(len(latent))
    cache = _empty(cache_format, num_blocks).to(device)
    latent = latent.to(device)
    format_ops.concat_and_cache_mla(
        latent[:, :NOPE_DIM], latent[:, NOPE_DIM:], cache, slots.to(device), cache_format.name
    )
    got = cache.flatten(0, 1).cpu()
    expected = torch.zeros_like(got)
    expected[slots] = want
    return _first_difference(got, expected, "slot", "byte" if got.element_size() == 1 else "dim")


def _empty(cache_format: CacheFormat, num_blocks: int) -> Tensor:
    spec = get_kv_cache_spec(kv_cache_dtype=cache_format.name, block_size=_BLOCK_SIZE)
    return torch.zeros(spec.shape(num_blocks), dtype=spec.storage_dtype)


def _gathered(
    device: torch.device, cache_format: CacheFormat, records: Tensor, want: Tensor
) -> tuple[int, str]:
    num_blocks, slots = _shuffled_slots(len(records))
    cache = _empty(cache_format, num_blocks)
    cache.view(-1, cache.shape[-1])[slots] = records
    gather = _GATHERS[cache_format.name]
    got = gather(kv_cache=cache.to(device), slots=slots.to(device), dtype=want.dtype)
    return _first_difference(got.cpu(), want, "token", "dim")


def _gathered_by_request(
    device: torch.device, cache_format: CacheFormat, records: Tensor, want: Tensor
) -> tuple[int, str]:
    """Requests of ever more blocks, which lie in the cache from its end to its beginning."""
    num_blocks = -(-len(records) // _BLOCK_SIZE)
    cache = _empty(cache_format, num_blocks)
    cache.view(-1, cache.shape[-1])[: len(records)] = records
    sizes: list[int] = []
    while sum(sizes) < num_blocks:
        sizes.append(min(len(sizes) + 1, num_blocks - sum(sizes)))
    ids = torch.arange(num_blocks - 1, -1, -1, dtype=torch.int32).split(sizes)
    table = torch.nn.utils.rnn.pad_sequence(list(ids), batch_first=True)
    starts = torch.tensor([0, *sizes[:-1]], dtype=torch.int32).cumsum(0).int() * _BLOCK_SIZE
    dst = torch.empty(len(records), HEAD_DIM, dtype=want.dtype, device=device)
    _CP_GATHERS[cache_format.name](
        src_cache=cache.flip(0).to(device),
        dst=dst,
        block_table=table.to(device),
        workspace_starts=starts.to(device),
        batch_size=len(sizes),
    )
    return _first_difference(dst.cpu(), want, "token", "dim")


def _converted(
    device: torch.device, records: Tensor, src_format: str, dst_format: str
) -> tuple[int, str]:
    got = format_ops.convert_kv_cache(
        src=records[:, None].to(device), src_format=src_format, dst_format=dst_format
    )
    want = reference_formats.convert(records, src_format, dst_format)
    return _first_difference(got[:, 0].cpu(), want, "token", "element")


def _fused(device: torch.device, latent: Tensor, seed: int) -> tuple[int, str]:
    """A layer of a pool with keys rotated in halves, and one with keys rotated in neighbours."""
    generator = torch.Generator().manual_seed(seed)
    latent = latent.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)  # a NaN's sign is nowhere promised
    num_blocks, slots = _shuffled_slots(len(latent))
    tensors: dict[str, Any] = {
        "kv_c": latent[:, :NOPE_DIM],
        "k_pe": latent[:, NOPE_DIM:],
        "norm_weight": 1 + torch.randn(NOPE_DIM, generator=generator) / 4,
        "positions": torch.randint(100, (len(latent),), generator=generator),
        "cos_sin_cache": torch.rand(100, ROPE_DIM, generator=generator) * 2 - 1,
        "slot_mapping": slots,
    }
    on_device = {name: tensor.to(device) for name, tensor in tensors.items()}
    cache = _empty(get_cache_format("nvfp4_ds_mla"), num_blocks)
    want = torch.stack([cache, cache])
    got = want.to(device, copy=True)
    for layer, is_neox in enumerate((True, False)):
        others: dict[str, Any] = {"eps": 1e-6, "is_neox": is_neox, "layer": layer}
        reference_fused.concat_and_cache(**tensors, **others, kv_cache=want)
        ops.fused_rmsnorm_rope_concat_and_cache_nvfp4_ds_mla(**on_device, **others, kv_cache=got)
    return _first_difference(got.flatten(0, 2).cpu(), want.flatten(0, 2), "slot", "byte")


def _attended(device: torch.device, tokens: int, seed: int, parts: int) -> tuple[int, str]:
    """Queries of 2 x 3 rows and 16 heads over half of the tokens, some indices naming none.

    All at once, or to each of two parts of the tokens, and merged.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(tokens, HEAD_DIM, generator=generator)
    cache = reference.encode(rows[:, :NOPE_DIM], rows[:, NOPE_DIM:])[:, None]
    q = torch.randn(2, 3, 16, HEAD_DIM, generator=generator).bfloat16()
    indices = torch.randint(-1, tokens, (2, 3, tokens // 2), generator=generator).int()
    scale = HEAD_DIM**-0.5
    (out, lse), *rest = [
        ops.sparse_mla_decode(
            q=q.to(device), kv_cache=cache.to(device), indices=part, softmax_scale=scale
        )
        for part in indices.to(device).chunk(parts, dim=-1)
    ]
    for out_b, lse_b in rest:
        out, lse = ops.merge_attention_states(out_a=out, lse_a=lse, out_b=out_b, lse_b=lse_b)
    want, want_lse = reference.attention(q.float(), cache, indices, scale)
    of_out = (out.cpu().float() - want).norm() / want.norm()
    of_lse = (lse.cpu() - want_lse).norm() / want_lse.norm()
    error = torch.maximum(of_out, of_lse).item()  # NaN if either is
    return (0, "") if error <= 0.005 else (1, f"relative error {error:.2g}, want 0.005 at most")


def _first_difference(got: Tensor, want: Tensor, row: str, column: str) -> tuple[int, str]:
    """Values of equal bits, or both NaN, are equal."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[got.element_size()]
    different = got.view(bits) != want.view(bits)
    if got.is_floating_point():
        different &= ~(got.isnan() & want.isnan())
    places = different.nonzero()
    if len(places) == 0:
        return 0, ""
    at = tuple(places[0].tolist())
    text = f"{row} {at[0]}, {column} {at[1]}: got {got[at].item()}, want {want[at].item()}"
    return len(places), text
