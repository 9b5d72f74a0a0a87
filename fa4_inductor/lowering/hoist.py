"""Hoisting: score terms that depend on a key and a query only through their distance become a table over distances.

T5's bucketed bias costs a logarithm and a gather per score where it stands. As a function of `kv_idx - q_idx` alone
it has `seqlen_q + seqlen_k - 1` distinct values per head, so the graph computes them once, with the very torch ops the
user wrote (bucket boundaries round as in eager), in the layout that suits the kernel (docs/decisions/0011). Rejected:
anything that also depends on q_idx or kv_idx by itself, and terms that are cheap where they are and load nothing
(ALiBi's product).
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
_LENGTHS = ("seqlen_q", "seqlen_k")
_Q, _KV = E.index("q_idx"), E.index("kv_idx")
PADDING = 256
"""Entries beyond the first and the last distance, so that a tile at a ragged edge reads inside the table."""
POSITION = _KV - _Q + (E.size("seqlen_q") + (PADDING - 1))
"""Where a table has the entry of a score."""


@dataclass(frozen=True)
class HoistedTable:
    """A table of pairs `(batch or 1, heads or 1, length, 2)` that becomes an aux tensor.

    `value` is the hoisted term; entry `[b, h, i, 0]` is its value at `kv_idx - q_idx = i - (seqlen_q - 1) - PADDING`,
    and `[b, h, i, 1]` that of `i + 1`: two neighbouring keys are one aligned read. Entries of distances that no key
    has repeat the nearest one. `dtype` is bfloat16 where that holds every value exactly, else float32. The term reads
    the aux tensors of the spec it was taken from.
    """

    value: E.Expr
    dtype: str


def hoist_distance_terms(spec: AttentionSpec) -> tuple[AttentionSpec, tuple[HoistedTable, ...]]:
    """Replace the costly terms of `spec.score` that are functions of the distance by loads from new aux tensors.

    Returns the new spec, whose `aux` is the old one followed by one rank-4 tensor per table, and the tables.
    A spec without such terms comes back unchanged.
    """
    found: dict[E.Expr, E.Expr] = {}
    tables: list[HoistedTable] = []
    distance_of: dict[E.Expr, bool] = {}
    for root in _maximal_terms(spec.score, distance_of):
        slot = len(spec.aux) + len(tables)
        batch = E.index("b") if "b" in root.free else E.const(0)
        head = E.index("h") if "h" in root.free else E.const(0)
        found[root] = E.load(slot, (batch, head, POSITION, E.const(0)), Kind.FLOAT)
        exact = root.op == "load" and spec.aux[root.value].dtype == "bfloat16"
        tables.append(HoistedTable(root, "bfloat16" if exact else "float32"))
    if not tables:
        return spec, ()
    aux = (*spec.aux, *(AuxSpec(t.dtype, 4) for t in tables))
    return dataclasses.replace(spec, score=E.substitute(spec.score, found), aux=aux), tuple(tables)


def _maximal_terms(root: E.Expr, memo: dict[E.Expr, bool]) -> list[E.Expr]:
    """Largest FLOAT subexpressions that are functions of the distance (and b, h) and worth a table."""
    if root.kind is Kind.FLOAT and _is_distance(root, memo):
        return [root] if _is_worth_it(root) else []
    terms = [t for a in root.args for t in _maximal_terms(a, memo)]
    return list(dict.fromkeys(terms))


def is_of_distance(e: E.Expr) -> bool:
    """Whether `e` depends on the query and the key through their distance alone (and on b, h and the lengths)."""
    return _is_distance(e, {})


def _is_distance(e: E.Expr, memo: dict[E.Expr, bool]) -> bool:
    if e not in memo:
        memo[e] = _compute_is_distance(e, memo)
    return memo[e]


def _compute_is_distance(e: E.Expr, memo: dict[E.Expr, bool]) -> bool:
    if e.op == "score":
        return False
    if e.op == "size":
        return e.value in _LENGTHS
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


def _is_worth_it(e: E.Expr) -> bool:
    """More than cheap arithmetic."""
    if not {"q_idx", "kv_idx"} & e.free:
        return False
    return any(n.op == "load" or n.op not in _CHEAP for n in E.walk(e) if n.args and {"q_idx", "kv_idx"} & n.free)


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def table_length(seqlen_q: Any, seqlen_k: Any) -> Any:
    """Pairs of a table, for ints or graph values of ints; a multiple of 4, so that heads begin at 16 bytes."""
    return (seqlen_q + seqlen_k + (2 * PADDING + 2)) // 4 * 4


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
    Dimensions the term does not depend on have size 1. The result is contiguous, as `HoistedTable` describes it.
    """
    used = table.value.free
    length = table_length(seqlen_q, seqlen_k)
    position = make(torch.reshape, make(torch.arange, length, device=device), (-1, 1))
    pairs = position + make(torch.arange, 2, device=device)
    distance = make(torch.clamp, pairs - (seqlen_q + (PADDING - 1)), 1 - seqlen_q, seqlen_k - 1)
    names = {
        "q_idx": make(torch.zeros, (1, 1, 1, 1), dtype=torch.int64, device=device),
        "kv_idx": make(torch.reshape, distance, (1, 1, -1, 2)),
    }
    if "b" in used:
        names["b"] = make(torch.reshape, make(torch.arange, batch, device=device), (-1, 1, 1, 1))
    if "h" in used:
        names["h"] = make(torch.reshape, make(torch.arange, heads, device=device), (1, -1, 1, 1))
    for name, n in zip(_LENGTHS, (seqlen_q, seqlen_k)):
        if name in used:
            # torch functions take no two plain numbers, so a size that is known at run time only becomes a tensor
            names[name] = n if isinstance(n, int) else make(torch.full, (), n, dtype=torch.int64, device=device)
    values = evaluate(table.value, Env(names, aux))
    shape = (batch if "b" in used else 1, heads if "h" in used else 1, length, 2)
    return values.to(getattr(torch, table.dtype)).expand(shape).contiguous()
