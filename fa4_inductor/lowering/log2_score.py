"""The score in base-2 units, arranged so that few instructions are left per element.

Five rewrites, all of which keep the value up to fp32 rounding:
- log2(e) is multiplied into constants, and into the factor that changes least often;
- float(kv_idx - q_idx) becomes float(kv_idx) - float(q_idx): exact below 2^24, and conversions run at an eighth of the
  rate of additions;
- slope * (column - row) becomes slope * column + (-slope * row), one fused multiply-add per element. The fused form
  rounds once, at the size of the result, and the rounding of the row's part is the same for all keys of a row, to
  which softmax is blind;
- where rows share such terms they share their shift as well, so that what is added to the product is computed once
  (`shared_score`);
- values that may be as large as a finfo.min fill are multiplied by log2(e) rounding toward zero, which saturates: what
  was finite stays finite, so that a row of nothing but such fills stays uniform.
"""

from __future__ import annotations

from fa4_inductor.analysis.bounds import FLOAT_MAX, value_range
from fa4_inductor.analysis.parts import Stage, stage, terms, total
from fa4_inductor.lowering.emit_expr import LOG2_E
from fa4_inductor.spec.expr import Expr, call, cast, const, index, score, walk
from fa4_inductor.spec.ops import Kind
from fa4_inductor.spec.simplify import simplify

SHIFT = Expr("shift", Kind.FLOAT)
"""Minus the row's softmax shift, a value that only kernel programs know."""

KV_FIRST = Expr("index", Kind.INT, (), "kv_first")
"""kv_idx of the thread's first column in the tile."""
OFFSET = Expr("index", Kind.FLOAT, (), "offset")
"""kv_idx - KV_FIRST, known when the kernel is traced."""

_PRODUCT = score()
_FUNCTIONS = frozenset({"tanh", "exp", "exp2", "sigmoid", "sin", "cos", "erf"})
_SPLIT = frozenset({"add", "sub", "neg", "abs", "minimum", "maximum"})


def log2_score(score: Expr, shift: Expr | None = None, *, saturate: bool = False) -> Expr:
    """`score * log2(e) + shift`. saturate: the product has come with what may be a fill, and saturates like one.

    Score terms come last in the sum, so that they meet the rest in one fused multiply-add, and the shift right before
    them: what is added up before it may be large and cancel. Without a shift, terms that may be fills are rounded
    before the score is added: a row of nothing but fills is uniform because the fill swallows the score. With one they
    are added last, in one multiply-add; the kernel runs rows whose shift is a fill again without.
    """
    parts = [_spread(t) for t in terms(scaled(_arranged(float_distances(simplify(score))), LOG2_E))]
    fills = [t for t in parts if t.op == "mul_rz" and stage(t) is Stage.ELEMENT]
    rest = sorted((t for t in parts if t not in fills), key=stage)
    biases, scores = [t for t in rest if "score" not in t.free], [t for t in rest if "score" in t.free]
    if shift is not None:
        return _add_fills(_add_scores(total([*biases, shift]), scores, saturate), fills)
    if fills and not any(n.op == "mul_rz" for n in walk(*biases)):
        return total([*biases, _add_fills(fills[0], fills[1:]), *scores])
    with_fills = [_add_fills(total(biases), fills)] if fills else biases
    return total([*with_fills, *scores])


def _add_fills(result: Expr, fills: list[Expr]) -> Expr:
    """`result` + fills, saturating."""
    for term in fills:
        result = Expr("fma_rz", Kind.FLOAT, (*term.args, result))
    return result


def shared_score(score: Expr, tables: tuple[Expr, ...], *, saturate: bool = False) -> tuple[Expr, Expr] | None:
    """(shared, row) with `score * log2(e) == shared + row` up to a SHIFT that `shared` adds, or None.

    The rows of a thread may then have one shift: `row` is the part of the score that only knows the row, and most of
    `shared` but the product is equal for them, because it knows the key alone or is read from a table along the
    diagonal. None where nothing is shared, so that a shift of its own costs a row nothing.
    """
    parts = [_spread(t) for t in terms(scaled(_arranged(float_distances(simplify(score))), LOG2_E))]
    rows: list[Expr] = []
    slopes: list[Expr] = []
    shared: list[Expr] = []
    rest: list[Expr] = []
    for t in (t for t in parts if "score" not in t.free):
        if t.op == "fma" and stage(t.args[0]) is Stage.UNIFORM:
            slope, column, row = t.args
            rows.append(row)
            if column is cast(index("kv_idx"), Kind.FLOAT):
                slopes.append(slope)
            else:
                shared.append(slope * column)
        elif stage(t) in (Stage.UNIFORM, Stage.ROW) and not any(n.op == "load" for n in walk(t)):
            rows.append(t)
        else:
            (shared if _is_shared(t, tables) else rest).append(t)
    if not slopes and not shared:
        return None
    result = SHIFT
    for slope in slopes:
        result = fma(slope, cast(KV_FIRST, Kind.FLOAT), result)
    for t in shared:
        result = _add_fills(result, [t]) if t.op == "mul_rz" and stage(t) is Stage.ELEMENT else result + t
    for slope in slopes:
        result = fma(slope, OFFSET, result)
    fills = [t for t in rest if t.op == "mul_rz" and stage(t) is Stage.ELEMENT]
    scores = [t for t in parts if "score" in t.free]
    result = _add_scores(total([result, *(t for t in rest if t not in fills)]), scores, saturate)
    return _add_fills(result, fills), total(rows)


def _add_scores(result: Expr, scores: list[Expr], saturate: bool) -> Expr:
    product = _PRODUCT * LOG2_E
    if not saturate or product not in scores:
        return total([result, *scores])
    return _add_fills(total([result, *(t for t in scores if t is not product)]), [_saturating(_PRODUCT)])


def without_tile(score: Expr, dense: tuple[Expr, ...]) -> tuple[int, Expr] | None:
    """(i, rest) where `score` is the product and dense[i] and other terms, rest being all but dense[i]; else None."""
    parts = terms(simplify(score))
    found = [i for i, tile in enumerate(dense) if tile in parts and tile.kind is Kind.FLOAT]
    if not found or _PRODUCT not in parts:
        return None
    parts.remove(dense[found[0]])
    return found[0], total(parts)


def _is_shared(term: Expr, tables: tuple[Expr, ...]) -> bool:
    """Whether `term` knows the row through `tables` alone."""
    if term in tables or "q_idx" not in term.free:
        return True
    return bool(term.args) and all(_is_shared(a, tables) for a in term.args)


def scaled(e: Expr, factor: float) -> Expr:
    """`e * factor`, with the factor moved towards constants and rarely changing operands."""
    if e.is_const:
        finite = abs(e.value) <= FLOAT_MAX
        return const(min(max(e.value * factor, -FLOAT_MAX), FLOAT_MAX) if finite else e.value * factor)
    if e.op in ("add", "sub"):
        return call(e.op, scaled(e.args[0], factor), scaled(e.args[1], factor))
    if e.op == "neg":
        return -scaled(e.args[0], factor)
    if e.op == "where":
        return call("where", e.args[0], scaled(e.args[1], factor), scaled(e.args[2], factor))
    if e.op == "mul":
        cheap, other = sorted(e.args, key=lambda a: (stage(a), not a.is_const))
        return scaled(cheap, factor) * other
    if e.op == "div":
        return scaled(e.args[0], factor) / e.args[1]
    if e.op == "score" or max(map(abs, value_range(e))) * factor <= FLOAT_MAX:
        return e * factor
    return _saturating(e, factor)


def _saturating(e: Expr, factor: float = LOG2_E) -> Expr:
    return Expr("mul_rz", Kind.FLOAT, (e, const(factor)))


def _arranged(root: Expr) -> Expr:
    """`root` with the sums below its functions of the score arranged as the score itself is: constant factors moved
    inwards, biases before the product."""
    done: dict[Expr, Expr] = {}
    for node in walk(root):
        args = tuple(done[a] for a in node.args)
        if node.op in _FUNCTIONS and "score" in node.free:
            args = tuple(_sum_of_scores(a) for a in args)
        done[node] = node if args == node.args else Expr(node.op, node.kind, args, node.value)
    return done[root]


def _sum_of_scores(e: Expr) -> Expr:
    if e.op == "mul" and any(a.is_const for a in e.args):
        factor, other = sorted(e.args, key=lambda a: not a.is_const)
        e = scaled(other, factor.value)
    parts = [_spread(t) for t in terms(e)]
    return total(sorted(parts, key=lambda t: ("score" in t.free, stage(t))))


def float_distances(root: Expr) -> Expr:
    """`root` with float(integer formula of q_idx and kv_idx) computed in floats, where all integers are below 2^24."""
    done: dict[Expr, Expr] = {}
    for node in walk(root):
        args = tuple(done[a] for a in node.args)
        if node.op == "to_float" and node.args[0].kind is Kind.INT and stage(node) is Stage.ELEMENT:
            done[node] = _as_float(node.args[0])
        else:
            done[node] = node if args == node.args else Expr(node.op, node.kind, args, node.value)
    return done[root]


def _as_float(e: Expr) -> Expr:
    if e.kind is Kind.INT and e.op in _SPLIT and stage(e) is Stage.ELEMENT and all(_is_small(a) for a in e.args):
        return call(e.op, *(_as_float(a) for a in e.args))
    return cast(e, Kind.FLOAT)


def _is_small(e: Expr) -> bool:
    """An integer made of indices, lengths and small constants by sums: exact in fp32."""
    if e.is_const:
        return abs(e.value) < 1 << 22
    if e.op in ("index", "size"):
        return e.value in ("q_idx", "kv_idx", "seqlen_q", "seqlen_k", "b", "h")
    return e.op in _SPLIT and all(_is_small(a) for a in e.args)


def _spread(term: Expr) -> Expr:
    """slope * (column + row) as fma(slope, column, slope * row); any other term as it is."""
    if term.op == "neg" and (inner := _spread(term.args[0])).op == "fma":
        slope, column, row = inner.args
        return fma(-slope, column, -row)
    if term.op != "mul" or stage(term) is not Stage.ELEMENT or "score" in term.free:
        return term
    slope, distance = sorted(term.args, key=stage)
    if stage(slope) not in (Stage.UNIFORM, Stage.ROW):
        return term
    parts = terms(distance)
    columns = [t for t in parts if stage(t) is Stage.COLUMN]
    rows = [t for t in parts if stage(t) in (Stage.UNIFORM, Stage.ROW)]
    if not columns or not rows or len(columns) + len(rows) < len(parts):
        return term
    return fma(slope, total(columns), slope * total(rows))


def fma(a: Expr, b: Expr, c: Expr) -> Expr:
    """a * b + c with one rounding; an op that only kernel programs have."""
    return Expr("fma", Kind.FLOAT, (a, b, c))
