"""Rules for ops whose elements come from elsewhere: arange, indexing, concatenation, padding, writes, reductions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch import fx

from fa4_inductor.capture.fx_view import size_expr
from fa4_inductor.errors import DeclineReason, DeclineSite
from fa4_inductor.patterns.indices import Index
from fa4_inductor.patterns.rules_pointwise import Rule, kind_of
from fa4_inductor.patterns.rules_views import argument, broadcast, dimension, shape, slice_bounds
from fa4_inductor.patterns.splitting import split_cases
from fa4_inductor.spec import expr as E
from fa4_inductor.spec.ops import Kind

if TYPE_CHECKING:
    from fa4_inductor.patterns.elements import Elements

aten = torch.ops.aten


def _unsupported(detail: str) -> DeclineSite:
    return DeclineSite(DeclineReason.UNSUPPORTED_OP, detail)


def _arange(ev: Elements, node: fx.Node, index: Index) -> E.Expr:
    overload = node.target._overloadname
    start = ev.operand(node.args[0], ()) if overload != "default" else E.const(0)
    step = ev.operand(argument(node, 2, "step", 1), ()) if overload == "start_step" else E.const(1)
    return E.cast(start + ev.space.to_expr(index[0]) * step, kind_of(node.meta["val"].dtype))


def _eye(ev: Elements, node: fx.Node, index: Index) -> E.Expr:
    return E.call("eq", *(ev.space.to_expr(i) for i in index))


def _diagonal_scatter(ev: Elements, node: fx.Node, index: Index) -> E.Expr:
    target, source = node.args[:2]
    offset, first, second = (argument(node, i, n, d) for i, n, d in ((2, "offset", 0), (3, "dim1", 0), (4, "dim2", 1)))
    first, second = first % len(index), second % len(index)
    row, column = (ev.space.to_expr(index[d]) for d in (first, second))
    here = ev.space.simplify(E.call("eq", column, row + int(offset)))
    along = index[first] if offset >= 0 else index[second]
    inner = (*(e for d, e in enumerate(index) if d not in (first, second)), along)
    if here.is_const:
        return ev.value(source, inner) if here.value else ev.value(target, index)
    return E.call("where", here, ev.value(source, inner), ev.value(target, index))


def _embedding(ev: Elements, node: fx.Node, index: Index) -> E.Expr:
    weight, rows = node.args[:2]
    row = ev.space.to_index(ev.value(rows, index[:-1]))
    return ev.value(weight, (row, index[-1]))


def _index(ev: Elements, node: fx.Node, index: Index) -> E.Expr:
    """Advanced indexing; a run of index tensors takes the place of the first, separated ones go to the front."""
    source, tensors = node.args[:2]
    old = shape(source)
    tensors = list(tensors) + [None] * (len(old) - len(tensors))
    at = [d for d, t in enumerate(tensors) if t is not None]
    rank = max(len(shape(tensors[d])) for d in at)
    adjacent = at == list(range(at[0], at[-1] + 1))
    first = at[0] if adjacent else 0
    subscript = index[first : first + rank]
    rest = iter(index[:first] + index[first + rank :])
    result = []
    for dim, tensor in enumerate(tensors):
        if tensor is None:
            result.append(next(rest))
            continue
        if tensor.meta["val"].dtype not in (torch.int32, torch.int64):
            raise _unsupported(f"indexing with {tensor.meta['val'].dtype}")
        value = ev.value(tensor, broadcast(subscript, shape(tensor)))
        result.append(ev.space.to_index(_wrapped(ev, value, old[dim])))
    return ev.value(source, tuple(result))


def _wrapped(ev: Elements, value: E.Expr, size: sympy.Expr) -> E.Expr:
    """Negative subscripts count from the end."""
    value = ev.space.simplify(value)
    negative = ev.space.simplify(E.call("lt", value, 0))
    if negative.is_const:
        return value + ev.space.to_expr(size) if negative.value else value
    low = ev.space.ranges.bounds(ev.space.to_index(value))[0]
    if low.is_nonnegative:
        return value
    return E.call("where", negative, value + ev.space.to_expr(size), value)


def _gather(ev: Elements, node: fx.Node, index: Index) -> E.Expr:
    source, dim, where = node.args[0], dimension(node), node.args[2]
    row = ev.space.to_index(ev.value(where, index))
    return ev.value(source, index[:dim] + (row,) + index[dim + 1 :])


def _cat(ev: Elements, node: fx.Node, index: Index) -> E.Expr:
    tensors = node.args[0]
    dim = dimension(node, rank=len(index))
    ranges, position = ev.space.ranges, index[dim]
    pieces: list[tuple[sympy.Expr, E.Expr]] = []
    start = sympy.Integer(0)
    for tensor in tensors:
        end = start + shape(tensor)[dim]
        if ranges.below(position, start) is True:
            break
        if ranges.below(position, end) is not False:
            pieces.append((end, ev.value(tensor, index[:dim] + (position - start,) + index[dim + 1 :])))
        start = end
    result = pieces[-1][1]
    at = ev.space.to_expr(position)
    for end, piece in reversed(pieces[:-1]):
        result = E.call("where", E.call("lt", at, ev.space.to_expr(end)), piece, result)
    return result


def _pad(ev: Elements, node: fx.Node, index: Index) -> E.Expr:
    source, pads = node.args[0], argument(node, 1, "pad")
    fill = ev.fill(argument(node, 2, "value", 0), node)
    old, inside = shape(source), []
    result = list(index)
    for pair in range(len(pads) // 2):
        dim = len(old) - 1 - pair
        before = size_expr(pads[2 * pair])
        result[dim] = sympy.expand(index[dim] - before)
        position = ev.space.to_expr(result[dim])
        inside += [E.call("ge", position, 0), E.call("lt", position, ev.space.to_expr(old[dim]))]
    condition = ev.space.simplify(E.conjunction(inside))
    if condition.is_const and not condition.value:
        return fill
    value = ev.value(source, tuple(result))
    return value if condition.is_const else E.call("where", condition, value, fill)


def _slice_scatter(ev: Elements, node: fx.Node, index: Index) -> E.Expr:
    target, source = node.args[:2]
    dim = dimension(node, 2)
    start, step = slice_bounds(node, dim, shape(target)[dim], ev.space.ranges, first=3)
    if step != 1:
        raise _unsupported("strided slice assignment")
    length = shape(source)[dim]
    position = ev.space.to_expr(sympy.expand(index[dim] - start))
    inside = E.call("ge", position, 0) & E.call("lt", position, ev.space.to_expr(length))
    inside = ev.space.simplify(inside)
    inner = index[:dim] + (sympy.expand(index[dim] - start),) + index[dim + 1 :]
    if inside.is_const:
        return ev.value(source, inner) if inside.value else ev.value(target, index)
    return E.call("where", inside, ev.value(source, inner), ev.value(target, index))


def _select_scatter(ev: Elements, node: fx.Node, index: Index) -> E.Expr:
    target, source = node.args[:2]
    dim = dimension(node, 2)
    at = size_expr(argument(node, 3, "index"))
    at = at + shape(target)[dim] if at.is_negative else at
    here = ev.space.simplify(E.call("eq", ev.space.to_expr(index[dim]), ev.space.to_expr(at)))
    inner = index[:dim] + index[dim + 1 :]
    if here.is_const:
        return ev.value(source, inner) if here.value else ev.value(target, index)
    return E.call("where", here, ev.value(source, inner), ev.value(target, index))


def _cumsum(ev: Elements, node: fx.Node, index: Index) -> E.Expr:
    """Scan of a constant; of anything else it is data."""
    dim = dimension(node)
    body = ev.value(node.args[0], index)
    body = split_cases(ev.space, E.cast(body, kind_of(node.meta["val"].dtype)))
    if not body.is_const:
        raise _unsupported("cumsum of data")
    return E.call("mul", body, ev.space.to_expr(index[dim]) + 1)


def _softmax(ev: Elements, node: fx.Node, index: Index) -> E.Expr:
    if ev.contract is None:
        raise _unsupported("softmax of data")
    return ev.atom("softmax", node, index)


def _log_softmax(ev: Elements, node: fx.Node, index: Index) -> E.Expr:
    return ev.atom("log_softmax", node, index)


def _exp(ev: Elements, node: fx.Node, index: Index) -> E.Expr:
    value = ev.operand(node.args[0], index)
    atom = ev.atom_of(value)
    if atom is not None and atom.kind == "log_softmax":
        return ev.atom("softmax", atom.node, atom.index)
    return E.call("exp", value)


def reduced_dim(node: fx.Node) -> int:
    """The dimension that a reduction reduces. Raises `DeclineSite`: UNSUPPORTED_OP if there are several."""
    rank = len(shape(node.args[0]))
    dims = argument(node, 1, "dim")
    dims = [dims] if isinstance(dims, int) else list(dims or range(rank))
    if len(dims) != 1:
        raise _unsupported("reduction over several dimensions")
    return int(dims[0]) % rank


def _reduced(node: fx.Node, index: Index) -> tuple[int, Index]:
    """The reduced dimension and the index of the result without it."""
    dim = reduced_dim(node)
    keepdim = bool(argument(node, 2, "keepdim", False))
    return dim, index[:dim] + index[dim + 1 :] if keepdim else index


def _unrolled(name: str) -> Rule:
    """A reduction over few elements, as mods do it over the entries of a small list."""

    def rule(ev: Elements, node: fx.Node, index: Index) -> E.Expr:
        dim, rest = _reduced(node, index)
        source, length = node.args[0], shape(node.args[0])[dim]
        if not (length.is_Integer and 0 < length <= _UNROLLED):
            raise _unsupported(f"{node.target} over {length} elements")
        elements = [ev.value(source, rest[:dim] + (sympy.Integer(i),) + rest[dim:]) for i in range(int(length))]
        result = E.cast(elements[0], Kind.BOOL)
        for element in elements[1:]:
            result = E.call(name, result, E.cast(element, Kind.BOOL))
        return result

    return rule


_UNROLLED = 16


def _max(ev: Elements, node: fx.Node, index: Index) -> E.Expr:
    if not ev.reads_product(node):
        raise _unsupported("maximum of data")
    dim, rest = _reduced(node, index)
    over_keys = ev.space.seqlen_k, ev.space.seqlen_k + 1  # and a sink
    if shape(node.args[0])[dim] not in over_keys:
        return ev.atom("max", node, rest)
    return ev.atom("max", node, rest, ev.value(node.args[0], rest[:dim] + (ev.space.kv,) + rest[dim:]))


def _sum(ev: Elements, node: fx.Node, index: Index) -> E.Expr:
    if not ev.reads_product(node):
        raise _unsupported("sum of data")
    dim, rest = _reduced(node, index)
    if shape(node.args[0])[dim] != ev.space.seqlen_k:
        raise _unsupported("sum over another dimension than the keys")
    body = ev.value(node.args[0], rest[:dim] + (ev.space.kv,) + rest[dim:])
    return ev.atom("sum", node, rest, body)


TENSOR_RULES: dict[Any, Rule] = {
    aten.arange.default: _arange,
    aten.arange.start: _arange,
    aten.arange.start_step: _arange,
    aten.eye.default: _eye,
    aten.eye.m: _eye,
    aten.diagonal_scatter.default: _diagonal_scatter,
    aten.embedding.default: _embedding,
    aten.index.Tensor: _index,
    aten.gather.default: _gather,
    aten.cat.default: _cat,
    aten.constant_pad_nd.default: _pad,
    aten.slice_scatter.default: _slice_scatter,
    aten.select_scatter.default: _select_scatter,
    aten.cumsum.default: _cumsum,
    aten._softmax.default: _softmax,
    aten.softmax.int: _softmax,
    aten._log_softmax.default: _log_softmax,
    aten.exp.default: _exp,
    aten.any.dim: _unrolled("or_"),
    aten.all.dim: _unrolled("and_"),
    aten.amax.default: _max,
    aten.sum.dim_IntList: _sum,
}
