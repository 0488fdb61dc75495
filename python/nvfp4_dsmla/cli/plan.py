"""How many tokens a memory budget holds, in each format."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from nvfp4_dsmla.cli.screen import bytes_text
from nvfp4_dsmla.formats import CACHE_FORMATS, get_kv_cache_spec

if TYPE_CHECKING:
    from pathlib import Path

    from nvfp4_dsmla.cli.screen import Screen


@dataclass(frozen=True)
class Model:
    """What of a model decides the size of its cache.

    Attributes:
        layers: that keep a latent cache.
        indexer_layers: that keep keys of their own for choosing tokens.
        indexer_bytes: of one token's keys in one such layer.
        source: where the numbers are from.
    """

    layers: int
    indexer_layers: int
    indexer_bytes: int
    source: str


# An indexer's key is 128 dims of e4m3 and one fp32 scale, as the engines store it.
_INDEXER_BYTES = 128 + 4

MODELS: dict[str, Model] = {
    "deepseek-v3.2": Model(
        61, 61, _INDEXER_BYTES, "deepseek-ai/DeepSeek-V3.2, config.json: num_hidden_layers"
    ),
    "glm-5": Model(78, 78, _INDEXER_BYTES, "zai-org/GLM-5, config.json: num_hidden_layers"),
    "glm-5.1": Model(78, 78, _INDEXER_BYTES, "zai-org/GLM-5.1, config.json: num_hidden_layers"),
    # Layers 0, 1, 2, 6, 10 .. 74 choose tokens, the others take the choice of the one before.
    "glm-5.2": Model(
        78,
        21,
        _INDEXER_BYTES,
        "zai-org/GLM-5.2, config.json: num_hidden_layers, index_topk_freq 4, "
        "index_skip_topk_offset 3",
    ),
}


def parse_bytes(text: str) -> int:
    """The bytes that "60GiB", "1.5 TB" or "1000000" means.

    Raises:
        ValueError: it means none.
    """
    units = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
    units |= {f"{unit}i": 1024**power for power, unit in enumerate("kmgt", start=1)}
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text.strip().lower())
    if found is None or found[2] not in units:
        raise ValueError(f"memory: wanted bytes such as 60GiB or 1.5TB, got {text!r}")
    return int(float(found[1]) * units[found[2]])


def gather(
    *,
    model: str,
    memory: int,
    block_size: int,
    layers: int | None = None,
    indexer_layers: int | None = None,
    indexer_bytes: int | None = None,
    ranks: int = 1,
) -> dict[str, Any]:
    """The report: what a token costs in each format, and how many fit.

    Args:
        model: a key of `MODELS`; the next three override what it says.
        memory: bytes a GPU has for the cache.
        block_size: tokens a block; only whole blocks count.
        layers: that keep a latent cache.
        indexer_layers: that keep an indexer's keys.
        indexer_bytes: of a token's keys in such a layer.
        ranks: GPUs that share the tokens out among them (context parallelism).

    Raises:
        ValueError: the model is unknown, or a number is out of its range.
    """
    if model not in MODELS:
        raise ValueError(f"model: wanted one of {', '.join(MODELS)}, got {model!r}")
    given = {"layers": layers, "indexer_layers": indexer_layers, "indexer_bytes": indexer_bytes}
    changed: dict[str, Any] = {name: n for name, n in given.items() if n is not None}
    geometry = replace(MODELS[model], **changed)
    for name, value, least in (
        ("layers", geometry.layers, 1),
        ("indexer_layers", geometry.indexer_layers, 0),
        ("indexer_bytes", geometry.indexer_bytes, 0),
        ("ranks", ranks, 1),
    ):
        if value < least:
            raise ValueError(f"{name}: wanted {least} or more, got {value}")
    indexer = geometry.indexer_layers * geometry.indexer_bytes
    formats = {}
    for name in CACHE_FORMATS:
        spec = get_kv_cache_spec(kv_cache_dtype=name, block_size=block_size)
        latent = geometry.layers * spec.state_content_bytes
        blocks = memory // (block_size * (latent + indexer))
        formats[name] = {
            "bytes_a_token_and_layer": spec.state_content_bytes,
            "latent_bytes_a_token": latent,
            "indexer_bytes_a_token": indexer,
            "blocks": blocks,
            "tokens": blocks * block_size * ranks,
        }
    return {
        "model": model,
        "geometry": asdict(geometry),
        "overridden": sorted(changed),
        "memory_bytes": memory,
        "block_size": block_size,
        "ranks": ranks,
        "formats": formats,
    }


def draw(screen: Screen, report: dict[str, Any]) -> None:
    """The screen."""
    geometry, formats = report["geometry"], report["formats"]
    indexer = geometry["indexer_layers"] * geometry["indexer_bytes"]
    screen.heading(f"{report['model']}: {bytes_text(report['memory_bytes'])} a GPU for the cache")
    screen.pairs(
        [
            ("layers", f"{geometry['layers']} with a latent cache"),
            (
                "indexer",
                (
                    f"{indexer:,} bytes a token: {geometry['indexer_layers']} layers of "
                    f"{geometry['indexer_bytes']}"
                ),
            ),
            ("blocks", f"of {report['block_size']} tokens, whole ones only"),
            ("GPUs", f"{report['ranks']}, each with tokens of its own"),
            ("source", _source(report)),
        ]
    )
    screen.gap()
    base = formats["bfloat16"]["tokens"]
    most = max(row["tokens"] for row in formats.values())
    screen.table(
        ["format", ">a layer", ">a token", ">tokens", ">times", ""],
        [
            [
                name,
                f"{row['bytes_a_token_and_layer']} B",
                bytes_text(row["latent_bytes_a_token"] + row["indexer_bytes_a_token"]),
                f"{row['tokens']:,}",
                f"{row['tokens'] / base:.2f}" if base else "",
                screen.bar(row["tokens"] / most if most else 0, width=20),
            ]
            for name, row in formats.items()
        ],
    )


def _source(report: dict[str, Any]) -> str:
    changed = report["overridden"]
    also = f"; {', '.join(changed)} as given" if changed else ""
    return f"{report['geometry']['source']}{also}"


def plot(report: dict[str, Any], path: Path) -> None:
    """Draws the bars into a PNG."""
    from matplotlib.figure import Figure

    formats = report["formats"]
    figure = Figure(figsize=(7, 2.6), layout="constrained")
    axes = figure.add_subplot()
    bars = axes.barh(list(formats), [row["tokens"] for row in formats.values()], color="#2e7d32")
    axes.bar_label(bars, fmt="{:,.0f}", padding=4)
    axes.margins(x=0.18)
    axes.invert_yaxis()
    axes.set_xlabel("tokens")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_title(f"{report['model']}, {bytes_text(report['memory_bytes'])} a GPU for the cache")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
