"""What a call costs the host: ours against ops of the same signatures that do nothing.

The plain ops are plain_op/plain_op.cpp, built on first use with torch's own headers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import nvfp4_dsmla
from benchmarks.comparison import HostCost
from benchmarks.timing import Timing, time_loops
from nvfp4_dsmla.layout import HEAD_DIM, NOPE_DIM, RECORD_BYTES, ROPE_DIM

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

SOURCE = Path(__file__).parent / "plain_op" / "plain_op.cpp"
BUILD = Path(__file__).parents[1] / "build" / "benchmarks" / "plain_op"

PUBLIC = "nvfp4_dsmla, public function"
OP = "nvfp4_dsmla, torch.ops"
PLAIN = "plain TORCH_LIBRARY op"

LAYERS = 20  # ops in the longer of two compiled functions


@dataclass(frozen=True)
class Call:
    """One op and its arguments but the layer, which comes last: by position, and by name."""

    op: str
    public: Callable[..., object]
    overloads: dict[str, Callable[..., object]]
    arguments: tuple[Any, ...]
    names: tuple[str, ...]


def run(device: torch.device, *, quick: bool) -> Iterator[HostCost]:
    """Measures every op; each cost is there when it is measured."""
    load_plain()
    for tokens in (0, 1):
        for call in calls(tokens, device):
            functions = eager(call)
            if tokens > 0:
                del functions[PLAIN]  # which does nothing with a token either
            with torch.inference_mode():
                timings = time_loops(functions)
            for subject, timing in timings.items():
                yield HostCost(call.op, subject, "eager", tokens, device.type, timing)
    if quick:
        return
    for call in calls(0, device):
        for subject, overload in call.overloads.items():
            timing = compiled_cost(overload, call.arguments)
            yield HostCost(call.op, subject, "compiled", 0, device.type, timing)


def calls(tokens: int, device: torch.device) -> list[Call]:
    """The three ops on tensors of the least size."""

    def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device=device)

    ours, plain = torch.ops.nvfp4_dsmla, torch.ops.nvfp4_dsmla_plain
    kv_c = zeros(tokens, NOPE_DIM, dtype=torch.bfloat16)
    k_pe = zeros(tokens, ROPE_DIM, dtype=torch.bfloat16)
    dst = zeros(tokens, HEAD_DIM, dtype=torch.bfloat16)
    pool = zeros(LAYERS, 4, 64, RECORD_BYTES, dtype=torch.uint8)
    slots = zeros(tokens, dtype=torch.int64)
    table, starts = zeros(1, 4, dtype=torch.int32), zeros(1, dtype=torch.int32)
    return [
        Call(
            "write",
            nvfp4_dsmla.concat_and_cache_nvfp4_ds_mla,
            {OP: ours.concat_and_cache_nvfp4_ds_mla.default, PLAIN: plain.write.default},
            (kv_c, k_pe, pool, slots),
            ("kv_c", "k_pe", "kv_cache", "slot_mapping"),
        ),
        Call(
            "gather by request",
            nvfp4_dsmla.cp_gather_and_upconvert_nvfp4_kv_cache,
            {
                OP: ours.cp_gather_and_upconvert_nvfp4_kv_cache.default,
                PLAIN: plain.cp_gather.default,
            },
            (pool, dst, table, starts, 1, None),
            ("src_cache", "dst", "block_table", "workspace_starts", "batch_size", "seq_starts"),
        ),
        Call(
            "gather by slot",
            nvfp4_dsmla.gather_and_upconvert_nvfp4_ds_mla,
            {OP: ours.gather_and_upconvert_nvfp4_ds_mla.default, PLAIN: plain.gather.default},
            (pool, slots, None),
            ("kv_cache", "slots", "dtype"),
        ),
    ]


def eager(call: Call) -> dict[str, Callable[[], object]]:
    """A call from Python, by subject."""
    by_name = dict(zip(call.names, call.arguments, strict=True))
    functions: dict[str, Callable[[], object]] = {PUBLIC: lambda: call.public(**by_name, layer=1)}
    for subject, overload in call.overloads.items():
        functions[subject] = lambda overload=overload: overload(  # type: ignore[misc]
            *call.arguments, 1
        )
    return functions


def compiled_cost(overload: Callable[..., object], arguments: tuple[Any, ...]) -> Timing:
    """What one op more costs in a compiled function: that of LAYERS of them less that of one."""

    def time_of(count: int) -> Timing:
        def function(*arguments: object) -> list[object]:
            return [overload(*arguments, layer) for layer in range(count)]

        torch.compiler.reset()  # each is one more specialisation of the same code, otherwise
        compiled = torch.compile(function, fullgraph=True, dynamic=False)
        with torch.no_grad():
            return time_loops({"": lambda: compiled(*arguments)})[""]

    return cost_of_one(time_of)


def cost_of_one(time_of: Callable[[int], Timing]) -> Timing:
    """What one op costs where so many of them take `time_of`."""
    many, one = time_of(LAYERS), time_of(1)
    more = LAYERS - 1
    return Timing(
        us=(many.us - one.us) / more,
        low=(many.low - one.high) / more,
        high=(many.high - one.low) / more,
        samples=many.samples,
    )


def load_plain() -> None:
    """Builds and registers the plain ops, and says what they return while tracing."""
    if hasattr(torch.ops.nvfp4_dsmla_plain, "write"):
        return
    from torch.utils import cpp_extension

    BUILD.mkdir(parents=True, exist_ok=True)
    cpp_extension.load(
        name="nvfp4_dsmla_plain",
        sources=[str(SOURCE)],
        build_directory=str(BUILD),
        extra_cflags=["-O2"],
        is_python_module=False,
    )
    library = torch.library
    library.register_fake("nvfp4_dsmla_plain::write", lambda *_, **__: None)
    library.register_fake("nvfp4_dsmla_plain::cp_gather", lambda *_, **__: None)
    library.register_fake("nvfp4_dsmla_plain::gather", _fake_gather)


def _fake_gather(
    kv_cache: Tensor, slots: Tensor, dtype: torch.dtype | None = None, *_: int, **__: int
) -> Tensor:
    return kv_cache.new_empty((*slots.shape, HEAD_DIM), dtype=dtype or torch.bfloat16)
