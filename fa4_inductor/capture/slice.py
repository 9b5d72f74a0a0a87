"""Backward slices of a Dynamo graph: what an attention site is computed from, down to opaque leaves.

A slice keeps graph order. It goes through pointwise, view, factory, index, softmax and contraction ops; everything else
(linear, norms, convolutions, other attention sites, ...) is a leaf, and so is a contraction that lies behind two
others. A mutation before the site of any storage the slice reads belongs to the slice: the value of a node at the site
is the value after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from fa4_inductor.capture import ops
from fa4_inductor.capture.fx_view import (
    example,
    is_mutation,
    mutated_storages,
    storage_keys,
    target_name,
    tensors_of,
)
from fa4_inductor.errors import DeclineReason, DeclineSite

MAX_CONTRACTIONS = 2
MAX_NODES = 4000
_CONSTANTS = (bool, int, str, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True)
class Slice:
    """`nodes` in graph order, leaves included; `roots` are the nodes whose elements are wanted."""

    nodes: tuple[fx.Node, ...]
    leaves: frozenset[fx.Node]
    roots: tuple[fx.Node, ...]

    def key(self) -> tuple:
        """Equal for slices that replay alike: same calls with the same constants in the same order, leaves of the same
        kind, and the same of them one object. All that a shadow is made from (docs/decisions/0006)."""
        number = {n: i for i, n in enumerate(self.nodes)}
        first: dict[int, int] = {}
        parts: list[Any] = [tuple(number[r] for r in self.roots)]
        for i, node in enumerate(self.nodes):
            if node in self.leaves:
                parts.append(("leaf", value_key(example(node)), first.setdefault(id(example(node)), i)))
            else:
                parts.append((node.op, node.target, arg_key(node.args, number), arg_key(node.kwargs, number)))
        return tuple(parts)


def value_key(value: Any) -> Any:
    """What a trace can see of a leaf: kind, shape and strides of a tensor and whether it is a parameter, the expression
    of a number."""
    if isinstance(value, torch.Tensor):
        dense = value.layout is torch.strided
        strides = tuple(map(_number_key, value.stride())) if dense else value.layout
        kind = (value.dtype, value.device, isinstance(value, torch.nn.Parameter))
        return (*kind, tuple(map(_number_key, value.shape)), strides)
    if isinstance(value, tuple | list):
        return (type(value), *map(value_key, value))
    return (type(value), str(value))


def _number_key(size: int | torch.SymInt) -> int | str:
    return size if isinstance(size, int) else str(size)


def arg_key(arg: Any, number: dict[fx.Node, int]) -> Any:
    """An argument with numbers for nodes. Equal constants of different types differ: x[(0, 1)] is not x[[0, 1]]."""
    if isinstance(arg, fx.Node):
        return ("node", number[arg])
    if isinstance(arg, tuple | list):
        return (isinstance(arg, tuple), *(arg_key(a, number) for a in arg))
    if isinstance(arg, dict):
        return tuple((k, arg_key(v, number)) for k, v in arg.items())
    if isinstance(arg, slice):
        return ("slice", *(arg_key(a, number) for a in (arg.start, arg.stop, arg.step)))
    if isinstance(arg, float):
        return (float, repr(arg))  # 0.0 and -0.0 are equal, and nan is not
    return (type(arg), arg if isinstance(arg, _CONSTANTS) else id(arg))


def is_opaque(node: fx.Node) -> bool:
    """Is this node a leaf of every slice?"""
    name = target_name(node)
    if name.startswith("__") and name.endswith("__"):
        name = name.strip("_")
    return node.op in ("placeholder", "get_attr", "output") or name not in ops.TRANSPARENT


def has_softmax_above(anchor: fx.Node) -> bool:
    """Is there a softmax-like op above a contraction, with no opaque op and no other contraction between?"""
    seen: set[fx.Node] = set()
    names: set[str] = set()
    stack = list(anchor.all_input_nodes)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        name = target_name(node)
        if name in ops.SOFTMAX:
            return True
        names.add(name)
        if not is_opaque(node) and name not in ops.CONTRACTIONS:
            stack.extend(node.all_input_nodes)
    return not any(names.isdisjoint(part) for part in ops.SOFTMAX_BY_HAND)


class GraphIndex:
    """What slicing needs to know about a graph, looked up once: order, mutations and state changes."""

    def __init__(self, graph: fx.Graph) -> None:
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self.mutations = [(n, mutated_storages(n)) for n in graph.nodes if is_mutation(n)]
        calls = [n for n in graph.nodes if n.op == "call_function"]
        self.state = [n for n in calls if target_name(n) in ops.STATE]
        self.vmap = [n for n in calls if target_name(n) in ops.VMAP - {"_add_batch_dim", "_remove_batch_dim"}]


def backward_slice(
    roots: Sequence[fx.Node], site: fx.Node, index: GraphIndex, *, contractions: int = MAX_CONTRACTIONS
) -> Slice:
    """The slice of `roots` as they are when `site` runs (roots come before it, or are it).

    Raises:
        DeclineSite: TENSOR_SUBCLASS, or MUTATION by an op that cannot be followed.
    """
    members: set[fx.Node] = set()
    leaves: set[fx.Node] = set()
    _grow([(r, 0) for r in roots], members, leaves, contractions)
    before = index.order[site]
    while added := _add_mutations(members, leaves, index, before):
        _grow(added, members, leaves, contractions)
    state = index.state + (index.vmap if any(target_name(n) in ops.VMAP for n in members) else [])
    for node in state:
        if node not in members and index.order[node] < before:
            members.add(node)
            members.update(node.all_input_nodes)
    _check_aliases(members, leaves, index)
    for node in members:
        _check_value(node)
    if len(members) > MAX_NODES:
        raise DeclineSite(DeclineReason.UNSUPPORTED_OP, f"more than {MAX_NODES} nodes lead to this site")
    return Slice(tuple(sorted(members, key=index.order.__getitem__)), frozenset(leaves), tuple(roots))


def _grow(start: list[tuple[fx.Node, int]], members: set[fx.Node], leaves: set[fx.Node], contractions: int) -> None:
    """Breadth first over the number of contractions behind, so that each node is reached with its least number."""
    level = list(start)
    depth = min((d for _, d in start), default=0)
    deferred: list[tuple[fx.Node, int]] = []
    while level:
        node, at = level.pop()
        if at > depth:
            deferred.append((node, at))
        elif node not in members:
            members.add(node)
            contraction = target_name(node) in ops.CONTRACTIONS
            if is_opaque(node) or (contraction and at >= contractions):
                leaves.add(node)
            else:
                level.extend((n, at + contraction) for n in node.all_input_nodes)
        if not level and deferred:
            level, deferred, depth = deferred, [], depth + 1


def _add_mutations(
    members: set[fx.Node], leaves: set[fx.Node], index: GraphIndex, before: int
) -> list[tuple[fx.Node, int]]:
    """Mutations of what the slice reads that are not in it yet."""
    candidates = [
        (n, written) for n, written in index.mutations if index.order[n] < before and (n not in members or n in leaves)
    ]
    if not candidates:
        return []
    storages = frozenset().union(*(storage_keys(n) for n in members))
    found = []
    for node, written in candidates:
        if written & storages:
            # A product with out= would end the slice, so what it wrote would never be part of it.
            if is_opaque(node) or target_name(node) in ops.CONTRACTIONS:
                detail = f"{target_name(node)} writes into a tensor that this site reads"
                raise DeclineSite(DeclineReason.MUTATION, detail)
            leaves.discard(node)
            members.discard(node)
            found.append((node, MAX_CONTRACTIONS))
    return found


def _check_aliases(members: set[fx.Node], leaves: set[fx.Node], index: GraphIndex) -> None:
    """A leaf that is a view made by an opaque op (as_strided, unfold, .data) is a tensor of its own in the shadow, so a
    write would not be seen through it."""
    written = frozenset().union(*(w for n, w in index.mutations if n in members and n not in leaves))
    for leaf in leaves if written else ():
        shared = storage_keys(leaf) & written
        others = [n for n in (*leaf.all_input_nodes, *(m for m in leaves if m is not leaf)) if storage_keys(n) & shared]
        if shared and others:
            made_by = target_name(leaf) or leaf.op
            detail = f"{leaf.name} ({made_by}) and {others[0].name} share memory that is written before this site"
            raise DeclineSite(DeclineReason.MUTATION, detail)


def _check_value(node: fx.Node) -> None:
    for tensor in tensors_of(example(node)):
        if type(tensor) is not FakeTensor and type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            if not _is_functorch_wrapper(tensor):
                raise DeclineSite(DeclineReason.TENSOR_SUBCLASS, f"{node.name} is a {type(tensor).__name__}")


def _is_functorch_wrapper(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(tensor)
