"""A Dynamo-like graph of a function, without Dynamo: the torch calls it makes, one node each.

The calls run on real tensors; each node gets a fake tensor of the same layout, and fakes share storages as the real
ones do. That costs a twentieth of running on fake tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from fa4_inductor.capture.fx_view import tensors_of

_OPERATORS = {
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "eq", "ne", "lt", "le",
    "gt", "ge", "neg", "invert", "getitem", "setitem", "iadd", "isub", "imul", "itruediv", "iand", "ior",
}  # fmt: skip
_REVERSED = {"radd": "add", "rsub": "sub", "rmul": "mul", "rtruediv": "truediv", "rpow": "pow", "rmatmul": "matmul",
             "rdiv": "truediv", "rand": "and", "ror": "or", "rxor": "xor", "rfloordiv": "floordiv"}  # fmt: skip


class _Recorder(TorchFunctionMode):
    """Writes one node per outermost torch call that returns a tensor or changes one."""

    def __init__(self, graph: fx.Graph) -> None:
        super().__init__()
        self.graph = graph
        self.holder: dict[int, fx.Node] = {}
        self.alive: list[torch.Tensor] = []  # an id or address belongs to one tensor while that lives
        self.mode = FakeTensorMode()
        self.mode.cache_enabled = False  # every graph is new: looking results up costs more than it saves
        self.storages: dict[int, torch.UntypedStorage] = {}

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor with the dtype, shape, strides and aliases of a real one."""
        self.alive.append(tensor)
        real = tensor.untyped_storage()
        if real._cdata not in self.storages:
            self.storages[real._cdata] = torch.UntypedStorage(real.nbytes(), device="meta")
        meta = torch.empty(0, dtype=tensor.dtype, device="meta")
        meta.set_(self.storages[real._cdata], tensor.storage_offset(), tensor.shape, tensor.stride())
        return FakeTensor(self.mode, meta.requires_grad_(tensor.requires_grad), tensor.device)

    def hold(self, tensor: torch.Tensor, node: fx.Node, rebind: bool = False) -> None:
        if rebind or id(tensor) not in self.holder:
            self.alive.append(tensor)
            self.holder[id(tensor)] = node

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind, target, reverse = _spelling(func)
        given = self._nodes(args), self._nodes(kwargs)  # before the call: an in-place call keeps its argument's node
        result = func(*args, **kwargs)
        if next(tensors_of(result), None) is None and target is not operator.setitem:
            return result
        if target is getattr:
            node_args = (given[0][0], func.__self__.__name__)
        else:
            node_args = given[0][::-1] if reverse else given[0]
        node = self.graph.create_node(kind, target, tuple(node_args), given[1])
        if isinstance(result, tuple | list):
            fakes = [self.fake(item) if isinstance(item, torch.Tensor) else item for item in result]
            node.meta["example_value"] = tuple(fakes)
            for i, item in enumerate(result):
                if isinstance(item, torch.Tensor):
                    part = self.graph.call_function(operator.getitem, (node, i))
                    part.meta["example_value"] = fakes[i]
                    self.hold(item, part)
        elif isinstance(result, torch.Tensor):
            node.meta["example_value"] = self.fake(result)
            # `x += 1` gives the name x to the new node; after `x.add_(1)` it names the old one.
            self.hold(result, node, rebind=getattr(target, "__module__", "") == "_operator")
        return result

    def _nodes(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.holder[id(value)]
        if isinstance(value, tuple | list):
            return type(value)(map(self._nodes, value)) if type(value) in (tuple, list) else tuple(value)
        if isinstance(value, dict):
            return {key: self._nodes(item) for key, item in value.items()}
        return value


def _spelling(func: Any) -> tuple[str, Any, bool]:
    """Node kind, target and whether the arguments are to be swapped, as Dynamo would write the call."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return "call_function", getattr, False
    bare = name.strip("_") if name.startswith("__") else ""
    if bare in _REVERSED:
        name = _REVERSED[bare]
        return "call_function", getattr(operator, name, None) or getattr(operator, name + "_"), True
    if bare in _OPERATORS:
        return "call_function", getattr(operator, bare, None) or getattr(operator, bare + "_"), False
    if getattr(torch.Tensor, name, None) is func:
        return "call_method", name, False
    return "call_function", func, False


def record(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> fx.GraphModule:
    """The graph of `function`, whose results come back as a tuple."""
    graph = fx.Graph()
    recorder = _Recorder(graph)
    for i, tensor in enumerate(inputs):
        node = graph.placeholder(f"arg{i}")
        node.meta["example_value"] = recorder.fake(tensor)
        recorder.hold(tensor, node)
    with recorder:
        result = function(*inputs)
    results = result if isinstance(result, tuple) else (result,)
    graph.output(tuple(recorder.holder[id(r)] for r in results))
    return fx.GraphModule({}, graph)
