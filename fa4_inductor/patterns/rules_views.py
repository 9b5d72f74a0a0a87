"""View rules: where the element of a view lives. Each rule maps (node, index) to (input node, index into it).

Pure data movement (clone, contiguous, alias, flip, repeat) counts as a view here: it does not change values.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import fx

from fa4_inductor.capture.fx_view import shape_exprs, size_expr
from fa4_inductor.errors import DeclineReason, DeclineSite
from fa4_inductor.patterns.indices import Index, Ranges

aten = torch.ops.aten
Source = tuple[fx.Node, Index]
ViewRule = Callable[[Ranges, fx.Node, Index], Source]
ZERO = sympy.Integer(0)


def shape(node: Any) -> tuple[sympy.Expr, ...]:
    return shape_exprs(node.meta["val"])


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """A schema argument by position or keyword; nodes that hold a SymInt come back as the SymInt."""
    value = node.args[position] if len(node.args) > position else node.kwargs.get(name, default)
    return value.meta["val"] if isinstance(value, fx.Node) and not _is_tensor(value) else value


def _is_tensor(node: fx.Node) -> bool:
    return not isinstance(node.meta.get("val"), int | float | bool | torch.SymInt | torch.SymFloat | torch.SymBool)


def dimension(node: fx.Node, position: int = 1, rank: int | None = None) -> int:
    rank = len(shape(node.args[0])) if rank is None else rank
    return int(argument(node, position, "dim", 0)) % max(rank, 1)


def _reshape(ranges: Ranges, node: fx.Node, index: Index) -> Source:
    return node.args[0], ranges.reshape(index, shape(node), shape(node.args[0]))


def _permute(ranges: Ranges, node: fx.Node, index: Index) -> Source:
    dims = [d % len(index) for d in node.args[1]]
    return node.args[0], tuple(index[dims.index(d)] for d in range(len(dims)))


def _transpose(ranges: Ranges, node: fx.Node, index: Index) -> Source:
    result = list(index)
    first, second = (argument(node, i, f"dim{i - 1}") % len(index) for i in (1, 2))
    result[first], result[second] = result[second], result[first]
    return node.args[0], tuple(result)


def _t(ranges: Ranges, node: fx.Node, index: Index) -> Source:
    return node.args[0], tuple(reversed(index))


def broadcast(index: Index, source_shape: tuple[sympy.Expr, ...]) -> Index:
    """Index into a tensor of `source_shape` that is broadcast (trailing alignment) to the shape `index` belongs to."""
    tail = index[len(index) - len(source_shape) :]
    return tuple(ZERO if n == 1 else i for i, n in zip(tail, source_shape))


def _expand(ranges: Ranges, node: fx.Node, index: Index) -> Source:
    return node.args[0], broadcast(index, shape(node.args[0]))


def _unsqueeze(ranges: Ranges, node: fx.Node, index: Index) -> Source:
    dim = dimension(node, rank=len(index))
    return node.args[0], index[:dim] + index[dim + 1 :]


def _squeeze(ranges: Ranges, node: fx.Node, index: Index) -> Source:
    old = shape(node.args[0])
    dims = argument(node, 1, "dim")
    if dims is None:
        gone = {i for i, n in enumerate(old) if n == 1}
    else:
        gone = {d % len(old) for d in ([dims] if isinstance(dims, int) else dims) if old[d % len(old)] == 1}
    if len(index) + len(gone) != len(old):
        raise DeclineSite(DeclineReason.UNSUPPORTED_SHAPE, "a squeeze of dimensions whose sizes are not known")
    rest = iter(index)
    return node.args[0], tuple(ZERO if i in gone else next(rest) for i in range(len(old)))


def slice_bounds(node: fx.Node, dim: int, size: sympy.Expr, ranges: Ranges, first: int = 2) -> tuple[Any, int]:
    """Start (sympy) and step of aten.slice-like arguments beginning at position `first`."""
    start, step = argument(node, first, "start"), argument(node, first + 2, "step", 1)
    begin = ZERO if start is None else size_expr(start)
    if begin.is_negative:
        begin = begin + size
        if begin.is_Integer and begin < 0:
            begin = ZERO
    elif begin.is_nonnegative is not True and not begin.is_Integer:
        raise DeclineSite(DeclineReason.UNSUPPORTED_SHAPE, f"slice start {begin} has an unknown sign")
    return begin, int(step)


def _slice(ranges: Ranges, node: fx.Node, index: Index) -> Source:
    dim = dimension(node)
    begin, step = slice_bounds(node, dim, shape(node.args[0])[dim], ranges)
    return node.args[0], index[:dim] + (begin + step * index[dim],) + index[dim + 1 :]


def _select(ranges: Ranges, node: fx.Node, index: Index) -> Source:
    old = shape(node.args[0])
    dim = dimension(node)
    at = size_expr(argument(node, 2, "index"))
    if at.is_negative:
        at = at + old[dim]
    return node.args[0], index[:dim] + (at,) + index[dim:]


def _same(ranges: Ranges, node: fx.Node, index: Index) -> Source:
    return node.args[0], index


def _flip(ranges: Ranges, node: fx.Node, index: Index) -> Source:
    old = shape(node.args[0])
    dims = {d % len(old) for d in node.args[1]}
    return node.args[0], tuple(old[i] - 1 - e if i in dims else e for i, e in enumerate(index))


def _repeat(ranges: Ranges, node: fx.Node, index: Index) -> Source:
    old = shape(node.args[0])
    tail = index[len(index) - len(old) :]
    return node.args[0], tuple(ranges.rem(e, n) for e, n in zip(tail, old))


def _getitem(ranges: Ranges, node: fx.Node, index: Index) -> Source:
    """Element of a split, chunk or unbind."""
    source, which = node.args
    rule = _MULTI_OUTPUT.get(source.target)
    if rule is None:
        raise DeclineSite(DeclineReason.UNSUPPORTED_OP, f"{source.target} is not understood")
    return rule(source, int(which), index)


def _split(source: fx.Node, which: int, index: Index) -> Source:
    dim = dimension(source, 2) if len(source.args) > 2 or "dim" in source.kwargs else 0
    start = ZERO
    for part in source.meta["val"][:which]:
        start = start + shape_exprs(part)[dim]
    return source.args[0], index[:dim] + (start + index[dim],) + index[dim + 1 :]


def _unbind(source: fx.Node, which: int, index: Index) -> Source:
    dim = dimension(source)
    return source.args[0], index[:dim] + (sympy.Integer(which),) + index[dim:]


_MULTI_OUTPUT: dict[Any, Callable[[fx.Node, int, Index], Source]] = {
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.chunk.default: _split,
    aten.unbind.int: _unbind,
}

COPIES = {aten.clone.default, aten.repeat.default, aten.flip.default}
"""Of the rules below, the ones that move data in eager."""

VIEW_RULES: dict[Any, ViewRule] = {
    aten.view.default: _reshape,
    aten._unsafe_view.default: _reshape,
    aten.reshape.default: _reshape,
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.t.default: _t,
    aten.expand.default: _expand,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.alias.default: _same,
    aten.detach.default: _same,
    aten.clone.default: _same,
    aten.lift_fresh_copy.default: _same,
    aten.lift_fresh.default: _same,
    aten.flip.default: _flip,
    aten.repeat.default: _repeat,
    operator.getitem: _getitem,
}
