"""Whether the ops of this installation give the right bits on the devices of this machine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nvfp4_dsmla import _C, ops, reference
from nvfp4_dsmla.cache import allocate_kv_cache
from nvfp4_dsmla.layout import HEAD_DIM, NOPE_DIM, RECORD_BYTES
from nvfp4_dsmla.support import supports_combination

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from nvfp4_dsmla.cli.screen import Screen

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_BLOCK_SIZE = 64
_FORMAT = "nvfp4_ds_mla"

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
        verdict = screen.verdict(count == 0, "equal" if count == 0 else f"{count:,} differ")
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
    if only is not None:
        return [torch.device(only)]
    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    served = [
        torch.device("cuda", index)
        for index in gpus
        if supports_combination(compute_capability=torch.cuda.get_device_capability(index)) is None
    ]
    return [torch.device("cpu"), *served]


def _checks(device: torch.device, tokens: int, seed: int) -> Iterator[_Check]:
    generator = torch.Generator().manual_seed(seed)
    check = partial(_Check, str(device), _FORMAT)
    latent, records = golden()
    count = len(latent)
    yield check("golden records written", count, partial(_written, device, latent, records))
    want = reference.decode(records)
    yield check("golden records gathered", count, partial(_gathered, device, records, want))
    sweep = random_latents(tokens, generator)
    any_bytes = torch.randint(256, (tokens, RECORD_BYTES), dtype=torch.uint8, generator=generator)
    for name, dtype in DTYPES.items():
        latent = sweep.to(dtype)
        records = reference.encode(latent[:, :NOPE_DIM], latent[:, NOPE_DIM:])
        run = partial(_written, device, latent, records)
        yield check(f"random {name} written", tokens, run)
    for name, dtype in DTYPES.items():
        run = partial(_gathered, device, any_bytes, reference.decode(any_bytes, dtype))
        yield check(f"any bytes gathered to {name}", tokens, run)
    run = partial(_gathered_by_request, device, any_bytes, reference.decode(any_bytes))
    yield check("any bytes gathered by request", tokens, run)


def golden() -> tuple[Tensor, Tensor]:
    """The golden tokens, bfloat16 [n, 576], and their records, uint8 [n, 352]."""
    with np.load(GOLDEN / f"{_FORMAT}.npz") as file:
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


def _written(device: torch.device, latent: Tensor, want: Tensor) -> tuple[int, str]:
    num_blocks, slots = _shuffled_slots(len(latent))
    cache = allocate_kv_cache(num_blocks=num_blocks, block_size=_BLOCK_SIZE, device=device)
    latent = latent.to(device)
    ops.concat_and_cache_nvfp4_ds_mla(
        kv_c=latent[:, :NOPE_DIM],
        k_pe=latent[:, NOPE_DIM:],
        kv_cache=cache,
        slot_mapping=slots.to(device),
    )
    got = cache.view(-1, RECORD_BYTES).cpu()
    expected = torch.zeros_like(got)
    expected[slots] = want
    return _first_difference(got, expected, "slot", "byte")


def _cache_of(records: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    num_blocks, slots = _shuffled_slots(len(records))
    flat = torch.zeros(num_blocks * _BLOCK_SIZE, RECORD_BYTES, dtype=torch.uint8)
    flat[slots] = records
    return flat.view(num_blocks, _BLOCK_SIZE, RECORD_BYTES).to(device), slots


def _gathered(device: torch.device, records: Tensor, want: Tensor) -> tuple[int, str]:
    cache, slots = _cache_of(records, device)
    got = ops.gather_and_upconvert_nvfp4_ds_mla(
        kv_cache=cache, slots=slots.to(device), dtype=want.dtype
    )
    return _first_difference(got.cpu(), want, "token", "dim")


def _gathered_by_request(device: torch.device, records: Tensor, want: Tensor) -> tuple[int, str]:
    """Requests of ever more blocks, which lie in the cache from its end to its beginning."""
    num_blocks = -(-len(records) // _BLOCK_SIZE)
    flat = torch.zeros(num_blocks * _BLOCK_SIZE, RECORD_BYTES, dtype=torch.uint8)
    flat[: len(records)] = records
    cache = flat.view(num_blocks, _BLOCK_SIZE, RECORD_BYTES).flip(0).to(device)
    sizes: list[int] = []
    while sum(sizes) < num_blocks:
        sizes.append(min(len(sizes) + 1, num_blocks - sum(sizes)))
    ids = torch.arange(num_blocks - 1, -1, -1, dtype=torch.int32).split(sizes)
    table = torch.nn.utils.rnn.pad_sequence(list(ids), batch_first=True)
    starts = torch.tensor([0, *sizes[:-1]], dtype=torch.int32).cumsum(0).int() * _BLOCK_SIZE
    dst = torch.empty(len(records), HEAD_DIM, dtype=want.dtype, device=device)
    ops.cp_gather_and_upconvert_nvfp4_kv_cache(
        src_cache=cache,
        dst=dst,
        block_table=table.to(device),
        workspace_starts=starts.to(device),
        batch_size=len(sizes),
    )
    return _first_difference(dst.cpu(), want, "token", "dim")


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
