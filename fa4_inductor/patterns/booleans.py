"""Expressions of truth values only: mask arithmetic such as (1 - float(m)) * c, float(a) * float(b) > 0 or
where(m, 0, c) < 0, as formulas and selections."""

from __future__ import annotations

import itertools

from fa4_inductor.spec import expr as E
from fa4_inductor.spec.ops import Kind
from fa4_inductor.spec.simplify import simplify

MAX_ATOMS = 4
_CONNECTIVES = ("and_", "or_", "xor", "not_")
_VARIES = ("load", "index", "size", "score")
Table = dict[tuple[bool, ...], E.Expr]


def boolean_selection(e: E.Expr) -> E.Expr:
    """`e` as a formula if it is BOOL, else as where(formula, c1, c2), when it is made of a few bools and constants.

    Returns `e` itself where that is not so, or where it is a formula already.
    """
    if e.is_const or e.op in (*_VARIES, *_CONNECTIVES):
        return e
    found = _atoms(e)
    atoms = list(dict.fromkeys(atom for atom, _ in found.values())) if found is not None else []
    if found is None or len(atoms) > MAX_ATOMS:
        return e
    table: Table = {}
    for row in itertools.product((True, False), repeat=len(atoms)):
        value = dict(zip(atoms, row))
        known = {part: E.const(value[atom] == same) for part, (atom, same) in found.items()}
        table[row] = _constant(E.substitute(e, known))
    values = list(dict.fromkeys(table.values()))
    if not all(v.is_const for v in values):
        return e
    if len(values) == 1:
        return values[0]
    if e.kind is Kind.BOOL:
        return _formula(atoms, table)
    if len(values) != 2:
        return e
    condition = _formula(atoms, {row: E.const(v is values[0]) for row, v in table.items()})
    if condition.op == "not_":
        return E.call("where", condition.args[0], values[1], values[0])
    return E.call("where", condition, *values)


def _constant(e: E.Expr) -> E.Expr:
    return E.const(0.0) if e.is_const and e.kind is Kind.FLOAT and e.value == 0 else e  # also for -0.0


def _atoms(e: E.Expr) -> dict[E.Expr, tuple[E.Expr, bool]] | None:
    """The bools that `e` is made of, None if something else below it varies: whole formulas if there is only one.

    Each comes with its atom and whether it equals it: `q_idx <= 2` is `q_idx >= 3` negated.
    """
    whole: dict[E.Expr, None] = {}
    stack = list(e.args)
    while stack:
        node = stack.pop()
        if node.kind is Kind.BOOL and not node.is_const:
            whole[node.args[0] if node.op == "not_" else node] = None
        elif node.op in _VARIES:
            return None
        else:
            stack.extend(node.args)
    if len(whole) <= 1:
        return {w: (w, True) for w in whole}
    parts = sorted({a for w in whole for a in _parts(w)}, key=lambda a: ("aux" in a.free, repr(a)))
    found: dict[E.Expr, tuple[E.Expr, bool]] = {}
    for part in parts:
        opposite = simplify(~part)
        found[part] = (opposite, False) if opposite in found else (part, True)
    return found


def _parts(e: E.Expr) -> list[E.Expr]:
    """What the connectives of a formula connect."""
    return [p for a in e.args for p in _parts(a)] if e.op in _CONNECTIVES else [] if e.is_const else [e]


def _formula(atoms: list[E.Expr], table: Table) -> E.Expr:
    """The formula of a table of truth values."""
    if not atoms:
        return table[()]
    yes, no = (
        _formula(atoms[1:], {row[1:]: v for row, v in table.items() if row[0] is first}) for first in (True, False)
    )
    atom = atoms[0]
    if yes is no:
        return yes
    if yes.is_const and no.is_const:
        return atom if yes.value else ~atom
    if yes.is_const:
        return atom | no if yes.value else ~atom & no
    if no.is_const:
        return ~atom | yes if no.value else atom & yes
    return E.call("where", atom, yes, no)
