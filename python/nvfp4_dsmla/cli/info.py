"""What is installed, what of it is loaded, and which op runs where."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import nvfp4_dsmla
from nvfp4_dsmla import _C
from nvfp4_dsmla.cli.screen import bytes_text
from nvfp4_dsmla.formats import CACHE_FORMATS
from nvfp4_dsmla.support import OPS, supports_combination

if TYPE_CHECKING:
    from nvfp4_dsmla.cli.screen import Screen


def gather() -> dict[str, Any]:
    """The report: versions, libraries, devices, formats, and each op's reason on each device."""
    devices = _devices()
    return {
        "versions": {
            "nvfp4_dsmla": nvfp4_dsmla.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "torch_cuda": torch.version.cuda,
            "oldest_torch": _C.TORCH_TARGET,
            "compiler": _C.COMPILER,
        },
        "libraries": [str(path) for path in nvfp4_dsmla.loaded_libraries()],
        "cuda_archs": list(_C.CUDA_ARCHS),
        "devices": devices,
        "formats": {f.name: f.bytes_per_token for f in CACHE_FORMATS.values()},
        "ops": {op: {d["name"]: _why_not(op, d) for d in devices} for op in OPS},
    }


def _devices() -> list[dict[str, Any]]:
    cpu = {
        "name": "cpu",
        "type": "cpu",
        "is": _cpu_name(),
        "threads": torch.get_num_threads(),
    }
    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        gpus.append(
            {
                "name": f"cuda:{index}",
                "type": "cuda",
                "is": properties.name,
                "compute_capability": [properties.major, properties.minor],
                "memory_bytes": properties.total_memory,
            }
        )
    # Without a GPU the reason for that is still worth a column.
    return [cpu, *(gpus or [{"name": "cuda", "type": "cuda", "is": None}])]


def _cpu_name() -> str:
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _why_not(op: str, device: dict[str, Any]) -> str | None:
    capability = device.get("compute_capability")
    return supports_combination(
        op=op,
        kv_cache_dtype=OPS[op] or "nvfp4_ds_mla",
        device_type=device["type"],
        compute_capability=None if capability is None else (capability[0], capability[1]),
    )


def draw(screen: Screen, report: dict[str, Any]) -> None:
    """The screen."""
    versions = report["versions"]
    cuda = versions["torch_cuda"]
    screen.heading(f"nvfp4_dsmla {versions['nvfp4_dsmla']}")
    screen.pairs(
        [
            ("Python", versions["python"]),
            ("torch", f"{versions['torch']}, " + (f"CUDA {cuda}" if cuda else "without CUDA")),
            ("built for", f"torch {versions['oldest_torch']} and newer, by {versions['compiler']}"),
            ("GPU code", ", ".join(report["cuda_archs"]) or "none"),
            *(("library", path) for path in report["libraries"]),
        ]
    )
    screen.gap()
    screen.heading("Devices")
    screen.pairs([(device["name"], _device_text(device)) for device in report["devices"]])
    screen.gap()
    screen.heading("Formats")
    screen.pairs([(name, f"{size} bytes a token") for name, size in report["formats"].items()])
    screen.gap()
    screen.heading("Ops")
    names = [device["name"] for device in report["devices"]]
    reasons: list[str] = []
    rows = []
    for op, why_not in report["ops"].items():
        marks = [_mark(why_not[name], op, reasons) for name in names]
        rows.append([op, *(screen.verdict(mark == "yes", mark) for mark in marks)])
    screen.table(["op", *names], rows)
    for number, reason in enumerate(reasons, start=1):
        screen.note(f"{number}: {reason}")


def _mark(reason: str | None, op: str, reasons: list[str]) -> str:
    """yes, or no and the number of the reason, which is listed once for all ops that share it."""
    if reason is None:
        return "yes"
    text = reason.removeprefix(f"{op}: ")
    if text not in reasons:
        reasons.append(text)
    return f"no {reasons.index(text) + 1}"


def _device_text(device: dict[str, Any]) -> str:
    if device["is"] is None:
        return "none that torch sees"
    if device["type"] == "cpu":
        return f"{device['is']}, {device['threads']} threads"
    major, minor = device["compute_capability"]
    memory = bytes_text(device["memory_bytes"])
    return f"{device['is']}, compute capability {major}.{minor}, {memory}"
