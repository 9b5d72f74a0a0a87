"""Writes the ATen calls made on fake tensors to an FX graph.

What `torch.fx.experimental.proxy_tensor.make_fx` does, at a third of its cost per call: the graph is read and never
run, so a run-time size is an input instead of a call, and the value of a node is the fake tensor itself.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from fa4_inductor.capture.fx_view import SymScalar, tensors_of

aten = torch.ops.aten
_QUERIES = {aten.size.default, aten.stride.default, aten.storage_offset.default}


class AtenTracer(TorchDispatchMode):
    """Records while it is entered. Nodes carry their value in `meta["val"]`.

    Attributes:
        graph: the calls so far, without an output node; its inputs are the placeholders and the run-time numbers among
            the arguments. constants: owner of its get_attr nodes, which are tensors that
            no call made.
    """

    def __init__(self, decompositions: dict[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.constants = torch.nn.Module()
        self._decompositions = decompositions
        self._nodes: dict[int, fx.Node] = {}
        self._alive: list[torch.Tensor] = []  # ids stay unique while their tensors live

    def placeholder(self, value: Any) -> fx.Node:
        """An input with this value; a tensor is known by it from now on."""
        node = self.graph.placeholder(f"leaf{len(self.graph.nodes)}")
        node.meta["val"] = value
        if isinstance(value, torch.Tensor):
            self._hold(value, node)
        return node

    def node_of(self, tensor: torch.Tensor) -> fx.Node:
        """The node whose value a tensor is; a constant where no call made it."""
        if id(tensor) not in self._nodes:
            name = f"constant{len(self._alive)}"
            self.constants.register_buffer(name, tensor)
            node = self.graph.get_attr(name)
            node.meta["val"] = tensor
            self._hold(tensor, node)
        return self._nodes[id(tensor)]

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        decomposition = self._decompositions.get(func)
        if decomposition is None and func not in _QUERIES and _is_composite(func):
            decomposition = func.decompose
        if decomposition is not None:
            with self:
                result = decomposition(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if func is aten.lift_fresh.default:  # the node is a copy, so that a write to it leaves the constant alone
            func = aten.lift_fresh_copy.default
        inputs = tuple(map(self._as_nodes, args))  # before the call, which may overwrite them
        keywords = {key: self._as_nodes(value) for key, value in kwargs.items()}
        result = func(*args, **kwargs)
        if next(tensors_of(result), None) is not None:
            self._record(func, inputs, keywords, result)
        return result

    def _record(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        node = self.graph.create_node("call_function", func, args, kwargs)
        node.meta["val"] = result
        if isinstance(result, torch.Tensor):
            self._hold(result, node)
            return
        for i, item in enumerate(result):
            if isinstance(item, torch.Tensor):
                part = self.graph.create_node("call_function", operator.getitem, (node, i))
                part.meta["val"] = item
                self._hold(item, part)

    def _hold(self, tensor: torch.Tensor, node: fx.Node) -> None:
        self._nodes[id(tensor)] = node
        self._alive.append(tensor)

    def _as_nodes(self, arg: Any) -> Any:
        if isinstance(arg, torch.Tensor):
            return self.node_of(arg)
        if isinstance(arg, tuple | list):
            return [self._as_nodes(a) for a in arg]
        return self.placeholder(arg) if isinstance(arg, SymScalar) else arg


@functools.cache
def _is_composite(func: OpOverload) -> bool:
    """Does torch define the call by other calls alone? They reach a mode only where autograd was passed by."""
    if func.namespace == "prim":  # not the dispatcher's
        return False
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


@contextlib.contextmanager
def uncached_autocast() -> Iterator[None]:
    """Autocast keeps casts of parameters, which would be another trace's tensors."""
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)
