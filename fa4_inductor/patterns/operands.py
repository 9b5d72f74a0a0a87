"""q, k and v as views of captured tensors.

From the contraction's operand the way leads back over views, copies, casts and factors that do not depend on the
feature index (those move into the score). Every captured tensor passed on that way is a candidate if its subscripts are
index variables, constants or merges of whole index variables: then a view without data movement gives (B, H, S, D). The
best candidate leaves the fewest copies (repeat_kv, contiguous, scaling) to be executed; among equals the shortest view.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from fa4_inductor.capture.fx_view import shape_exprs
from fa4_inductor.errors import DeclineReason, DeclineSite
from fa4_inductor.patterns.elements import MUTATED, Elements, Source, has_atoms
from fa4_inductor.patterns.indices import FloorDiv, Index, Ranges, Rem, exact_quotient
from fa4_inductor.patterns.rules_views import COPIES, VIEW_RULES, broadcast
from fa4_inductor.spec import expr as E

aten = torch.ops.aten
Steps = tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class Role:
    """One dimension of a (B, H, S, D) operand: its subscript in the site's indices and its size."""

    subscript: sympy.Expr
    size: sympy.Expr
    optional: bool  # may be missing (broadcast), as batch and heads of k and v


@dataclass(frozen=True)
class BoundOperand:
    """A captured tensor, the view to (B, H, S, D) with sympy sizes, and the factor taken out of the product."""

    source: Source
    view: Steps
    dtype: torch.dtype
    heads: sympy.Expr
    factors: tuple[E.Expr, ...] = ()


@dataclass(frozen=True)
class _Stop:
    """One node on the way back."""

    node: fx.Node
    index: Index
    factors: tuple[E.Expr, ...]
    copies: int  # copies passed to get here
    cast: torch.dtype | None  # narrowing cast still to be applied


def bind(
    ev: Elements, node: fx.Node, index: Index, position: sympy.Expr, feature: sympy.Expr, *, key: bool, scaled: bool
) -> BoundOperand:
    """Operand `node[index]`, whose sequence index is `position` and whose last index is `feature`.

    Args:
        key: k or v (heads may be grouped, batch and heads may be missing), not q.
        scaled: factors independent of `feature` may be taken out (q and k).

    Raises:
        DeclineSite: UNSUPPORTED_LAYOUT when no captured tensor on the way is a view of the operand; MUTATION when
            tensors of the slice are written, so that the one that was may be gone.
    """
    best: tuple[tuple[int, int], BoundOperand] | None = None
    stops = list(_way_back(ev, node, index, feature, scaled))
    total = stops[-1].copies
    for stop in stops:
        source = ev.source_of(stop.node)
        if source is None:
            continue
        found = _view_of(ev, stop, position, feature, key)
        if found is None:
            continue
        steps, heads = found
        if stop.cast is not None:
            steps = (*steps, ("to", stop.cast))
        cost = (total - stop.copies, len(steps))
        if best is None or cost < best[0]:
            dtype = stop.cast or stop.node.meta["val"].dtype
            best = cost, BoundOperand(source, steps, dtype, heads, stop.factors)
    if best is None and ev.shadow.mutates:
        raise DeclineSite(DeclineReason.MUTATION, MUTATED)
    if best is None:
        role = "k or v" if key else "q"
        raise DeclineSite(DeclineReason.UNSUPPORTED_LAYOUT, f"{role} is not a view of a captured tensor")
    return best[1]


def _way_back(ev: Elements, node: fx.Node, index: Index, feature: sympy.Expr, scaled: bool) -> list[_Stop]:
    stops = [_Stop(node, index, (), 0, None)]
    while (following := _step(ev, stops[-1], feature, scaled)) is not None:
        stops.append(following)
    return stops


def _step(ev: Elements, at: _Stop, feature: sympy.Expr, scaled: bool) -> _Stop | None:
    node, target = at.node, at.node.target
    if node.op != "call_function":
        return None
    if target in VIEW_RULES:
        try:
            source, index = VIEW_RULES[target](ev.space.ranges, node, at.index)
        except DeclineSite:
            return None
        copies = at.copies + (target in COPIES or _repeats(node))
        return _Stop(source, index, at.factors, copies, at.cast)
    if target is aten._to_copy.default:
        return _through_cast(at)
    if scaled and target in (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.neg.default):
        return _through_factor(ev, at, feature)
    return None


def _repeats(node: fx.Node) -> bool:
    """Does an expand give a dimension of size 1 several elements (which a later reshape would copy)?"""
    if node.target is not aten.expand.default:
        return False
    old, new = shape_exprs(node.args[0].meta["val"]), shape_exprs(node.meta["val"])
    return any(a == 1 and b != 1 for a, b in zip(old, new[len(new) - len(old) :]))


def _through_cast(at: _Stop) -> _Stop | None:
    source = at.node.args[0]
    old, new = source.meta["val"].dtype, at.node.meta["val"].dtype
    if not (old.is_floating_point and new.is_floating_point) or source.meta["val"].device != at.node.meta["val"].device:
        return None
    if old.itemsize > new.itemsize:
        return _Stop(source, at.index, at.factors, at.copies, at.cast or new)
    # A widening cast is exact, but the product below it is computed in the wide type: keep it.
    return _Stop(source, at.index, at.factors, at.copies, at.cast or new) if old == new else None


def _through_factor(ev: Elements, at: _Stop, feature: sympy.Expr) -> _Stop | None:
    node = at.node
    if node.target is aten.neg.default:
        return _Stop(node.args[0], at.index, (*at.factors, E.const(-1.0)), at.copies + 1, at.cast)
    divides = node.target in (aten.div.Tensor, aten.div.Scalar)
    for chain, other in [node.args[:2]] if divides else (node.args[:2], node.args[1::-1]):
        if not isinstance(chain, fx.Node) or not isinstance(chain.meta["val"], torch.Tensor):
            continue
        shape = shape_exprs(chain.meta["val"])
        if shape != shape_exprs(node.meta["val"]) or chain.meta["val"].dtype != node.meta["val"].dtype:
            continue
        if isinstance(other, fx.Node) and isinstance(other.meta["val"], torch.Tensor):
            at_other = broadcast(at.index, shape_exprs(other.meta["val"]))
            if any(ev.space.depends(i, feature) for i in at_other):
                continue
        try:
            factor = ev.operand(other, at.index)
        except DeclineSite:
            continue
        if not _is_costly(ev, factor):
            factor = E.call("div", 1.0, factor) if divides else factor
            return _Stop(chain, at.index, (*at.factors, factor), at.copies + 1, at.cast)
    return None


def _is_costly(ev: Elements, factor: E.Expr) -> bool:
    """Is a factor better left where it is: computed from scores, or read from a tensor for each row (a norm)?"""
    per_row = "aux" in factor.free and bool({"q_idx", "kv_idx"} & factor.free)
    return per_row or "score" in factor.free or has_atoms(factor)


def _view_of(
    ev: Elements, stop: _Stop, position: sympy.Expr, feature: sympy.Expr, key: bool
) -> tuple[Steps, sympy.Expr] | None:
    """Steps from the captured tensor to (B, H, S, D), and H."""
    space = ev.space
    head, heads = _head_of(ev, stop.index) if key else (space.h, space.heads)
    length = space.ranges.sizes.get(position, sympy.Integer(1))
    roles = [
        Role(space.b, space.batch, key),
        Role(head, heads, key),
        Role(position, length, False),
        Role(feature, space.ranges.sizes[feature], False),
    ]
    shape = shape_exprs(stop.node.meta["val"])
    split = _split_roles(stop.index, shape, roles)
    steps: list[tuple[Any, ...]] = []
    order: list[int] = []  # the role of each dimension so far; a split role appears several times in a row
    for dim in range(len(shape) - 1, -1, -1):
        if dim in split:
            order.insert(0, split[dim])
            continue
        taken = _match_dim(stop.index[dim], shape[dim], roles, {*order, *split.values()})
        if taken is None:
            return None
        pieces, found = taken
        steps.extend((name, dim + ahead, *rest) for name, ahead, *rest in pieces)
        order[:0] = found
    missing = [i for i in range(4) if i not in order]
    expanded = [i for i in missing if roles[i].size != 1 and not roles[i].optional]
    if expanded and (key or not set(expanded) <= {0, 1}):
        return None
    arranged = sorted(range(len(order)), key=lambda p: order[p])  # stable: parts of a role stay in their order
    if arranged != list(range(len(order))):
        steps.append(("permute", tuple(arranged)))
    if split:
        steps.append(("reshape", tuple(roles[i].size for i in range(4) if i not in missing)))
    steps.extend(("unsqueeze", i) for i in missing)
    if expanded:
        steps.append(("expand", tuple(roles[i].size if i in expanded else -1 for i in range(4))))
    return tuple(steps), sympy.Integer(1) if 1 in missing else heads


def _split_roles(index: Index, shape: tuple[sympy.Expr, ...], roles: list[Role]) -> dict[int, int]:
    """Dimensions that one role is cut into, leading part first: (b // n, b % n) is b."""
    parts = [d for d, e in enumerate(index) if isinstance(e, FloorDiv | Rem)]
    found: dict[int, int] = {}
    for i, role in enumerate(roles):
        mine = [d for d in parts if index[d].free_symbols == role.subscript.free_symbols and role.subscript.is_Symbol]
        if len(mine) > 1 and sympy.expand(sympy.Mul(*(shape[d] for d in mine)) - role.size) == 0:
            whole = Ranges({role.subscript: role.size}).unmerge(role.subscript, [shape[d] for d in mine])
            if whole == tuple(index[d] for d in mine):
                found |= dict.fromkeys(mine, i)
    return found


def _head_of(ev: Elements, index: Index) -> tuple[sympy.Expr, sympy.Expr]:
    """Which head of k or v query head h reads: h, or h // group."""
    space = ev.space
    groups = [a for e in index for a in e.atoms(FloorDiv) if a.args[0] == space.h]
    whole = any(space.h in e.subs(dict.fromkeys(groups, 0)).free_symbols for e in index)
    for group in [] if whole else groups:
        quotient = sympy.cancel(space.heads / group.args[1])
        return group, quotient
    if any(space.h in e.free_symbols for e in index):
        return space.h, space.heads
    return sympy.Integer(0), sympy.Integer(1)


def _match_dim(
    e: sympy.Expr, size: sympy.Expr, roles: list[Role], used: set[int]
) -> tuple[list[tuple[Any, ...]], list[int]] | None:
    """How one dimension is cut into roles: (steps with their dim counted from this one, roles in order), or None."""
    if e.is_Integer:
        return ([("select", 0, int(e))], []) if e >= 0 else None
    free = [i for i in range(4) if i not in used and not roles[i].subscript.is_Integer]
    for count in (1, 2, 3):
        for chosen in itertools.permutations(free, count):
            merged, total = sympy.Integer(0), sympy.Integer(1)
            for i in chosen:
                merged = merged * roles[i].size + roles[i].subscript
                total = total * roles[i].size
            cut = _cut(e, merged, total, size)
            if cut is not None:
                whole = [("unflatten", 0, tuple(roles[i].size for i in chosen))] if count > 1 else []
                return [*cut, *whole], list(chosen)
    return None


def _cut(e: sympy.Expr, merged: sympy.Expr, total: sympy.Expr, size: sympy.Expr) -> list[tuple[Any, ...]] | None:
    """Steps that leave the `total` elements at `e` = merged + offset or stride * merged + offset."""
    offset = sympy.expand(e - merged)
    if offset.is_Integer and offset >= 0:
        if total == size:
            return [] if offset == 0 else None
        return [("narrow", 0, int(offset), total)] if _fits(total, offset, size) else None
    stride = exact_quotient(size, total)
    if stride is None or stride == 1:
        return None
    offset = sympy.expand(e - stride * merged)
    if not (offset.is_Integer and stride.is_Integer and 0 <= offset < stride):
        return None
    return [("unflatten", 0, (total, stride)), ("select", 1, int(offset))]


def _fits(total: sympy.Expr, offset: sympy.Expr, size: sympy.Expr) -> bool:
    room = sympy.expand(size - total - offset)
    return bool(room.is_nonnegative) or all(t.is_nonnegative for t in sympy.Add.make_args(room))
