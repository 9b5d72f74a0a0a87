"""P as a sum of softmaxes with factors that are constant in a row.

A factor that does not depend on the key commutes with the product: (f * P) @ V = f * (P @ V), and a sum distributes:
(P1 - f * P2) @ V = P1 @ V - f * (P2 @ V). So does a selection by row, where(c, P1, P2). What is left of a term is a
softmax, perhaps with probabilities set to zero, which `probabilities.distribution` reads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fa4_inductor.patterns.elements import has_atoms
from fa4_inductor.spec import expr as E
from fa4_inductor.spec.ops import Kind

RESULT = E.score()
"""In an epilogue: the element of the attention's result."""


@dataclass(frozen=True)
class Zeroing:
    """Probabilities become 0 where `condition` holds. `by_factor`: they were multiplied by 0, which keeps a NaN."""

    condition: E.Expr
    by_factor: bool


@dataclass(frozen=True)
class Term:
    """`p`, meant to be a softmax, whose product with V becomes `epilogue` (of RESULT, b, h and q_idx).

    `zeroed` are the zeros written into it, `cleaned` tells that a NaN in it becomes 0.
    """

    p: E.Expr
    epilogue: E.Expr = RESULT
    zeroed: tuple[Zeroing, ...] = ()
    cleaned: bool = False


def terms_of(p: E.Expr) -> list[Term]:
    """The terms of P; a single one with P itself if it is no such sum."""
    return _split(Term(p))


def _split(term: Term) -> list[Term]:
    """Takes the outermost operation off, as long as it is linear in P."""
    p = term.p
    if p.op == "to_float":
        return _split(replace(term, p=p.args[0]))
    if p.op == "neg":
        return _split(_after(term, p.args[0], -RESULT))
    if p.op in ("mul", "div"):
        return _split_scaled(term)
    if p.op in ("add", "sub") and not term.cleaned and all(map(has_atoms, p.args)):
        left = _split(replace(term, p=p.args[0]))
        return left + _split(_after(term, p.args[1], RESULT if p.op == "add" else -RESULT))
    if p.op == "where":
        return _split_selection(term)
    return [term]


def _after(term: Term, p: E.Expr, change: E.Expr) -> Term:
    """`term` with `change` (of RESULT) done to `p` first."""
    return replace(term, p=p, epilogue=E.substitute(term.epilogue, {RESULT: change}))


def _split_scaled(term: Term) -> list[Term]:
    p = term.p
    for inner, factor in (p.args, p.args[::-1]) if p.op == "mul" else (p.args,):
        if is_row_constant(factor) and not term.cleaned:
            return _split(_after(term, inner, E.call(p.op, RESULT, factor)))
        mask = mask_of(factor) if p.op == "mul" else None
        if mask is not None:
            return _split(replace(term, p=inner, zeroed=(*term.zeroed, Zeroing(~mask, by_factor=True))))
    return [term]


def _split_selection(term: Term) -> list[Term]:
    condition, a, b = term.p.args
    test = _test_of(condition)
    if test is not None:
        name, tested = test
        if tested is _inner(b) and (name == "inf" or is_zero(a)):
            return _split(replace(term, p=b, cleaned=term.cleaned or name == "nan"))
        return [term]
    if is_row_constant(condition):
        sides = ((a, E.call("where", condition, RESULT, 0.0)), (b, E.call("where", condition, 0.0, RESULT)))
        return [t for p, change in sides if not is_zero(p) for t in _split(_after(term, p, change))]
    if "score" in condition.free or has_atoms(condition):
        return [term]
    for inner, zero, dropped in ((a, b, ~condition), (b, a, condition)):
        if is_zero(zero):
            return _split(replace(term, p=inner, zeroed=(*term.zeroed, Zeroing(dropped, by_factor=False))))
    return [term]


def is_row_constant(e: E.Expr) -> bool:
    """Is `e` the same for all keys of a row, and no value of the softmax?"""
    return not {"kv_idx", "score"} & e.free and not has_atoms(e)


def mask_of(factor: E.Expr) -> E.Expr | None:
    """The bool that a factor of 0 or 1 is made of, if it knows nothing of the scores."""
    while factor.op in ("to_float", "to_int"):
        factor = factor.args[0]
    return None if factor.kind is not Kind.BOOL or "score" in factor.free or has_atoms(factor) else factor


def _test_of(condition: E.Expr) -> tuple[str, E.Expr] | None:
    """("nan", x) for x != x, ("inf", x) for x == inf or x == -inf: what isnan and nan_to_num are made of."""
    if condition.op == "ne" and condition.args[0] is condition.args[1]:
        return "nan", _inner(condition.args[0])
    if condition.op == "eq" and condition.args[1].is_const and abs(condition.args[1].value) == math.inf:
        return "inf", _inner(condition.args[0])
    return None


def _inner(e: E.Expr) -> E.Expr:
    """`e` without the tests for NaN and infinity and the casts around it."""
    while True:
        if e.op == "to_float":
            e = e.args[0]
        elif e.op == "where" and _test_of(e.args[0]) is not None:
            e = e.args[2]
        else:
            return e


def is_zero(e: E.Expr) -> bool:
    """Is `e` the number 0?"""
    return e.is_const and e.value == 0
