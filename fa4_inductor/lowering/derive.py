"""The derivative of a score program with respect to the scaled score or to what it loads, as another expression.

    dS = P * (dP - delta) * d E_score / d score * softmax_scale
    d aux[i] = the sum of P * (dP - delta) * d E_score / d aux[i] over all scores that load aux[i]

Conventions where a function has a kink: minimum and maximum take the derivative of their second operand at a tie, |x|
that of x at 0. Whatever is constant almost everywhere (floor, comparisons, conversions to int, indices) has the
derivative 0.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable

from fa4_inductor.spec.expr import Expr, call, const, score, walk
from fa4_inductor.spec.ops import Kind
from fa4_inductor.spec.simplify import simplify

_ZERO, _ONE = const(0.0), const(1.0)
_Rule = Callable[..., Expr]
"""`rule(node, *args, *derivatives of args)`."""

_RULES: dict[str, _Rule] = {
    "add": lambda e, a, b, da, db: _plus(da, db),
    "sub": lambda e, a, b, da, db: _plus(da, _times(const(-1.0), db)),
    "mul": lambda e, a, b, da, db: _plus(_times(da, b), _times(a, db)),
    "div": lambda e, a, b, da, db: _over(_plus(da, _times(_times(const(-1.0), e), db)), b),
    "mod": lambda e, a, b, da, db: _plus(da, _times(_times(const(-1.0), call("floor", a / b)), db)),
    "neg": lambda e, a, da: _times(const(-1.0), da),
    "minimum": lambda e, a, b, da, db: call("where", a < b, da, db),
    "maximum": lambda e, a, b, da, db: call("where", a > b, da, db),
    "abs": lambda e, a, da: call("where", a >= 0.0, da, _times(const(-1.0), da)),
    "where": lambda e, c, a, b, dc, da, db: call("where", c, da, db),
    "exp": lambda e, a, da: _times(e, da),
    "exp2": lambda e, a, da: _times(e * math.log(2.0), da),
    "log": lambda e, a, da: _over(da, a),
    "log2": lambda e, a, da: _over(_times(const(1.0 / math.log(2.0)), da), a),
    "sqrt": lambda e, a, da: _over(_times(const(0.5), da), e),
    "rsqrt": lambda e, a, da: _times(e * e * e * -0.5, da),
    "tanh": lambda e, a, da: _times(_ONE - e * e, da),
    "sigmoid": lambda e, a, da: _times(e * (_ONE - e), da),
    "erf": lambda e, a, da: _times(call("exp", -(a * a)) * (2.0 / math.sqrt(math.pi)), da),
    "sin": lambda e, a, da: _times(call("cos", a), da),
    "cos": lambda e, a, da: _times(-call("sin", a), da),
    "pow": lambda e, a, b, da, db: _plus(_times(b * call("pow", a, b - 1.0), da), _times(e * call("log", a), db)),
}
"""Ops without a rule are constant almost everywhere."""


@functools.lru_cache(maxsize=1024)
def score_derivative(program: Expr) -> Expr:
    """d `program` / d `score`, a FLOAT expression over the same names; `program` is the `score` of a spec."""
    return derivative_by(program, score())


@functools.lru_cache(maxsize=1024)
def derivative_by(program: Expr, variable: Expr) -> Expr:
    """d `program` / d `variable`, which is `score` or a FLOAT load."""
    derivative: dict[Expr, Expr] = {}
    for node in walk(program):
        derivative[node] = _derivative(node, [derivative[a] for a in node.args], variable)
    return simplify(derivative[program])


def learned_loads(program: Expr, slots: Iterable[int]) -> tuple[Expr, ...]:
    """The FLOAT loads of `program` from aux tensors in these slots, in the order of the slots and of the program."""
    loads = [n for n in walk(program) if n.op == "load" and n.kind is Kind.FLOAT]
    return tuple(n for slot in slots for n in loads if n.value == slot)


def _derivative(node: Expr, of_args: list[Expr], variable: Expr) -> Expr:
    if node is variable:
        return _ONE
    rule = _RULES.get(node.op)
    if rule is None or node.kind is not Kind.FLOAT or all(d is _ZERO for d in of_args):
        return _ZERO
    return rule(node, *node.args, *of_args)


def _plus(a: Expr, b: Expr) -> Expr:
    return b if a is _ZERO else a if b is _ZERO else a + b


def _times(a: Expr, b: Expr) -> Expr:
    """a * b, where 0 times anything is 0 (what does not depend on the score may be infinite)."""
    return _ZERO if _ZERO in (a, b) else b if a is _ONE else a if b is _ONE else a * b


def _over(a: Expr, b: Expr) -> Expr:
    return _ZERO if a is _ZERO else a / b
