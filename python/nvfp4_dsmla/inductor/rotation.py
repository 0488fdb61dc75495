"""Recognises a rotated key by the expressions of its columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from torch._inductor import config

from nvfp4_dsmla.inductor.columns import GraphColumns, Place
from nvfp4_dsmla.inductor.expressions import Expressions, Rounding
from nvfp4_dsmla.inductor.values import NotFusedError, value_of
from nvfp4_dsmla.layout import ROPE_DIM

if TYPE_CHECKING:
    from torch import fx

HALF = ROPE_DIM // 2
# Which columns turn together.
PAIRS = {
    True: [(i, i + HALF) for i in range(HALF)],  # is_neox
    False: [(2 * i, 2 * i + 1) for i in range(HALF)],
}


class Table(NamedTuple):
    """A table whose rows are cosines, then sines, and the row of each token."""

    cos_sin: fx.Node
    positions: fx.Node


class Angles(NamedTuple):
    """The cosines and sines of each token."""

    cos: Place
    sin: Place


class Rotation(NamedTuple):
    """Pairs (a, b) of the columns of x become (a cos - b sin, b cos + a sin)."""

    x: Place
    angles: Table | Angles
    is_neox: bool
    rounding: Rounding


class Turn(NamedTuple):
    """One pair of a rotation: a cos - b sin, b cos + a sin."""

    a: int
    b: int
    cos: int
    sin: int


def find_rotation(k_pe: fx.Node) -> tuple[Rotation, GraphColumns]:
    """The rotation that a key [tokens, 64] comes from, and the part of the graph looked into.

    Raises:
        NotFusedError: it comes from none, or from one of another kind.
    """
    graph = GraphColumns(max_degree=2)
    numbers = graph.row_of(k_pe, ROPE_DIM, "k_pe")
    rounding = graph.expressions.rounding_of(numbers, "k_pe")
    refusal = NotFusedError("k_pe: wanted pairs a cos - b sin, b cos + a sin, got other terms")
    for is_neox, pairs in PAIRS.items():
        for turns in _readings(graph.expressions, [(numbers[p], numbers[q]) for p, q in pairs]):
            try:
                return Rotation(*_places(graph, turns, is_neox), is_neox, rounding), graph
            except NotFusedError as why:  # noqa: PERF203
                refusal = why
    raise refusal


def _readings(expressions: Expressions, pairs: list[tuple[int, int]]) -> Iterator[list[Turn]]:
    """The ways to read pairs of columns as turns.

    There are two, since (a + ib)(cos + i sin) is a product: either factor may be the angle. If one
    of them is a row of a table, it is.
    """
    first = _turns(expressions, *pairs[0])
    likely = [turn for turn in first if _is_lookup(expressions, turn.cos)]
    for turn in likely or first:
        sources = {_source(expressions, column) for column in (turn.a, turn.b)}
        turns = [
            reading
            for pair in pairs
            for reading in _turns(expressions, *pair)
            if {_source(expressions, reading.a), _source(expressions, reading.b)} <= sources
        ]
        if len(turns) == HALF:
            yield turns


def _turns(expressions: Expressions, first: int, second: int) -> list[Turn]:
    """The ways to read one pair, two or none."""
    (cos_sign, plus), *minuses = sorted(expressions.factors(first), reverse=True)
    added = expressions.factors(second)
    if cos_sign < 0 or len(minuses) != 1 or len(added) != 2 or min(s for s, _ in added) < 0:
        return []
    sin_sign, minus = minuses[0]
    if sin_sign > 0 or len(plus) != 2 or len(minus) != 2:
        return []
    wanted = sorted(sorted(factors) for _, factors in added)
    readings = [
        Turn(a, b, cos, sin) for a, cos in (plus, plus[::-1]) for b, sin in (minus, minus[::-1])
    ]
    return [
        turn
        for turn in readings
        if sorted((sorted((turn.b, turn.cos)), sorted((turn.a, turn.sin)))) == wanted
    ]


def _is_lookup(expressions: Expressions, column: int) -> bool:
    atom = expressions.sole_atom(expressions.unrounded(column))
    return atom is not None and atom.function == "lookup"


def _source(expressions: Expressions, column: int) -> object:
    """Where a column comes from: a leaf of the graph, or rows that are looked up."""
    while True:
        atom = expressions.sole_atom(column)
        if atom is None:
            column = expressions.factors(column)[0][1][0]
        elif atom.function == "column":
            return atom.other[0]  # type: ignore[index]
        elif atom.function == "lookup":
            return atom.other
        else:
            column = atom.columns[0]


def _places(graph: GraphColumns, turns: list[Turn], is_neox: bool) -> tuple[Place, Table | Angles]:
    """Where the graph has what is turned, in the op's order, and the angles."""
    x = [0] * ROPE_DIM
    for (p, q), turn in zip(PAIRS[is_neox], turns, strict=True):
        x[p], x[q] = turn.a, turn.b
    place = graph.rows_of(x, "k_pe")
    cos, sin = [turn.cos for turn in turns], [turn.sin for turn in turns]
    table = _table(graph, cos + sin)
    if table is not None:
        return place, table
    places = graph.places_of(cos), graph.places_of(sin)
    if not all(places):
        raise NotFusedError(f"k_pe: wanted {HALF} cosines and {HALF} sines evenly in a tensor each")
    return place, Angles(places[0][0], places[1][0])


def _table(graph: GraphColumns, cos_sin: list[int]) -> Table | None:
    """The table, if all angles are whole rows of one."""
    columns = cos_sin
    if not config.emulate_precision_casts:  # else a cast of the rows is one
        columns = [graph.expressions.unrounded(column) for column in cos_sin]
    atoms = [graph.expressions.sole_atom(column) for column in columns]
    rows = [atom for atom in atoms if atom is not None and atom.function == "lookup"]
    if len(rows) != ROPE_DIM or len({atom.other for atom in rows}) != 1:
        return None
    for place in graph.places_of([atom.columns[0] for atom in rows]):
        if place.width == ROPE_DIM and value_of(place.node).dim() == 2:
            return Table(place.node, rows[0].other)  # type: ignore[arg-type]
    return None
