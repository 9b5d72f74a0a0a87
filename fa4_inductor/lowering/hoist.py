"""Hoisting: score terms that depend on a key and a query only through their distance become a table over distances.

T5's bucketed bias costs a logarithm and a gather per score where it stands. As a function of `kv_idx - q_idx` alone
it has
`seqlen_q + seqlen_k - 1` distinct values per head, so the graph computes them once, with the very torch ops the user
wrote (bucket
boundaries round as in eager), and the kernel does one load per score. Rejected: anything that also depends on q_idx
or kv_idx by
itself, and terms that are cheap enough where they are (ALiBi's product, a plain table read).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fa4_inductor.spec import expr as E
from fa4_inductor.spec.attention import AttentionSpec, AuxSpec
from fa4_inductor.spec.interpret import Env, evaluate
from fa4_inductor.spec.linear import linear
from fa4_inductor.spec.ops import Kind

_CHEAP = frozenset(
    ["add", "sub", "mul", "neg", "to_float", "to_int", "minimum", "maximum", "abs", "where", "and_", "or_", "not_"]
    + ["lt", "le", "gt", "ge", "eq", "ne"]
)
_Q, _KV = E.index("q_idx"), E.index("kv_idx")


@dataclass(frozen=True)
class HoistedTable:
    """A float32 table `(batch or 1, heads or 1, seqlen_q + seqlen_k - 1)` that becomes an aux tensor.

    `value` is the hoisted term; entry `[b, h, d]` is its value at `kv_idx - q_idx = d - (seqlen_q - 1)`. It reads
    the aux tensors of the spec it was taken from.
    """

    value: E.Expr


def hoist_distance_terms(spec: AttentionSpec) -> tuple[AttentionSpec, tuple[HoistedTable, ...]]:
    """Replace the costly terms of `spec.score` that are functions of the distance by loads from new aux tensors.

    Returns the new spec, whose `aux` is the old one followed by one float32 rank-3 tensor per table, and the tables.
    A spec without such
    terms comes back unchanged.
    """
    found: dict[E.Expr, E.Expr] = {}
    tables: list[HoistedTable] = []
    distance_of: dict[E.Expr, bool] = {}
    for root in _maximal_terms(spec.score, distance_of):
        slot = len(spec.aux) + len(tables)
        batch = E.index("b") if "b" in root.free else E.const(0)
        head = E.index("h") if "h" in root.free else E.const(0)
        found[root] = E.load(slot, (batch, head, _KV - _Q + (E.size("seqlen_q") - 1)), Kind.FLOAT)
        tables.append(HoistedTable(root))
    if not tables:
        return spec, ()
    aux = (*spec.aux, *(AuxSpec("float32", 3) for _ in tables))
    return dataclasses.replace(spec, score=E.substitute(spec.score, found), aux=aux), tuple(tables)


def _maximal_terms(root: E.Expr, memo: dict[E.Expr, bool]) -> list[E.Expr]:
    """Largest FLOAT subexpressions that are functions of the distance (and b, h) and worth a table."""
    if root.kind is Kind.FLOAT and _is_distance(root, memo):
        return [root] if _is_costly(root) else []
    terms = [t for a in root.args for t in _maximal_terms(a, memo)]
    return list(dict.fromkeys(terms))


def _is_distance(e: E.Expr, memo: dict[E.Expr, bool]) -> bool:
    if e not in memo:
        memo[e] = _compute_is_distance(e, memo)
    return memo[e]


def _compute_is_distance(e: E.Expr, memo: dict[E.Expr, bool]) -> bool:
    if e.op in ("score", "size"):
        return False
    if e.op == "index":
        return e.value in ("b", "h")
    if e.kind is Kind.INT and e.op in ("add", "sub", "neg", "mul"):
        form = linear(e)
        if form.coefficient(_Q) == -form.coefficient(_KV):
            return all(_is_distance(a, memo) for a, _ in form.terms if a not in (_Q, _KV))
        return False
    if e.op in ("lt", "le", "gt", "ge", "eq", "ne") and e.args[0].kind is Kind.INT:
        # The simplifier isolates kv_idx on one side: `kv_idx <= q_idx + 3` is a fact about the distance.
        return _is_distance_form(e.args[0] - e.args[1], memo)
    return all(_is_distance(a, memo) for a in e.args)


def _is_distance_form(difference: E.Expr, memo: dict[E.Expr, bool]) -> bool:
    form = linear(difference)
    return form.coefficient(_Q) == -form.coefficient(_KV) and all(
        _is_distance(a, memo) for a, _ in form.terms if a not in (_Q, _KV)
    )


def _is_costly(e: E.Expr) -> bool:
    """More than cheap arithmetic and one read: a table load replaces it at a profit."""
    if not {"q_idx", "kv_idx"} & e.free:
        return False
    gathers = [n for n in E.walk(e) if n.op == "load" and {"q_idx", "kv_idx"} & n.free]
    heavy = [n for n in E.walk(e) if n.args and n.op != "load" and n.op not in _CHEAP]
    indirect = [g for g in gathers if any(a.op not in ("index", "const", "add", "sub", "neg") for a in g.args)]
    return bool(heavy or indirect or len(gathers) > 1)


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def materialise(
    table: HoistedTable,
    aux: Sequence[Any],
    batch: Any,
    heads: Any,
    seqlen_q: Any,
    seqlen_k: Any,
    device: Any,
    make: Callable[..., Any] = _call,
) -> Any:
    """The table's values, by torch ops on tensors or on graph values.

    `batch`, `heads` and the lengths are ints or graph values of ints; `make` calls a function, or records the call.
    Dimensions the term does not depend on have size 1. The result is contiguous float32
    `(batch or 1, heads or 1, seqlen_q + seqlen_k - 1)`.
    """
    used = table.value.free
    distance = make(torch.arange, seqlen_q + seqlen_k - 1, device=device) - (seqlen_q - 1)
    names = {
        "q_idx": make(torch.zeros, (1, 1, 1), dtype=torch.int64, device=device),
        "kv_idx": make(torch.reshape, distance, (1, 1, -1)),
    }
    if "b" in used:
        names["b"] = make(torch.reshape, make(torch.arange, batch, device=device), (-1, 1, 1))
    if "h" in used:
        names["h"] = make(torch.reshape, make(torch.arange, heads, device=device), (1, -1, 1))
    values = evaluate(table.value, Env(names, aux))
    shape = (batch if "b" in used else 1, heads if "h" in used else 1, seqlen_q + seqlen_k - 1)
    return values.to(torch.float32).expand(shape).contiguous()
