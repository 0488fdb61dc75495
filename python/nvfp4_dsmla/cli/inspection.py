"""What the records of a saved cache say about themselves, and about the latents they were."""

from __future__ import annotations

from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nvfp4_dsmla import _C, layout
from nvfp4_dsmla.cli.screen import share_text
from nvfp4_dsmla.formats import CacheFormat, format_from_cache
from nvfp4_dsmla.reference_formats import CODECS

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from nvfp4_dsmla.cli.screen import Screen

_CHUNK = 4096  # records at a time: a cache may be larger than memory has room for twice
_E4M3_FLOOR, _E4M3_MAX, _E4M3_NAN = 0x01, 0x7E, 0x7F  # magnitudes of an e4m3 byte
_E2M1_MAX = 7
_SHORT_GAP = 3  # octaves without a scale that a histogram still shows one by one

# What is counted in the records of each format: a key of the report, its words, and of what it is a
# share.
_COUNTED = {
    "nvfp4_ds_mla": [
        ("floor", "blocks at the smallest scale, 2^-9", "blocks"),
        ("ceiling", "blocks at the largest scale, 448", "blocks"),
        ("clipped", "elements at 6 x 448, most of them clipped", "nope_elements"),
        ("scale_nan", "blocks with a NaN scale", "blocks"),
        ("rope_max", "RoPE elements at 448, most of them clipped", "rope_elements"),
        ("rope_nan", "RoPE elements that are NaN", "rope_elements"),
    ],
    "fp8_ds_mla": [
        ("floor", "blocks at the smallest scale, 2^-126", "blocks"),
        ("scale_nan", "blocks with a scale that is infinite or NaN", "blocks"),
        ("code_nan", "elements that are NaN", "nope_elements"),
        ("rope_nan", "RoPE elements that are NaN", "rope_elements"),
    ],
}


def load(path: Path, key: str | None = None) -> Tensor:
    """The tensor in a file: .npy, or what torch.save wrote (a tensor, or a dict of tensors).

    Args:
        path: the file; mapped into memory, not read at once.
        key: which tensor of a dict; None where there is one.

    Raises:
        OSError: there is no such file, or it may not be read.
        ValueError: the file holds no such tensor, or nothing that can be read as one.
    """
    stored = _read(path)
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


def _read(path: Path) -> object:
    try:
        if path.suffix == ".npy":
            return torch.from_numpy(np.lib.format.open_memmap(path, mode="c"))
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (ValueError, TypeError, RuntimeError, EOFError, UnpicklingError) as error:
        wanted = "an array of numpy.save" if path.suffix == ".npy" else "a zip file of torch.save"
        raise ValueError(f"{path.name}: wanted {wanted}, got something else") from error


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
    if found.name not in _COUNTED:
        raise ValueError(
            f"{path.name}: wanted a cache of {' or '.join(_COUNTED)}, got {found.name}"
        )
    records = cache.reshape(-1, found.bytes_per_token)
    latents = None if against is None else _latents(load(against, against_key), against, records)
    counts = _Counts(found)
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
    width = layout.HEAD_DIM
    rows = latents.numel() // width
    if not latents.is_floating_point() or latents.shape[-1:] != (width,) or rows != len(records):
        raise ValueError(
            f"{path.name}: wanted floating point [..., {width}] with a row for each of the "
            f"{len(records)} records, got {latents.dtype} {list(latents.shape)}"
        )
    return latents.reshape(-1, width)


class _Counts:
    """Sums over the records seen so far."""

    def __init__(self, cache_format: CacheFormat) -> None:
        self.format = cache_format
        keys = ("records", "empty", *(key for key, _, _ in _COUNTED[cache_format.name]))
        self.counts = dict.fromkeys(keys, 0)
        self.octaves: dict[int, int] = {}
        self.compared = False
        self.squares = {"nope": [0.0, 0.0], "rope": [0.0, 0.0]}  # of the error, of the latents
        self.worst = {"nope": 0.0, "rope": 0.0}
        self.unlike = 0  # finite on one side only

    def add(self, records: Tensor, latents: Tensor | None) -> None:
        written = records.ne(0).any(dim=-1)
        self.counts["records"] += len(records)
        self.counts["empty"] += int((~written).sum())
        records = records[written]
        look = _look_at_nvfp4 if self.format.name == "nvfp4_ds_mla" else _look_at_fp8
        scales, found = look(records)
        for key, seen in found.items():
            self.counts[key] += int(seen)
        for exponent, count in octaves(scales).items():
            self.octaves[exponent] = self.octaves.get(exponent, 0) + count
        if latents is not None:
            self._compare(records, latents[written])

    def _compare(self, records: Tensor, latents: Tensor) -> None:
        self.compared = True
        want = latents.double()
        got = CODECS[self.format.name].decode(records, torch.float32).double()
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
        written = self.counts["records"] - self.counts["empty"]
        report: dict[str, Any] = {
            "counts": self.counts,
            "blocks": written * self.format.num_scales,
            "nope_elements": written * self.format.nope_dim,
            "rope_elements": written * self.format.rope_dim,
            "octaves": {str(exponent): n for exponent, n in sorted(self.octaves.items())},
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


def _look_at_nvfp4(records: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The scales, and how many of each sort of thing there is."""
    scale = layout.scale_bytes(records)
    rope = layout.rope_bytes(records) & 0x7F
    ceiling = scale == _E4M3_MAX
    return layout.scales_by_block(records), {
        "floor": (scale == _E4M3_FLOOR).sum(),
        "ceiling": ceiling.sum(),
        "clipped": _largest_codes(records, ceiling),
        "scale_nan": ((scale & 0x7F) == _E4M3_NAN).sum(),
        "rope_max": (rope == _E4M3_MAX).sum(),
        "rope_nan": (rope == _E4M3_NAN).sum(),
    }


def _largest_codes(records: Tensor, ceiling: Tensor) -> Tensor:
    """Codes of the largest magnitude in blocks whose scale could not grow: most are clipped."""
    order = [layout.SCALE_ORDER.index(block) for block in range(layout.NUM_SCALES)]
    by_block = layout.codes(records).unflatten(-1, (layout.NUM_SCALES, -1))[ceiling[:, order]]
    low, high = by_block & _E2M1_MAX, (by_block >> 4) & _E2M1_MAX
    return torch.stack([low, high]).eq(_E2M1_MAX).sum()


def _look_at_fp8(records: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The scales, and how many of each sort of thing there is."""
    codes = records[:, _C.FP8_CODES_OFFSET :][:, : layout.NOPE_DIM] & 0x7F
    scale_bytes = records[:, _C.FP8_SCALES_OFFSET : _C.FP8_ROPE_OFFSET].contiguous()
    scale = scale_bytes.view(torch.float32)
    rope = records[:, _C.FP8_ROPE_OFFSET :].contiguous().view(torch.bfloat16)
    return scale, {
        "floor": (scale == torch.finfo(torch.float32).tiny).sum(),
        "scale_nan": (~scale.isfinite()).sum(),
        "code_nan": (codes == _E4M3_NAN).sum(),
        "rope_nan": rope.isnan().sum(),
    }


def octaves(scales: Tensor) -> dict[int, int]:
    """How many scales lie in [2^e, 2^(e+1)), by e; zero, infinity and NaN are in none."""
    counted = scales[scales.isfinite() & (scales != 0)]
    exponents, counts = (torch.frexp(counted).exponent - 1).unique(return_counts=True)
    return dict(zip(exponents.tolist(), counts.tolist(), strict=True))


def histogram_of(report: dict[str, Any]) -> list[tuple[int | None, int]]:
    """Octaves and their counts, short gaps filled with zeros; None stands for a longer gap."""
    filled: list[tuple[int | None, int]] = []
    before: int | None = None
    for text, count in report["octaves"].items():
        exponent = int(text)
        gap = range(before + 1, exponent) if before is not None else range(0)
        filled += [(e, 0) for e in gap] if len(gap) <= _SHORT_GAP else [(None, 0)]
        filled.append((exponent, count))
        before = exponent
    return filled


def draw(screen: Screen, report: dict[str, Any]) -> None:
    """The screen."""
    counts = report["counts"]
    rows = [
        ("records", counts["records"], None),
        ("never written (all zero)", counts["empty"], counts["records"]),
        *((text, counts[key], report[of]) for key, text, of in _COUNTED[report["format"]]),
    ]
    screen.heading(f"{report['file']}: {report['format']} {report['shape']}")
    screen.table(
        ["", ">count", ">share"],
        [[name, f"{n:,}", "" if of is None else share_text(n, of)] for name, n, of in rows],
    )
    histogram = histogram_of(report)
    if histogram:
        screen.gap()
        screen.heading("Scales, by octave")
        most = max(count for _, count in histogram)
        screen.table(
            [">from", ">blocks", ">share", ""],
            [
                ["...", "", "", ""]
                if e is None
                else [
                    f"2^{e}",
                    f"{n:,}",
                    share_text(n, report["blocks"]),
                    screen.bar(n / most, width=36),
                ]
                for e, n in histogram
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

    histogram = histogram_of(report)
    labels = ["..." if e is None else f"$2^{{{e}}}$" for e, _ in histogram]
    figure = Figure(figsize=(7, 3.4), layout="constrained")
    axes = figure.add_subplot()
    axes.bar(range(len(labels)), [n for _, n in histogram], color="#2e7d32", tick_label=labels)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_xlabel("scale, by octave")
    axes.set_ylabel("blocks")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_title(f"{report['format']}, {report['counts']['records']:,} records")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
