"""What the records of a saved cache say about themselves, and about the latents they were."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nvfp4_dsmla import layout, reference
from nvfp4_dsmla.cli.screen import share_text
from nvfp4_dsmla.formats import CACHE_FORMATS, format_from_cache

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from nvfp4_dsmla.cli.screen import Screen

_CHUNK = 4096  # records at a time: a cache may be larger than memory has room for twice
_FLOOR, _CEILING = 0x01, 0x7E  # the least and the largest scale that is ever written
_NAN, _MAGNITUDE = 0x7F, 0x7F  # of an e4m3 byte, without its sign
_E4M3_BIAS, _E4M3_MANTISSA_BITS = 7, 3
_E2M1_MAX = 7


def load(path: Path, key: str | None = None) -> Tensor:
    """The tensor in a file: .npy, or what torch.save wrote (a tensor, or a dict of tensors).

    Args:
        path: the file; mapped into memory, not read at once.
        key: which tensor of a dict; None where there is one.

    Raises:
        ValueError: the file holds no such tensor.
    """
    if path.suffix == ".npy":
        return torch.from_numpy(np.load(path, mmap_mode="c"))
    stored = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if isinstance(stored, torch.Tensor):
        return stored
    tensors = {}
    if isinstance(stored, dict):
        tensors = {str(name): x for name, x in stored.items() if isinstance(x, torch.Tensor)}
    if key is None and len(tensors) == 1:
        return next(iter(tensors.values()))
    if key not in tensors:
        wanted = f"one of the keys {', '.join(tensors)}" if tensors else "a file with a tensor"
        raise ValueError(f"{path.name}: wanted {wanted}, got {key or 'no key'}")
    return tensors[key]


def gather(
    screen: Screen, path: Path, *, key: str | None, against: Path | None, against_key: str | None
) -> dict[str, Any]:
    """The report: counts over all records, the scales' histogram, and the error if asked for.

    Args:
        screen: for the progress bar.
        path: a file with a cache.
        key: which tensor of it.
        against: a file with the latents that were written, bfloat16 (or a wider type) of the
            cache's leading shape and 576, or as many rows as the cache has slots.
        against_key: which tensor of that.

    Raises:
        ValueError: a file does not hold what is wanted; this format cannot be inspected.
    """
    cache = load(path, key)
    found = format_from_cache(cache)
    if found.name != "nvfp4_ds_mla":
        raise ValueError(
            f"{path.name}: wanted a cache of nvfp4_ds_mla ({layout.RECORD_BYTES} bytes a token), "
            f"got {found.name}"
        )
    records = cache.reshape(-1, layout.RECORD_BYTES)
    latents = None if against is None else _latents(load(against, against_key), against, records)
    counts = _Counts()
    chunks = range(0, len(records), _CHUNK)
    with screen.progress("reading records", len(chunks)) as step:
        for start in chunks:
            part = records[start : start + _CHUNK]
            counts.add(part, None if latents is None else latents[start : start + _CHUNK])
            step(f"{start + len(part):,}")
    return {
        "file": str(path),
        "format": found.name,
        "shape": list(cache.shape),
        **counts.report(),
    }


def _latents(latents: Tensor, path: Path, records: Tensor) -> Tensor:
    width = CACHE_FORMATS["bfloat16"].head_size
    rows = latents.numel() // width
    if not latents.is_floating_point() or latents.shape[-1:] != (width,) or rows != len(records):
        raise ValueError(
            f"{path.name}: wanted floating point [..., {width}] with a row for each of the "
            f"{len(records)} records, got {latents.dtype} {list(latents.shape)}"
        )
    return latents.reshape(-1, width)


class _Counts:
    """Sums over the records seen so far."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(
            (
                "records",
                "empty",
                "floor",
                "ceiling",
                "clipped",
                "scale_nan",
                "rope_max",
                "rope_nan",
            ),
            0,
        )
        self.scales = torch.zeros(256, dtype=torch.int64)
        self.compared = False
        self.squares = {"nope": [0.0, 0.0], "rope": [0.0, 0.0]}  # of the error, of the latents
        self.worst = {"nope": 0.0, "rope": 0.0}
        self.unlike = 0  # finite on one side only

    def add(self, records: Tensor, latents: Tensor | None) -> None:
        written = records.ne(0).any(dim=-1)
        self.counts["records"] += len(records)
        self.counts["empty"] += int((~written).sum())
        records = records[written]
        scale = layout.scale_bytes(records)
        rope = layout.rope_bytes(records) & _MAGNITUDE
        self.scales += torch.bincount(scale.flatten().long(), minlength=256)
        ceiling = scale == _CEILING
        self.counts["floor"] += int((scale == _FLOOR).sum())
        self.counts["ceiling"] += int(ceiling.sum())
        self.counts["clipped"] += _largest_codes(records, ceiling)
        self.counts["scale_nan"] += int(((scale & _MAGNITUDE) == _NAN).sum())
        self.counts["rope_max"] += int((rope == _CEILING).sum())
        self.counts["rope_nan"] += int((rope == _NAN).sum())
        if latents is not None:
            self._compare(records, latents[written])

    def _compare(self, records: Tensor, latents: Tensor) -> None:
        self.compared = True
        want = latents.double()
        got = reference.decode(records, torch.float32).double()
        comparable = want.isfinite() & got.isfinite()
        self.unlike += int((want.isfinite() != got.isfinite()).sum())
        error = torch.where(comparable, got - want, 0.0)
        want = torch.where(comparable, want, 0.0)
        for part, dims in (
            ("nope", slice(None, layout.NOPE_DIM)),
            ("rope", slice(layout.NOPE_DIM, None)),
        ):
            self.squares[part][0] += float(error[:, dims].square().sum())
            self.squares[part][1] += float(want[:, dims].square().sum())
            worst = error[:, dims].abs().amax().item() if len(error) else 0.0
            self.worst[part] = max(self.worst[part], worst)

    def report(self) -> dict[str, Any]:
        counts = self.counts
        written = counts["records"] - counts["empty"]
        report: dict[str, Any] = {
            "counts": counts,
            "blocks": written * layout.NUM_SCALES,
            "rope_elements": written * layout.ROPE_DIM,
            "scales": {str(byte): n for byte, n in enumerate(self.scales.tolist()) if n > 0},
        }
        if self.compared:
            report["error"] = {
                part: {
                    "relative_rms": (error / signal) ** 0.5 if signal > 0 else None,
                    "largest": self.worst[part],
                }
                for part, (error, signal) in self.squares.items()
            }
            report["finite_on_one_side"] = self.unlike
        return report


def _largest_codes(records: Tensor, ceiling: Tensor) -> int:
    """Codes of the largest magnitude in blocks whose scale could not grow: most are clipped."""
    order = [layout.SCALE_ORDER.index(block) for block in range(layout.NUM_SCALES)]
    by_block = layout.codes(records).unflatten(-1, (layout.NUM_SCALES, -1))[ceiling[:, order]]
    low, high = by_block & _E2M1_MAX, (by_block >> 4) & _E2M1_MAX
    return int((low == _E2M1_MAX).sum() + (high == _E2M1_MAX).sum())


def octaves(report: dict[str, Any]) -> dict[int, int]:
    """How many scales lie in [2^e, 2^(e+1)), by e from the first to the last that has any.

    Zero and NaN are in none.
    """
    found: dict[int, int] = {}
    for text, count in report["scales"].items():
        byte = int(text) & _MAGNITUDE
        if byte in (0, _NAN):
            continue
        field, mantissa = divmod(byte, 1 << _E4M3_MANTISSA_BITS)
        if field > 0:
            exponent = field - _E4M3_BIAS
        else:
            exponent = mantissa.bit_length() - _E4M3_BIAS - _E4M3_MANTISSA_BITS
        found[exponent] = found.get(exponent, 0) + count
    every = range(min(found), max(found) + 1) if found else range(0)
    return {exponent: found.get(exponent, 0) for exponent in every}


def draw(screen: Screen, report: dict[str, Any]) -> None:
    """The screen."""
    counts, blocks, rope = report["counts"], report["blocks"], report["rope_elements"]
    screen.heading(f"{report['file']}: {report['format']} {report['shape']}")
    rows = [
        ("records", counts["records"], None),
        ("never written (all zero)", counts["empty"], counts["records"]),
        ("blocks at the smallest scale, 2^-9", counts["floor"], blocks),
        ("blocks at the largest scale, 448", counts["ceiling"], blocks),
        ("elements at 6 x 448, most of them clipped", counts["clipped"], blocks * layout.BLOCK_DIM),
        ("blocks with a NaN scale", counts["scale_nan"], blocks),
        ("RoPE elements at 448, most of them clipped", counts["rope_max"], rope),
        ("RoPE elements that are NaN", counts["rope_nan"], rope),
    ]
    screen.table(
        ["", ">count", ">share"],
        [[name, f"{n:,}", "" if of is None else share_text(n, of)] for name, n, of in rows],
    )
    histogram = octaves(report)
    if histogram:
        screen.gap()
        screen.heading("Scales, by octave")
        most = max(histogram.values())
        screen.table(
            [">from", ">blocks", ">share", ""],
            [
                [f"2^{e}", f"{n:,}", share_text(n, blocks), screen.bar(n / most, width=36)]
                for e, n in histogram.items()
            ],
        )
    if "error" in report:
        screen.gap()
        screen.heading("Error against the latents given")
        screen.table(
            ["part", ">relative RMS", ">largest"],
            [
                [part, _number(error["relative_rms"]), _number(error["largest"])]
                for part, error in report["error"].items()
            ],
        )
        if report["finite_on_one_side"] > 0:
            screen.note(f"finite on one side only: {report['finite_on_one_side']:,}")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def plot(report: dict[str, Any], path: Path) -> None:
    """Draws the histogram of the scales into a PNG."""
    from matplotlib.figure import Figure

    histogram = octaves(report)
    figure = Figure(figsize=(7, 3.4), layout="constrained")
    axes = figure.add_subplot()
    axes.bar([f"$2^{{{e}}}$" for e in histogram], list(histogram.values()), color="#2e7d32")
    axes.set_xlabel("scale, by octave")
    axes.set_ylabel("blocks")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_title(f"{report['format']}, {report['counts']['records']:,} records")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
