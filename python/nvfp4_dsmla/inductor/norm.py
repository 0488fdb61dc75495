"""Recognises a normalised latent by the expressions of its columns."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nvfp4_dsmla.inductor.columns import GraphColumns, Place
from nvfp4_dsmla.inductor.expressions import LOW_PRECISION, Atom, Expressions, Rounding
from nvfp4_dsmla.inductor.values import NotFusedError, arguments, value_of
from nvfp4_dsmla.layout import NOPE_DIM

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import fx

aten = torch.ops.aten
RMS_NORMS = [getattr(aten, name, None) for name in ("rms_norm", "_fused_rms_norm")]


class Norm(NamedTuple):
    """x / sqrt(mean(x^2) + eps) * weight, for each token."""

    x: Place
    weight: Place
    eps: float
    rounding: Rounding


class InverseRms(NamedTuple):
    """A column that is 1 / sqrt(mean(x^2) + eps)."""

    column: int
    inputs: list[int]  # the columns of x
    eps: float
    is_rounded: bool  # to low precision, in any step


def find_norm(kv_c: fx.Node, leaves: Sequence[fx.Node] = ()) -> tuple[Norm, GraphColumns]:
    """The norm that a latent [tokens, 512] comes from, and the part of the graph looked into.

    Args:
        kv_c: the latent.
        leaves: nodes that are not looked into.

    Raises:
        NotFusedError: it comes from none, or from one of another kind.
    """
    graph = GraphColumns(max_degree=3, leaves=leaves)
    numbers = graph.row_of(kv_c, NOPE_DIM, "kv_c")
    norm = _norm_of_one_node(graph, numbers)
    if norm is not None:
        return norm, graph
    rms = _inverse_rms(graph.expressions)
    if rms is None:
        raise NotFusedError("kv_c: wanted a factor 1 / sqrt(mean(x^2) + eps) with a number eps")
    if not leaves and any(len(graph.expressions.factors(x)[0][1]) > 1 for x in rms.inputs):
        # x is a product itself, of a scale perhaps: take it as it is.
        return find_norm(kv_c, leaves=[graph.rows_of(rms.inputs, "kv_c").node])
    return _norm(graph, numbers, rms), graph


def _norm(graph: GraphColumns, numbers: list[int], rms: InverseRms) -> Norm:
    expressions, inputs = graph.expressions, set(rms.inputs)
    x, weight, inverses = [], [], []
    for number in numbers:
        (sign, factors), *more = expressions.factors(number)
        own = [f for f in factors if expressions.origin(f) in inputs]
        inverse = [f for f in factors if expressions.unrounded(f) == rms.column]
        others = [f for f in factors if f not in own + inverse]
        if more or sign < 0 or len(own) != 1 or len(inverse) != 1:
            raise NotFusedError("kv_c: wanted x / sqrt(mean(x^2) + eps) * weight, got other terms")
        if len(others) != 1:
            raise NotFusedError(f"kv_c: wanted one weight, got {len(others)}")
        x += own
        weight += others
        inverses += inverse
    if len(inputs) != NOPE_DIM or {expressions.origin(column) for column in x} != inputs:
        raise NotFusedError(f"kv_c: wanted the mean over the same {NOPE_DIM} columns")
    rounding = expressions.rounding_of(numbers, "kv_c")
    early = rounding.early or rms.is_rounded or set(inverses) != {rms.column}
    rounding = rounding._replace(early=early)
    return Norm(graph.rows_of(x, "kv_c"), _weight(graph, weight), rms.eps, rounding)


def _inverse_rms(expressions: Expressions) -> InverseRms | None:
    """The last one in a graph, which is that of its outermost norm."""
    for column in reversed(expressions.atoms()):
        root = expressions.sole_atom(column)
        if root is None or root.function != "rsqrt":
            continue
        plus = _argument(expressions, root, "plus")
        mean = _argument(expressions, plus, "mean") if plus else None
        if plus is None or mean is None or not 0 <= plus.other < math.inf:  # type: ignore[operator]
            continue
        squares = [_argument(expressions, mean, "square", i) for i in range(len(mean.columns))]
        if all(square is not None for square in squares):
            steps = [root, plus, mean, *(square for square in squares if square)]
            inputs = [square.columns[0] for square in squares if square]
            is_rounded = any(step.dtype in LOW_PRECISION for step in steps)
            return InverseRms(column, inputs, float(plus.other), is_rounded)  # type: ignore[arg-type]
    return None


def _argument(expressions: Expressions, atom: Atom, function: str, i: int = 0) -> Atom | None:
    """An argument of an atom that is a certain function; of low precision if it was rounded."""
    column = expressions.unrounded(atom.columns[i])
    found = expressions.sole_atom(column)
    if found is None or found.function != function:
        return None
    is_rounded = column != atom.columns[i]
    return found._replace(dtype=torch.bfloat16) if is_rounded else found


def _norm_of_one_node(graph: GraphColumns, numbers: list[int]) -> Norm | None:
    """The norm in a graph of ops that are not decomposed."""
    atoms = [graph.expressions.sole_atom(number) for number in numbers]
    columns: list[Any] = [atom.other for atom in atoms if atom and atom.function == "column"]
    node: Any = columns[0][0] if columns else None
    if columns != [(node, i, "") for i in range(NOPE_DIM)]:
        return None
    op = node.args[0] if node.target is operator.getitem and node.args[1] == 0 else node
    if getattr(op.target, "overloadpacket", None) not in RMS_NORMS:
        return None
    named = arguments(op)
    weight, eps = named["weight"], named["eps"]
    if list(named["normalized_shape"]) != [NOPE_DIM] or weight is None or eps is None:
        raise NotFusedError(f"kv_c: wanted a norm of {NOPE_DIM} columns with a weight and an eps")
    x = graph.rows_of(graph.row_of(named["input"], NOPE_DIM, "kv_c"), "kv_c")
    dtype = value_of(node).dtype
    rounding = Rounding(dtype if dtype in LOW_PRECISION else None, early=False)
    return Norm(x, _weight(graph, graph.row_of(weight, NOPE_DIM, "norm_weight")), eps, rounding)


def _weight(graph: GraphColumns, numbers: list[int]) -> Place:
    place = graph.rows_of(numbers, "norm_weight")
    if place.width != NOPE_DIM or any(graph.of(place.node).tokens):
        raise NotFusedError(f"norm_weight: wanted a tensor of {NOPE_DIM} elements")
    return place
