"""Bounds on the queries that a range of keys meets, from the transposed mask: for kernels that walk along queries."""

from __future__ import annotations

from fa4_inductor.analysis.intervals import NOTHING, Q_HI, Q_LO, Interval, full, visited
from fa4_inductor.analysis.solve import solve
from fa4_inductor.analysis.tile_test import KV_HI, KV_LO
from fa4_inductor.spec.expr import Expr, const, index, size, substitute

_LENGTHS = {size("seqlen_q"): size("seqlen_k"), size("seqlen_k"): size("seqlen_q")}
_TRANSPOSE = {index("q_idx"): index("kv_idx"), index("kv_idx"): index("q_idx"), **_LENGTHS}
_BACK = {Q_LO: KV_LO, Q_HI: KV_HI, **_LENGTHS}
Bounds = tuple[Expr, Expr]


def query_ranges(keep: Expr) -> tuple[Bounds, Bounds]:
    """(visited, full) over `kv_lo` and `kv_hi`, the first and last key (inclusive): [lo, hi) inside [0, seqlen_q).

    Queries outside `visited` drop all these keys; queries inside `full` keep all of them (lo >= hi when there are
    none).
    """
    transposed = solve(substitute(keep, _TRANSPOSE))
    return _bounds(visited(transposed)), _bounds(full(transposed))


def _bounds(interval: Interval) -> Bounds:
    if interval == NOTHING:
        return const(0), const(0)
    lo, hi = interval.clipped()
    return substitute(lo, _BACK), substitute(hi, _BACK)
