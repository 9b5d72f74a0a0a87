"""Is a tile of query rows and keys empty, mixed or full? A test from the extremes of what `keep` compares.

Documents (`aux0[b, kv_idx] == aux0[b, q_idx]`) need the least and greatest id of the tile's rows and of its keys:
disjoint ranges keep nothing, four equal ids keep everything. A test is conservative for any data: not `possible` means
that no element is kept, `certain` that all are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fa4_inductor.analysis.intervals import Q, largest, row_extent, smallest
from fa4_inductor.analysis.parts import Stage, stage
from fa4_inductor.analysis.solve import KV, both, either
from fa4_inductor.spec.expr import FALSE, TRUE, Expr, call, const
from fa4_inductor.spec.linear import linear
from fa4_inductor.spec.ops import Kind

KV_LO = Expr("index", Kind.INT, (), "kv_lo")
KV_HI = Expr("index", Kind.INT, (), "kv_hi")
_COMPARE = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})
_Extent = tuple[Expr, Expr]
_Test = tuple[Expr, Expr]


@dataclass(frozen=True)
class TileTest:
    """The test of the tile of rows q_lo..q_hi and keys kv_lo..kv_hi (inclusive).

    Attributes:
        possible, certain: BOOL over uniform values, these four names and the extremes below.
        rows, columns: INT expressions of one row or key whose extremes over the tile the test reads, as
            `row_extreme(i, greatest)` and `column_extreme(i, greatest)`.
        elements: some part of keep is only known element by element, and counts as possible and not certain.
    """

    possible: Expr
    certain: Expr
    rows: tuple[Expr, ...]
    columns: tuple[Expr, ...]
    elements: bool


def row_extreme(i: int, greatest: bool) -> Expr:
    """The least or greatest value of `TileTest.rows[i]`."""
    return Expr("index", Kind.INT, (), f"rows[{i}][{int(greatest)}]")


def column_extreme(i: int, greatest: bool) -> Expr:
    """The least or greatest value of `TileTest.columns[i]`."""
    return Expr("index", Kind.INT, (), f"columns[{i}][{int(greatest)}]")


def tile_test(keep: Expr) -> TileTest:
    """The test for a solved `keep` (analysis.solve)."""
    builder = _Builder()
    possible, certain = builder.test(keep)
    return TileTest(possible, certain, tuple(builder.rows), tuple(builder.columns), builder.elements)


def is_closed_form(keep: Expr) -> bool:
    """Whether `analysis.intervals` bounds the kept keys of several rows by every term of a solved `keep`: then there is
    nothing that a look at the data could add."""
    if keep.op in ("and_", "or_"):
        return all(map(is_closed_form, keep.args))
    if keep.op in ("lt", "ge") and keep.args[0] is KV and "kv_idx" not in keep.args[1].free:
        return row_extent(keep.args[1]) is not None
    return not keep.free & {"kv_idx", "q_idx"}


class _Builder:
    def __init__(self) -> None:
        self.rows: list[Expr] = []
        self.columns: list[Expr] = []
        self.elements = False

    def test(self, e: Expr) -> _Test:
        """(possible, certain) of a BOOL expression."""
        if stage(e) is Stage.UNIFORM:
            return e, e
        if e.op in ("and_", "or_"):
            join = both if e.op == "and_" else either
            (p0, c0), (p1, c1) = self.test(e.args[0]), self.test(e.args[1])
            return join(p0, p1), join(c0, c1)
        if e.op == "not_":
            possible, certain = self.test(e.args[0])
            return _not(certain), _not(possible)
        if e.op in _COMPARE and e.args[0].kind is not Kind.FLOAT:
            a, b = (call("to_int", x) for x in e.args)
            if stage(e) is Stage.ELEMENT or (_is_free(a) and _is_free(b)):
                extents = self.extent(a), self.extent(b)
                if extents[0] is not None and extents[1] is not None:
                    return _comparison(e.op, extents[0], extents[1])
        if stage(e) is Stage.ELEMENT:
            self.elements = True
            return TRUE, FALSE
        least, greatest = self._reduced(call("to_int", e))
        return call("ne", greatest, 0), call("ne", least, 0)

    def extent(self, e: Expr) -> _Extent | None:
        """(least, greatest) of an INT expression over the tile; None where only its elements tell."""
        if stage(e) is Stage.UNIFORM:
            return e, e
        if e is KV:
            return KV_LO, KV_HI
        if stage(e) is Stage.ROW:
            known = row_extent(e) if _is_free(e) else None
            return known or self._reduced(e)
        if stage(e) is Stage.COLUMN:
            return self._reduced(e)
        rule = _EXTENTS.get(e.op)
        if rule is None or e.kind is not Kind.INT or e.args[0].kind is not Kind.INT:
            return None
        parts = [self.extent(a) for a in e.args]
        known_parts = [p for p in parts if p is not None]
        return rule(*known_parts) if len(known_parts) == len(parts) else None

    def _reduced(self, e: Expr) -> _Extent:
        """The extremes of a value of the row, or of the key, which the kernel finds."""
        of_row = stage(e) is Stage.ROW
        values = self.rows if of_row else self.columns
        if e not in values:
            values.append(e)
        extreme = row_extreme if of_row else column_extreme
        return extreme(values.index(e), False), extreme(values.index(e), True)


def _is_free(e: Expr) -> bool:
    """The extremes are those of the index itself, and exact: nothing needs to be reduced."""
    if stage(e) is Stage.UNIFORM or e is KV:
        return True
    return stage(e) is Stage.ROW and all(atom is Q or "q_idx" not in atom.free for atom, _ in linear(e).terms)


def _not(e: Expr) -> Expr:
    return const(not e.value) if e.is_const else ~e


def _comparison(op: str, a: _Extent, b: _Extent) -> _Test:
    if op in ("gt", "ge"):
        possible, certain = _comparison("lt" if op == "ge" else "le", a, b)
        return _not(certain), _not(possible)
    if op == "ne":
        possible, certain = _comparison("eq", a, b)
        return _not(certain), _not(possible)
    if op == "eq":
        overlap = both(call("le", a[0], b[1]), call("le", b[0], a[1]))
        return overlap, both(both(call("eq", a[0], a[1]), call("eq", b[0], b[1])), call("eq", a[0], b[0]))
    return call(op, a[0], b[1]), call(op, a[1], b[0])


_EXTENTS: dict[str, Callable[..., _Extent]] = {
    "add": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "neg": lambda a: (-a[1], -a[0]),
    "abs": lambda a: (largest(const(0), largest(a[0], -a[1])), largest(a[1], -a[0])),
    "minimum": lambda a, b: (smallest(a[0], b[0]), smallest(a[1], b[1])),
    "maximum": lambda a, b: (largest(a[0], b[0]), largest(a[1], b[1])),
}
