"""Linear normal form of integer expressions: sum of coefficient * atom + constant.

Atoms are whatever is not a sum or a product by a constant: index variables, sizes, loads, `//`, `%`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fa4_inductor.spec import expr as E
from fa4_inductor.spec.ops import Kind

Range = tuple[float, float]
"""Inclusive bounds of an integer; infinite where unknown."""


@dataclass(frozen=True)
class Linear:
    """`sum(coefficient * atom) + constant`; atoms distinct, coefficients non-zero, in a fixed order."""

    terms: tuple[tuple[E.Expr, int], ...]
    constant: int

    def coefficient(self, atom: E.Expr) -> int:
        return dict(self.terms).get(atom, 0)

    def without(self, atom: E.Expr) -> Linear:
        return Linear(tuple(t for t in self.terms if t[0] is not atom), self.constant)

    def __add__(self, other: Linear) -> Linear:
        return _combine(self, other, 1)

    def __sub__(self, other: Linear) -> Linear:
        return _combine(self, other, -1)

    def __mul__(self, factor: int) -> Linear:
        return _scaled(self, factor)

    def shifted(self, by: int) -> Linear:
        return Linear(self.terms, self.constant + by)

    def floordiv(self, divisor: int) -> Linear:
        """floor(self / divisor), divisor > 0; stays linear where the division is exact."""
        if self.constant % divisor == 0 and all(c % divisor == 0 for _, c in self.terms):
            return Linear(tuple((a, c // divisor) for a, c in self.terms), self.constant // divisor)
        return linear(E.call("floordiv", to_expr(self), divisor))

    def negated(self) -> Linear:
        return Linear(tuple((a, -c) for a, c in self.terms), -self.constant)


def linear(e: E.Expr) -> Linear:
    """The linear form of an INT expression."""
    if e.op == "const":
        return Linear((), int(e.value))
    if e.op in ("add", "sub"):
        return _combine(linear(e.args[0]), linear(e.args[1]), 1 if e.op == "add" else -1)
    if e.op == "neg":
        return linear(e.args[0]).negated()
    if e.op == "mul":
        left, right = (linear(a) for a in e.args)
        for factor, rest in ((left, right), (right, left)):
            if not factor.terms:
                return _scaled(rest, factor.constant)
    return Linear(((e, 1),), 0)


def _scaled(form: Linear, factor: int) -> Linear:
    if factor == 0:
        return Linear((), 0)
    return Linear(tuple((a, c * factor) for a, c in form.terms), form.constant * factor)


def _combine(a: Linear, b: Linear, sign: int) -> Linear:
    total = dict(a.terms)
    for atom, c in b.terms:
        total[atom] = total.get(atom, 0) + sign * c
    kept = [(atom, c) for atom, c in total.items() if c]
    return Linear(tuple(sorted(kept, key=lambda t: _order(t[0]))), a.constant + sign * b.constant)


def _order(atom: E.Expr) -> tuple[int, str]:
    ranks = {"q_idx": 0, "kv_idx": 1, "h": 2, "b": 3}
    rank = ranks.get(atom.value, 5) if atom.op == "index" else 4 if atom.op == "size" else 5
    return rank, repr(atom)


def to_expr(form: Linear) -> E.Expr:
    """The shortest expression of a linear form: positive terms first, then negative ones, then the constant."""
    result: E.Expr | None = None
    for atom, c in sorted(form.terms, key=lambda t: t[1] < 0):
        term = atom if abs(c) == 1 else E.call("mul", abs(c), atom)
        if result is None:
            result = term if c > 0 else -term
        else:
            result = result + term if c > 0 else result - term
    if result is None:
        return E.const(form.constant)
    if form.constant:
        result = result + form.constant if form.constant > 0 else result - (-form.constant)
    return result


def bounds(form: Linear, ranges: dict[str, Range]) -> Range:
    """Inclusive bounds of a linear form. `ranges` maps index and size names to bounds; unknown atoms are unbounded.

    Besides the plain interval sum, `q_idx <= seqlen_q - 1` and `kv_idx <= seqlen_k - 1` are used symbolically.
    """
    low, high = _interval_sum(form, ranges)
    low_symbolic, _ = _interval_sum(_extreme(form, -1), ranges)
    _, high_symbolic = _interval_sum(_extreme(form, 1), ranges)
    return max(low, low_symbolic), min(high, high_symbolic)


def _extreme(form: Linear, sign: int) -> Linear:
    """`form` with q_idx and kv_idx at the end of their ranges that makes it largest (sign 1) or smallest (sign -1)."""
    for name, length in (("q_idx", "seqlen_q"), ("kv_idx", "seqlen_k")):
        c = form.coefficient(E.index(name))
        if c * sign > 0:
            last = Linear(((E.size(length), -c),), c)
            form = form.without(E.index(name)) - last
        elif c:
            form = form.without(E.index(name))
    return form


def _interval_sum(form: Linear, ranges: dict[str, Range]) -> Range:
    low = high = float(form.constant)
    for atom, c in form.terms:
        lo, hi = atom_range(atom, ranges)
        low += min(c * lo, c * hi)
        high += max(c * lo, c * hi)
    return low, high


def atom_range(atom: E.Expr, ranges: dict[str, Range]) -> Range:
    """Bounds of one atom: indices and sizes are never negative, `x % n` lies in [0, n), a cast bool in [0, 1]."""
    if atom.op in ("index", "size"):
        return ranges.get(atom.value, (0.0, math.inf))
    if atom.op == "mod" and atom.args[1].is_const and atom.args[1].value > 0:
        return 0.0, float(atom.args[1].value - 1)
    if atom.op == "to_int" and atom.args[0].kind is Kind.BOOL:
        return 0.0, 1.0
    if atom.op == "abs":
        return 0.0, math.inf
    return -math.inf, math.inf
