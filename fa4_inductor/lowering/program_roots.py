"""Spec and facts -> the expressions that a kernel program computes, before they are written as text."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass, field

from fa4_inductor.analysis.facts import AttentionFacts
from fa4_inductor.analysis.intervals import largest, smallest
from fa4_inductor.analysis.parts import Stage, drop_row_constants, stage
from fa4_inductor.analysis.transposed import query_ranges
from fa4_inductor.lowering.derive import derivative_by, learned_loads, score_derivative
from fa4_inductor.lowering.emit_expr import LOG2_E, clamp_loads, exact_nodes, group_by_stage
from fa4_inductor.lowering.hoist import is_of_distance
from fa4_inductor.lowering.log2_score import SHIFT, log2_score, scaled, shared_score, without_tile
from fa4_inductor.spec.attention import AttentionSpec
from fa4_inductor.spec.expr import TRUE, Expr, call, conjunction, const, index, load, score, size, substitute, walk


@dataclass(frozen=True)
class LearnedLoad:
    """A load of the score whose tensor has a gradient.

    Attributes:
        load: with its indices clamped. weight: d score / d its element.
        kind: what the indices depend on besides b and h: "uniform" nothing, "column" the key, "distance" the distance
            of query and key, "element" anything.
    """

    load: Expr
    weight: Expr
    kind: str


@dataclass
class Roots:
    """The expressions of a program, loads clamped, and how exactly each node has to be computed.

    `interval`: the keys of a row that pass the solved bounds of keep; `keep` is what else it asks for.
    `accumulated`: the dense tile that `shifted` and `shared` find in the product already.
    """

    score: Expr
    interval: tuple[Expr, Expr] | None
    keep: Expr
    column: Expr
    sink: Expr | None
    kv_range: tuple[Expr, Expr]
    kv_full: tuple[Expr, Expr]
    row_range: tuple[Expr, ...]
    row_full: tuple[Expr, ...]
    dense: tuple[Expr, ...] = ()
    tables: tuple[Expr, ...] = ()
    columns: tuple[Expr, ...] = ()
    shifted: Expr | None = None
    shared: tuple[Expr, Expr] | None = None
    accumulated: int | None = None
    unit_stride: tuple[int, ...] = ()
    tile_map: int | None = None
    grad: Expr | None = None
    learned: tuple[LearnedLoad, ...] = ()
    exact: frozenset[Expr] = field(default_factory=frozenset)

    @property
    def plain(self) -> bool:
        return self.score is score()

    @property
    def tiles(self) -> dict[Expr, str]:
        """Loads that the kernel fetches by the tile, and what their elements are called."""
        named = (("d", self.dense), ("t", (*self.tables, *self.columns)))
        return {e: f"{name}[{i}]" for name, loads in named for i, e in enumerate(loads)}


def read_as_tiles(
    spec: AttentionSpec, tables: tuple[Expr, ...], columns: tuple[Expr, ...]
) -> tuple[AttentionSpec, tuple[Expr, ...], tuple[Expr, ...]]:
    """`spec`, `tables` and `columns` with these loads written as loads of a tile, [..., q_idx, kv_idx], that stay as
    they are."""
    at = (index("q_idx"), index("kv_idx"))
    tiles = {e: load(e.value, (*e.args[:-2], *at), e.kind) for e in tables}
    vectors = {e: load(e.value, (*e.args[:-1], *at), e.kind) for e in columns}
    score_of_tiles = substitute(spec.score, tiles | vectors)
    return dataclasses.replace(spec, score=score_of_tiles), tuple(tiles.values()), tuple(vectors.values())


def make_roots(
    spec: AttentionSpec,
    facts: AttentionFacts,
    need_lse: bool,
    fast_math: bool,
    dense: tuple[Expr, ...],
    tables: tuple[Expr, ...] = (),
    columns_apart: bool = True,
    accumulate: bool = False,
) -> Roots:
    """columns_apart: full tiles may have dropped columns, which `keep_column` tells; those of a tile map have none."""
    shifted = spec.score if need_lse or spec.sink is not None else drop_row_constants(spec.score)
    # The kernel takes the maximum of raw products where nothing is to be computed, which a negative scale turns around.
    plain = shifted is score() and spec.softmax_scale > 0
    raw, tiles = _of_raw_product(shifted, spec.softmax_scale), (*dense, *tables)
    apart = without_tile(shifted, dense) if accumulate and math.frexp(spec.softmax_scale)[0] == 0.5 else None
    accumulated, rest_of_score = (None, raw) if apart is None else apart
    raw = raw if apart is None else shifted
    saturate = apart is not None
    logit = shifted if plain else prepared(log2_score(raw), tiles)
    with_shift = None if plain else prepared(log2_score(rest_of_score, SHIFT, saturate=saturate), tiles)
    parts = None if plain else shared_score(rest_of_score, tables, saturate=saturate)
    shared = None if parts is None else (prepared(parts[0], tiles), prepared(parts[1], tiles))
    interval = _row_interval(facts)
    rest = TRUE if facts.exact else conjunction(list(facts.residual))
    keep, column = prepared(rest, tiles), prepared(facts.column) if columns_apart else TRUE
    sink = None if spec.sink is None else prepared(scaled(spec.sink, LOG2_E))
    ranges = [prepared(e) for e in (*facts.kv_range, *(facts.kv_full_rest if columns_apart else facts.kv_full))]
    of_row = (facts.row_range, facts.row_full) if columns_apart else (None, None)
    row_range, row_full = (tuple(map(prepared, bounds or ())) for bounds in of_row)
    logits = [e for e in (logit, with_shift, *(shared or ()), sink) if e is not None]
    bounds = [keep, column, *(interval or ()), *ranges, *row_range, *row_full]
    exact = exact_nodes(logits, bounds if fast_math else [*bounds, *logits])
    kv_range, kv_full = (ranges[0], ranges[1]), (ranges[2], ranges[3])
    return Roots(
        logit, interval, keep, column, sink, kv_range, kv_full, row_range, row_full, dense, shifted=with_shift,
        shared=shared, accumulated=accumulated, exact=exact,
    )  # fmt: skip


def _row_interval(facts: AttentionFacts) -> tuple[Expr, Expr] | None:
    """[lo, hi) of the keys that pass the solved bounds of keep in row q_idx; None without any."""
    if facts.exact:
        lo, hi = facts.row.lo, facts.row.hi
        return prepared(const(0) if lo is None else lo), prepared(size("seqlen_k") if hi is None else hi)
    if not facts.linear:
        return None
    on_key = [t for t in facts.linear if "kv_idx" in t.free]
    lows, highs = ([t.args[1] for t in on_key if t.op == op] for op in ("ge", "lt"))
    lo = functools.reduce(largest, lows) if lows else const(0)
    hi = functools.reduce(smallest, highs) if highs else size("seqlen_k")
    condition = conjunction([t for t in facts.linear if t not in on_key])
    return prepared(lo), prepared(hi if condition is TRUE else call("where", condition, hi, 0))


def with_gradient(roots: Roots, spec: AttentionSpec, fast_math: bool, slots: tuple[int, ...] = ()) -> Roots:
    """`roots` with the derivative of the score, and bounds on the queries in the place of those on the keys.

    slots: aux tensors whose gradients are wanted.
    """
    derivative = score_derivative(spec.score)
    grad = None
    if derivative is not const(1.0):
        grad = prepared(_of_raw_product(derivative, spec.softmax_scale))
    outside, inside = ((prepared(lo), prepared(hi)) for lo, hi in query_ranges(spec.keep))
    learned = tuple(_learned_load(spec, e) for e in learned_loads(spec.score, slots))
    logits = [e for e in (grad, *(x.weight for x in learned)) if e is not None]
    bounds = [*outside, *inside, *(i for x in learned for i in x.load.args)]
    exact = exact_nodes(logits, bounds if fast_math else [*bounds, *logits])
    return dataclasses.replace(
        roots, grad=grad, learned=learned, kv_range=outside, kv_full=inside, exact=roots.exact | exact
    )


def _learned_load(spec: AttentionSpec, e: Expr) -> LearnedLoad:
    weight = _of_raw_product(derivative_by(spec.score, e), spec.softmax_scale)
    return LearnedLoad(prepared(e), prepared(weight), _kind(e))


def _kind(e: Expr) -> str:
    free = frozenset[str]().union(*(i.free for i in e.args)) & {"q_idx", "kv_idx"}
    if not free:
        return "uniform"
    if free == {"kv_idx"}:
        return "column"
    return "distance" if all(is_of_distance(i) for i in e.args) else "element"


def _of_raw_product(e: Expr, softmax_scale: float) -> Expr:
    """`e` with `score` standing for q . k: the scale then folds into the program's other constants."""
    return substitute(e, {score(): score() * softmax_scale})


def prepared(e: Expr, tiles: tuple[Expr, ...] = ()) -> Expr:
    return clamp_loads(group_by_stage(e, tiles), tiles)


def may_fill(roots: Roots) -> bool:
    """Whether the score adds what may be the fill of an additive mask. A table may be one, too, but that is rare, and
    tiles with such rows run again."""
    saturating = [n for n in walk(roots.score) if n.op in ("mul_rz", "fma_rz") and stage(n) is not Stage.UNIFORM]
    return any(n.args[0] not in roots.tables for n in saturating)
