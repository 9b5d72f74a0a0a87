"""Spec and facts -> text of the Python module that the kernel inlines (interface in docs/architecture.md).

Every value is computed at the cheapest stage: what depends on (b, h) in `uniform`, on the query row in `row`, on the
key in `column`, and only the rest per element. `keep` is written in its solved form (analysis.solve), so constraints
compare the key with per-row bounds.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from fa4_inductor.analysis.facts import AttentionFacts
from fa4_inductor.analysis.intervals import largest, smallest
from fa4_inductor.analysis.parts import Stage, drop_row_constants, stage
from fa4_inductor.analysis.tile_test import tile_test
from fa4_inductor.analysis.transposed import query_ranges
from fa4_inductor.lowering.derive import score_derivative
from fa4_inductor.lowering.emit_expr import LOG2_E, Writer, bare, clamp_loads, exact_nodes, group_by_stage
from fa4_inductor.lowering.log2_score import SHIFT, log2_score, scaled, shared_score
from fa4_inductor.spec.attention import AttentionSpec
from fa4_inductor.spec.expr import TRUE, Expr, call, conjunction, const, index, load, score, size, substitute, walk

_TUPLES = {Stage.UNIFORM: "u", Stage.ROW: "r", Stage.COLUMN: "c"}
_ARGUMENTS = {
    "uniform": "ctx, b, h",
    "row": "ctx, b, h, q_idx, u",
    "column": "ctx, b, h, kv_idx, u",
    "score": "ctx, s, b, h, q_idx, kv_idx, u, r, c",
    "shifted_score": "ctx, s, b, h, q_idx, kv_idx, u, r, c, shift",
    "shared_score": "ctx, s, b, h, q_idx, kv_idx, u, r, c, shift, kv_first, offset",
    "row_score": "ctx, b, h, q_idx, u, r",
    "score_grad": "ctx, s, b, h, q_idx, kv_idx, u, r, c",
    "keep": "ctx, b, h, q_idx, kv_idx, u, r, c",
    "kv_interval": "ctx, b, h, q_idx, u, r",
    "keep_column": "ctx, b, h, kv_idx, u, c",
    "kv_range": "ctx, b, h, q_lo, q_hi",
    "kv_full": "ctx, b, h, q_lo, q_hi",
    "q_range": "ctx, b, h, kv_lo, kv_hi",
    "q_full": "ctx, b, h, kv_lo, kv_hi",
    "row_range": "ctx, b, h, q_idx",
    "row_full": "ctx, b, h, q_idx",
    "sink": "ctx, b, h, q_idx",
    "dense_index": "ctx, b, h",
    "row_values": "ctx, b, h, q_idx",
    "column_values": "ctx, b, h, kv_idx",
    "tile_test": "ctx, b, h, q_lo, q_hi, kv_lo, kv_hi, rows, columns",
    "table_index": "ctx, b, h",
}
_PER_ELEMENT = ("score", "shifted_score", "shared_score", "keep")
_SPECIAL = frozenset({"tanh", "exp", "exp2", "log", "log2", "sigmoid", "div", "sqrt", "rsqrt", "sin", "cos"})
_HEADER = """\
from cutlass import Boolean, Float32, Int32, cute

from fa4_inductor.kernels.cute import ops
from fa4_inductor.kernels.cute import program_ops as pops

INF = float("inf")
NAN = float("nan")
"""


@dataclass
class _Roots:
    """The expressions of a program, loads clamped, and how exactly each node has to be computed.

    `interval`: the keys of a row that pass the solved bounds of keep; `keep` is what else it asks for.
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
    shifted: Expr | None = None
    shared: tuple[Expr, Expr] | None = None
    unit_stride: tuple[int, ...] = ()
    tile_map: int | None = None
    grad: Expr | None = None
    exact: frozenset[Expr] = field(default_factory=frozenset)

    @property
    def plain(self) -> bool:
        return self.score is score()

    @property
    def tiles(self) -> dict[Expr, str]:
        """Loads that the kernel fetches by the tile, and what their elements are called."""
        named = (("d", self.dense), ("t", self.tables))
        return {e: f"{name}[{i}]" for name, loads in named for i, e in enumerate(loads)}


def emit_program(
    spec: AttentionSpec,
    facts: AttentionFacts,
    *,
    need_lse: bool = False,
    fast_math: bool = True,
    dense: tuple[Expr, ...] = (),
    tables: tuple[Expr, ...] = (),
    unit_stride: tuple[int, ...] = (),
    use_tile_map: bool = False,
    gradient: bool = False,
) -> str:
    """Module text for `spec`; equal arguments give equal text.

    Args:
        dense: loads of the spec (lowering.aux_layout) that the kernel brings in as tiles.
        tables: loads from distance tables, in whose layout the kernel may trust.
        unit_stride: aux slots of tensors with an innermost stride of 1.
        use_tile_map: read the spec's tile map, whose tiles are those of the kernel.
        gradient: for a backward kernel: with `score_grad` unless it is 1, and with q_range and q_full instead of
            kv_range and kv_full.
        need_lse: keep the terms that shift the LSE without changing the output.
        fast_math: logits through the special function unit, with tanh good to 2^-11 (relative); False computes tanh,
            exp, log and divisions exactly, at several times their cost.

    Raises:
        ProgramError: an integer constant does not fit into int32 arithmetic.
    """
    text = spec.text
    spec, tables = _with_table_tiles(spec, tables)
    slot = spec.tile_map.slot if use_tile_map and spec.tile_map is not None else None
    roots = _roots(spec, facts, need_lse, fast_math, dense, tables, columns_apart=slot is None and not gradient)
    roots = dataclasses.replace(roots, unit_stride=unit_stride, tile_map=slot)
    if gradient:
        roots = _with_gradient(roots, spec, fast_math)
    parts = [f'"""{text}"""\n\n{_HEADER}', _flags(spec, facts, roots)]
    stages, given = _staged(spec, roots)
    parts += stages
    if not roots.plain:
        parts.append(_function("score", [roots.score], spec, roots, given))
    if roots.shared is not None:
        shared, row = roots.shared
        parts.append(_function("shared_score", [shared], spec, roots, given | {SHIFT: "shift"}))
        parts.append(_function("row_score", [row], spec, roots, given))
    elif roots.shifted is not None:
        parts.append(_function("shifted_score", [roots.shifted], spec, roots, given | {SHIFT: "shift"}))
    if roots.grad is not None:
        parts.append(_function("score_grad", [roots.grad], spec, roots, given))
    if facts.keep is not TRUE:
        if roots.interval is not None:
            parts.append(_function("kv_interval", list(roots.interval), spec, roots, given))
        if roots.keep is not TRUE:
            parts.append(_function("keep", [roots.keep], spec, roots, given))
        if roots.column is not TRUE:
            parts.append(_function("keep_column", [roots.column], spec, roots, given))
        tiles = ("q_range", "q_full") if gradient else ("kv_range", "kv_full")
        parts.append(_function(tiles[0], list(roots.kv_range), spec, roots, {}))
        parts.append(_function(tiles[1], list(roots.kv_full), spec, roots, {}))
        for name, bounds in (("row_range", roots.row_range), ("row_full", roots.row_full)):
            if bounds:
                parts.append(_function(name, list(bounds), spec, roots, {}))
    if roots.sink is not None:
        parts.append(_function("sink", [roots.sink], spec, roots, {}))
    if dense:
        parts.append(_leading_indices("dense_index", dense, spec, roots))
    if tables:
        parts.append(_leading_indices("table_index", tables, spec, roots))
    return "\n\n".join(part.rstrip("\n") + "\n" for part in parts)


def emit_tile_test(
    spec: AttentionSpec,
    facts: AttentionFacts,
    *,
    dense: tuple[Expr, ...] = (),
    unit_stride: tuple[int, ...] = (),
) -> str:
    """Module text for the kernel that finds out which tiles of the mask `spec.keep` are empty, mixed or full: a program
    with the functions of `analysis.tile_test`.

    Raises:
        ProgramError: as `emit_program`.
    """
    test = tile_test(facts.keep)
    rows, columns = ([_prepared(e) for e in values] for values in (test.rows, test.columns))
    results = [_prepared(e) for e in (test.possible, test.certain)]
    exact = exact_nodes([], [*rows, *columns, *results])
    roots = dataclasses.replace(_roots(spec, facts, False, True, (), ()), unit_stride=unit_stride, exact=exact)
    parts = [
        emit_program(spec, facts, dense=dense, unit_stride=unit_stride),
        f"TEST_ELEMENTS = {test.elements}\n",
        _function("row_values", rows, spec, roots, {}, as_tuple=True),
        _function("column_values", columns, spec, roots, {}, as_tuple=True),
        _function("tile_test", results, spec, roots, {}),
    ]
    return "\n\n".join(part.rstrip("\n") + "\n" for part in parts)


def write_program(text: str, digest: str, directory: Path) -> Path:
    """Write a program module as `directory/fa4_program_<digest>.py`, atomically, and return its path.

    The directory is made private to the user: the file is going to be executed. A file that is already there with other
    content is replaced.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = directory / f"fa4_program_{digest}.py"
    if path.exists() and path.read_text() == text:
        return path
    scratch = directory / f".{path.name}.{os.getpid()}"
    scratch.write_text(text)
    os.replace(scratch, path)
    return path


def _with_table_tiles(spec: AttentionSpec, tables: tuple[Expr, ...]) -> tuple[AttentionSpec, tuple[Expr, ...]]:
    """`spec` and `tables` with table loads written as loads of a tile, [..., q_idx, kv_idx], that stay as they are."""
    at = (index("q_idx"), index("kv_idx"))
    tiles = {e: load(e.value, (*e.args[:-2], *at), e.kind) for e in tables}
    return dataclasses.replace(spec, score=substitute(spec.score, tiles)), tuple(tiles.values())


def _roots(
    spec: AttentionSpec,
    facts: AttentionFacts,
    need_lse: bool,
    fast_math: bool,
    dense: tuple[Expr, ...],
    tables: tuple[Expr, ...] = (),
    columns_apart: bool = True,
) -> _Roots:
    """columns_apart: full tiles may have dropped columns, which `keep_column` tells; those of a tile map have none."""
    shifted = spec.score if need_lse or spec.sink is not None else drop_row_constants(spec.score)
    # The kernel takes the maximum of raw products where nothing is to be computed, which a negative scale turns around.
    plain = shifted is score() and spec.softmax_scale > 0
    raw, tiles = _of_raw_product(shifted, spec.softmax_scale), (*dense, *tables)
    logit = shifted if plain else _prepared(log2_score(raw), tiles)
    with_shift = None if plain else _prepared(log2_score(raw, SHIFT), tiles)
    parts = None if plain else shared_score(raw, tables)
    shared = None if parts is None else (_prepared(parts[0], tiles), _prepared(parts[1], tiles))
    interval = _row_interval(facts)
    rest = TRUE if facts.exact else conjunction(list(facts.residual))
    keep, column = _prepared(rest, tiles), _prepared(facts.column) if columns_apart else TRUE
    sink = None if spec.sink is None else _prepared(scaled(spec.sink, LOG2_E))
    ranges = [_prepared(e) for e in (*facts.kv_range, *(facts.kv_full_rest if columns_apart else facts.kv_full))]
    of_row = (facts.row_range, facts.row_full) if columns_apart else (None, None)
    row_range, row_full = (tuple(map(_prepared, bounds or ())) for bounds in of_row)
    logits = [e for e in (logit, with_shift, *(shared or ()), sink) if e is not None]
    bounds = [keep, column, *(interval or ()), *ranges, *row_range, *row_full]
    exact = exact_nodes(logits, bounds if fast_math else [*bounds, *logits])
    kv_range, kv_full = (ranges[0], ranges[1]), (ranges[2], ranges[3])
    return _Roots(
        logit, interval, keep, column, sink, kv_range, kv_full, row_range, row_full, dense, tables, with_shift, shared,
        exact=exact,
    )  # fmt: skip


def _row_interval(facts: AttentionFacts) -> tuple[Expr, Expr] | None:
    """[lo, hi) of the keys that pass the solved bounds of keep in row q_idx; None without any."""
    if facts.exact:
        lo, hi = facts.row.lo, facts.row.hi
        return _prepared(const(0) if lo is None else lo), _prepared(size("seqlen_k") if hi is None else hi)
    if not facts.linear:
        return None
    on_key = [t for t in facts.linear if "kv_idx" in t.free]
    lows, highs = ([t.args[1] for t in on_key if t.op == op] for op in ("ge", "lt"))
    lo = functools.reduce(largest, lows) if lows else const(0)
    hi = functools.reduce(smallest, highs) if highs else size("seqlen_k")
    condition = conjunction([t for t in facts.linear if t not in on_key])
    return _prepared(lo), _prepared(hi if condition is TRUE else call("where", condition, hi, 0))


def _with_gradient(roots: _Roots, spec: AttentionSpec, fast_math: bool) -> _Roots:
    """`roots` with the derivative of the score, and bounds on the queries in the place of those on the keys."""
    derivative = score_derivative(spec.score)
    grad = None
    if derivative is not const(1.0):
        grad = _prepared(_of_raw_product(derivative, spec.softmax_scale))
    outside, inside = ((_prepared(lo), _prepared(hi)) for lo, hi in query_ranges(spec.keep))
    logits = [e for e in (grad,) if e is not None]
    bounds = [*outside, *inside]
    exact = exact_nodes(logits, bounds if fast_math else [*bounds, *logits])
    return dataclasses.replace(roots, grad=grad, kv_range=outside, kv_full=inside, exact=roots.exact | exact)


def _of_raw_product(e: Expr, softmax_scale: float) -> Expr:
    """`e` with `score` standing for q . k: the scale then folds into the program's other constants."""
    return substitute(e, {score(): score() * softmax_scale})


def _prepared(e: Expr, tiles: tuple[Expr, ...] = ()) -> Expr:
    return clamp_loads(group_by_stage(e, tiles), tiles)


def _flags(spec: AttentionSpec, facts: AttentionFacts, roots: _Roots) -> str:
    bound = None if facts.score_bound is None else facts.score_bound * LOG2_E
    flags: dict[str, object] = {
        "PLAIN": roots.plain,
        "RAW_SCORE": not roots.plain,  # `score` takes q . k without the scale
        "MASKED": facts.keep is not TRUE,
        "BOUND_LOG2": bound,
        "HAS_SINK": spec.sink is not None,
        "EMPTY_ROW": "zero" if spec.sink is not None else spec.empty_row.value,
        "MAY_BE_EMPTY": facts.may_be_empty,
        "AUX": tuple((a.dtype, a.ndim) for a in spec.aux),
        "NUM_SIZES": spec.num_sizes,
    }
    special = [n for n in walk(roots.score) if n.op in _SPECIAL and stage(n) is Stage.ELEMENT]
    if special:
        flags["SPECIAL_FUNCTIONS"] = len(special)
    if _may_fill(roots):
        flags["FILLS"] = True
    if roots.dense:
        flags["DENSE"] = tuple(tile.value for tile in roots.dense)
        in_score = set(walk(*(e for e in (roots.score, roots.shifted) if e is not None)))
        flags["DENSE_IN_SCORE"] = tuple(i for i, tile in enumerate(roots.dense) if tile in in_score)
        if not any("b" in i.free for tile in roots.dense for i in tile.args):
            flags["BATCH_INNER"] = True
    if roots.tables:
        flags["TABLES"] = tuple(tile.value for tile in roots.tables)
    if roots.unit_stride:
        flags["UNIT_STRIDE"] = roots.unit_stride
    if roots.tile_map is not None:
        flags["TILE_MAP"] = roots.tile_map
    return "\n".join(f"{name} = {_literal(value)}" for name, value in flags.items())


def _may_fill(roots: _Roots) -> bool:
    """Whether the score adds what may be the fill of an additive mask. A table may be one, too, but that is rare, and
    tiles with such rows run again."""
    saturating = [n for n in walk(roots.score) if n.op in ("mul_rz", "fma_rz") and stage(n) is not Stage.UNIFORM]
    return any(n.args[0] not in roots.tables for n in saturating)


def _literal(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _staged(spec: AttentionSpec, roots: _Roots) -> tuple[list[str], dict[Expr, str]]:
    """The functions `uniform`, `row`, `column` that are needed, and where later stages find their values."""
    rest = [r for r in (roots.keep, roots.column, roots.grad) if r is not None]
    per_element = [r for r in (roots.score, *(roots.interval or ()), *rest) if r.args]
    exported = _exported(per_element, roots.tiles)
    functions: list[str] = []
    given: dict[Expr, str] = {}
    for at, name in ((Stage.UNIFORM, "uniform"), (Stage.ROW, "row"), (Stage.COLUMN, "column")):
        values = exported[at]
        if values:
            functions.append(_function(name, values, spec, roots, given, as_tuple=True))
            given |= {e: f"{_TUPLES[at]}[{i}]" for i, e in enumerate(values)}
    return functions, given


def _exported(per_element: list[Expr], tiles: dict[Expr, str]) -> dict[Stage, list[Expr]]:
    """For each stage below ELEMENT, the values that a later stage (or the element functions themselves) reads."""
    found: dict[Stage, dict[Expr, None]] = {s: {} for s in Stage}
    for root in per_element:
        found[stage(root)][root] = None
        for node in walk(root):
            for arg in () if node in tiles else node.args:
                if stage(arg) < stage(node) and _is_work(arg):
                    found[stage(arg)][arg] = None
    return {s: list(found[s]) for s in (Stage.UNIFORM, Stage.ROW, Stage.COLUMN)}


def _is_work(e: Expr) -> bool:
    """More than reading a variable or writing a constant."""
    return e.op == "load" or bool(e.args)


def _function(
    name: str, values: list[Expr], spec: AttentionSpec, roots: _Roots, given: dict[Expr, str], as_tuple: bool = False
) -> str:
    writer = Writer(spec.aux, roots.exact, given, roots.tiles, roots.unit_stride)
    texts = [bare(text) for text in writer.body(values)]
    result = ", ".join(texts)
    if as_tuple:
        result = _tuple(texts)
    arguments = _ARGUMENTS[name]
    if name in _PER_ELEMENT:
        arguments += ", d" * bool(roots.dense) + ", t" * bool(roots.tables)
    lines = [*writer.lines, f"return {result}"]
    return f"def {name}({arguments}):\n" + "\n".join(f"    {line}" for line in lines)


def _tuple(texts: Iterable[str]) -> str:
    items = list(texts)
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


def _leading_indices(name: str, loads: tuple[Expr, ...], spec: AttentionSpec, roots: _Roots) -> str:
    """The function that gives the indices of each load but its last two."""
    leads = [[_prepared(i) for i in tile.args[:-2]] for tile in loads]
    writer = Writer(spec.aux, roots.exact, {}, unit_stride=roots.unit_stride)
    texts = iter([bare(text) for text in writer.body([i for lead in leads for i in lead])])
    lines = [*writer.lines, f"return {_tuple(_tuple(next(texts) for _ in lead) for lead in leads)}"]
    return f"def {name}({_ARGUMENTS[name]}):\n" + "\n".join(f"    {line}" for line in lines)
