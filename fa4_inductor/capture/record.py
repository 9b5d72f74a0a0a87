"""Records the torch calls that a Python function makes on fake tensors as nodes of a Dynamo graph."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import sympy
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._sympy.functions import FloorDiv

from fa4_inductor.capture.fx_view import example, shape_exprs, size_expr, tensors_of

_KEPT_META = ("stack_trace", "nn_module_stack", "source_fn_stack")


class CannotRecord(Exception):
    """Something in a call has no counterpart in the graph; the message says what."""


class Recorder(TorchFunctionMode):
    """Writes nodes in front of `at`, which names the tensors that the recorded function is given.

    Attributes:
        nodes: what was written, in graph order, each with its fake value.
    """

    def __init__(self, at: fx.Node) -> None:
        super().__init__()
        self.at, self.graph = at, at.graph
        self.nodes: list[fx.Node] = []
        self._holder: dict[int, fx.Node] = {}
        self._alive: list[torch.Tensor] = []  # ids stay unique while their tensors live
        self._sizes: dict[sympy.Expr, fx.Node] = {}
        for node in self.graph.nodes:
            if node is at:
                break
            if isinstance(example(node), torch.SymInt | torch.SymFloat):
                self._sizes.setdefault(_number(example(node)), node)
        for node in at.all_input_nodes:
            for tensor in tensors_of(example(node)):
                self._hold(tensor, node)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Calls made inside become nodes."""
        tensors = (t for n in self.at.all_input_nodes for t in tensors_of(example(n)))
        mode = next((t.fake_mode for t in tensors if isinstance(t, FakeTensor)), None)
        if mode is None:
            raise CannotRecord("no fake tensor is involved")
        with mode, self:
            yield

    def node_of(self, tensor: torch.Tensor) -> fx.Node:
        """The node whose value a tensor is. Raises `CannotRecord` for one that came from elsewhere."""
        if id(tensor) not in self._holder:
            raise CannotRecord("a tensor comes from outside the graph")
        return self._holder[id(tensor)]

    def undo(self) -> None:
        """Erase everything that was written."""
        for node in reversed(self.nodes):
            self.graph.erase_node(node)
        self.nodes.clear()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if next(tensors_of(result), None) is None:  # shapes, dtypes, flags: they are known
            return result
        node = self._write(*_call(func), self._as_nodes(args), self._as_nodes(kwargs), result)
        if isinstance(result, tuple | list):
            for i, item in enumerate(result):
                if isinstance(item, torch.Tensor):
                    self._hold(item, self._write("call_function", operator.getitem, (node, i), {}, item))
        else:
            self._hold(result, node)
        return result

    def _hold(self, tensor: torch.Tensor, node: fx.Node) -> None:
        self._holder[id(tensor)] = node
        self._alive.append(tensor)

    def _write(self, kind: str, target: Any, args: Any, kwargs: Any, value: Any) -> fx.Node:
        with self.graph.inserting_before(self.at):
            node = self.graph.create_node(kind, target, tuple(args), dict(kwargs))
        node.meta = {key: self.at.meta[key] for key in _KEPT_META if key in self.at.meta}
        node.meta["example_value"] = value
        self.nodes.append(node)
        return node

    def _as_nodes(self, arg: Any) -> Any:
        """Arguments with nodes in the place of tensors and of run-time sizes."""
        if isinstance(arg, torch.Tensor):
            return self.node_of(arg)
        if isinstance(arg, torch.SymInt | torch.SymFloat):
            return self._size(_number(arg))
        if isinstance(arg, torch.SymBool):
            raise CannotRecord(f"a run-time truth value {arg}")
        if isinstance(arg, tuple | list):
            return tuple(map(self._as_nodes, arg)) if isinstance(arg, tuple) else list(map(self._as_nodes, arg))
        if isinstance(arg, dict):
            return {key: self._as_nodes(value) for key, value in arg.items()}
        if isinstance(arg, slice):
            return slice(*(self._as_nodes(part) for part in (arg.start, arg.stop, arg.step)))
        return arg

    def _size(self, e: sympy.Expr) -> int | float | fx.Node:
        if e.is_number:
            return int(e) if e.is_Integer else float(e)
        if e not in self._sizes:
            self._sizes[e] = self._dimension(e) or self._computed(e)
        return self._sizes[e]

    def _dimension(self, e: sympy.Expr) -> fx.Node | None:
        for node in self.at.all_input_nodes:
            value = example(node)
            if isinstance(value, torch.Tensor) and e in shape_exprs(value):
                dim = shape_exprs(value).index(e)
                return self._write("call_method", "size", (node, dim), {}, value.shape[dim])
        return None

    def _computed(self, e: sympy.Expr) -> fx.Node:
        function = {sympy.Mul: operator.mul, sympy.Add: operator.add, FloorDiv: operator.floordiv}.get(e.func)
        if function is None:
            raise CannotRecord(f"no node holds the run-time size {e}")

        def combine(left: Any, right: Any) -> fx.Node:
            values = [example(n) if isinstance(n, fx.Node) else n for n in (left, right)]
            return self._write("call_function", function, (left, right), {}, function(*values))

        return functools.reduce(combine, map(self._size, e.args))


def _number(value: torch.SymInt | torch.SymFloat) -> sympy.Expr:
    return size_expr(value) if isinstance(value, torch.SymInt) else value.node.expr


def _call(func: Callable[..., Any]) -> tuple[str, Any]:
    """Node kind and target of a function as a function mode sees it.

    Raises:
        CannotRecord: for property setters and the like.
    """
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        raise CannotRecord(f"a tensor attribute is used: {func}")
    if getattr(torch.Tensor, name, None) is func:
        return "call_method", name
    return "call_function", func
