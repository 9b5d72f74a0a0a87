"""Linear normal form of integer expressions: sum of coefficient * atom + constant.

Atoms are whatever is not a sum or a product by a constant: index variables, sizes, loads, `//`, `%`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
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
    low: float = form.constant
    high: float = form.constant
    for atom, c in form.terms:
        lo, hi = atom_range(atom, ranges)
        low += min(c * lo, c * hi)
        high += max(c * lo, c * hi)
    return low, high


def atom_range(atom: E.Expr, ranges: dict[str, Range]) -> Range:
    """Bounds of an INT expression by interval arithmetic: indices and sizes are never negative."""
    return _value_range(atom, tuple(ranges.items()))


@functools.lru_cache(maxsize=4096)
def _value_range(e: E.Expr, ranges: tuple[tuple[str, Range], ...]) -> Range:
    if e.op == "const":
        return int(e.value), int(e.value)
    if e.op in ("index", "size"):
        return dict(ranges).get(e.value, (0, math.inf))
    if e.op == "to_int" and e.args[0].kind is Kind.BOOL:
        return 0, 1
    if e.op == "load" or e.kind is not Kind.INT or any(a.kind is Kind.FLOAT for a in e.args):
        return _ANYTHING
    operands = [_value_range(a, ranges) for a in e.args if a.kind is Kind.INT]
    rule = _RANGE_RULES.get(e.op)
    return rule(*operands) if rule is not None else _ANYTHING


_ANYTHING: Range = (-math.inf, math.inf)


def _times(a: float, b: float) -> float:
    return 0 if a == 0 or b == 0 else a * b  # 0 * inf is not a number


def _product(x: Range, y: Range) -> Range:
    corners = [_times(a, b) for a in x for b in y]
    return min(corners), max(corners)


def _quotient(x: Range, n: Range) -> Range:
    if n[0] != n[1] or n[0] <= 0:
        return _ANYTHING
    low, high = (b if math.isinf(b) else b // n[0] for b in x)
    return low, high


def _remainder(x: Range, n: Range) -> Range:
    if n[0] <= 0:
        return _ANYTHING
    return x if x[0] >= 0 and x[1] < n[0] else (0, n[1] - 1)


def _absolute(x: Range) -> Range:
    return (0 if x[0] <= 0 <= x[1] else min(abs(x[0]), abs(x[1]))), max(abs(x[0]), abs(x[1]))


def _common_bits(x: Range, y: Range) -> Range:
    """x & y lies between 0 and any non-negative operand."""
    known = [high for low, high in (x, y) if low >= 0]
    return (0, min(known)) if known else _ANYTHING


def _united_bits(x: Range, y: Range) -> Range:
    """x | y and x ^ y of non-negative integers need no more bits than the longer one."""
    if min(x[0], y[0]) < 0:
        return _ANYTHING
    high = max(x[1], y[1])
    return 0, high if math.isinf(high) else (1 << int(high).bit_length()) - 1


_RANGE_RULES: dict[str, Callable[..., Range]] = {
    "add": lambda x, y: (x[0] + y[0], x[1] + y[1]),
    "sub": lambda x, y: (x[0] - y[1], x[1] - y[0]),
    "neg": lambda x: (-x[1], -x[0]),
    "mul": _product,
    "floordiv": _quotient,
    "mod": _remainder,
    "abs": _absolute,
    "minimum": lambda x, y: (min(x[0], y[0]), min(x[1], y[1])),
    "maximum": lambda x, y: (max(x[0], y[0]), max(x[1], y[1])),
    "where": lambda x, y: (min(x[0], y[0]), max(x[1], y[1])),
    "bit_and": _common_bits,
    "bit_or": _united_bits,
    "bit_xor": _united_bits,
}
"""Bounds from the bounds of the INT operands (a `where` has two)."""
