"""What the PyTorch at hand does with ops that write: the column for it of docs/compile.md's table.

    python -m benchmarks.torch_behaviours                           prints the column
    python -m benchmarks.torch_behaviours --into docs/compile.md    and puts it into that table

On a GPU if there is one. What is asked of a GPU alone is "-" elsewhere.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

import nvfp4_dsmla
from nvfp4_dsmla.layout import HEAD_DIM, NOPE_DIM

Probe = Callable[[torch.device], bool]

HEAD = "| torch |"
LAYERS, BLOCKS, BLOCK_SIZE, TOKENS = 5, 13, 3, 7


@dataclass(frozen=True)
class Behaviour:
    statement: str
    probe: Probe
    gpu_only: bool
    slow: bool  # takes a C++ compiler several seconds

    def find_out(self, device: torch.device) -> str:
        """yes or no; error, where PyTorch raises; -, where there is no GPU to ask."""
        if self.gpu_only and device.type != "cuda":
            return "-"
        torch.compiler.reset()
        counters.clear()
        torch.manual_seed(0)
        # Before 2.13 a graph that a cache holds, of the statement before say, has that one's marks.
        no_caches = torch._inductor.config.patch(force_disable_caches=True)
        with warnings.catch_warnings(), torch.no_grad(), no_caches:
            warnings.simplefilter("ignore")
            try:
                return "yes" if self.probe(device) else "no"
            except Exception:  # noqa: BLE001  # whatever it is, it is what is to be known
                return "error"


BEHAVIOURS: list[Behaviour] = []


def behaviour(
    statement: str, *, gpu_only: bool = False, slow: bool = False
) -> Callable[[Probe], Probe]:
    def add(probe: Probe) -> Probe:
        BEHAVIOURS.append(Behaviour(statement, probe, gpu_only, slow))
        return probe

    return add


# ---- ops that are anybody's: this library's refuse what goes wrong ------------------------------

_library = torch.library.Library("nvfp4_dsmla_probe", "FRAGMENT")
_library.define("fill(Tensor(a!) x, Tensor value) -> ()")
_library.define("swap(Tensor(a!) y, Tensor x) -> ()")


def _fill(x: Tensor, value: Tensor) -> None:
    x.copy_(value.expand_as(x))


def _swap(y: Tensor, x: Tensor) -> None:
    y[0].copy_(x[1])
    y[1].copy_(x[0])


for _name, _function in (("fill", _fill), ("swap", _swap)):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _function, _key)
    torch.library.register_fake(f"nvfp4_dsmla_probe::{_name}", lambda *_: None, lib=_library)

fill = torch.ops.nvfp4_dsmla_probe.fill.default
swap = torch.ops.nvfp4_dsmla_probe.swap.default


def same_as_eager(
    function: Callable[..., Any], arguments: tuple[Any, ...], *, dynamic: bool | None = None
) -> bool:
    """Whether all arguments and the result are what eager code makes of them."""
    copies = tuple(x.clone() if isinstance(x, Tensor) else x for x in arguments)
    got = torch.compile(function, fullgraph=True, dynamic=dynamic)(*copies)
    want = function(*arguments)
    pairs = [*zip(copies, arguments, strict=True), (got, want)]
    return all(torch.equal(a, b) for a, b in pairs if isinstance(a, Tensor))


def floats(device: torch.device, *shape: int) -> Tensor:
    return torch.rand(*shape, device=device)


# ---- views ---------------------------------------------------------------------------------------


def write_row(pool: Tensor, row: int, value: Tensor) -> None:
    fill(pool[row], value)


@behaviour("`pool[layer]` with a fixed offset is written in its place")
def _(device: torch.device) -> bool:
    arguments = (floats(device, 5, 7, 3), 2, floats(device, 7, 3))
    return same_as_eager(write_row, arguments, dynamic=False)


@behaviour("`pool[layer]` with a symbolic offset is written in its place")
def _(device: torch.device) -> bool:
    arguments = (floats(device, 5, 7, 3), 2, floats(device, 7, 3))
    return same_as_eager(write_row, arguments, dynamic=True)


@behaviour("an op of this library refuses that view while it is traced")
def _(device: torch.device) -> bool:
    def function(pool: Tensor, layer: int, x: Tensor, slots: Tensor) -> None:
        write(pool[layer], x, slots)

    pool, x, slots = tokens_and_pool(device)
    try:
        torch.compile(function, dynamic=True)(pool, 2, x, slots)
    except RuntimeError as error:
        return "198068" in str(error)
    return False


@behaviour("`workspace[n:]` with a symbolic offset is written in its place")
def _(device: torch.device) -> bool:
    def function(like: Tensor, first: int, value: Tensor) -> Tensor:
        workspace = torch.zeros_like(like)
        fill(workspace[first:], value)
        return workspace

    return same_as_eager(function, (floats(device, 9, 4), 3, floats(device, 4)), dynamic=True)


@behaviour("layers that are inputs, of any offset, are written in their places")
def _(device: torch.device) -> bool:
    def function(first: Tensor, second: Tensor, value: Tensor) -> None:
        fill(second, value)
        fill(first, value + 1)

    pools = [floats(device, 5, 7, 3) for _ in range(2)]
    pools[1].copy_(pools[0])
    value = floats(device, 7, 3)
    torch.compile(function, dynamic=True, fullgraph=True)(pools[0][1], pools[0][3], value)
    function(pools[1][1], pools[1][3], value)
    return torch.equal(*pools)


# ---- the pool, whole -----------------------------------------------------------------------------


def tokens_and_pool(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    pool = nvfp4_dsmla.allocate_kv_cache(
        num_layers=LAYERS, num_blocks=BLOCKS, block_size=BLOCK_SIZE, device=device
    )
    x = torch.randn(TOKENS, HEAD_DIM, device=device)
    return pool, x, torch.randperm(BLOCKS * BLOCK_SIZE, device=device)[:TOKENS]


def write(cache: Tensor, x: Tensor, slots: Tensor, layer: int = 0) -> None:
    nvfp4_dsmla.concat_and_cache_nvfp4_ds_mla(
        kv_c=x[:, :NOPE_DIM],
        k_pe=x[:, NOPE_DIM:],
        kv_cache=cache,
        slot_mapping=slots,
        layer=layer,
    )


def write_layer(pool: Tensor, layer: int, x: Tensor, slots: Tensor) -> None:
    write(pool, x, slots, layer)


@behaviour("a pool with `layer=`: every layer in its place, after two compilations")
def _(device: torch.device) -> bool:
    pool, x, slots = tokens_and_pool(device)
    want = pool.clone()
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(write_layer, backend=counter, fullgraph=True)
    for layer in range(LAYERS):
        compiled(pool, layer, x, slots)
        write_layer(want, layer, x, slots)
    return torch.equal(pool, want) and counter.frame_count <= 2


@behaviour("`pool.view(dtype)`, made in the region and written: no copy of the pool")
def _(device: torch.device) -> bool:
    def function(pool: Tensor, value: Tensor) -> None:
        fill(pool.view(torch.int32), value)

    pool = torch.zeros(4096, dtype=torch.uint8, device=device)
    value = torch.ones(1, dtype=torch.int32, device=device)
    compiled = torch.compile(function, fullgraph=True)
    _, (code,) = run_and_get_code(compiled, pool, value)
    right = bool((pool.view(torch.int32) == 1).all())
    return right and re.search(r"fused\w*_(?:clone|copy)_|aten\.(?:clone|copy)", code) is None


@behaviour("two inputs of other dtypes share a pool that is written")
def _(device: torch.device) -> bool:
    def function(pool: Tensor, words: Tensor, value: Tensor) -> Tensor:
        fill(pool, value)
        return words + 1

    def run(call: Callable[..., Tensor]) -> Tensor:
        pool = torch.zeros(4096, dtype=torch.uint8, device=device)
        value = torch.ones(1, dtype=torch.uint8, device=device)
        return call(pool, pool.view(torch.int32), value)

    return torch.equal(run(torch.compile(function, fullgraph=True)), run(function))


@behaviour("`y = x.clone(); op(y, x)` stays two tensors")
def _(device: torch.device) -> bool:
    def function(x: Tensor) -> Tensor:
        x = x + 1
        y = x.clone()
        swap(y, x)
        return y

    return same_as_eager(function, (floats(device, 2, 5),))


@behaviour("a write in the body of `torch.while_loop`")
def _(device: torch.device) -> bool:
    def function(x: Tensor, count: Tensor) -> Tensor:
        def body(i: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            fill(x, i.float())
            return i + 1, x.clone()

        _, x = torch.while_loop(lambda i, _: i < count, body, (torch.zeros_like(count), x))
        return x

    return same_as_eager(function, (floats(device, 3), torch.tensor(4, device=device)))


@behaviour("`inference_mode` around the call of a compiled function")
def _(device: torch.device) -> bool:
    pool, x, slots = tokens_and_pool(device)
    with torch.inference_mode():
        return same_as_eager(write_layer, (pool, 2, x, slots))


@behaviour("a gradient that goes through an op is an error, not a warning")
def _(device: torch.device) -> bool:
    pool, _, slots = tokens_and_pool(device)
    q = torch.randn(1, 1, 2, HEAD_DIM, dtype=torch.bfloat16, device=device, requires_grad=True)
    with torch.enable_grad():
        out, _ = nvfp4_dsmla.sparse_mla_decode(
            q=q, kv_cache=pool, indices=slots[None, None].int(), softmax_scale=1.0
        )
        try:
            out.sum().backward()
        except RuntimeError:
            return True
    return False


# ---- AOTInductor ---------------------------------------------------------------------------------


class WriteLayer(torch.nn.Module):
    def __init__(self, pool: Tensor) -> None:
        super().__init__()
        self.register_buffer("pool", pool)

    def forward(self, x: Tensor, slots: Tensor) -> Tensor:
        write(self.get_buffer("pool"), x, slots, 2)
        return slots + 1


def package_writes(device: torch.device, options: dict[str, Any]) -> bool:
    pool, x, slots = tokens_and_pool(device)
    batch = {0: torch.export.Dim("batch", max=1024)}
    exported = torch.export.export(
        WriteLayer(pool.clone()), (x, slots), dynamic_shapes=(batch, batch)
    )
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "package.pt2")
        torch._inductor.aoti_compile_and_package(
            exported, package_path=path, inductor_configs=options
        )
        package = torch._inductor.aoti_load_package(path)
    mine = pool.clone()
    package.load_constants({"pool": mine}, check_full_update=True, user_managed=True)
    package(x[:-1], slots[:-1])
    write(pool, x[:-1], slots[:-1], 2)
    return torch.equal(mine, pool)


@behaviour("AOTInductor: a package writes into the caller's pool (`user_managed`)", slow=True)
def _(device: torch.device) -> bool:
    return package_writes(device, {})


@behaviour("AOTInductor: the same by the C entry points (`aoti.c_shims`)", slow=True)
def _(device: torch.device) -> bool:
    return package_writes(device, nvfp4_dsmla.aoti.c_shims())


# ---- CUDA graphs ---------------------------------------------------------------------------------


def graphs_used(function: Callable[..., Any], arguments: tuple[Any, ...]) -> bool:
    def step(*arguments: Tensor) -> Tensor:
        function(*arguments)
        return arguments[-1] + 1

    compiled = torch.compile(step, mode="reduce-overhead", fullgraph=True)
    graph = torch.cuda.CUDAGraph
    with mock.patch.object(graph, "replay", autospec=True, side_effect=graph.replay) as replay:
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            compiled(*arguments)
    return counters["inductor"]["cudagraph_skips"] == 0 and replay.called


@behaviour('`mode="reduce-overhead"` makes a CUDA graph that writes to a buffer', gpu_only=True)
def _(device: torch.device) -> bool:
    pool, x, slots = tokens_and_pool(device)
    return graphs_used(WriteLayer(pool), (x, slots))


@behaviour("the same to an argument, after `mark_static_pools`", gpu_only=True)
def _(device: torch.device) -> bool:
    pool, x, slots = tokens_and_pool(device)
    nvfp4_dsmla.mark_static_pools(pool)
    return graphs_used(write_layer, (pool, 2, x, slots))


@behaviour("the same to any argument", gpu_only=True)
def _(device: torch.device) -> bool:
    pool, x, slots = tokens_and_pool(device)
    return graphs_used(write_layer, (pool, 2, x, slots))


# ---- the last, for it leaves inference mode on --------------------------------------------------


@behaviour("`inference_mode` inside of the compiled function")
def _(device: torch.device) -> bool:
    pool, x, slots = tokens_and_pool(device)
    return same_as_eager(torch.inference_mode()(write_layer), (pool, 2, x, slots))


# ---- the table -----------------------------------------------------------------------------------


def column_name(device: torch.device) -> str:
    """As in "2.13.0+cpu, CPU"."""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return f"{torch.__version__}, {where}"


def read_table(text: str) -> dict[str, dict[str, str]]:
    """The columns of a page's table: of each PyTorch, what was found for each statement."""
    rows = text[text.index(HEAD) :].partition("\n\n")[0].splitlines()
    head, _, *body = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {name: {row[0]: row[i] for row in body} for i, name in enumerate(head) if i > 0}


def write_table(columns: dict[str, dict[str, str]]) -> str:
    """The inverse, the columns by their versions; what an older column lacks is left out."""
    names = sorted(columns, key=lambda name: [int(n) for n in re.findall(r"\d+", name)[:3]])
    rows = [[HEAD.strip("| "), *names], ["---"] * (1 + len(names))]
    rows += [
        [each.statement, *(columns[name].get(each.statement, "") for name in names)]
        for each in BEHAVIOURS
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(into: Path | None) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = {each.statement: each.find_out(device) for each in BEHAVIOURS}
    column = {column_name(device): found}
    print(write_table(column))
    if into is not None:
        text = into.read_text(encoding="utf-8")
        old = text[text.index(HEAD) :].partition("\n\n")[0]
        table = write_table(read_table(text) | column)
        into.write_text(text.replace(old, table), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--into", type=Path)
    main(**vars(parser.parse_args()))
