"""Expressions that depend on a single truth value: mask arithmetic such as (1 - float(m)) * c or where(m, 0, c) < 0."""

from __future__ import annotations

from fa4_inductor.spec import expr as E
from fa4_inductor.spec.ops import Kind


def boolean_selection(e: E.Expr) -> E.Expr:
    """`e` as where(m, c1, c0), or as m or ~m if it is BOOL, when it is made of one bool `m` and constants; else `e`."""
    if e.is_const or e.op in ("load", "index", "size", "score"):
        return e
    condition = _single_bool(e)
    if condition is None:
        return e
    yes, no = (E.substitute(e, {condition: E.const(v)}) for v in (True, False))
    if not (yes.is_const and no.is_const):
        return e
    if condition.op == "not_":
        condition, yes, no = condition.args[0], no, yes
    if e.kind is Kind.BOOL:
        return yes if yes is no else condition if yes.value else ~condition
    return yes if yes is no else E.call("where", condition, yes, no)


def _single_bool(e: E.Expr) -> E.Expr | None:
    """The one non-constant bool strictly below `e`, if nothing else below it varies."""
    found: dict[E.Expr, None] = {}
    stack = list(e.args)
    while stack:
        node = stack.pop()
        if node.kind is Kind.BOOL and not node.is_const:
            found[node] = None
        elif node.op in ("load", "index", "size", "score"):
            return None
        else:
            stack.extend(node.args)
    return next(iter(found)) if len(found) == 1 else None
