"""Kept keys of a range of query rows, as closed expressions: what must be visited, and what needs no mask.

Both work on a solved `keep` (analysis.solve) and are conservative: `visited` contains every key that some row of the
range keeps, `full` only keys that every row keeps. A bound is known over rows [q_lo, q_hi] when it is monotone in
q_idx step by step (sums, products, floor division, min, max); a bound that loads by row is not, and then the whole
range stands (visited) or nothing (full).
"""

from __future__ import annotations

from dataclasses import dataclass

from fa4_inductor.analysis.solve import KV
from fa4_inductor.spec.expr import FALSE, TRUE, Expr, call, const, size, substitute
from fa4_inductor.spec.linear import linear, to_expr
from fa4_inductor.spec.ops import Kind

Q = Expr("index", Kind.INT, (), "q_idx")
Q_LO = Expr("index", Kind.INT, (), "q_lo")
Q_HI = Expr("index", Kind.INT, (), "q_hi")
_ZERO = const(0)
_SEQLEN_K = size("seqlen_k")


@dataclass(frozen=True)
class Interval:
    """Keys [lo, hi); None is unbounded. Expressions over b, h, sizes, uniform loads, and `q_lo`, `q_hi` (rows,
    inclusive)."""

    lo: Expr | None = None
    hi: Expr | None = None

    def clipped(self) -> tuple[Expr, Expr]:
        """Inside [0, seqlen_k)."""
        lo = _ZERO if self.lo is None else largest(_ZERO, self.lo)
        hi = _SEQLEN_K if self.hi is None else smallest(_SEQLEN_K, self.hi)
        return lo, hi

    def of_row(self) -> Interval:
        """The interval of the single row q_idx."""
        row = {Q_LO: Q, Q_HI: Q}
        lo = None if self.lo is None else substitute(self.lo, row)
        hi = None if self.hi is None else substitute(self.hi, row)
        return Interval(lo, hi)


EVERYTHING = Interval()
NOTHING = Interval(_ZERO, _ZERO)


def smallest(a: Expr, b: Expr) -> Expr:
    return a if a is b else call("minimum", a, b)


def largest(a: Expr, b: Expr) -> Expr:
    return a if a is b else call("maximum", a, b)


def visited(keep: Expr, single_row: bool = False) -> Interval:
    """Keys outside it are dropped by every row q_lo..q_hi. `keep` must be solved.

    single_row: the interval of the row `q_idx` instead. It may load by row, so it can be tighter than that of a range
    of one row.
    """
    if keep is TRUE:
        return EVERYTHING
    if keep is FALSE:
        return NOTHING
    if keep.op in ("and_", "or_"):
        join = _intersect if keep.op == "and_" else _hull
        return join(visited(keep.args[0], single_row), visited(keep.args[1], single_row))
    if (bound := _solved(keep)) is not None:
        extent = _extent(bound, single_row)
        if extent is None:
            return EVERYTHING
        return Interval(hi=extent[1]) if keep.op == "lt" else Interval(lo=extent[0])
    return _switched(keep, single_row) or EVERYTHING


def full(keep: Expr, single_row: bool = False) -> Interval:
    """Keys inside it are kept by every row q_lo..q_hi. `keep` must be solved. single_row: as in `visited`."""
    if keep is TRUE:
        return EVERYTHING
    if keep.op in ("and_", "or_"):
        join = _intersect if keep.op == "and_" else _union_or_longer
        return join(full(keep.args[0], single_row), full(keep.args[1], single_row))
    if (bound := _solved(keep)) is not None:
        extent = _extent(bound, single_row)
        if extent is None:
            return NOTHING
        return Interval(hi=extent[0]) if keep.op == "lt" else Interval(lo=extent[1])
    return _switched(keep, single_row) or NOTHING


def _extent(bound: Expr, single_row: bool) -> tuple[Expr, Expr] | None:
    return (bound, bound) if single_row else row_extent(bound)


def _solved(keep: Expr) -> Expr | None:
    """The bound of `kv_idx < bound` or `kv_idx >= bound`."""
    if keep.op in ("lt", "ge") and keep.args[0] is KV and "kv_idx" not in keep.args[1].free:
        return keep.args[1]
    return None


def _switched(condition: Expr, single_row: bool) -> Interval | None:
    """A condition on (b, h) alone, or on the single row, keeps all keys or none."""
    if condition.free & ({"kv_idx"} if single_row else {"kv_idx", "q_idx"}):
        return None
    return Interval(hi=call("where", condition, _SEQLEN_K, _ZERO))


def _intersect(a: Interval, b: Interval) -> Interval:
    if NOTHING in (a, b):
        return NOTHING
    lo = a.lo if b.lo is None else b.lo if a.lo is None else largest(a.lo, b.lo)
    hi = a.hi if b.hi is None else b.hi if a.hi is None else smallest(a.hi, b.hi)
    return Interval(lo, hi)


def _hull(a: Interval, b: Interval) -> Interval:
    """Contains both; a side that turns out empty at run time only makes it larger than needed."""
    if a == NOTHING:
        return b
    if b == NOTHING:
        return a
    lo = None if a.lo is None or b.lo is None else smallest(a.lo, b.lo)
    hi = None if a.hi is None or b.hi is None else largest(a.hi, b.hi)
    return Interval(lo, hi)


def _union_or_longer(a: Interval, b: Interval) -> Interval:
    """The union where the two touch, else the longer one, decided at run time unless they share an end."""
    if NOTHING in (a, b):
        return b if a == NOTHING else a
    if a.lo is b.lo or a.hi is b.hi:
        return _hull(a, b)
    (a_lo, a_hi), (b_lo, b_hi) = a.clipped(), b.clipped()
    touch = call("le", a_lo, b_hi) & call("le", b_lo, a_hi)
    a_longer = call("ge", a_hi - a_lo, b_hi - b_lo)
    lo = call("where", touch, smallest(a_lo, b_lo), call("where", a_longer, a_lo, b_lo))
    hi = call("where", touch, largest(a_hi, b_hi), call("where", a_longer, a_hi, b_hi))
    return Interval(lo, hi)


def row_extent(e: Expr) -> tuple[Expr, Expr] | None:
    """(least, greatest) value of an INT expression without kv_idx over rows q_lo..q_hi; None when it cannot be
    bounded."""
    if "q_idx" not in e.free:
        return e, e
    if e is Q:
        return Q_LO, Q_HI
    if e.kind is not Kind.INT or e.op == "load":
        return None
    if e.op in ("add", "sub", "neg", "mul"):
        return _linear_extent(e)
    if e.op == "where":
        return _where_extent(e)
    extents = [row_extent(a) for a in e.args]
    if any(x is None for x in extents):
        return None
    known = [x for x in extents if x is not None]
    if e.op in ("minimum", "maximum"):
        return call(e.op, known[0][0], known[1][0]), call(e.op, known[0][1], known[1][1])
    if e.op in ("floordiv", "mod") and e.args[1].is_const and e.args[1].value > 0:
        divisor = e.args[1]
        if e.op == "mod":
            return _ZERO, divisor - 1
        return call("floordiv", known[0][0], divisor), call("floordiv", known[0][1], divisor)
    if e.op == "abs":
        least, greatest = known[0]
        return largest(_ZERO, largest(least, -greatest)), largest(-least, greatest)
    return None


def _linear_extent(e: Expr) -> tuple[Expr, Expr] | None:
    """Sum of the extents of the terms; each atom occurs once, so equal atoms have cancelled before."""
    form = linear(e)
    least = greatest = const(form.constant)
    for atom, c in form.terms:
        extent = _product_extent(atom) if atom.op == "mul" else row_extent(atom)
        if extent is None:
            return None
        low, high = (extent[0] * c, extent[1] * c) if c > 0 else (extent[1] * c, extent[0] * c)
        least, greatest = least + low, greatest + high
    return to_expr(linear(least)), to_expr(linear(greatest))


def _product_extent(e: Expr) -> tuple[Expr, Expr] | None:
    """A product of two non-constants: the extremes are among the products of the ends."""
    if "q_idx" not in e.free:
        return e, e
    extents = [row_extent(a) for a in e.args]
    if extents[0] is None or extents[1] is None:
        return None
    corners = [a * b for a in extents[0] for b in extents[1]]
    least = greatest = corners[0]
    for corner in corners[1:]:
        least, greatest = smallest(least, corner), largest(greatest, corner)
    return least, greatest


def _where_extent(e: Expr) -> tuple[Expr, Expr] | None:
    condition, then, other = e.args
    a, b = row_extent(then), row_extent(other)
    if a is None or b is None:
        return None
    if "q_idx" in condition.free:
        return smallest(a[0], b[0]), largest(a[1], b[1])
    return call("where", condition, a[0], b[0]), call("where", condition, a[1], b[1])
