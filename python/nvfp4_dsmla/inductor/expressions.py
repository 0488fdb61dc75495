"""Columns as expressions: sums of products of atoms, and how often they were rounded.

A column is one element of a token's row, for all tokens at once. An atom is a column that is not
looked into, of some node of the graph, or a function of other columns, such as their mean. Equal
expressions have equal numbers, so columns can be moved about as the elements of integer tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import fx

from nvfp4_dsmla.inductor.values import NotFusedError

if TYPE_CHECKING:
    from collections.abc import Sequence

LOW_PRECISION = (torch.bfloat16, torch.float16)
ARITHMETIC = (torch.float32, *LOW_PRECISION)

# The sign of a product and its atoms, sorted.
Term = tuple[int, tuple[int, ...]]


class Atom(NamedTuple):
    """A function of columns and of something that is not a column; or of that alone.

    "column" has a node and which of its columns it is, "lookup" the node of the positions, "plus"
    and "times" a number, "value" and all others nothing.
    """

    function: str
    columns: tuple[int, ...]
    dtype: torch.dtype
    other: float | fx.Node | tuple[fx.Node, int, str] | None = None


class Sum(NamedTuple):
    """A real column.

    `rounded` is the type of low precision that it was last rounded to, `early` whether it was also
    rounded before its last operation. An atom that stands alone has neither: it is what it is.
    """

    terms: tuple[Term, ...]
    rounded: torch.dtype | None = None
    early: bool = False


class Complex(NamedTuple):
    """A complex column: the numbers of its two real ones."""

    real: int
    imag: int


class Rounding(NamedTuple):
    """What columns were last rounded to, if to low precision, and whether before that as well."""

    last: torch.dtype | None
    early: bool


class Expressions:
    """All expressions of one analysis, by their numbers, and the arithmetic on the numbers.

    Args:
        max_degree: the atoms that a product may have. A factor that would make it longer becomes
            an atom itself, "value".
    """

    def __init__(self, max_degree: int) -> None:
        self.max_degree = max_degree
        self._columns: list[Sum | Complex] = []
        self._numbers: dict[Sum | Complex, int] = {}
        self._atoms: list[Atom] = []
        self._atom_numbers: dict[Atom, int] = {}

    def number(self, column: Sum | Complex) -> int:
        """The number of an expression, a new one if it is new."""
        if column not in self._numbers:
            self._numbers[column] = len(self._columns)
            self._columns.append(column)
        return self._numbers[column]

    def column(self, number: int) -> Sum | Complex:
        """The expression of a number."""
        return self._columns[number]

    def real(self, number: int) -> Sum:
        """The expression of a number whose column is real."""
        column = self._columns[number]
        assert isinstance(column, Sum)
        return column

    def atoms(self) -> list[int]:
        """The columns that are atoms."""
        return [self.of_atom(atom) for atom in range(len(self._atoms))]

    def factors(self, number: int) -> list[tuple[int, list[int]]]:
        """The terms of a real column: their signs, and the columns that are multiplied."""
        terms = self.real(number).terms
        return [(sign, [self.of_atom(atom) for atom in atoms]) for sign, atoms in terms]

    def sole_atom(self, number: int) -> Atom | None:
        """The atom that a column is, and nothing else; None if it is more."""
        column = self._columns[number]
        if isinstance(column, Complex) or column.rounded is not None:
            return None
        if len(column.terms) != 1 or column.terms[0][0] < 0 or len(column.terms[0][1]) != 1:
            return None
        return self._atoms[column.terms[0][1][0]]

    def of_atom(self, atom: int) -> int:
        """The column that is an atom."""
        return self.number(Sum(((1, (atom,)),)))

    def origin(self, number: int) -> int:
        """A column, or what it was before it became an atom that can be multiplied."""
        atom = self.sole_atom(number)
        return atom.columns[0] if atom is not None and atom.function == "value" else number

    def unrounded(self, number: int) -> int:
        """A column, or the atom that it was before it was rounded."""
        atom = self.sole_atom(number)
        return atom.columns[0] if atom is not None and atom.function == "rounded" else number

    def rounding_of(self, numbers: Sequence[int], name: str) -> Rounding:
        """How columns were rounded, which must be the same for each."""
        columns = [self.real(number) for number in numbers]
        found = {column.rounded for column in columns}
        if len(found) > 1:
            raise NotFusedError(f"{name}: wanted all columns rounded alike")
        return Rounding(found.pop(), any(column.early for column in columns))

    # ---- operations; dtype is that of the node that computes them ------------------------------

    def function(
        self,
        function: str,
        *columns: int,
        dtype: torch.dtype,
        other: float | fx.Node | tuple[fx.Node, int, str] | None = None,
    ) -> int:
        """A column that is an atom."""
        atom = self._simplified(Atom(function, columns, dtype, other))
        if atom not in self._atom_numbers:
            self._atom_numbers[atom] = len(self._atoms)
            self._atoms.append(atom)
        return self.of_atom(self._atom_numbers[atom])

    def _simplified(self, atom: Atom) -> Atom:
        """One name for what has several: 1 / sqrt is rsqrt, a sum over its length is a mean."""
        inner = self.sole_atom(atom.columns[0]) if len(atom.columns) == 1 else None
        if inner is None:
            return atom
        dtype = inner.dtype if inner.dtype in LOW_PRECISION else atom.dtype
        if (atom.function, inner.function) == ("reciprocal", "sqrt"):
            return Atom("rsqrt", inner.columns, dtype)
        is_share = (atom.function, inner.function) == ("times", "sum")
        if is_share and atom.other == 1 / len(inner.columns):
            return Atom("mean", inner.columns, dtype)
        return atom

    def multiply(self, a: int, b: int, dtype: torch.dtype) -> int:
        """a * b."""
        left, right = self._columns[a], self._columns[b]
        if isinstance(left, Complex) and isinstance(right, Complex):
            minus = self.negate(self.multiply(left.imag, right.imag, dtype))
            real = self.add(self.multiply(left.real, right.real, dtype), minus, dtype)
            cross = self.multiply(left.imag, right.real, dtype)
            imag = self.add(self.multiply(left.real, right.imag, dtype), cross, dtype)
            return self.number(Complex(real, imag))
        if a == b:
            return self.function("square", a, dtype=dtype)
        a, b = self._as_factor(a, b, dtype), self._as_factor(b, a, dtype)
        left, right = self.real(a), self.real(b)
        (sign_a, atoms_a), (sign_b, atoms_b) = left.terms[0], right.terms[0]
        term = (sign_a * sign_b, tuple(sorted(atoms_a + atoms_b)))
        return self._computed((term,), left, right, dtype=dtype)

    def _as_factor(self, factor: int, other: int, dtype: torch.dtype) -> int:
        """A factor that may be multiplied out: one term, and not too long beside the other."""
        terms = self.real(factor).terms
        degree, degree_of_other = len(terms[0][1]), len(self.real(other).terms[0][1])
        if len(terms) == 1 and (degree == 1 or degree + degree_of_other <= self.max_degree):
            return factor
        return self.function("value", factor, dtype=dtype)

    def add(self, a: int, b: int, dtype: torch.dtype) -> int:
        """a + b."""
        left, right = self._columns[a], self._columns[b]
        if isinstance(left, Complex) and isinstance(right, Complex):
            real = self.add(left.real, right.real, dtype)
            return self.number(Complex(real, self.add(left.imag, right.imag, dtype)))
        a, b = self._as_summand(a, dtype), self._as_summand(b, dtype)
        left, right = self.real(a), self.real(b)
        return self._computed(left.terms + right.terms, left, right, dtype=dtype)

    def _as_summand(self, a: int, dtype: torch.dtype) -> int:
        return a if len(self.real(a).terms) == 1 else self.function("value", a, dtype=dtype)

    def _computed(self, terms: tuple[Term, ...], *operands: Sum, dtype: torch.dtype) -> int:
        rounded = dtype if dtype in LOW_PRECISION else None
        early = any(x.early or x.rounded is not None for x in operands)
        return self.number(Sum(tuple(sorted(terms)), rounded, early))

    def negate(self, a: int) -> int:
        """-a, which is exact."""
        column = self._columns[a]
        if isinstance(column, Complex):
            return self.number(Complex(self.negate(column.real), self.negate(column.imag)))
        terms = sorted((-sign, atoms) for sign, atoms in column.terms)
        return self.number(column._replace(terms=tuple(terms)))

    def cast(self, a: int, dtype: torch.dtype) -> int:
        """a, rounded if `dtype` is too narrow for it."""
        column = self.real(a)
        sign, atoms = column.terms[0]
        if len(column.terms) == 1 and len(atoms) == 1 and column.rounded is None:
            own = self._atoms[atoms[0]].dtype
            if own == dtype or (own in LOW_PRECISION and dtype == torch.float32):
                return a
            rounded = self.function("rounded", self.of_atom(atoms[0]), dtype=dtype)
            return rounded if sign > 0 else self.negate(rounded)
        if dtype == torch.float32 or column.rounded == dtype:
            return a
        early = column.early or column.rounded is not None
        return self.number(column._replace(rounded=dtype, early=early))
