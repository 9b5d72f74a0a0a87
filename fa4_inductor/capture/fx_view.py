"""Read-only helpers on nodes of a Dynamo graph. Nothing here adds a guard: sizes are compared as sympy expressions."""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Iterator
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._sympy.functions import FloorDiv

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in ')
_LIBRARIES = ("/torch/", "/transformers/", "/site-packages/")
SymScalar = torch.SymInt | torch.SymFloat | torch.SymBool


def target_name(node: fx.Node) -> str:
    """Bare name of what a node calls: "matmul", "softmax", "_enter_autocast"; "" for other ops."""
    if node.op == "call_method":
        return str(node.target)
    if node.op == "call_function":
        target = node.target
        if isinstance(target, torch._ops.OpOverload):
            return target._opname
        return getattr(target, "__name__", str(target))
    return ""


def example(node: fx.Node) -> Any:
    """The fake value Dynamo computed for a node, or None."""
    return node.meta.get("example_value")


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Tensors in a value or in a (nested) tuple or list of values."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_of(item)


def storage_keys(node: fx.Node) -> frozenset[int]:
    """Identities of the storages a node's value lives in; nodes that share one alias."""
    keys = set()
    for tensor in tensors_of(example(node)):
        try:
            keys.add(tensor.untyped_storage()._cdata)
        except (RuntimeError, NotImplementedError):  # sparse and other layouts without a storage
            keys.add(id(tensor))
    return frozenset(keys)


def size_expr(size: Any) -> sympy.Expr:
    """A size (int, SymInt or sympy) as a sympy expression."""
    if isinstance(size, torch.SymInt):
        return _divided(size.node.expr)
    return sympy.Integer(size) if isinstance(size, int) else sympy.sympify(size)


def _divided(e: sympy.Expr) -> sympy.Expr:
    """Floor divisions of sizes that come out even, as polynomials: (2*s**2) // s = 2*s."""
    if not e.has(FloorDiv):
        return e
    e = e.func(*(_divided(a) for a in e.args))
    if isinstance(e, FloorDiv):
        quotient = sympy.cancel(e.args[0] / e.args[1])
        numerator, denominator = quotient.as_numer_denom()
        if denominator == 1 and all(c.is_integer for c in sympy.Poly(numerator, *numerator.free_symbols).coeffs()):
            return quotient
    return e


def shape_exprs(tensor: torch.Tensor) -> tuple[sympy.Expr, ...]:
    return tuple(size_expr(s) for s in tensor.shape)


def location(node: fx.Node) -> str:
    """ "file.py:123": the innermost frame outside torch (preferring one outside installed libraries altogether)."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    outside_torch = [f for f in frames if "/torch/" not in f[0]]
    user = [f for f in outside_torch if not any(part in f[0] for part in _LIBRARIES)]
    for candidates in (outside_torch, user, frames):
        if candidates:
            path, line = candidates[-1]
            return f"{path.rsplit('/', 1)[-1]}:{line}"
    return ""


def is_mutation(node: fx.Node) -> bool:
    """Does the node write into one of its arguments?"""
    if node.op not in ("call_function", "call_method"):
        return False
    if node.kwargs.get("out") is not None:
        return True
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return "wrapper" in target_name(node) or "functionalized" in target_name(node)
    name = target_name(node)
    if node.op == "call_function" and getattr(node.target, "__module__", "") == "_operator":
        if node.target not in _INPLACE_OPERATORS:  # operator.and_ and its like are no mutations
            return False
        first = node.args[0] if node.args else None
        return isinstance(first, fx.Node) and isinstance(example(first), torch.Tensor)
    if _asks_for_inplace(node):
        return True
    return name in _INPLACE_METHODS or name.endswith("_") and not name.endswith("__")


def _asks_for_inplace(node: fx.Node) -> bool:
    """Is `inplace` set, by name or by position: F.relu(x, True)?"""
    if node.kwargs.get("inplace") is True:
        return True
    if node.op != "call_function" or not any(a is True for a in node.args):
        return False
    try:
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
    except (TypeError, ValueError):  # built-in functions of torch have no signature, and no such argument
        return False
    return bound.arguments.get("inplace") is True


_INPLACE_OPERATORS = {
    operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.iand,
    operator.ior, operator.ixor, operator.imod, operator.ipow, operator.imatmul, operator.ilshift, operator.irshift,
}  # fmt: skip


_INPLACE_METHODS = {f"__{f.__name__}__" for f in _INPLACE_OPERATORS}


def mutated_storages(node: fx.Node) -> frozenset[int]:
    """Storages a mutating node writes: of its first tensor argument, or of all of them where that is not known."""
    if isinstance(node.target, torch._ops.HigherOrderOperator | torch._ops.OpOverload):
        return frozenset().union(*(storage_keys(n) for n in node.all_input_nodes))
    out = node.kwargs.get("out")
    if out is not None:  # one tensor, or a tuple of them
        return frozenset().union(*(storage_keys(n) for n in (out if isinstance(out, tuple | list) else (out,))))
    if target_name(node).startswith("_foreach_"):
        return frozenset().union(*(storage_keys(n) for n in node.all_input_nodes))
    return storage_keys(node.all_input_nodes[0]) if node.all_input_nodes else frozenset()
