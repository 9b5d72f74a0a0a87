"""FX nodes that can be computed with like tensors: every torch call on them adds a node with its fake value.

Dynamo's graphs want an `example_value` in each node's meta; a plain `fx.Proxy` gives none, and knows neither its dtype,
device nor shape. The caller sets the insert point, just before the node that is being replaced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.fx.node import map_aggregate

from fa4_inductor.capture.fx_view import is_mutation

Memo = dict[Any, tuple[fx.Node, fx.Node]]
"""Nodes shared by sites of one graph, by key, each with the last node up to which nothing was written after it."""
SIZES = ("batch", "heads", "seqlen_q", "seqlen_k")


class GraphValue(fx.Proxy):
    """A node's value. Sizes that are static are plain ints."""

    @property
    def example(self) -> Any:
        return self.node.meta["example_value"]

    @property
    def dtype(self) -> torch.dtype:
        return self.example.dtype

    @property
    def device(self) -> torch.device:
        return self.example.device

    @property
    def shape(self) -> tuple[Any, ...]:
        return tuple(self.size(i) for i in range(self.dim()))

    def dim(self) -> int:
        return self.example.dim()

    def size(self, dim: int) -> Any:
        length = self.example.shape[dim]
        return (
            int(length) if isinstance(length, int) else self.tracer.create_proxy("call_method", "size", (self, dim), {})
        )


class GraphValues(fx.proxy.GraphAppendingTracer):
    """Makes `GraphValue`s at the insert point of `graph`; new nodes take the source location of `like`."""

    def __init__(self, graph: fx.Graph, like: fx.Node) -> None:
        super().__init__(graph)
        self.like = like
        values = [n.meta.get("example_value") for n in (like, *like.all_input_nodes)]
        # Not detect_fake_mode: while a backend runs, the context already holds another mode than the graph's values.
        self.fake_mode = next((v.fake_mode for v in values if isinstance(v, FakeTensor)), None)

    def wrap(self, node: fx.Node) -> GraphValue:
        return GraphValue(node, self)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return GraphValue(node, self)

    def make(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Record a call."""
        return self.create_proxy("call_function", function, args, kwargs)

    def length(self, node: fx.Node, dim: int) -> Any:
        """A size of a tensor node: an int where it is static, else a value."""
        return self.wrap(node).size(dim)

    def number(self, value: fx.Node | int) -> Any:
        """An int, or the value of a node that holds one."""
        return self.wrap(value) if isinstance(value, fx.Node) else value

    @staticmethod
    def real_constants() -> contextlib.AbstractContextManager[None]:
        """While values are computed, constants that eager helpers make must be real, so that they can be written
        down."""
        return unset_fake_temporarily()

    def value_of(self, value: Any) -> Any:
        return value.example if isinstance(value, GraphValue) else value

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, torch.Tensor):  # a constant that an eager helper made
            return self.make(torch.full, (), a.item(), dtype=a.dtype, device=a.device).node
        return super().create_arg(a)

    def create_node(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **options: Any) -> fx.Node:
        node = super().create_node(kind, target, args, kwargs, *rest, **options)
        node.meta = {
            k: self.like.meta[k] for k in ("stack_trace", "nn_module_stack", "source_fn_stack") if k in self.like.meta
        }
        fake_args, fake_kwargs = (map_aggregate(x, _example) for x in (args, kwargs))
        with self.fake_mode or contextlib.nullcontext():
            if kind == "call_method":
                node.meta["example_value"] = getattr(fake_args[0], target)(*fake_args[1:], **fake_kwargs)
            else:
                node.meta["example_value"] = target(*fake_args, **fake_kwargs)
        return node

    def shared(self, memo: Memo, key: Any, build: Callable[[], GraphValue]) -> fx.Node:
        """The node that `build` made for this key at an earlier site, if nothing was written since; else a new one."""
        if key in memo:
            node, checked = memo[key]
        if key not in memo or not self._unwritten_since(node if checked._erased else checked):
            node = build().node
        memo[key] = node, self.like.prev
        return node

    def _unwritten_since(self, node: fx.Node) -> bool:
        """Whether `node` comes before the insert point with nothing written in place between the two."""
        current = self.like.prev
        while current is not node:
            if current.op == "root" or is_mutation(current):
                return False
            current = current.prev
        return True


def _example(value: Any) -> Any:
    return value.meta["example_value"] if isinstance(value, fx.Node) else value


def index_names(
    make: Callable[..., Any], used: frozenset[str], lengths: dict[str, Any], numbers: dict[str, Any], device: Any
) -> dict[str, Any]:
    """Index tensors of shape (B,1,1,1) ... (1,1,1,Sk) and lengths, as far as the program uses them."""
    names: dict[str, Any] = {}
    for axis, (name, length) in enumerate(zip(("b", "h", "q_idx", "kv_idx"), SIZES, strict=True)):
        if name in used:
            shape = [1, 1, 1, 1]
            shape[axis] = -1
            names[name] = make(torch.reshape, make(torch.arange, lengths[length], device=device), shape)
    named = {"seqlen_q": lengths["seqlen_q"], "seqlen_k": lengths["seqlen_k"], **numbers}
    for name, value in named.items():
        if name in used:
            # torch functions take no two plain numbers, so a size that is known at run time only becomes a tensor
            static = isinstance(value, int)
            names[name] = value if static else make(torch.full, (), value, dtype=torch.int64, device=device)
    return names
