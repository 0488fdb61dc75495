"""Replaces the writes of a graph whose latents are normalised and whose keys are rotated in it."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._inductor import config
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import statically_known_true

from nvfp4_dsmla.inductor.columns import Place
from nvfp4_dsmla.inductor.norm import Norm, find_norm
from nvfp4_dsmla.inductor.rotation import HALF, Angles, Rotation, Table, find_rotation
from nvfp4_dsmla.inductor.values import NotFusedError, arguments, is_tensor, shape_of, value_of
from nvfp4_dsmla.layout import NOPE_DIM, ROPE_DIM

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.fx.node import Argument


aten = torch.ops.aten
higher_order = torch.ops.higher_order
WRITE = torch.ops.nvfp4_dsmla.concat_and_cache_nvfp4_ds_mla.default
FUSED_WRITE = torch.ops.nvfp4_dsmla.fused_rmsnorm_rope_concat_and_cache_nvfp4_ds_mla.default

logger = logging.getLogger("nvfp4_dsmla.inductor")


class Counts(NamedTuple):
    """Writes that were found in graphs, and how many of them were fused."""

    writes: int
    fused: int


class Chain(NamedTuple):
    """What a write's latent and key come from."""

    norm: Norm
    rotation: Rotation
    round_to_input: bool
    nodes: list[fx.Node]  # that the fused op may leave without a reader


def fuse_writes(graph: fx.Graph) -> Counts:
    """Fuses what can be fused of a graph, in place. A write that cannot is left as it is."""
    writes = [node for node in graph.nodes if is_write(node)]
    new_nodes = NewNodes(graph)
    chains = [(write, _chain_or_none(write)) for write in writes]
    for write, chain in chains:
        if chain is not None:
            replace(write, chain, new_nodes)
    return Counts(len(writes), sum(chain is not None for _, chain in chains))


def _chain_or_none(write: fx.Node) -> Chain | None:
    try:
        with unset_fake_temporarily():
            return find_chain(write)
    except NotFusedError as why:
        logger.debug("%s not fused: %s", write.name, why)
    except Exception:  # a graph that the pass cannot read compiles all the same
        logger.exception("%s not fused, which is a bug in nvfp4_dsmla.inductor", write.name)
    return None


def is_functionalized(node: fx.Node) -> bool:
    """Whether a node is an op that mutates, in a graph in which nothing does."""
    return node.target in (higher_order.auto_functionalized, higher_order.auto_functionalized_v2)


def is_write(node: fx.Node) -> bool:
    """Whether a node writes tokens into a cache."""
    return node.target is WRITE or (is_functionalized(node) and node.args[0] is WRITE)


def write_arguments(write: fx.Node) -> dict[str, Any]:
    """The arguments of a write, and what a functionalized one has beside them, by their names."""
    return dict(write.kwargs) if is_functionalized(write) else arguments(write)


# ---- whether to fuse ---------------------------------------------------------------------------


def find_chain(write: fx.Node) -> Chain:
    """What a write's latent and key come from.

    Raises:
        NotFusedError: the first condition that does not hold.
    """
    named = write_arguments(write)
    norm, of_norm = find_norm(named["kv_c"])
    rotation, of_rotation = find_rotation(named["k_pe"])
    dtype = value_of(norm.x.node).dtype
    if value_of(rotation.x.node).dtype != dtype:
        raise NotFusedError(
            f"k_pe: wanted the type of the latent before its norm, {dtype}, "
            f"got {value_of(rotation.x.node).dtype} before its rotation"
        )
    round_to_input = _round_to_input(norm, rotation, dtype)
    _check_rows(named["kv_c"], norm, rotation)
    _check_memory(named["slot_mapping"], norm, rotation)
    nodes = list(dict.fromkeys([*of_norm.known, *of_rotation.known]))
    if not is_functionalized(write):
        _check_mutations(write, nodes)
    return Chain(norm, rotation, round_to_input, nodes)


def _round_to_input(norm: Norm, rotation: Rotation, dtype: torch.dtype) -> bool:
    """Whether norm and rotation are rounded to the type of their inputs at their ends, or not."""
    for name, rounding in (("kv_c", norm.rounding), ("k_pe", rotation.rounding)):
        if rounding.last not in (None, dtype):
            raise NotFusedError(f"{name}: wanted {dtype} or torch.float32, got {rounding.last}")
        if rounding.early and config.emulate_precision_casts:
            raise NotFusedError(
                f"{name}: wanted one rounding at the end, as config.emulate_precision_casts keeps "
                "each, got several"
            )
    if norm.rounding.last != rotation.rounding.last:
        raise NotFusedError(
            f"k_pe: wanted the rounding of kv_c ({norm.rounding.last}), "
            f"got {rotation.rounding.last}"
        )
    return norm.rounding.last is not None or dtype == torch.float32


def _check_rows(kv_c: fx.Node, norm: Norm, rotation: Rotation) -> None:
    """Everything must have a row for each token: nothing is shared between tokens."""
    tokens = value_of(kv_c).shape[0]
    wanted = [("kv_c before its norm", norm.x), ("k_pe before its rotation", rotation.x)]
    if isinstance(rotation.angles, Angles):
        wanted += [("cos", rotation.angles.cos), ("sin", rotation.angles.sin)]
    sizes = [(name, value_of(place.node), place.width) for name, place in wanted]
    if isinstance(rotation.angles, Table):
        sizes.append(("positions", value_of(rotation.angles.positions), 1))
    for name, value, width in sizes:
        parts = 2 if value.is_complex() else 1
        if not statically_known_true(math.prod(value.shape) * parts == tokens * width):
            raise NotFusedError(
                f"{name}: wanted {width} columns for each of {tokens} tokens, "
                f"got {list(value.shape)}"
            )


def _check_memory(slot_mapping: fx.Node, norm: Norm, rotation: Rotation) -> None:
    """The op takes certain types, and everything on one device."""
    nodes = {"kv_c": norm.x.node, "k_pe": rotation.x.node, "norm_weight": norm.weight.node}
    if isinstance(rotation.angles, Table):
        nodes["cos_sin_cache"] = rotation.angles.cos_sin
        if value_of(rotation.angles.cos_sin).stride()[-1] != 1:
            raise NotFusedError("cos_sin_cache: wanted contiguous rows")
    dtype, device = value_of(norm.x.node).dtype, value_of(slot_mapping).device
    for name, node in nodes.items():
        if value_of(node).dtype not in (dtype, torch.float32):
            raise NotFusedError(
                f"{name}: wanted {dtype} or torch.float32, got {value_of(node).dtype}"
            )
    angles = [x.node if isinstance(x, Place) else x for x in rotation.angles]
    for node in (*nodes.values(), *angles):
        if value_of(node).device != device:
            raise NotFusedError(f"{node.name}: wanted it on {device}, got {value_of(node).device}")


def _check_mutations(write: fx.Node, nodes: Iterable[fx.Node]) -> None:
    """What the op reads at the write must be what the chain read before it."""
    chain = set(nodes)
    between = iter(write.graph.nodes)
    for node in between:
        if node in chain:
            break
    for node in between:
        if node is write:
            return
        # Bytes are those of a cache, and no part of the chain.
        if any(not is_tensor(x) or value_of(x).dtype != torch.uint8 for x in _written(node)):
            raise NotFusedError(f"wanted nothing written between chain and write, got {node.name}")


def _written(node: fx.Node) -> list[object]:
    """What a node writes to."""
    if isinstance(node.target, torch._ops.HigherOrderOperator) and not is_functionalized(node):
        return [node.target]  # who knows
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return []
    named = arguments(node)
    return [named[x.name] for x in schema.arguments if x.alias_info and x.alias_info.is_write]


# ---- the replacement ---------------------------------------------------------------------------


class NewNodes:
    """Makes the nodes that the fused op reads beside those of the graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._tables: dict[Table | Angles, tuple[fx.Node, fx.Node]] = {}  # one serves all layers

    def call(self, op: Callable[..., Tensor], *args: Argument) -> fx.Node:
        """A node, its fake value what the op makes of the arguments' fake values."""
        node = self._graph.call_function(op, args)
        node.meta["val"] = op(*fx.node.map_arg(args, lambda x: x.meta["val"]))
        return node

    def rows(self, place: Place, count: int) -> fx.Node:
        """The columns at a place as [tokens, count]."""
        node = place.node
        if value_of(node).is_complex():
            node = self.call(aten.view_as_real.default, node)
        if value_of(node).dim() != 2 or shape_of(node)[-1] != place.width:
            node = self.call(aten.reshape.default, node, [-1, place.width])
        if place.width != count:
            end = place.start + count * place.step
            node = self.call(aten.slice.Tensor, node, 1, place.start, end, place.step)
        return node

    def flat(self, node: fx.Node) -> fx.Node:
        """A tensor as [elements]."""
        return node if value_of(node).dim() == 1 else self.call(aten.reshape.default, node, [-1])

    def table(self, angles: Table | Angles) -> tuple[fx.Node, fx.Node]:
        """The op's cos_sin_cache and positions: a table, or one of each token's own angles."""
        if angles not in self._tables:
            if isinstance(angles, Table):
                self._tables[angles] = angles.cos_sin, self.flat(angles.positions)
            else:
                self._tables[angles] = self._own_table(angles)
        return self._tables[angles]

    def _own_table(self, angles: Angles) -> tuple[fx.Node, fx.Node]:
        parts = [self.rows(place, HALF) for place in angles]
        wide = [
            part
            if value_of(part).dtype == torch.float32
            else self.call(torch.ops.prims.convert_element_type.default, part, torch.float32)
            for part in parts
        ]
        table = self.call(aten.cat.default, wide, 1)
        value = value_of(table)
        tokens: Any = value.shape[0]
        if isinstance(tokens, torch.SymInt):
            tokens = self.call(aten.sym_size.int, table, 0)
        counting: dict[str, Argument] = {"start": 0, "step": 1, "dtype": torch.int64}
        counting |= {"device": value.device, "requires_grad": False}
        positions = self._graph.call_function(torch.ops.prims.iota.default, (tokens,), counting)
        positions.meta["val"] = value.new_empty(value.shape[:1], dtype=torch.int64)
        return table, positions


def replace(write: fx.Node, chain: Chain, new_nodes: NewNodes) -> None:
    """Puts the fused op in the place of a write, and takes out of the chain what has no reader."""
    norm, rotation = chain.norm, chain.rotation
    graph = write.graph
    with graph.inserting_before(write):
        cos_sin_cache, positions = new_nodes.table(rotation.angles)
        named = write_arguments(write) | {
            "kv_c": new_nodes.rows(norm.x, NOPE_DIM),
            "k_pe": new_nodes.rows(rotation.x, ROPE_DIM),
            "norm_weight": new_nodes.flat(norm.weight.node),
            "eps": norm.eps,
            "positions": positions,
            "cos_sin_cache": cos_sin_cache,
            "is_neox": rotation.is_neox,
            "round_to_input": chain.round_to_input,
        }
        if is_functionalized(write):
            new = graph.call_function(write.target, (FUSED_WRITE,), named)  # type: ignore[arg-type]
        else:
            ordered = [named[argument.name] for argument in FUSED_WRITE._schema.arguments]
            new = graph.call_function(FUSED_WRITE, tuple(ordered))
    new.meta = dict(write.meta)
    if "eager_input_vals" in new.meta:  # the strides that Inductor is to give the arguments
        given = (new.args, new.kwargs)
        new.meta["eager_input_vals"] = fx.node.map_arg(given, lambda x: x.meta["val"])
    write.replace_all_uses_with(new)
    graph.erase_node(write)
    for node in reversed(chain.nodes):
        if node.op == "call_function" and not node.users and not node.is_impure():
            graph.erase_node(node)
