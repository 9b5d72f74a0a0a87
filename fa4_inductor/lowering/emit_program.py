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
from pathlib import Path

from fa4_inductor.analysis.facts import AttentionFacts
from fa4_inductor.analysis.intervals import smallest
from fa4_inductor.analysis.parts import Stage, stage
from fa4_inductor.analysis.tile_test import tile_test
from fa4_inductor.lowering.emit_expr import LOG2_E, Writer, aux_length, bare, exact_nodes
from fa4_inductor.lowering.log2_score import SHIFT
from fa4_inductor.lowering.program_roots import Roots, make_roots, may_fill, prepared, read_as_tiles, with_gradient
from fa4_inductor.spec.attention import AttentionSpec
from fa4_inductor.spec.expr import TRUE, Expr, const, walk

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
    "gradients": "ctx, s, b, h, q_idx, kv_idx, u, r, c",
    "learned_index": "ctx, b, h, q_idx, kv_idx, u, r, c",
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
    "column_index": "ctx, b, h",
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


def emit_program(
    spec: AttentionSpec,
    facts: AttentionFacts,
    *,
    need_lse: bool = False,
    fast_math: bool = True,
    dense: tuple[Expr, ...] = (),
    tables: tuple[Expr, ...] = (),
    columns: tuple[Expr, ...] = (),
    unit_stride: tuple[int, ...] = (),
    use_tile_map: bool = False,
    accumulate: bool = False,
    gradient: bool = False,
    learned: tuple[int, ...] = (),
) -> str:
    """Module text for `spec`; equal arguments give equal text.

    Args:
        dense: loads of the spec (lowering.aux_layout) that the kernel brings in as tiles.
        tables: loads from distance tables, in whose layout the kernel may trust.
        columns: loads from vectors over the key, whose rows begin an even number of elements apart.
        unit_stride: aux slots of tensors with an innermost stride of 1.
        use_tile_map: read the spec's tile map, whose tiles are those of the kernel.
        accumulate: q may be multiplied by the softmax scale where that is exact, so that the tensor cores add a dense
            bias; for bfloat16.
        gradient: for a backward kernel: with `score_grad` unless it is 1, and with q_range and q_full instead of
            kv_range and kv_full.
        learned: with `gradient`: slots of the aux tensors whose gradients are wanted.
        need_lse: keep the terms that shift the LSE without changing the output.
        fast_math: logits through the special function unit, with tanh good to 2^-11 (relative); False computes tanh,
            exp, log and divisions exactly, at several times their cost.

    Raises:
        ProgramError: an integer constant does not fit into int32 arithmetic.
    """
    parts = [f'"""{spec.text}"""\n\n{_HEADER}']
    lengths = [aux_length(e.value, len(e.args) - 1) for e in columns]
    spec, tables, columns = read_as_tiles(spec, tables, columns)
    slot = spec.tile_map.slot if use_tile_map and spec.tile_map is not None else None
    apart, paired = slot is None and not gradient, (*tables, *columns)
    roots = make_roots(spec, facts, need_lse, fast_math, dense, paired, columns_apart=apart, accumulate=accumulate)
    full = roots.kv_full[0], functools.reduce(smallest, lengths, roots.kv_full[1])
    roots = dataclasses.replace(
        roots, unit_stride=unit_stride, tile_map=slot, kv_full=full, tables=tables, columns=columns
    )
    if gradient:
        roots = with_gradient(roots, spec, fast_math, learned)
    stages, given = _staged(spec, roots)
    parts += [_flags(spec, facts, roots), *stages]
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
    if roots.learned:
        parts += _learned(spec, roots, given)
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
    for name, loads in (("dense_index", dense), ("table_index", tables), ("column_index", columns)):
        if loads:
            parts.append(_leading_indices(name, loads, spec, roots))
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
    rows, columns = ([prepared(e) for e in values] for values in (test.rows, test.columns))
    results = [prepared(e) for e in (test.possible, test.certain)]
    exact = exact_nodes([], [*rows, *columns, *results])
    roots = dataclasses.replace(make_roots(spec, facts, False, True, (), ()), unit_stride=unit_stride, exact=exact)
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


def _flags(spec: AttentionSpec, facts: AttentionFacts, roots: Roots) -> str:
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
    if may_fill(roots):
        flags["FILLS"] = True
    if roots.dense:
        flags["DENSE"] = tuple(tile.value for tile in roots.dense)
        in_score = set(walk(*(e for e in (roots.score, roots.shifted) if e is not None)))
        flags["DENSE_IN_SCORE"] = tuple(i for i, tile in enumerate(roots.dense) if tile in in_score)
        if not any("b" in i.free for tile in roots.dense for i in tile.args):
            flags["BATCH_INNER"] = True
    if roots.accumulated is not None:
        flags["ACCUMULATED"] = roots.accumulated
    if roots.tables:
        flags["TABLES"] = tuple(tile.value for tile in roots.tables)
    if roots.columns:
        flags["COLUMNS"] = tuple(tile.value for tile in roots.columns)
    if roots.unit_stride:
        flags["UNIT_STRIDE"] = roots.unit_stride
    if roots.learned:
        flags["LEARNED"] = tuple((x.load.value, x.kind) for x in roots.learned)
    if roots.tile_map is not None:
        flags["TILE_MAP"] = roots.tile_map
    return "\n".join(f"{name} = {_literal(value)}" for name, value in flags.items())


def _literal(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _staged(spec: AttentionSpec, roots: Roots) -> tuple[list[str], dict[Expr, str]]:
    """The functions `uniform`, `row`, `column` that are needed, and where later stages find their values."""
    learned = [e for x in roots.learned for e in (x.weight, *x.load.args)]
    rest = [r for r in (roots.keep, roots.column, roots.grad, *learned) if r is not None]
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
    name: str, values: list[Expr], spec: AttentionSpec, roots: Roots, given: dict[Expr, str], as_tuple: bool = False
) -> str:
    writer = Writer(spec.aux, roots.exact, given, roots.tiles, roots.unit_stride)
    texts = [bare(text) for text in writer.body(values)]
    result = ", ".join(texts)
    if as_tuple:
        result = _tuple(texts)
    arguments = _ARGUMENTS[name]
    if name in _PER_ELEMENT:
        arguments += ", d" * bool(roots.dense) + ", t" * bool(roots.tables or roots.columns)
    lines = [*writer.lines, f"return {result}"]
    return f"def {name}({arguments}):\n" + "\n".join(f"    {line}" for line in lines)


def _learned(spec: AttentionSpec, roots: Roots, given: dict[Expr, str]) -> list[str]:
    """`gradients`: the derivative of the score by the scaled score and by the element of each learned load;
    `learned_index`: the indices of each of these elements."""
    weights = [const(1.0) if roots.grad is None else roots.grad, *(x.weight for x in roots.learned)]
    writer = Writer(spec.aux, roots.exact, given, roots.tiles, roots.unit_stride)
    texts = iter([bare(text) for text in writer.body([i for x in roots.learned for i in x.load.args])])
    lines = [*writer.lines, f"return {_tuple(_tuple(next(texts) for _ in x.load.args) for x in roots.learned)}"]
    index = f"def learned_index({_ARGUMENTS['learned_index']}):\n" + "\n".join(f"    {line}" for line in lines)
    return [_function("gradients", weights, spec, roots, given, as_tuple=True), index]


def _tuple(texts: Iterable[str]) -> str:
    items = list(texts)
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


def _leading_indices(name: str, loads: tuple[Expr, ...], spec: AttentionSpec, roots: Roots) -> str:
    """The function that gives the indices of each load but its last two."""
    leads = [[prepared(i) for i in tile.args[:-2]] for tile in loads]
    writer = Writer(spec.aux, roots.exact, {}, unit_stride=roots.unit_stride)
    texts = iter([bare(text) for text in writer.body([i for lead in leads for i in lead])])
    lines = [*writer.lines, f"return {_tuple(_tuple(next(texts) for _ in lead) for lead in leads)}"]
    return f"def {name}({_ARGUMENTS[name]}):\n" + "\n".join(f"    {line}" for line in lines)
