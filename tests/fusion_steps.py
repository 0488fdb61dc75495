"""Programs of a chain and a write, their arguments, and backends that show what the pass does."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table

import nvfp4_dsmla
from fusion_cases import EPS, NORM_INPUTS, ROTATION_INPUTS, ROTATIONS, TABLE, WEIGHTS
from nvfp4_dsmla.inductor import Counts
from nvfp4_dsmla.inductor.rewrite import FUSED_WRITE, fuse_writes
from nvfp4_dsmla.layout import HEAD_DIM, NOPE_DIM, ROPE_DIM

if TYPE_CHECKING:
    from fusion_cases import Lookup, Norm, Rotation

LAYERS = 3
Arguments = dict[str, Tensor]
# Of x, weight, table and positions: the latent and the key as they are written.
Chain = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def random_arguments(
    generator: torch.Generator,
    device: torch.device,
    *,
    shape: tuple[int, ...] = (7,),
    dtype: torch.dtype = torch.bfloat16,
) -> Arguments:
    """What a step takes, for tokens of a shape; no two sizes are alike."""
    weight = 1 + torch.randn(NOPE_DIM, generator=generator) / 4
    pool = nvfp4_dsmla.allocate_kv_cache(num_layers=LAYERS, num_blocks=20, block_size=4)
    arguments = {
        "x": torch.randn(*shape, HEAD_DIM, generator=generator).to(dtype),
        "weight": weight.to(dtype),
        "table": TABLE,
        "positions": torch.randint(len(TABLE), shape, generator=generator),
        "pool": pool,
        "slots": torch.randperm(80, generator=generator)[: torch.Size(shape).numel()],
    }
    return {name: value.to(device) for name, value in arguments.items()}


def copied(arguments: Arguments) -> Arguments:
    return {name: value.clone() for name, value in arguments.items()}


def chain_of(norm: Norm, rotation: Rotation, lookup: Lookup) -> Chain:
    def chain(x: Tensor, weight: Tensor, table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        kv_c, k_pe = x.split([NOPE_DIM, ROPE_DIM], dim=-1)
        return norm(kv_c, weight), rotation(k_pe, lookup(table, positions))

    return chain


def step_of(chain: Chain) -> Callable[..., None]:
    """Writes what a chain gives to layer 1 of the pool."""

    def step(
        x: Tensor, weight: Tensor, table: Tensor, positions: Tensor, pool: Tensor, slots: Tensor
    ) -> None:
        kv_c, k_pe = chain(x, weight, table, positions)
        nvfp4_dsmla.concat_and_cache_nvfp4_ds_mla(
            kv_c=kv_c.flatten(0, -2),
            k_pe=k_pe.flatten(0, -2),
            kv_cache=pool,
            slot_mapping=slots,
            layer=1,
        )

    return step


def pool_of_the_op(
    arguments: Arguments, norm: Norm, rotation: Rotation, lookup: Lookup, **changed: Any
) -> Tensor:
    """The pool after the op was called with what the chain computes from."""
    kv_c, k_pe = arguments["x"].flatten(0, -2).split([NOPE_DIM, ROPE_DIM], dim=-1)
    weight, pool = arguments["weight"], arguments["pool"].clone()
    cos_sin = lookup(arguments["table"], arguments["positions"].flatten())
    nvfp4_dsmla.fused_rmsnorm_rope_concat_and_cache_nvfp4_ds_mla(
        kv_c=NORM_INPUTS[norm](kv_c, weight) if norm in NORM_INPUTS else kv_c,
        k_pe=ROTATION_INPUTS[rotation](k_pe, cos_sin) if rotation in ROTATION_INPUTS else k_pe,
        norm_weight=WEIGHTS[norm](weight) if norm in WEIGHTS else weight,
        eps=EPS,
        positions=torch.arange(len(cos_sin), device=cos_sin.device),
        cos_sin_cache=cos_sin,
        is_neox=ROTATIONS[rotation],
        kv_cache=pool,
        slot_mapping=arguments["slots"],
        layer=1,
        **changed,
    )
    return pool


def share_of_different_bytes(a: Tensor, b: Tensor, arguments: Arguments) -> float:
    return int((a != b).sum()) / (len(arguments["slots"]) * a.shape[-1])


def fused_ops(graph: fx.Graph) -> int:
    return sum(node.target is FUSED_WRITE or FUSED_WRITE in node.args for node in graph.nodes)


class FusingBackend:
    """A backend of torch.compile: the pass where Inductor runs it, then the graph as it is."""

    def __init__(self) -> None:
        self.counts: list[Counts] = []
        self.graphs: list[fx.Graph] = []

    def __call__(self, module: fx.GraphModule, inputs: list[Tensor]) -> Any:
        backend = aot_autograd(fw_compiler=self._compile, decompositions=select_decomp_table())
        return backend(module, inputs)

    def _compile(self, module: fx.GraphModule, _inputs: list[Tensor]) -> fx.GraphModule:
        self.counts.append(fuse_writes(module.graph))
        self.graphs.append(module.graph)
        module.graph.lint()
        module.recompile()
        return module
