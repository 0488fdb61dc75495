"""What the values of a graph are, column by column, and where in it given columns are."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from nvfp4_dsmla.inductor import arithmetic, moves
from nvfp4_dsmla.inductor.expressions import Complex, Expressions
from nvfp4_dsmla.inductor.values import (
    Columns,
    NotFusedError,
    arguments,
    counts_tokens,
    is_tensor,
    shape_of,
    tokens_come_first,
    value_of,
)
from nvfp4_dsmla.layout import NOPE_DIM

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

# How the columns of a node follow from those of its arguments, by its op. None: they do not.
RULES = {**moves.RULES, **arithmetic.RULES}

# Chains are short: what is farther away, or wider, is not looked into.
MAX_DEPTH = 64
MAX_WIDTH = 1 << 16


class Place(NamedTuple):
    """Where some columns are: `[start::step]` of the `width` real columns of a node."""

    node: fx.Node
    start: int
    step: int
    width: int


class GraphColumns:
    """Works out the columns of a graph's values.

    Args:
        max_degree: the atoms that a product may have, see `Expressions`.
        leaves: nodes not to look into.
    """

    def __init__(self, max_degree: int, leaves: Collection[fx.Node] = ()) -> None:
        self.expressions = Expressions(max_degree)
        self.known: dict[fx.Node, Columns | list[Columns]] = {}  # each after what it is made of
        self._leaves = leaves
        self._depth = 0

    def of(self, node: fx.Node) -> Columns:
        """The columns of a tensor; atoms if it is not understood what it is computed from."""
        if not is_tensor(node):
            raise NotFusedError(f"wanted a tensor of the graph, got {node}")
        columns = self._looked_into(node)
        if not isinstance(columns, Columns):
            columns = self.known[node] = self._leaf(node)
        return columns

    def _looked_into(self, node: fx.Node) -> Columns | list[Columns] | None:
        if node in self.known:
            return self.known[node]
        if node.op != "call_function" or node in self._leaves or self._depth == MAX_DEPTH:
            return None
        self._depth += 1
        try:
            columns = self._by_rule(node)
        except (NotFusedError, RuntimeError, IndexError):
            # Made of something of no static width, or of arguments that make no sense for numbers.
            columns = None
        self._depth -= 1
        if columns is not None:
            self.known[node] = columns
        return columns

    def _by_rule(self, node: fx.Node) -> Columns | list[Columns] | None:
        if node.target is operator.getitem:
            several, index = node.args
            columns = self._looked_into(several)  # type: ignore[arg-type]
            return columns[index] if isinstance(columns, list) else None  # type: ignore[index]
        rule = RULES.get(getattr(node.target, "overloadpacket", None))  # type: ignore[arg-type]
        return rule(self, node, arguments(node)) if rule is not None else None

    def _leaf(self, node: fx.Node) -> Columns:
        """The elements of the last axis are atoms; all other axes count tokens."""
        value, shape = value_of(node), shape_of(node)
        *rows, width = shape or (1,)
        if not isinstance(width, int) or width > MAX_WIDTH:
            raise NotFusedError(f"{node.name}: wanted a static width, got {shape}")
        if value.dim() == 1 and width != NOPE_DIM:
            # Numbers of tokens, perhaps. A vector of so many is taken for a weight.
            raise NotFusedError(f"{node.name}: wanted rows of columns, got {shape}")
        numbers = torch.tensor([self._atom(node, value.dtype, i) for i in range(width)])
        if value.dim() == 0:
            return Columns(numbers[0], ())
        return Columns(numbers.view(*[1] * len(rows), -1), (*map(counts_tokens, rows), False))

    def _atom(self, node: fx.Node, dtype: torch.dtype, i: int) -> int:
        def part(name: str) -> int:
            real = dtype.to_real() if dtype.is_complex else dtype
            return self.expressions.function("column", dtype=real, other=(node, i, name))

        if not dtype.is_complex:
            return part("")
        return self.expressions.number(Complex(part("real"), part("imag")))

    def row_of(self, node: fx.Node, width: int, name: str) -> list[int]:
        """The columns of a node, which must be real and `width` a token; `name` is for refusals."""
        numbers = self.of(node).numbers.flatten().tolist()
        if len(numbers) != width:
            raise NotFusedError(f"{name}: wanted {width} columns, got {len(numbers)}")
        return numbers

    def real_numbers(self, numbers: Tensor) -> list[int]:
        """The numbers of real columns, of a complex one both."""
        flat: list[int] = []
        for number in numbers.flatten().tolist():
            column = self.expressions.column(number)
            flat += column if isinstance(column, Complex) else (number,)
        return flat

    def places_of(self, wanted: Sequence[int]) -> list[Place]:
        """The nodes that have these columns, in their order.

        The narrowest come first, those before a cast that widens; of these the ones that are
        [tokens, columns] without a copy, and of these the ones that have no other columns.
        """
        wanted = [self.expressions.origin(number) for number in wanted]
        places = [
            place
            for node, columns in self.known.items()
            if isinstance(columns, Columns)
            if (place := self._place_in(node, columns, wanted)) is not None
        ]

        def cost(place: Place) -> tuple[int, bool, bool]:
            value = value_of(place.node)
            is_flat = value.dim() == 2 or _is_packed(value, value.dim())
            return value.itemsize, not is_flat, place.width != len(wanted)

        return sorted(places, key=cost)

    def rows_of(self, wanted: Sequence[int], name: str) -> Place:
        """The first node of which each token's columns are a piece of memory.

        Raises:
            NotFusedError: there is none; `name` is for the sentence.
        """
        for place in self.places_of(wanted):
            value, columns = value_of(place.node), self.of(place.node)
            axes = columns.numbers.dim() - sum(columns.tokens)
            if place.step == 1 and _is_packed(value, axes):
                return place
        raise NotFusedError(f"{name}: wanted its {len(wanted)} columns side by side in one tensor")

    def _place_in(self, node: fx.Node, columns: Columns, wanted: list[int]) -> Place | None:
        flat = self.real_numbers(columns.numbers)
        if wanted[0] not in flat or wanted[1] not in flat or not tokens_come_first(columns):
            return None
        start = flat.index(wanted[0])
        step = flat.index(wanted[1]) - start
        if step < 1 or flat[start::step][: len(wanted)] != wanted:
            return None
        return Place(node, start, step, len(flat))


def _is_packed(value: Tensor, count: int) -> bool:
    """Whether the last axes of a value, `count` of them, lie in memory without gaps."""
    step: int | torch.SymInt = 1
    for axis in reversed(range(value.dim() - count, value.dim())):
        size, stride = value.shape[axis], value.stride(axis)
        if not statically_known_true(size == 1):
            if not statically_known_true(stride == step):
                return False
            step = step * size
    return True
