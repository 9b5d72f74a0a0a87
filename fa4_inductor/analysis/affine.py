"""Integer expressions as `sum(coefficient * atom) + constant`, the form in which constraints are compared and
solved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fa4_inductor.spec.expr import Expr, call, const
from fa4_inductor.spec.ops import Kind


@dataclass(frozen=True)
class Affine:
    """Exact over the integers. `terms` maps an atom (any non-affine INT expression) to its nonzero coefficient."""

    terms: Mapping[Expr, int] = field(default_factory=dict)
    constant: int = 0

    def __add__(self, other: Affine) -> Affine:
        terms = dict(self.terms)
        for atom, coefficient in other.terms.items():
            total = terms.pop(atom, 0) + coefficient
            if total:
                terms[atom] = total
        return Affine(terms, self.constant + other.constant)

    def __mul__(self, factor: int) -> Affine:
        if factor == 0:
            return Affine()
        return Affine({atom: c * factor for atom, c in self.terms.items()}, self.constant * factor)

    def __sub__(self, other: Affine) -> Affine:
        return self + other * -1

    def plus(self, constant: int) -> Affine:
        return Affine(self.terms, self.constant + constant)

    def without(self, atom: Expr) -> Affine:
        return Affine({a: c for a, c in self.terms.items() if a is not atom}, self.constant)

    def floordiv(self, divisor: int) -> Affine:
        """floor(self / divisor), divisor > 0; stays affine where the division is exact."""
        if self.constant % divisor == 0 and all(c % divisor == 0 for c in self.terms.values()):
            return Affine({a: c // divisor for a, c in self.terms.items()}, self.constant // divisor)
        return affine(call("floordiv", self.expr(), divisor))

    def expr(self) -> Expr:
        """As an expression; one text for one form, whatever order it was built in."""
        ordered = sorted(self.terms.items(), key=lambda item: (item[1] < 0, str(item[0])))
        if not ordered:
            return const(self.constant)
        result: Expr | None = None
        for atom, c in ordered:
            scaled = atom if abs(c) == 1 else atom * abs(c)
            if result is None:
                result = scaled if c > 0 else -scaled
            else:
                result = result + scaled if c > 0 else result - scaled
        assert result is not None
        if self.constant:
            result = result + self.constant if self.constant > 0 else result - -self.constant
        return result


def affine(e: Expr) -> Affine:
    """The affine form of an INT expression; what is not affine becomes an atom."""
    if e.is_const:
        return Affine({}, int(e.value))
    if e.op == "add":
        return affine(e.args[0]) + affine(e.args[1])
    if e.op == "sub":
        return affine(e.args[0]) - affine(e.args[1])
    if e.op == "neg":
        return affine(e.args[0]) * -1
    if e.op == "mul":
        left, right = affine(e.args[0]), affine(e.args[1])
        if not left.terms:
            return right * left.constant
        if not right.terms:
            return left * right.constant
    return Affine({e: 1}, 0)


def is_int(e: Expr) -> bool:
    return e.kind is Kind.INT
