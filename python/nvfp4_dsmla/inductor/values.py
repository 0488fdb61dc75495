"""The values of a graph: what their nodes tell, and their columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from torch import SymInt, Tensor, fx

if TYPE_CHECKING:
    from collections.abc import Sequence


class NotFusedError(Exception):
    """The first condition of fusing that does not hold, as a sentence."""


class Columns(NamedTuple):
    """The columns of a value of T tokens, each the number of its expression.

    `numbers` has the value's shape, but 1 for the axes that count tokens: all tokens are treated
    alike, so a column is the same expression for each.
    """

    numbers: Tensor  # int64, on the CPU
    tokens: tuple[bool, ...]  # for each axis, whether it counts tokens


def arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a node's op by their names, defaults included."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    named = {x.name: x.default_value for x in schema if x.has_default_value()}
    named.update({x.name: given for x, given in zip(schema, node.args, strict=False)})
    return named | node.kwargs


def is_tensor(argument: object) -> TypeGuard[fx.Node]:
    """Whether an argument is a node whose value is a tensor."""
    return isinstance(argument, fx.Node) and isinstance(argument.meta.get("val"), Tensor)


def value_of(node: fx.Node) -> Tensor:
    """The fake tensor that tells a node's shape, strides and dtype."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        raise NotFusedError(f"{node.name}: wanted a tensor whose shape is known")
    return value


def shape_of(node: fx.Node) -> list[int | SymInt]:
    """The sizes of a value, as numbers where they are known."""
    return [_number(size) for size in value_of(node).shape]


def _number(size: int | SymInt) -> int | SymInt:
    """A symbol that a condition has fixed is a number, though it is not written as one."""
    number = size.node.maybe_as_int() if isinstance(size, SymInt) else size
    return size if number is None else number


def counts_tokens(size: int | SymInt) -> bool:
    """Whether an axis before a row's columns counts tokens: not if there can be one alone."""
    return not (isinstance(size, int) and size == 1)


def tokens_come_first(columns: Columns) -> bool:
    """Whether [tokens, columns] is a view of the value: no token's axis is after a column's."""
    wide = [axis for axis, size in enumerate(columns.numbers.shape) if size != 1]
    return not wide or not any(columns.tokens[wide[0] :])


def common_tokens(several: Sequence[Columns]) -> tuple[bool, ...] | None:
    """Which axes count tokens where values of as many axes meet; None if they disagree."""
    tokens = tuple(any(axis) for axis in zip(*(c.tokens for c in several), strict=True))
    for columns in several:
        sizes = zip(tokens, columns.numbers.shape, strict=True)
        if any(is_token and size != 1 for is_token, size in sizes):
            return None
    return tokens
