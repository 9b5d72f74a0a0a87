"""Simplification of score programs: one ordered table of named rules, applied bottom-up until nothing changes.

Rules keep the value of every element. Float rules that reassociate (and so change the last bit) apply only where the
value is rounded
anyway, never below a comparison, a truncation or an index, where the last bit could flip a decision (T5's bucket
boundaries).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from fa4_inductor.spec import expr as E
from fa4_inductor.spec.attention import AttentionSpec
from fa4_inductor.spec.linear import Linear, Range, atom_range, bounds, linear, to_expr
from fa4_inductor.spec.ops import Kind

_COMPARE = {"lt", "le", "gt", "ge", "eq", "ne"}
_NEGATED = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt", "eq": "ne", "ne": "eq"}
_EXACT_BELOW = _COMPARE | {"to_int", "to_bool", "floor", "ceil", "trunc", "round", "floordiv", "mod", "load"}
Rule = Callable[[E.Expr, dict[str, Range]], E.Expr | None]


def _is(e: E.Expr, value: object) -> bool:
    return e.is_const and e.value == value and type(e.value) is type(value)


def bool_identities(e: E.Expr, _: dict[str, Range]) -> E.Expr | None:
    """True & x, False | x, x & x, ~~x, x ^ False, ~(a < b) on integers, ~(x | y) as the terms of a conjunction."""
    if e.op in ("and_", "or_"):
        absorbing = e.op == "or_"
        for x, y in (e.args, e.args[::-1]):
            if x.is_const:
                return x if x.value is absorbing else y
            if x is y:
                return x
    if e.op == "xor" and e.args[1].is_const:
        return ~e.args[0] if e.args[1].value else e.args[0]
    if e.op == "not_":
        inner = e.args[0]
        if inner.op == "not_":
            return inner.args[0]
        if inner.op == "or_":
            return ~inner.args[0] & ~inner.args[1]
        # With NaN, ~(a < b) is not a >= b.
        if inner.op in _COMPARE and (inner.op in ("eq", "ne") or inner.args[0].kind is not Kind.FLOAT):
            return E.call(_NEGATED[inner.op], *inner.args)
    return None


def select_identities(e: E.Expr, _: dict[str, Range]) -> E.Expr | None:
    """where with a constant or negated condition, equal or boolean branches."""
    if e.op != "where":
        return None
    cond, a, b = e.args
    if cond.is_const:
        return a if cond.value else b
    if a is b:
        return a
    if cond.op == "not_":
        return E.call("where", cond.args[0], b, a)
    if a.kind is Kind.BOOL:
        if a.is_const:
            return cond | b if a.value else ~cond & b
        if b.is_const:
            return ~cond | a if b.value else cond & a
    return None


def casts(e: E.Expr, _: dict[str, Range]) -> E.Expr | None:
    """bool -> number -> bool, index -> float -> int, comparisons of a cast bool with 0 or 1."""
    if e.op == "to_bool" and e.args[0].op in ("to_int", "to_float") and e.args[0].args[0].kind is not Kind.FLOAT:
        return E.cast(e.args[0].args[0], Kind.BOOL)
    if (
        e.op == "to_int"
        and e.args[0].op == "to_float"
        and "aux" not in e.free
        and e.args[0].args[0].kind is not Kind.FLOAT
    ):
        return E.cast(e.args[0].args[0], Kind.INT)
    if e.op == "to_float" and e.args[0].op == "to_int" and e.args[0].args[0].kind is Kind.BOOL:
        return E.cast(e.args[0].args[0], Kind.FLOAT)
    if e.op in _COMPARE and e.args[1].is_const and e.args[0].op in ("to_int", "to_float", "to_bool"):
        inner, limit = e.args[0].args[0], float(e.args[1].value)
        if inner.kind is Kind.BOOL:
            at0, at1 = (_compare(e.op, x, limit) for x in (0.0, 1.0))
            return E.const(at0) if at0 == at1 else (inner if at1 else ~inner)
    if e.op in ("eq", "ne") and e.args[1].is_const and e.args[0].kind is Kind.BOOL:
        return e.args[0] if e.args[1].value == (e.op == "eq") else ~e.args[0]
    return None


def bool_of_sum(e: E.Expr, _: dict[str, Range]) -> E.Expr | None:
    """bool(where(p, -inf, 0) + where(q, -inf, 0)) = p | q: terms of one sign never cancel."""
    if e.op != "to_bool" or e.args[0].op != "add" or e.args[0].kind is not Kind.FLOAT:
        return None
    terms = e.args[0].args
    if any(t.op != "where" or not (t.args[1].is_const and t.args[2].is_const) for t in terms):
        return None
    values = [t.args[i].value for t in terms for i in (1, 2)]
    if not (all(v <= 0 for v in values) or all(v >= 0 for v in values)):
        return None
    left, right = (E.call("where", t.args[0], *(E.const(v.value != 0) for v in t.args[1:])) for t in terms)
    return left | right


def compared_selection(e: E.Expr, _: dict[str, Range]) -> E.Expr | None:
    """where(c, 0, x) != 0 = where(c, False, x != 0) where x is a constant or such a selection itself."""
    if e.op != "to_bool" and not (e.op in _COMPARE and e.args[1].is_const):
        return None
    chosen, *limit = e.args
    if chosen.op != "where" or not _selects_constants(chosen):
        return None
    return E.call("where", chosen.args[0], *(E.call(e.op, a, *limit) for a in chosen.args[1:]))


def _selects_constants(e: E.Expr) -> bool:
    return e.is_const or (e.op == "where" and all(_selects_constants(a) for a in e.args[1:]))


def _compare(op: str, x: float, y: float) -> bool:
    return {"lt": x < y, "le": x <= y, "gt": x > y, "ge": x >= y, "eq": x == y, "ne": x != y}[op]


def arithmetic_identities(e: E.Expr, _: dict[str, Range]) -> E.Expr | None:
    """x + 0, x - 0, 0 - x, x * 1, x * -1, x / 1, --x, min(x, x)."""
    if e.op in ("add", "mul"):
        for x, y in (e.args, e.args[::-1]):
            if y.is_const and y.value == (0 if e.op == "add" else 1):
                return x
            if e.op == "mul" and y.is_const and y.value == -1:
                return -x
    if e.op == "sub":
        if e.args[1].is_const and e.args[1].value == 0:
            return e.args[0]
        if e.args[0].is_const and e.args[0].value == 0:
            return -e.args[1]
        if e.args[1].op == "neg":
            return e.args[0] + e.args[1].args[0]
    if e.op == "add" and e.args[1].op == "neg":
        return e.args[0] - e.args[1].args[0]
    if e.op in ("div", "floordiv") and e.args[1].is_const and e.args[1].value == 1:
        return e.args[0]
    if e.op == "neg" and e.args[0].op == "neg":
        return e.args[0].args[0]
    return e.args[0] if e.op in ("minimum", "maximum") and e.args[0] is e.args[1] else None


def integer_linear(e: E.Expr, _: dict[str, Range]) -> E.Expr | None:
    """Sums of integers in one normal form."""
    if e.kind is Kind.INT and e.op in ("add", "sub", "neg", "mul"):
        return to_expr(linear(e))
    return None


def integer_extremes(e: E.Expr, ranges: dict[str, Range]) -> E.Expr | None:
    """The smaller or larger of two integers whose order the ranges decide."""
    if e.op not in ("minimum", "maximum") or e.kind is not Kind.INT:
        return None
    low, high = bounds(linear(e.args[0]) - linear(e.args[1]), ranges)
    if high <= 0 or low >= 0:
        return e.args[0] if (high <= 0) == (e.op == "minimum") else e.args[1]
    return None


def integer_division(e: E.Expr, ranges: dict[str, Range]) -> E.Expr | None:
    """(n*a + r) // n = a and (n*a + r) % n = r where r is proven to lie in [0, n); x // a // b = x // (a*b), and
    x % (a*n) % n = x % n."""
    if e.op not in ("floordiv", "mod") or e.kind is not Kind.INT or not e.args[1].is_const or e.args[1].value <= 0:
        return None
    n = e.args[1].value
    x = e.args[0]
    if x.op == e.op and x.args[1].is_const and x.args[1].value > 0:
        if e.op == "floordiv":
            return E.call("floordiv", x.args[0], x.args[1].value * n)
        if x.args[1].value % n == 0:
            return E.call("mod", x.args[0], n)
    form = linear(x)
    whole = Linear(tuple((a, c // n) for a, c in form.terms if c % n == 0), form.constant // n)
    rest = Linear(tuple((a, c) for a, c in form.terms if c % n), form.constant % n)
    low, high = bounds(rest, ranges)
    if low >= 0 and high < n:
        return to_expr(whole if e.op == "floordiv" else rest)
    return None


def bits(e: E.Expr, ranges: dict[str, Range]) -> E.Expr | None:
    """x & c without the bits of c that x cannot have, and x where c holds all bits that x can have (x >= 0);
    x | 0 = x ^ 0 = x."""
    if e.op in ("bit_or", "bit_xor"):
        zero = [a.is_const and a.value == 0 for a in e.args]
        return e.args[1] if zero[0] else e.args[0] if zero[1] else None
    if e.op != "bit_and":
        return None
    x, c = e.args if e.args[1].is_const else e.args[::-1]
    if not c.is_const or c.value < 0:
        return None
    low, high = atom_range(x, _LENGTHS | ranges)
    if low < 0 or math.isinf(high):
        return E.call("bit_and", x, c) if e.args[0] is c else None
    possible = (1 << int(high).bit_length()) - 1
    kept = c.value & possible
    return x if kept == possible else E.call("bit_and", x, kept) if kept else E.const(0)


_LENGTHS: dict[str, Range] = dict.fromkeys(("b", "h", "q_idx", "kv_idx"), (0, (1 << 30) - 1))
"""No index reaches 2**30: kernel programs compute with them in int32."""


def integer_compare(e: E.Expr, ranges: dict[str, Range]) -> E.Expr | None:
    """One spelling for integer comparisons: `kv_idx <= ...` or `kv_idx >= ...` where possible; decided where the
    ranges decide."""
    if e.op not in _COMPARE or any(a.kind is not Kind.INT for a in e.args):
        return None
    diff = linear(e.args[0]) - linear(e.args[1])
    if e.op in ("gt", "ge"):
        diff = diff.negated()
    if e.op in ("lt", "gt"):
        diff = diff.shifted(1)
    low, high = bounds(diff, ranges)
    if e.op in ("eq", "ne"):
        if low > 0 or high < 0 or low == high == 0:
            return E.const((low == high == 0) == (e.op == "eq"))
        return _isolated(e.op, e.op, diff)
    if high <= 0 or low > 0:
        return E.const(high <= 0)
    return _isolated("le", "ge", diff)


def _isolated(op: str, flipped: str, diff: Linear) -> E.Expr:
    """`diff op 0` with kv_idx, else the positive terms, alone on the left."""
    divisor = math.gcd(*(c for _, c in diff.terms))
    if divisor > 1 and diff.constant % divisor == 0:
        diff = Linear(tuple((a, c // divisor) for a, c in diff.terms), diff.constant // divisor)
    kv = E.index("kv_idx")
    if diff.coefficient(kv) == 1:
        return E.call(op, kv, to_expr(diff.without(kv).negated()))
    if diff.coefficient(kv) == -1:
        return E.call(flipped, kv, to_expr(diff.without(kv)))
    left = Linear(tuple((a, c) for a, c in diff.terms if c > 0), 0)
    right = Linear(tuple((a, -c) for a, c in diff.terms if c < 0), -diff.constant)
    if not left.terms:
        return E.call(flipped, to_expr(right.shifted(diff.constant)), E.const(diff.constant))
    return E.call(op, to_expr(left), to_expr(right))


def fold_scales(e: E.Expr, _: dict[str, Range]) -> E.Expr | None:
    """x / c = x * (1/c), (x * c1) * c2 = x * (c1*c2), -(x * c) = x * -c; constants to the right. Inexact in the last
    bit."""
    if e.kind is not Kind.FLOAT:
        return None
    if e.op == "div" and E.is_finite_const(e.args[1]) and e.args[1].value != 0:
        return e.args[0] * (1.0 / e.args[1].value)
    if e.op == "mul":
        x, c = e.args if e.args[1].is_const else e.args[::-1]
        if c.is_const and x.op == "mul" and x.args[1].is_const:
            return x.args[0] * (x.args[1].value * c.value)
        if c.is_const and e.args[0] is c and not x.is_const:
            return E.call("mul", x, c)
    if e.op == "neg" and e.args[0].op == "mul" and e.args[0].args[1].is_const:
        return e.args[0].args[0] * (-e.args[0].args[1].value)
    return None


EXACT_RULES: tuple[Rule, ...] = (
    bool_identities,
    select_identities,
    casts,
    bool_of_sum,
    compared_selection,
    arithmetic_identities,
    integer_linear,
    integer_extremes,
    integer_division,
    bits,
    integer_compare,
)
INEXACT_RULES: tuple[Rule, ...] = (fold_scales,)
"""Change the last bit; not applied below comparisons, truncations and indices."""


def simplify(e: E.Expr, ranges: dict[str, Range] | None = None) -> E.Expr:
    """An expression with the same value everywhere in `ranges` (inclusive bounds by index or size name; indices are
    >= 0 anyway)."""
    memo: dict[tuple[E.Expr, bool], E.Expr] = {}
    return _simplify(e, False, dict(ranges or {}), memo)


def _simplify(e: E.Expr, exact: bool, ranges: dict[str, Range], memo: dict[tuple[E.Expr, bool], E.Expr]) -> E.Expr:
    key = (e, exact)
    if key in memo:
        return memo[key]
    below = exact or e.op in _EXACT_BELOW
    node = E.rebuild(e, tuple(_simplify(a, below, ranges, memo) for a in e.args)) if e.args else e
    for rule in EXACT_RULES if exact else EXACT_RULES + INEXACT_RULES:
        changed = rule(node, ranges)
        if changed is not None and changed is not node:
            node = _simplify(changed, exact, ranges, memo)
            break
    memo[key] = node
    return node


def simplify_spec(spec: AttentionSpec, ranges: dict[str, Range] | None = None) -> AttentionSpec:
    """Simplify every program of a spec, move a constant factor of the score into `softmax_scale`, order the terms of
    keep."""
    factor, new_score = _score_factor(simplify(spec.score, ranges))
    return dataclasses.replace(
        spec,
        softmax_scale=spec.softmax_scale * factor,
        score=simplify(new_score, ranges),
        keep=_ordered_keep(simplify(spec.keep, ranges)),
        sink=None if spec.sink is None else simplify(spec.sink, ranges),
    )


def drop_unused_aux(spec: AttentionSpec) -> tuple[AttentionSpec, tuple[int, ...]]:
    """The spec with the aux slots it reads, renumbered by first use, and the old slot of each."""
    loads = [n.value for root in _programs(spec) for n in E.walk(root) if n.op == "load"]
    kept = tuple(dict.fromkeys(loads if spec.dropout is None else [*loads, spec.dropout.slot]))
    if kept == tuple(range(len(spec.aux))):
        return spec, kept

    def renumber(root: E.Expr) -> E.Expr:
        done: dict[E.Expr, E.Expr] = {}
        for node in E.walk(root):
            args = tuple(done[a] for a in node.args)
            done[node] = E.load(kept.index(node.value), args, node.kind) if node.op == "load" else E.rebuild(node, args)
        return done[root]

    dropout = spec.dropout and dataclasses.replace(spec.dropout, slot=kept.index(spec.dropout.slot))
    aux = tuple(spec.aux[slot] for slot in kept)
    return dataclasses.replace(_mapped(spec, renumber), aux=aux, dropout=dropout), kept


def drop_unused_sizes(spec: AttentionSpec) -> tuple[AttentionSpec, tuple[int, ...]]:
    """The spec with the run-time integers it uses, renumbered by first use, and the old number of each."""
    names = (n.value for n in E.walk(*_programs(spec)) if n.op == "size" and n.value not in E.LENGTH_NAMES)
    kept = tuple(int(name.removeprefix("size")) for name in names)
    renamed = {E.size(f"size{old}"): E.size(f"size{new}") for new, old in enumerate(kept)}
    if kept != tuple(range(spec.num_sizes)):
        spec = dataclasses.replace(_mapped(spec, lambda root: E.substitute(root, renamed)), num_sizes=len(kept))
    return spec, kept


def _programs(spec: AttentionSpec) -> list[E.Expr]:
    return [spec.keep, spec.score] + ([spec.sink] if spec.sink is not None else [])


def _mapped(spec: AttentionSpec, change: Callable[[E.Expr], E.Expr]) -> AttentionSpec:
    sink = None if spec.sink is None else change(spec.sink)
    return dataclasses.replace(spec, score=change(spec.score), keep=change(spec.keep), sink=sink)


def _score_factor(e: E.Expr) -> tuple[float, E.Expr]:
    """If `score` occurs only as `score * c` with one finite constant c, that c and the expression without it."""
    s = E.score()
    factors = set()
    for node in E.walk(e):
        if s in node.args:
            if node.op == "mul" and node.args[0] is s and E.is_finite_const(node.args[1]):
                factors.add(node.args[1].value)
            elif node.op == "neg":
                factors.add(-1.0)
            else:
                return 1.0, e
    if len(factors) != 1:
        return 1.0, e
    (factor,) = factors
    return factor, E.substitute(e, {E.call("mul", s, factor): s, -s: s})


def _ordered_keep(keep: E.Expr) -> E.Expr:
    """Distinct terms, index formulas before data, so that equal masks print alike."""
    terms = dict.fromkeys(E.conjuncts(keep))
    return E.conjunction(sorted(terms, key=lambda t: ("aux" in t.free, len(repr(t)), repr(t))))
