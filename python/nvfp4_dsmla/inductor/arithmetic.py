"""How columns are computed: sums, products, casts, means, and rows of a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from nvfp4_dsmla.inductor.expressions import ARITHMETIC, Complex
from nvfp4_dsmla.inductor.moves import expanded
from nvfp4_dsmla.inductor.values import (
    Columns,
    common_tokens,
    counts_tokens,
    is_tensor,
    shape_of,
    value_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvfp4_dsmla.inductor.columns import GraphColumns

aten = torch.ops.aten


def each(columns: Columns, function: Callable[[int], int]) -> Columns:
    """A function of each column alone."""
    flat = columns.numbers.flatten().tolist()
    made = {number: function(number) for number in dict.fromkeys(flat)}
    numbers = torch.tensor([made[number] for number in flat], dtype=torch.int64)
    return Columns(numbers.view(columns.numbers.shape), columns.tokens)


def computes_in(node: fx.Node) -> torch.dtype | None:
    """The real type that a node computes in; None if it is none that is understood."""
    dtype = value_of(node).dtype
    dtype = dtype.to_real() if dtype.is_complex else dtype
    tensors = [value_of(x).dtype for x in node.all_input_nodes if is_tensor(x)]
    known = all(x in ARITHMETIC or x == torch.complex64 for x in tensors)
    return dtype if known and dtype in ARITHMETIC else None


def binary(graph: GraphColumns, node: fx.Node, named: dict[str, Any]) -> Columns | None:
    """A product, quotient, sum or difference."""
    dtype = computes_in(node)
    left, right = named["self"], named["other"]
    if dtype is None or not is_tensor(left) or named.get("alpha", 1) != 1:
        return None
    if named.get("rounding_mode") is not None:
        return None
    operation = node.target.overloadpacket  # type: ignore[union-attr]
    if isinstance(right, int | float):
        return _with_number(graph, operation, graph.of(left), right, dtype)
    if not is_tensor(right):
        return None
    return _of_two(graph, operation, (graph.of(left), graph.of(right)), value_of(node), dtype)


def _with_number(
    graph: GraphColumns, operation: object, columns: Columns, number: float, dtype: torch.dtype
) -> Columns | None:
    expressions = graph.expressions
    if any(isinstance(expressions.column(x), Complex) for x in columns.numbers.flatten().tolist()):
        return None
    if operation in (aten.add, aten.sub):
        summand = float(number if operation is aten.add else -number)
        return each(columns, lambda x: expressions.function("plus", x, dtype=dtype, other=summand))
    if operation is aten.div and number == 0:
        return None
    factor = float(number if operation is aten.mul else 1 / number)
    if abs(factor) == 1:
        return columns if factor > 0 else each(columns, expressions.negate)
    return each(columns, lambda x: expressions.function("times", x, dtype=dtype, other=factor))


def _of_two(
    graph: GraphColumns,
    operation: object,
    operands: tuple[Columns, Columns],
    value: Tensor,
    dtype: torch.dtype,
) -> Columns | None:
    expressions = graph.expressions

    def compute(a: int, b: int) -> int:
        if operation is aten.mul:
            return expressions.multiply(a, b, dtype)
        if operation is aten.div:
            return expressions.multiply(
                a, expressions.function("reciprocal", b, dtype=dtype), dtype
            )
        return expressions.add(a, b if operation is aten.add else expressions.negate(b), dtype)

    wide = [_with_axes(columns, value.dim()) for columns in operands]
    tokens = common_tokens(wide)
    if tokens is None:
        return None
    left, right = torch.broadcast_tensors(*(columns.numbers for columns in wide))
    pairs = list(zip(left.flatten().tolist(), right.flatten().tolist(), strict=True))
    complexes = {isinstance(expressions.column(x), Complex) for pair in pairs for x in pair}
    if len(complexes) > 1 or (operation is aten.div and complexes == {True}):
        return None
    made = {pair: compute(*pair) for pair in dict.fromkeys(pairs)}
    numbers = torch.tensor([made[pair] for pair in pairs], dtype=torch.int64)
    return Columns(numbers.view(left.shape), tokens)


def _with_axes(columns: Columns, count: int) -> Columns:
    """The same with axes of size 1 before, as in broadcasting."""
    new = count - len(columns.tokens)
    return Columns(columns.numbers[(None,) * new], (False,) * new + columns.tokens)


def negate(graph: GraphColumns, _node: fx.Node, named: dict[str, Any]) -> Columns:
    """-x."""
    return each(graph.of(named["self"]), graph.expressions.negate)


def unary(graph: GraphColumns, node: fx.Node, named: dict[str, Any]) -> Columns | None:
    """A function of each element."""
    dtype = computes_in(node)
    if dtype is None or value_of(node).dtype.is_complex:
        return None
    name = node.target.overloadpacket._qualified_op_name.partition("::")[2]  # type: ignore[union-attr]
    if name == "pow":
        exponent = named.get("exponent")
        name = {2: "square", 0.5: "sqrt", -0.5: "rsqrt"}.get(exponent, "")  # type: ignore[arg-type]
        if not name:
            return None
    function = graph.expressions.function
    return each(graph.of(named["self"]), lambda x: function(name, x, dtype=dtype))


def cast(graph: GraphColumns, node: fx.Node, named: dict[str, Any]) -> Columns | None:
    """The same elements in another type."""
    source = named.get("self", named.get("a"))
    dtype = computes_in(node)
    if dtype is None or value_of(node).dtype.is_complex or source is None:
        return None
    return each(graph.of(source), lambda x: graph.expressions.cast(x, dtype))


def copy(graph: GraphColumns, node: fx.Node, named: dict[str, Any]) -> Columns | None:
    """A value broadcast and cast to the shape and type of another one: x[...] = y."""
    dtype = computes_in(node)
    if dtype is None or value_of(node).dtype.is_complex:
        return None
    columns = expanded(graph.of(named["src"]), shape_of(node))
    return each(columns, lambda x: graph.expressions.cast(x, dtype))


def reduction(graph: GraphColumns, node: fx.Node, named: dict[str, Any]) -> Columns | None:
    """The mean or sum of all columns of a row."""
    columns, dtype = graph.of(named["self"]), computes_in(node)
    dims = named.get("dim")
    if dtype is None or not dims or value_of(node).dtype.is_complex:
        return None
    count = len(columns.tokens)
    axes = {dim % count for dim in dims}
    kept = [axis for axis in range(count) if axis not in axes]
    if any(columns.tokens[a] for a in axes) or any(columns.numbers.shape[a] != 1 for a in kept):
        return None
    name = node.target.overloadpacket._qualified_op_name.partition("::")[2]  # type: ignore[union-attr]
    number = graph.expressions.function(name, *columns.numbers.flatten().tolist(), dtype=dtype)
    left = range(count) if named["keepdim"] else kept
    return Columns(
        torch.full([1] * len(left), number), tuple(columns.tokens[axis] for axis in left)
    )


def lookup(graph: GraphColumns, _node: fx.Node, named: dict[str, Any]) -> Columns | None:
    """A row of a table for each token: table[positions], embedding, index_select."""
    table = named.get("weight", named.get("self"))
    rows = named.get("index", named.get("indices"))
    if isinstance(rows, list | tuple) and len(rows) == 1:
        rows = rows[0]
    if not is_tensor(table) or not is_tensor(rows) or named.get("dim", 0) != 0:
        return None
    if value_of(rows).dtype not in (torch.int32, torch.int64) or value_of(table).dim() != 2:
        return None
    columns, dtype = graph.of(table), value_of(table).dtype
    dtype = dtype.to_real() if dtype.is_complex else dtype

    def row(number: int) -> int:
        column = graph.expressions.column(number)
        if isinstance(column, Complex):
            return graph.expressions.number(Complex(row(column.real), row(column.imag)))
        return graph.expressions.function("lookup", number, dtype=dtype, other=rows)

    shape = shape_of(rows)
    numbers = each(columns, row).numbers.view([1] * len(shape) + [-1])
    return Columns(numbers, (*map(counts_tokens, shape), False))


RULES = {
    **dict.fromkeys((aten.mul, aten.div, aten.add, aten.sub), binary),
    aten.neg: negate,
    **dict.fromkeys((aten.pow, aten.square, aten.sqrt, aten.rsqrt, aten.reciprocal), unary),
    **dict.fromkeys((aten.cos, aten.sin), unary),
    **dict.fromkeys((torch.ops.prims.convert_element_type, aten._to_copy, aten.to), cast),
    aten.copy: copy,
    **dict.fromkeys((aten.mean, aten.sum), reduction),
    **dict.fromkeys((aten.index, aten.embedding, aten.index_select), lookup),
}
