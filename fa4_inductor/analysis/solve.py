"""`keep` rewritten so that every constraint on the key is solved for it: `kv_idx < bound` or `kv_idx >= bound`, bound
free of kv_idx.

The result is equivalent over the integers, in negation normal form; what cannot be solved (loads indexed by the key,
remainders, float comparisons) stays as it was. Solved bounds are per-row values, so a kernel compares the key with
two registers, and analyses read intervals off them. Rejected, hence left alone: a comparison in which kv_idx occurs
in two different non-affine terms; `!=`; `^`.
"""

from __future__ import annotations

from fa4_inductor.spec.expr import FALSE, TRUE, Expr, call, const, index
from fa4_inductor.spec.linear import Linear, linear, to_expr
from fa4_inductor.spec.ops import Kind

KV = index("kv_idx")
_NEGATED = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt", "eq": "ne", "ne": "eq"}


def solve(keep: Expr) -> Expr:
    """An equivalent of `keep` with its constraints on kv_idx solved (module docstring)."""
    return _Solver().visit(keep, True)


class _Solver:
    def __init__(self) -> None:
        self.memo: dict[tuple[Expr, bool], Expr] = {}

    def visit(self, e: Expr, positive: bool) -> Expr:
        key = (e, positive)
        if key not in self.memo:
            self.memo[key] = self._visit(e, positive)
        return self.memo[key]

    def _visit(self, e: Expr, positive: bool) -> Expr:
        if e.is_const:
            return const(bool(e.value) == positive)
        if e.op == "not_":
            return self.visit(e.args[0], not positive)
        if e.op in ("and_", "or_"):
            join = both if (e.op == "and_") == positive else either
            return join(self.visit(e.args[0], positive), self.visit(e.args[1], positive))
        if e.op == "where":
            condition, then, other = e.args
            return either(
                both(self.visit(condition, True), self.visit(then, positive)),
                both(self.visit(condition, False), self.visit(other, positive)),
            )
        if e.op in _NEGATED and e.args[0].kind is Kind.INT:  # not for floats: ~(a < b) is not a >= b for a NaN
            return compare(e.op if positive else _NEGATED[e.op], *e.args)
        return e if positive else ~e


def both(a: Expr, b: Expr) -> Expr:
    """a & b, constants folded."""
    if a is FALSE or b is FALSE:
        return FALSE
    return b if a is TRUE or a is b else a if b is TRUE else a & b


def either(a: Expr, b: Expr) -> Expr:
    """a | b, constants folded."""
    if a is TRUE or b is TRUE:
        return TRUE
    return b if a is FALSE or a is b else a if b is FALSE else a | b


def compare(op: str, a: Expr, b: Expr) -> Expr:
    """The comparison of two INT expressions, solved for kv_idx where possible."""
    original = call(op, a, b)
    if "kv_idx" not in original.free or op == "ne":
        return original
    difference = linear(a) - linear(b)
    if op == "eq":
        at_most, at_least = _nonpositive(difference), _nonpositive(difference * -1)
        return original if at_most is None or at_least is None else both(at_most, at_least)
    if op in ("gt", "ge"):
        difference = difference * -1
    solved = _nonpositive(difference.shifted(1) if op in ("lt", "gt") else difference)
    return original if solved is None else solved


def _nonpositive(form: Linear) -> Expr | None:
    """`form <= 0` solved for kv_idx, or None."""
    terms = [(atom, c) for atom, c in form.terms if "kv_idx" in atom.free]
    if not terms:
        return call("le", to_expr(form), 0)
    if len(terms) > 1:
        return None
    atom, c = terms[0]
    rest = form.without(atom)
    if atom is KV:
        if c > 0:
            return call("lt", KV, to_expr((rest * -1).floordiv(c).shifted(1)))
        return call("ge", KV, to_expr((rest * -1).floordiv(-c) * -1))
    if atom.op == "floordiv" and atom.args[1].is_const and atom.args[1].value > 0:
        return _floordiv(linear(atom.args[0]), int(atom.args[1].value), c, rest)
    if atom.op == "abs":
        inside = linear(atom.args[0])
        return _join(inside * c + rest, inside * -c + rest, both if c > 0 else either)
    if atom.op in ("maximum", "minimum"):
        left, right = (linear(a) * c + rest for a in atom.args)
        return _join(left, right, both if (atom.op == "maximum") == (c > 0) else either)
    return None


def _floordiv(x: Linear, divisor: int, c: int, rest: Linear) -> Expr | None:
    """`c * (x // divisor) + rest <= 0`, from x // n <= g <=> x <= n*g + n - 1 and x // n >= g <=> x >= n*g."""
    if c > 0:
        limit = (rest * -1).floordiv(c)
        return _nonpositive((x - limit * divisor).shifted(1 - divisor))
    limit = (rest * -1).floordiv(-c) * -1
    return _nonpositive(limit * divisor - x)


def _join(left: Linear, right: Linear, how: object) -> Expr | None:
    a, b = _nonpositive(left), _nonpositive(right)
    if a is None or b is None:
        return None
    return both(a, b) if how is both else either(a, b)
