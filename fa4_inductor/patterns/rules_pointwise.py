"""Pointwise rules: ATen op -> spec expression of the operands' elements."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from fa4_inductor.errors import DeclineReason, DeclineSite
from fa4_inductor.patterns.booleans import boolean_selection
from fa4_inductor.patterns.indices import Index
from fa4_inductor.patterns.rules_views import argument
from fa4_inductor.spec import expr as E
from fa4_inductor.spec.ops import Kind

if TYPE_CHECKING:
    from fa4_inductor.patterns.elements import Elements

aten = torch.ops.aten
Rule = Callable[["Elements", fx.Node, Index], E.Expr]
Operand = E.Expr | int | float | bool


def kind_of(dtype: torch.dtype) -> Kind:
    if dtype is torch.bool:
        return Kind.BOOL
    if dtype.is_complex:
        raise DeclineSite(DeclineReason.UNSUPPORTED_DTYPE, f"{dtype} in a score or mask")
    return Kind.FLOAT if dtype.is_floating_point else Kind.INT


def round_to(value: float, dtype: torch.dtype) -> float:
    """A float constant as `dtype` holds it: beyond its range it becomes infinite."""
    if not dtype.is_floating_point or dtype is torch.float64 or not math.isfinite(value):
        return value
    return float(torch.tensor(value, dtype=torch.float64, device="cpu").to(dtype).item())


def constant(value: Any, dtype: torch.dtype) -> E.Expr:
    """A Python number as an element of a tensor of `dtype`."""
    kind = kind_of(dtype)
    if kind is Kind.FLOAT:
        return E.const(round_to(float(value), dtype))
    return E.const(bool(value)) if kind is Kind.BOOL else E.const(int(value))


_DECIDES = {"eq", "ne", "lt", "le", "gt", "ge", "floor", "ceil", "trunc", "round", "mod"}


def _plain(name: str) -> Rule:
    """An op of the spec's table, applied to all positional arguments."""

    def rule(ev: Elements, node: fx.Node, index: Index) -> E.Expr:
        operands = [ev.operand(a, index) for a in node.args]
        if name in _DECIDES:
            for arg, operand in zip(node.args, operands):
                _check_unrounded(arg, operand)
        return E.call(name, *operands)

    return rule


def _check_unrounded(arg: Any, operand: E.Expr) -> None:
    """Rounding to a half type is noise in a score, but not where a decision is taken on the rounded value."""
    if not isinstance(arg, fx.Node) or not isinstance(arg.meta["val"], torch.Tensor):
        return
    exact = operand.op in ("const", "load") or boolean_selection(operand) is not operand
    exact = exact or (operand.op == "where" and operand.args[1].is_const and operand.args[2].is_const)
    exact = exact or (operand.op == "to_float" and operand.args[0].kind is Kind.BOOL)
    if arg.meta["val"].dtype in (torch.float16, torch.bfloat16) and not exact:
        raise DeclineSite(DeclineReason.UNSUPPORTED_OP, f"a decision on a rounded {arg.meta['val'].dtype} value")


def _add(ev: Elements, node: fx.Node, index: Index) -> E.Expr:
    return _scaled_sum(ev, node, index, "add")


def _sub(ev: Elements, node: fx.Node, index: Index) -> E.Expr:
    return _scaled_sum(ev, node, index, "sub")


def _scaled_sum(ev: Elements, node: fx.Node, index: Index, name: str) -> E.Expr:
    left, right = (ev.operand(a, index) for a in node.args[:2])
    alpha = argument(node, 2, "alpha", 1)
    if alpha != 1:
        right = E.call("mul", right, ev.operand(alpha, index))
    return E.call(name, left, right)


def _rsub(ev: Elements, node: fx.Node, index: Index) -> E.Expr:
    left, right = (ev.operand(a, index) for a in node.args[:2])
    if argument(node, 2, "alpha", 1) != 1:
        raise DeclineSite(DeclineReason.UNSUPPORTED_OP, "rsub with alpha")
    return E.call("sub", right, left)


def _div_mode(ev: Elements, node: fx.Node, index: Index) -> E.Expr:
    left, right = (ev.operand(a, index) for a in node.args[:2])
    mode = node.kwargs.get("rounding_mode")
    integers = left.kind is not Kind.FLOAT and right.kind is not Kind.FLOAT
    if mode is None:
        return E.call("div", left, right)
    if mode == "floor":
        return _floored(left, right)
    if integers:
        quotient = E.call("floordiv", E.call("abs", left), E.call("abs", right))
        same_sign = E.call("eq", E.call("lt", left, 0), E.call("lt", right, 0))
        return E.call("where", same_sign, quotient, -quotient)
    return E.call("trunc", E.call("div", left, right))


def _floor_divide(ev: Elements, node: fx.Node, index: Index) -> E.Expr:
    return _floored(*(ev.operand(a, index) for a in node.args[:2]))


def _floored(left: E.Expr, right: E.Expr) -> E.Expr:
    """Floor division. Among floats it is not the floor of the quotient where that is infinite: eager gives NaN."""
    if left.kind is not Kind.FLOAT and right.kind is not Kind.FLOAT:
        return E.call("floordiv", left, right)
    if right.op != "const" or any(n.op in ("load", "score") for n in E.walk(left)):
        raise DeclineSite(DeclineReason.UNSUPPORTED_PROGRAM, "floor division of floats that may be infinite")
    return E.call("floor", E.call("div", left, right))


def _pow(ev: Elements, node: fx.Node, index: Index) -> E.Expr:
    base, exponent = (ev.operand(a, index) for a in node.args[:2])
    if exponent.is_const and exponent.value == 2:
        return base * base
    if base.kind is not Kind.FLOAT and exponent.kind is not Kind.FLOAT:
        raise DeclineSite(DeclineReason.UNSUPPORTED_OP, "integer power")
    return E.call("pow", base, exponent)


def _limit(ev: Elements, node: fx.Node, index: Index, limit: Any) -> E.Expr:
    """A bound as the result holds it: in bf16, clamp(x, min=-1e9) gives the bf16 next to -1e9."""
    e = ev.operand(limit, index)
    return constant(e.value, node.meta["val"].dtype) if e.is_const else e


def _clamp(ev: Elements, node: fx.Node, index: Index) -> E.Expr:
    value = ev.operand(node.args[0], index)
    for position, name, op in ((1, "min", "maximum"), (2, "max", "minimum")):
        limit = node.args[position] if len(node.args) > position else node.kwargs.get(name)
        if limit is not None:
            value = E.call(op, value, _limit(ev, node, index, limit))
    return value


def _clamp_min(ev: Elements, node: fx.Node, index: Index) -> E.Expr:
    return E.call("maximum", ev.operand(node.args[0], index), _limit(ev, node, index, node.args[1]))


def _clamp_max(ev: Elements, node: fx.Node, index: Index) -> E.Expr:
    return E.call("minimum", ev.operand(node.args[0], index), _limit(ev, node, index, node.args[1]))


def _relu(ev: Elements, node: fx.Node, index: Index) -> E.Expr:
    return E.call("maximum", ev.operand(node.args[0], index), 0)


def _where(ev: Elements, node: fx.Node, index: Index) -> E.Expr:
    condition = E.cast(ev.operand(node.args[0], index), Kind.BOOL)
    condition = ev.space.simplify(condition)
    if condition.is_const:
        return ev.operand(node.args[1 if condition.value else 2], index)
    return E.call("where", condition, *(ev.operand(a, index) for a in node.args[1:3]))


def _logical(name: str) -> Rule:
    def rule(ev: Elements, node: fx.Node, index: Index) -> E.Expr:
        return E.call(name, *(E.cast(ev.operand(a, index), Kind.BOOL) for a in node.args))

    return rule


def _bitwise(name: str) -> Rule:
    """Bitwise ops on bools are logical ones."""

    def rule(ev: Elements, node: fx.Node, index: Index) -> E.Expr:
        operands = [ev.operand(a, index) for a in node.args]
        if all(x.kind is Kind.BOOL for x in operands):
            return E.call(name, *operands)
        if name == "not_":
            return -E.cast(operands[0], Kind.INT) - 1
        return E.call(f"bit_{name.rstrip('_')}", *operands)

    return rule


def _shift(ev: Elements, node: fx.Node, index: Index) -> E.Expr:
    """Shifts by a constant, as torch does them on int64: arithmetic to the right."""
    value, by = (ev.operand(a, index) for a in node.args)
    if not by.is_const or not 0 <= by.value < 31 or value.kind is not Kind.INT:
        raise DeclineSite(DeclineReason.UNSUPPORTED_OP, f"{node.target} by data")
    left = "lshift" in node.target._opname or "left_shift" in node.target._opname
    return E.call("mul" if left else "floordiv", value, 1 << int(by.value))


def _is(test: Callable[[E.Expr], E.Expr]) -> Rule:
    return lambda ev, node, index: test(ev.operand(node.args[0], index))


def _cast(ev: Elements, node: fx.Node, index: Index) -> E.Expr:
    """_to_copy: rounding of floats is not part of the meaning, the range of the new type and truncation to int are."""
    source, dtype = node.args[0], node.meta["val"].dtype
    value = ev.value(source, index)
    old = source.meta["val"].dtype
    if dtype.is_floating_point and old.is_floating_point:
        return ev.narrow(node, index, value) if narrows(old, dtype) else value
    if not dtype.is_floating_point and dtype not in (torch.bool, torch.int32, torch.int64) and old is not torch.bool:
        raise DeclineSite(DeclineReason.UNSUPPORTED_OP, f"cast to {dtype}")
    if not dtype.is_floating_point:
        _check_unrounded(source, value)
    return E.cast(value, kind_of(dtype))


def narrows(old: torch.dtype, new: torch.dtype) -> bool:
    """Can a finite value of `old` leave the range of `new`?"""
    return torch.finfo(new).max < torch.finfo(old).max


def _full(ev: Elements, node: fx.Node, index: Index) -> E.Expr:
    position = {"scalar_tensor": 0, "new_full": 2}.get(node.target._opname, 1)
    return ev.fill(argument(node, position, "fill_value", node.args[0]), node)


def _filled(value: int) -> Rule:
    return lambda ev, node, index: constant(value, node.meta["val"].dtype)


# The same name in ATen and in the spec.
_UNARY = (
    "neg", "abs", "exp2", "log", "log2", "sqrt", "rsqrt", "tanh", "sigmoid", "erf", "sin", "cos", "floor",
    "ceil", "trunc", "round",
)  # fmt: skip
_BINARY = {
    "mul": "mul", "div": "div", "maximum": "maximum", "minimum": "minimum", "remainder": "mod", "eq": "eq", "ne": "ne",
    "lt": "lt", "le": "le", "gt": "gt", "ge": "ge",
}  # fmt: skip


def _overloads(packet: Any) -> list[Any]:
    return [getattr(packet, o) for o in packet.overloads() if o in ("Tensor", "Scalar", "default")]


def _table() -> dict[Any, Rule]:
    rules: dict[Any, Rule] = {getattr(aten, n).default: _plain(n) for n in _UNARY}
    for name, spec_name in _BINARY.items():
        rules |= dict.fromkeys(_overloads(getattr(aten, name)), _plain(spec_name))
    for name in ("and", "or", "xor", "not"):
        op = f"{name}_" if name != "xor" else name
        rules[getattr(aten, f"logical_{name}").default] = _logical(op)
        rules |= dict.fromkeys(_overloads(getattr(aten, f"bitwise_{name}")), _bitwise(op))
    for name in ("__lshift__", "__rshift__", "bitwise_left_shift", "bitwise_right_shift"):
        packet = getattr(aten, name)
        rules |= {getattr(packet, o): _shift for o in packet.overloads() if o in ("Scalar", "Tensor", "Tensor_Scalar")}
    for name in ("full", "full_like", "new_full", "scalar_tensor"):
        rules[getattr(aten, name).default] = _full
    for name, value in (("zeros", 0), ("ones", 1)):
        for form in (name, f"{name}_like", f"new_{name}"):
            rules[getattr(aten, form).default] = _filled(value)
    return rules


POINTWISE_RULES: dict[Any, Rule] = _table() | {
    aten.add.Tensor: _add,
    aten.add.Scalar: _add,
    aten.sub.Tensor: _sub,
    aten.sub.Scalar: _sub,
    aten.rsub.Scalar: _rsub,
    aten.rsub.Tensor: _rsub,
    aten.div.Tensor_mode: _div_mode,
    aten.div.Scalar_mode: _div_mode,
    aten.floor_divide.default: _floor_divide,
    aten.pow.Tensor_Scalar: _pow,
    aten.pow.Tensor_Tensor: _pow,
    aten.pow.Scalar: _pow,
    aten.clamp.default: _clamp,
    aten.clamp.Tensor: _clamp,
    aten.clamp_min.default: _clamp_min,
    aten.clamp_max.default: _clamp_max,
    aten.relu.default: _relu,
    aten.where.self: _where,
    aten._to_copy.default: _cast,
    aten.copy.default: lambda ev, node, index: ev.operand(node.args[1], index),
    aten.reciprocal.default: _is(lambda x: E.call("div", 1.0, x)),
    aten.isposinf.default: _is(lambda x: E.call("eq", x, math.inf)),
    aten.isneginf.default: _is(lambda x: E.call("eq", x, -math.inf)),
    aten.isnan.default: _is(lambda x: E.call("ne", x, x)),
    aten.log1p.default: _is(lambda x: E.call("log", x + 1.0)),
    aten.expm1.default: _is(lambda x: E.call("exp", x) - 1.0),
    aten.sign.default: _is(lambda x: E.cast(E.call("gt", x, 0), Kind.INT) - E.cast(E.call("lt", x, 0), Kind.INT)),
}
