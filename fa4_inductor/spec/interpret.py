"""Expressions as eager torch: the oracle of every test, and the code behind fallback implementations.

Works on tensors and on `torch.fx.Proxy` alike, since it calls nothing but torch functions on the values it is given.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fa4_inductor.errors import ProgramError
from fa4_inductor.spec.expr import Expr, walk
from fa4_inductor.spec.ops import OPS, Kind, Op


@dataclass(frozen=True)
class Env:
    """Values of the names in a program.

    Attributes:
        names: `score`, `b`, `h`, `q_idx`, `kv_idx` (broadcastable tensors), `seqlen_q`, `seqlen_k` and `sizeN`
            (ints; where the values are
            proxies, 0-dim tensor proxies, since torch functions take no two plain numbers).
        aux: captured tensors in slot order.
    """

    names: Mapping[str, Any]
    aux: Sequence[Any] = ()


def grid(batch: Any, heads: Any, seqlen_q: Any, seqlen_k: Any, device: Any = None) -> dict[str, Any]:
    """Index tensors of shape (B,1,1,1), (1,H,1,1), (1,1,Sq,1), (1,1,1,Sk), int64, and the two lengths."""
    names = ("b", "h", "q_idx", "kv_idx")
    values: dict[str, Any] = {}
    for axis, (name, length) in enumerate(zip(names, (batch, heads, seqlen_q, seqlen_k), strict=True)):
        shape = [1, 1, 1, 1]
        shape[axis] = -1
        values[name] = torch.reshape(torch.arange(length, device=device), shape)
    return {**values, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}


def evaluate(root: Expr, env: Env) -> Any:
    """Value of `root`, broadcast only as far as it depends on its indices. Constants come back as Python numbers.

    Raises:
        ProgramError: a name or an aux tensor is missing from `env`.
    """
    values: dict[Expr, Any] = {}
    for node in walk(root):
        values[node] = _evaluate_node(node, [values[a] for a in node.args], env)
    return values[root]


def _evaluate_node(node: Expr, args: list[Any], env: Env) -> Any:
    if node.op == "const":
        return node.value
    if node.op in ("score", "index", "size"):
        name = node.value or "score"
        if name not in env.names:
            raise ProgramError(f"no value for {name}")
        return env.names[name]
    if node.op == "load":
        return _load(env.aux[node.value], args)
    return _apply(node, args)


def _load(tensor: Any, indices: list[Any]) -> Any:
    """Gather with clamped indices: a masked element may point outside the tensor."""
    if not indices:
        return tensor
    clamped = []
    for dim, i in enumerate(indices):
        last = tensor.size(dim) - 1
        clamped.append(torch.clamp(i, min=0, max=last) if _is_tensor(i) else i)
    if not any(_is_tensor(i) for i in clamped):
        for i in clamped:
            tensor = tensor.select(0, i)
        return tensor
    return tensor[tuple(clamped)]


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor | torch.fx.Proxy)


def _apply(node: Expr, args: list[Any]) -> Any:
    op = OPS[node.op]
    if not any(_is_tensor(a) for a in args):
        return _apply_to_numbers(op, args)
    if node.op in _TENSOR_ONLY or not _is_tensor(args[0]):
        args = _as_tensors(node, args)
    return op.torch(*args)


def _apply_to_numbers(op: Op, args: list[Any]) -> Any:
    try:
        return op.fold(*args)
    except (ValueError, ZeroDivisionError, OverflowError):  # where Python raises, torch gives inf or nan
        return op.torch(*(torch.tensor(a, dtype=torch.float64) for a in args)).item()


_TENSOR_ONLY = frozenset({"minimum", "maximum", "where", "and_", "or_", "xor", "pow", "eq", "sub"})


def _as_tensors(node: Expr, args: list[Any]) -> list[Any]:
    """Some torch functions take no Python numbers; give them 0-dim tensors of the operand's kind on the right
    device."""
    model = next(a for a in args if _is_tensor(a))
    out = []
    for expr, value in zip(node.args, args, strict=True):
        if not _is_tensor(value):
            dtype = {Kind.BOOL: torch.bool, Kind.INT: torch.int64, Kind.FLOAT: torch.float32}[expr.kind]
            if expr.kind is Kind.FLOAT and abs(value) > torch.finfo(dtype).max:
                value = math.copysign(math.inf, value)  # finfo(float64).min as a fill, for one
            value = torch.full((), value, dtype=dtype, device=model.device)
        out.append(value)
    return out
