"""Interval arithmetic on the numeric values of expressions: how large can a score get?

A load is unbounded (its values are data) unless it is bool. NaN is outside the analysis: a bound holds for every
score that is a number.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

from fa4_inductor.spec.expr import Expr, walk
from fa4_inductor.spec.ops import Kind

Range = tuple[float, float]
_ANY: Range = (-math.inf, math.inf)
_NATURAL: Range = (0.0, math.inf)
FLOAT_MAX = 3.4028234663852886e38


def value_range(root: Expr) -> Range:
    """[low, high] that contains every value of `root` which is a number; infinite ends where nothing is known."""
    ranges: dict[Expr, Range] = {}
    for node in walk(root):
        ranges[node] = _range(node, [ranges[a] for a in node.args])
    return ranges[root]


def score_bound(score: Expr) -> float | None:
    """Proven bound of |score| in natural units, or None."""
    low, high = value_range(score)
    bound = max(abs(low), abs(high))
    return bound if math.isfinite(bound) else None


def may_be_minus_inf(e: Expr) -> bool:
    """Whether a logit can be -inf for finite q . k: additive masks in data, log(0), constants.

    An infinite per-head slope of a distance is left out: it makes NaN, not -inf, of some key.
    """
    if e.is_const:
        return math.isinf(float(e.value))
    if e.op == "load":
        return e.kind is Kind.FLOAT
    if e.op in (
        "score",
        "index",
        "size",
        "to_float",
        "tanh",
        "sigmoid",
        "erf",
        "sin",
        "cos",
        "exp",
        "exp2",
        "pow",
        "sqrt",
        "rsqrt",
    ):
        return False
    if e.op == "mul" and not any(a.is_const for a in e.args):
        return any(may_be_minus_inf(a) and not _is_slope(a, b) for a, b in (e.args, e.args[::-1]))
    if e.op == "div":
        return may_be_minus_inf(e.args[0]) or not _never_zero(e.args[1])
    if e.op == "maximum":
        return all(map(may_be_minus_inf, e.args))
    if e.op in ("add", "sub", "mul", "neg", "minimum", "abs", "floor", "ceil", "trunc", "round"):
        return any(map(may_be_minus_inf, e.args))
    return may_be_minus_inf(e.args[1]) or may_be_minus_inf(e.args[2]) if e.op == "where" else True


def _is_slope(a: Expr, other: Expr) -> bool:
    positions = {"q_idx", "kv_idx"}
    return not a.free & {*positions, "score"} and bool(other.free & positions)


def _never_zero(e: Expr) -> bool:
    """Is a divisor surely not 0, as a mask made a number or a distance can be? Data count as scales, which are not."""
    if e.is_const:
        return bool(e.value != 0)
    if e.op == "load":
        return e.kind is Kind.FLOAT
    return e.op in ("add", "mul", "abs", "exp", "maximum") and all(map(_never_zero, e.args))


def _range(node: Expr, args: list[Range]) -> Range:
    if node.kind is Kind.BOOL:
        return 0.0, 1.0
    if node.op == "index" or (node.op == "size" and node.value in ("seqlen_q", "seqlen_k")):
        return _NATURAL
    if node.op == "const":
        result = (_rounded(float(node.value)),) * 2
    else:
        rule = _RULES.get(node.op)
        result = _ANY if rule is None else rule(*args)
    if any(math.isnan(x) for x in result):
        return _ANY
    # Arithmetic is fp32: what is beyond its range becomes infinite.
    low, high = (math.copysign(math.inf, x) if abs(x) > FLOAT_MAX else x for x in result)
    return low, high


def _rounded(x: float) -> float:
    """x as fp32, in which tiny numbers are zero."""
    return struct.unpack("f", struct.pack("f", x))[0] if abs(x) <= FLOAT_MAX else x


def _corners(op: Callable[[float, float], float], a: Range, b: Range) -> Range:
    values = [op(x, y) for x in a for y in b]
    return (math.nan, math.nan) if any(math.isnan(v) for v in values) else (min(values), max(values))


def _times(x: float, y: float) -> float:
    return 0.0 if 0.0 in (x, y) else x * y


def _divide(a: Range, b: Range) -> Range:
    if b[0] <= 0.0 <= b[1] or math.inf in (abs(b[0]), abs(b[1])):
        return _ANY
    return _corners(lambda x, y: x / y, a, b)


def _abs(a: Range) -> Range:
    least = 0.0 if a[0] <= 0.0 <= a[1] else min(abs(a[0]), abs(a[1]))
    return least, max(abs(a[0]), abs(a[1]))


def _exp(a: Range, base: float) -> Range:
    return tuple(base**x if x < 700.0 else math.inf for x in a)  # type: ignore[return-value]


def _monotone(f: Callable[[float], float]) -> Callable[[Range], Range]:
    return lambda a: (f(a[0]), f(a[1]))


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x > -700.0 else 0.0


_RULES: dict[str, Callable[..., Range]] = {
    "add": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "mul": lambda a, b: _corners(_times, a, b),
    "div": _divide,
    "neg": lambda a: (-a[1], -a[0]),
    "minimum": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "maximum": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "abs": _abs,
    "where": lambda c, a, b: (min(a[0], b[0]), max(a[1], b[1])),
    "to_int": lambda a: a,
    "to_float": lambda a: a,
    "exp": lambda a: _exp(a, math.e),
    "exp2": lambda a: _exp(a, 2.0),
    "sqrt": lambda a: (0.0, math.sqrt(a[1]) if 0.0 <= a[1] < math.inf else math.inf),
    "rsqrt": lambda a: _NATURAL if a[0] > 0.0 else _ANY,  # rsqrt(-0.0) is -inf
    "tanh": _monotone(math.tanh),
    "sigmoid": _monotone(_sigmoid),
    "erf": _monotone(math.erf),
    "sin": lambda a: (-1.0, 1.0),
    "cos": lambda a: (-1.0, 1.0),
    # One more on each side: fp32 rounding may have moved the operand across an integer.
    **dict.fromkeys(("floor", "ceil", "trunc", "round"), lambda a: (a[0] - 1.0, a[1] + 1.0)),
}
