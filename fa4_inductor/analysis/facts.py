"""AttentionFacts: everything later stages want to know about a spec, derived from its expressions and from nothing
else."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from fa4_inductor.analysis.bounds import score_bound
from fa4_inductor.analysis.empty import UNKNOWN, Lengths, may_be_empty
from fa4_inductor.analysis.intervals import NOTHING, Interval, Q, full, visited
from fa4_inductor.analysis.parts import Stage, affine_in_score, stage
from fa4_inductor.analysis.solve import KV, solve
from fa4_inductor.spec.attention import AttentionSpec
from fa4_inductor.spec.expr import TRUE, Expr, conjunction, conjuncts, const
from fa4_inductor.spec.linear import linear, to_expr


@dataclass(frozen=True)
class AttentionFacts:
    """Facts about one spec. Expressions over rows use the names `q_lo` and `q_hi` (first and last row, inclusive).

    Attributes:
        keep: equivalent of spec.keep with constraints solved for kv_idx (`analysis.solve`).
        linear, residual: conjuncts of `keep` that are solved bounds (or row conditions), and the others.
        visited, full: keys some row may keep, and keys all rows keep, of rows q_lo..q_hi.
        column: the factor of `keep` that only knows the key and is not a bound on it, such as padding; True when none.
        full_rest: as `full`, of the other factors.
        row_visited, row_full_rest: as `visited` and `full_rest`, of the single row q_idx; bounds may be loaded by row.
        exact: per row the kept keys are exactly an interval, `row`.
        row: that interval of the row q_idx (its hull when not exact).
        score_bound: proven bound of |score| in natural units, or None.
        slope, bias: score == slope * score + bias with both free of the score; None when it is not affine.
        may_be_empty: a row that keeps no key cannot be ruled out.
    """

    keep: Expr
    linear: tuple[Expr, ...]
    residual: tuple[Expr, ...]
    visited: Interval
    full: Interval
    column: Expr
    full_rest: Interval
    row_visited: Interval
    row_full_rest: Interval
    exact: bool
    row: Interval
    score_bound: float | None
    slope: Expr | None
    bias: Expr | None
    may_be_empty: bool

    @property
    def constant_slope(self) -> float | None:
        """The slope where it is a finite number other than 0, which SDPA can take for a scale, else None."""
        if self.slope is None or not self.slope.is_const or not math.isfinite(self.slope.value):
            return None
        return float(self.slope.value) or None

    @property
    def is_full(self) -> bool:
        """Every key takes part."""
        return self.keep is TRUE

    @property
    def is_causal(self) -> bool:
        """keep is exactly kv_idx <= q_idx (top-left aligned, as SDPA's is_causal)."""
        return self.causal_offset is not None and self.causal_offset is const(0)

    @property
    def causal_offset(self) -> Expr | None:
        """`d` with keep exactly kv_idx <= q_idx + d, d the same for all rows; None when keep is not of that form."""
        if not self.exact or self.row.lo is not None or self.row.hi is None:
            return None
        return _offset(self.row.hi, 1)

    @property
    def window_left(self) -> Expr | None:
        """`w` with no key before q_idx - w taking part, the same for all rows; None when there is no such bound."""
        offset = None if self.row.lo is None else _offset(self.row.lo, 0)
        return None if offset is None else to_expr(linear(offset) * -1)

    @property
    def kv_range(self) -> tuple[Expr, Expr]:
        """[lo, hi) inside [0, seqlen_k): keys outside are dropped by all rows q_lo..q_hi."""
        return self.visited.clipped()

    @property
    def kv_full(self) -> tuple[Expr, Expr]:
        """[lo, hi): keys kept by all rows q_lo..q_hi; lo >= hi when there are none."""
        return _clipped(self.full)

    @property
    def kv_full_rest(self) -> tuple[Expr, Expr]:
        """As `kv_full`, with `column` left out of keep."""
        return _clipped(self.full_rest)

    @property
    def row_range(self) -> tuple[Expr, Expr] | None:
        """As `kv_range`, of the row q_idx; None where that is kv_range with q_lo = q_hi = q_idx."""
        return None if self.row_visited == self.visited.of_row() else self.row_visited.clipped()

    @property
    def row_full(self) -> tuple[Expr, Expr] | None:
        """As `kv_full_rest`, of the row q_idx; None where that is kv_full_rest with q_lo = q_hi = q_idx."""
        return None if self.row_full_rest == self.full_rest.of_row() else _clipped(self.row_full_rest)


def _clipped(interval: Interval) -> tuple[Expr, Expr]:
    return (const(0), const(0)) if interval == NOTHING else interval.clipped()


def _offset(bound: Expr, constant: int) -> Expr | None:
    """bound - q_idx - constant, if that does not depend on the row."""
    form = linear(bound) - linear(Q)
    offset = to_expr(form.shifted(-constant))
    return None if "q_idx" in offset.free else offset


@functools.lru_cache(maxsize=1024)
def facts(spec: AttentionSpec, lengths: Lengths = UNKNOWN) -> AttentionFacts:
    """Facts about `spec`, conservative: what is not proven is left open.

    Args:
        lengths: what is known of run-time integers; used for `may_be_empty` alone, so that all else holds for every
            launch.
    """
    keep = solve(spec.keep)
    linear = tuple(t for t in conjuncts(keep) if t is not TRUE and _is_linear(t))
    residual = tuple(t for t in conjuncts(keep) if t is not TRUE and not _is_linear(t))
    outside, inside = visited(keep), full(keep)
    column = [t for t in residual if stage(t) is Stage.COLUMN]
    rest = conjunction([t for t in conjuncts(keep) if t not in column])
    row = outside.of_row()
    exact = row == inside.of_row()
    parts = affine_in_score(spec.score)
    return AttentionFacts(
        keep=keep,
        linear=linear,
        residual=residual,
        visited=outside,
        full=inside,
        column=conjunction(column),
        full_rest=full(rest),
        row_visited=visited(keep, single_row=True),
        row_full_rest=full(rest, single_row=True),
        exact=exact,
        row=row,
        score_bound=score_bound(spec.score),
        slope=parts[0] if parts else None,
        bias=parts[1] if parts else None,
        may_be_empty=may_be_empty(spec, lengths),
    )


def _is_linear(term: Expr) -> bool:
    """A solved bound on the key, or a condition that does not involve it."""
    return "kv_idx" not in term.free or (
        term.op in ("lt", "ge") and term.args[0] is KV and "kv_idx" not in term.args[1].free
    )
