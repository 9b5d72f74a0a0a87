"""How expressions decompose: the stage at which a value can be computed, and the score as slope * score + bias."""

from __future__ import annotations

import enum

from fa4_inductor.spec.expr import Expr, call, const, walk


class Stage(enum.IntEnum):
    """How often a value changes: once per (b, h), per query row, per key column, or per element."""

    UNIFORM = 0
    ROW = 1
    COLUMN = 2
    ELEMENT = 3


def stage(e: Expr) -> Stage:
    """The cheapest stage at which `e` can be computed."""
    if "score" in e.free or {"q_idx", "kv_idx"} <= e.free:
        return Stage.ELEMENT
    if "q_idx" in e.free:
        return Stage.ROW
    return Stage.COLUMN if "kv_idx" in e.free else Stage.UNIFORM


def affine_in_score(e: Expr) -> tuple[Expr, Expr] | None:
    """(slope, bias), both free of `score`, with e == slope * score + bias; None when `e` is not affine in the score."""
    if "score" not in e.free:
        return const(0.0), e
    if e.op == "score":
        return const(1.0), const(0.0)
    if e.op == "neg":
        part = affine_in_score(e.args[0])
        return part and (-part[0], -part[1])
    if e.op in ("add", "sub"):
        a, b = affine_in_score(e.args[0]), affine_in_score(e.args[1])
        return a and b and (_sum(e.op, a[0], b[0]), _sum(e.op, a[1], b[1]))
    if e.op == "mul" and any("score" not in a.free for a in e.args):
        varying, factor = e.args if "score" in e.args[0].free else (e.args[1], e.args[0])
        part = affine_in_score(varying)
        return part and (_product(part[0], factor), _product(part[1], factor))
    if e.op == "div" and "score" not in e.args[1].free:
        part = affine_in_score(e.args[0])
        return part and (part[0] / e.args[1], part[1] if _is(part[1], 0.0) else part[1] / e.args[1])
    return None


def _is(e: Expr, value: float) -> bool:
    return e.is_const and e.value == value


def _sum(op: str, a: Expr, b: Expr) -> Expr:
    if _is(b, 0.0):
        return a
    if _is(a, 0.0):
        return b if op == "add" else -b
    return call(op, a, b)


def _product(a: Expr, b: Expr) -> Expr:
    if _is(a, 0.0) or _is(b, 1.0):
        return a
    return b if _is(a, 1.0) else a * b


def terms(e: Expr) -> list[Expr]:
    """The summands of nested additions, left to right; subtracted terms appear negated."""
    if e.op == "add":
        return [*terms(e.args[0]), *terms(e.args[1])]
    if e.op == "sub":
        return [*terms(e.args[0]), *(-t for t in terms(e.args[1]))]
    return [e]


def total(parts: list[Expr]) -> Expr:
    """The sum of `parts` (FLOAT), 0 for none; negated parts are subtracted."""
    result = const(0.0)
    for part in parts:
        result = result - part.args[0] if part.op == "neg" and not _is(result, 0.0) else _sum("add", result, part)
    return result


# Ops that give finite values for finite operands (in the range of indices and lengths).
_FINITE_OPS = frozenset({"const", "index", "size", "add", "sub", "mul", "neg", "minimum", "maximum", "abs", "to_float"})


def drop_row_constants(score: Expr) -> Expr:
    """`score` without the additive terms that are equal for all keys of a row.

    softmax(s + c(q)) == softmax(s) for finite c, so this leaves the output as it is; it shifts the LSE, and is wrong
    beside a sink. A term that loads may be infinite and stays. Terms are not multiplied out to find more of them,
    since that loses digits when large parts cancel.
    """
    kept = [t for t in terms(score) if t.free & {"kv_idx", "score"} or any(n.op not in _FINITE_OPS for n in walk(t))]
    if len(kept) == len(terms(score)):
        return score
    return total(kept)
