"""Case splits on selections: an expression is simplified in each branch of an inner `where`, under its condition."""

from __future__ import annotations

from fa4_inductor.patterns.space import Space
from fa4_inductor.spec import expr as E
from fa4_inductor.spec.linear import Range, linear
from fa4_inductor.spec.simplify import simplify

MAX_SPLITS = 6


def split_cases(space: Space, e: E.Expr, budget: int = MAX_SPLITS) -> E.Expr:
    """`e`, or a constant if every branch of its selections on indices simplifies to that constant."""
    result = _split(e, space.bounds(), budget)
    return result if result.is_const else space.simplify(e)


def _split(e: E.Expr, ranges: dict[str, Range], budget: int) -> E.Expr:
    e = simplify(e, ranges)
    if e.is_const or budget == 0:
        return e
    select = next((n for n in E.walk(e) if n.op == "where" and _limit(n.args[0]) is not None), None)
    if select is None:
        return e
    condition, a, b = select.args
    yes = _split(E.substitute(e, {select: a}), _narrowed(ranges, condition, True), budget - 1)
    no = _split(E.substitute(e, {select: b}), _narrowed(ranges, condition, False), budget - 1)
    return yes if yes is no else e


def _limit(condition: E.Expr) -> tuple[str, str, int] | None:
    """`index op constant` as (index name, op, constant)."""
    if condition.op not in ("lt", "le", "gt", "ge") or condition.args[0].op != "index":
        return None
    form = linear(condition.args[1])
    return None if form.terms else (condition.args[0].value, condition.op, form.constant)


def _narrowed(ranges: dict[str, Range], condition: E.Expr, holds: bool) -> dict[str, Range]:
    limit = _limit(condition)
    assert limit is not None
    name, op, value = limit
    low, high = ranges.get(name, (0, float("inf")))
    if (op in ("lt", "le")) == holds:
        high = min(high, value - (op == "lt") if holds else value - (op == "ge"))
    else:
        low = max(low, value + (op == "gt") if holds else value + (op == "le"))
    return {**ranges, name: (low, high)}
