"""The table of pointwise operations a score program may use: arity, kinds, how they print, what they mean in eager
torch.

How an op is spelled in a kernel belongs to lowering; only its meaning lives here.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


class Kind(enum.IntEnum):
    """Value kind of an expression, ordered by promotion. INT is int64 in the interpreter and int32 in kernels; FLOAT
    is fp32 or wider."""

    BOOL = 0
    INT = 1
    FLOAT = 2


@dataclass(frozen=True)
class Op:
    """One pointwise operation.

    `operands` is "numeric" (promoted to a common INT or FLOAT), "float" (promoted to FLOAT), "int", "bool", "any"
    (common kind, BOOL allowed) or "select" (BOOL, then two of one kind). `result` is a fixed Kind, or None
    for the promoted kind of the operands. `symbol` is the Python operator it prints as, None for a function call.
    `fold` computes constants, `torch` tensors or proxies.
    """

    name: str
    arity: int
    operands: str
    result: Kind | None
    symbol: str | None
    fold: Callable[..., Any]
    torch: Callable[..., Any]


def _where_fold(cond: bool, a: Any, b: Any) -> Any:
    return a if cond else b


def _round_half_even(x: float) -> float:
    return float(round(x)) if math.isfinite(x) else x


def _to_bool(x: Any) -> Any:
    return torch.ne(x, 0)


def _to_int(x: Any) -> Any:
    return x.to(torch.int64)


def _to_float(x: Any) -> Any:
    return x.to(torch.float32) if getattr(x, "dtype", None) != torch.float64 else x


def _float_div(a: Any, b: Any) -> Any:
    if b == 0:
        return math.nan if a == 0 or a != a else math.copysign(math.inf, a) * math.copysign(1.0, b)
    return a / b


def _of_zero(log: Callable[[float], float]) -> Callable[[float], float]:
    """log of 0 is -inf: m.float().log() is a mask."""
    return lambda a: -math.inf if a == 0 else log(a)


def _nan_first(choose: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """As torch does it, and Python only where the NaN comes first."""
    return lambda a, b: a if a != a else b if b != b else choose(a, b)


def _floor_div(a: Any, b: Any) -> Any:
    return torch.div(a, b, rounding_mode="floor")


_TABLE = (
    Op("add", 2, "numeric", None, "+", lambda a, b: a + b, torch.add),
    Op("sub", 2, "numeric", None, "-", lambda a, b: a - b, torch.sub),
    Op("mul", 2, "numeric", None, "*", lambda a, b: a * b, torch.mul),
    Op("div", 2, "float", Kind.FLOAT, "/", _float_div, torch.div),
    Op("floordiv", 2, "numeric", Kind.INT, "//", lambda a, b: a // b, _floor_div),
    Op("mod", 2, "numeric", None, "%", lambda a, b: a % b, torch.remainder),
    Op("neg", 1, "numeric", None, "-", lambda a: -a, torch.neg),
    Op("minimum", 2, "numeric", None, None, _nan_first(min), torch.minimum),
    Op("maximum", 2, "numeric", None, None, _nan_first(max), torch.maximum),
    Op("abs", 1, "numeric", None, None, abs, torch.abs),
    Op("eq", 2, "any", Kind.BOOL, "==", lambda a, b: a == b, torch.eq),
    Op("ne", 2, "any", Kind.BOOL, "!=", lambda a, b: a != b, torch.ne),
    Op("lt", 2, "numeric", Kind.BOOL, "<", lambda a, b: a < b, torch.lt),
    Op("le", 2, "numeric", Kind.BOOL, "<=", lambda a, b: a <= b, torch.le),
    Op("gt", 2, "numeric", Kind.BOOL, ">", lambda a, b: a > b, torch.gt),
    Op("ge", 2, "numeric", Kind.BOOL, ">=", lambda a, b: a >= b, torch.ge),
    Op("and_", 2, "bool", Kind.BOOL, "&", lambda a, b: a and b, torch.logical_and),
    Op("or_", 2, "bool", Kind.BOOL, "|", lambda a, b: a or b, torch.logical_or),
    Op("xor", 2, "bool", Kind.BOOL, "^", lambda a, b: a != b, torch.logical_xor),
    Op("not_", 1, "bool", Kind.BOOL, "~", lambda a: not a, torch.logical_not),
    Op("bit_and", 2, "int", Kind.INT, None, lambda a, b: a & b, torch.bitwise_and),
    Op("bit_or", 2, "int", Kind.INT, None, lambda a, b: a | b, torch.bitwise_or),
    Op("bit_xor", 2, "int", Kind.INT, None, lambda a, b: a ^ b, torch.bitwise_xor),
    Op("where", 3, "select", None, None, _where_fold, torch.where),
    Op("to_bool", 1, "any", Kind.BOOL, None, lambda a: bool(a != 0), _to_bool),
    Op("to_int", 1, "any", Kind.INT, None, int, _to_int),
    Op("to_float", 1, "any", Kind.FLOAT, None, float, _to_float),
    Op("exp", 1, "float", Kind.FLOAT, None, math.exp, torch.exp),
    Op("exp2", 1, "float", Kind.FLOAT, None, lambda a: 2.0**a, torch.exp2),
    Op("log", 1, "float", Kind.FLOAT, None, _of_zero(math.log), torch.log),
    Op("log2", 1, "float", Kind.FLOAT, None, _of_zero(math.log2), torch.log2),
    Op("sqrt", 1, "float", Kind.FLOAT, None, math.sqrt, torch.sqrt),
    Op("rsqrt", 1, "float", Kind.FLOAT, None, lambda a: 1.0 / math.sqrt(a), torch.rsqrt),
    Op("tanh", 1, "float", Kind.FLOAT, None, math.tanh, torch.tanh),
    Op("sigmoid", 1, "float", Kind.FLOAT, None, lambda a: 1.0 / (1.0 + math.exp(-a)), torch.sigmoid),
    Op("erf", 1, "float", Kind.FLOAT, None, math.erf, torch.erf),
    Op("sin", 1, "float", Kind.FLOAT, None, math.sin, torch.sin),
    Op("cos", 1, "float", Kind.FLOAT, None, math.cos, torch.cos),
    Op("pow", 2, "float", Kind.FLOAT, None, math.pow, torch.pow),
    Op("floor", 1, "float", Kind.FLOAT, None, math.floor, torch.floor),
    Op("ceil", 1, "float", Kind.FLOAT, None, math.ceil, torch.ceil),
    Op("trunc", 1, "float", Kind.FLOAT, None, math.trunc, torch.trunc),
    Op("round", 1, "float", Kind.FLOAT, None, _round_half_even, torch.round),
)

OPS: dict[str, Op] = {op.name: op for op in _TABLE}
BINARY_SYMBOLS: dict[str, str] = {op.symbol: op.name for op in _TABLE if op.symbol and op.arity == 2}
"""Python operator to op name, for the parser."""
