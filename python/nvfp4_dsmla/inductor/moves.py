"""How columns move: views, slices, concatenations and the like.

Slices and their kin need no rules of their own. The ATen op that is in the graph moves the numbers
of columns as it would move the elements; it must only leave the axes of tokens alone.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import SymInt, Tensor, fx

from nvfp4_dsmla.inductor.expressions import Complex
from nvfp4_dsmla.inductor.values import (
    Columns,
    common_tokens,
    counts_tokens,
    shape_of,
    tokens_come_first,
    value_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nvfp4_dsmla.inductor.columns import GraphColumns

aten = torch.ops.aten


def reshape(graph: GraphColumns, node: fx.Node, named: dict[str, Any]) -> Columns | None:
    """The same elements in the same order: tokens stay tokens, columns stay columns."""
    columns = graph.of(named["self"])
    if not tokens_come_first(columns) or value_of(node).dtype != value_of(named["self"]).dtype:
        return None
    shape = shape_of(node)
    first = len(shape)  # the first axis of columns
    while math.prod(shape[first:]) != columns.numbers.numel():
        first -= 1
        if first < 0 or not isinstance(shape[first], int):
            return None
    tokens = tuple(counts_tokens(size) for size in shape[:first])
    numbers = columns.numbers.reshape([1] * first + shape[first:])
    return Columns(numbers, tokens + (False,) * (len(shape) - first))


def expand(graph: GraphColumns, node: fx.Node, named: dict[str, Any]) -> Columns:
    """Columns repeated along an axis."""
    return expanded(graph.of(named["self"]), shape_of(node))


def expanded(columns: Columns, shape: Sequence[int | SymInt]) -> Columns:
    """The columns of a value broadcast to a shape. An axis as long as a symbol counts tokens."""
    new = len(shape) - len(columns.tokens)
    before = (False,) * new + columns.tokens
    tokens = tuple(b or not isinstance(size, int) for b, size in zip(before, shape, strict=True))
    sizes = [1 if is_token else size for is_token, size in zip(tokens, shape, strict=True)]
    return Columns(columns.numbers[(None,) * new].expand(sizes), tokens)


def permute(graph: GraphColumns, _node: fx.Node, named: dict[str, Any]) -> Columns | None:
    """Axes in another order, those of tokens among themselves in the same."""
    columns = graph.of(named["self"])
    axes = list(range(len(columns.tokens)))
    if "dims" in named:
        axes = [axes[dim] for dim in named["dims"]]
    else:  # transpose, or t of two axes
        a, b = named.get("dim0", 0), named.get("dim1", -1)
        axes[a], axes[b] = axes[b], axes[a]
    of_tokens = [axis for axis in axes if columns.tokens[axis]]
    if of_tokens != sorted(of_tokens):
        return None
    return Columns(columns.numbers.permute(axes), tuple(columns.tokens[axis] for axis in axes))


def along(
    graph: GraphColumns, node: fx.Node, named: dict[str, Any]
) -> Columns | list[Columns] | None:
    """What an op does along axes of columns: slice, split, cat, flip, roll, slice_scatter."""
    inputs = named.get("tensors") or [named[name] for name in ("self", "src") if name in named]
    several = {tensor: graph.of(tensor) for tensor in inputs}
    tokens = common_tokens(list(several.values()))
    if tokens is None:
        return None
    if named.keys() >= {"start", "end", "step"} and "src" not in named and _is_whole(named):
        return several[named["self"]]
    axes = _axes(named, len(tokens))
    if not axes or any(tokens[axis] for axis in axes):
        return None
    return _with_tokens(_moved(node, several), tokens)


def _is_whole(named: dict[str, Any]) -> bool:
    """Whether a slice leaves nothing out: older versions of PyTorch write x[:, a:b] with one."""
    return (
        named["start"] in (None, 0) and named["end"] in (None, sys.maxsize) and named["step"] == 1
    )


def _axes(named: dict[str, Any], count: int) -> list[int]:
    """The axes that an op acts on, of `count`; none if there is no telling."""
    repeats = named.get("repeats")
    if isinstance(repeats, list | tuple):
        return [a for a, times in enumerate(repeats) if times != 1] if len(repeats) == count else []
    dims = named.get("dim", named.get("dims"))
    return [] if dims is None else [d % count for d in ([dims] if isinstance(dims, int) else dims)]


def select(
    graph: GraphColumns, node: fx.Node, named: dict[str, Any]
) -> Columns | list[Columns] | None:
    """One index of an axis of columns, or each, without the axis: select, unbind."""
    columns = graph.of(named["self"])
    axis = named["dim"] % len(columns.tokens)
    if columns.tokens[axis]:
        return None
    tokens = columns.tokens[:axis] + columns.tokens[axis + 1 :]
    return _with_tokens(_moved(node, {named["self"]: columns}), tokens)


def stack(
    graph: GraphColumns, node: fx.Node, named: dict[str, Any]
) -> Columns | list[Columns] | None:
    """A new axis of columns."""
    several = {tensor: graph.of(tensor) for tensor in named["tensors"]}
    tokens = common_tokens(list(several.values()))
    if tokens is None:
        return None
    axis = named["dim"] % (len(tokens) + 1)
    return _with_tokens(_moved(node, several), (*tokens[:axis], False, *tokens[axis:]))


def _moved(node: fx.Node, several: dict[fx.Node, Columns]) -> Tensor | list[Tensor] | None:
    """What a node's op makes of numbers in the place of elements; None if a size is a symbol."""
    if set(node.all_input_nodes) != set(several):
        return None
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda x: several[x].numbers)
    return node.target(*args, **kwargs)  # type: ignore[operator,no-any-return]


def _with_tokens(
    moved: Tensor | list[Tensor] | None, tokens: tuple[bool, ...]
) -> Columns | list[Columns] | None:
    if moved is None or isinstance(moved, Tensor):
        return Columns(moved, tokens) if moved is not None else None
    return [Columns(numbers, tokens) for numbers in moved]


def view_as_complex(graph: GraphColumns, _node: fx.Node, named: dict[str, Any]) -> Columns | None:
    """Pairs of real columns as complex ones."""
    columns = graph.of(named["self"])
    if columns.tokens[-1]:
        return None
    pairs = columns.numbers.reshape(-1, 2).tolist()
    numbers = torch.tensor([graph.expressions.number(Complex(*pair)) for pair in pairs])
    return Columns(numbers.view(columns.numbers.shape[:-1]), columns.tokens[:-1])


def view_as_real(graph: GraphColumns, _node: fx.Node, named: dict[str, Any]) -> Columns:
    """Complex columns as pairs of real ones."""
    columns = graph.of(named["self"])
    numbers = torch.tensor(graph.real_numbers(columns.numbers))
    return Columns(numbers.view(*columns.numbers.shape, 2), (*columns.tokens, False))


RULES = {
    **dict.fromkeys(
        (
            aten.view,
            aten.reshape,
            aten._unsafe_view,
            aten.squeeze,
            aten.unsqueeze,
            aten.flatten,
            aten.unflatten,
            aten.clone,
            aten.contiguous,
            aten.alias,
            aten.detach,
        ),
        reshape,
    ),
    aten.expand: expand,
    **dict.fromkeys((aten.permute, aten.transpose, aten.t), permute),
    **dict.fromkeys(
        (
            aten.slice,
            aten.split,
            aten.split_with_sizes,
            aten.chunk,
            aten.cat,
            aten.flip,
            aten.roll,
            aten.repeat,
            aten.repeat_interleave,
            aten.slice_scatter,
        ),
        along,
    ),
    **dict.fromkeys((aten.select, aten.unbind), select),
    aten.stack: stack,
    aten.view_as_complex: view_as_complex,
    aten.view_as_real: view_as_real,
}
