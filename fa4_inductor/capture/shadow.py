"""ATen shadow of a slice: the same computation in core ATen, and which shadow node is the value of which slice node.

The slice is run node by node under an `AtenTracer` on Dynamo's fake tensors, and every tensor it computes is returned,
which says for each slice node where its value *at the end of the slice* lives. A value that was overwritten
in between has no slice node any more, and a site that needs it declines.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._decomp import get_decompositions
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from fa4_inductor.capture.fx_view import SymScalar, example, is_mutation, target_name, tensors_of
from fa4_inductor.capture.slice import Slice
from fa4_inductor.capture.tracer import AtenTracer, uncached_autocast
from fa4_inductor.errors import DeclineReason, DeclineSite

aten = torch.ops.aten
_DECOMPOSE = (
    aten.triu, aten.tril, aten.masked_fill, aten.addmm, aten.addbmm, aten.rsub, aten.stack, aten.isinf,
    aten.zeros_like, aten.ones_like, aten.full_like, aten.new_zeros, aten.new_ones, aten.new_full, aten.softplus,
    aten.nan_to_num, aten.roll, aten.linspace, aten.logsumexp, aten.fill, aten.zero,
    aten.sum.default, aten.unbind, aten.pad, aten.lift_fresh_copy, aten.index_select, aten.addcmul,
    aten.addcdiv, aten.trunc, aten.t, aten.gelu, aten.silu,
)  # fmt: skip
# `m &= n` calls aten.__iand__, which functionalization does not know.
_IN_PLACE_BITS = {"iand": "bitwise_and_", "ior": "bitwise_or_", "ixor": "bitwise_xor_"}
_NO_VALUE = ("_set_grad_enabled",)
_LEVEL_ARGUMENT = {"_add_batch_dim": 2, "_remove_batch_dim": 1}


@dataclass
class Shadow:
    """A core-ATen graph and its map to positions in `Slice.nodes`.

    Attributes:
        graph: placeholders are the leaves, then run-time numbers; the output is every value of the slice.
        value: position of a slice node -> shadow node of its value at the end of the slice.
        positions: shadow node -> positions of the slice nodes with that value, in graph order.
        constants: owner of the graph's get_attr nodes.
        mutates: something is written in place, so a value may have no slice node any more.
        parameters: the placeholders of parameters of the model.
    """

    graph: fx.Graph
    value: dict[int, fx.Node]
    positions: dict[fx.Node, list[int]]
    constants: torch.nn.Module
    mutates: bool
    parameters: frozenset[fx.Node] = frozenset()


def trace(piece: Slice) -> Shadow:
    """Trace a slice.

    Raises:
        DeclineSite: UNSUPPORTED_OP when the slice cannot be run on fake tensors.
    """
    leaves = [n for n in piece.nodes if n in piece.leaves and example(n) is not None]
    inputs = [example(n) for n in leaves]
    mutates = any(is_mutation(n) for n in piece.nodes if n not in piece.leaves)
    replay = _Replay(piece, leaves, levels=int(mutates))
    body = torch.func.functionalize(replay, remove="mutations") if mutates else replay
    mode = next((t.fake_mode for v in inputs for t in tensors_of(v) if isinstance(t, FakeTensor)), None)
    mode = mode or _any_fake_mode(piece)
    tracer = AtenTracer(_decompositions())
    try:
        placeholders = [tracer.placeholder(value) for value in tree_leaves(inputs)]
        with torch.no_grad(), uncached_autocast(), mode or contextlib.nullcontext(), enable_python_dispatcher(), tracer:
            values = body(*inputs)
    except DeclineSite:
        raise
    except Exception as error:
        if type(error).__name__ == "TensorifyScalarRestartAnalysis":
            raise
        detail = f"the slice cannot be traced: {type(error).__name__}: {str(error).splitlines()[0][:120]}"
        raise DeclineSite(DeclineReason.UNSUPPORTED_OP, detail) from error
    shadow = _shadow_of(tracer, dict(zip(replay.returned, values, strict=True)), mutates)
    shadow.parameters = frozenset(n for n in placeholders if isinstance(n.meta["val"], torch.nn.Parameter))
    return shadow


@functools.cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    return get_decompositions(_DECOMPOSE)


def _any_fake_mode(piece: Slice) -> Any:
    for node in piece.nodes:
        for tensor in tensors_of(example(node)):
            if isinstance(tensor, FakeTensor):
                return tensor.fake_mode
    return None


class _Replay:
    """The slice as a function of its leaves that returns every tensor it computes; `returned` are their positions.

    `levels` is how many functorch levels surround the call: Dynamo's vmap nodes name theirs by number.
    """

    def __init__(self, piece: Slice, leaves: list[fx.Node], levels: int) -> None:
        self.piece, self.leaves, self.levels = piece, leaves, levels
        self.returned: list[int] = []

    def __call__(self, *args: Any) -> list[torch.Tensor]:
        env: dict[fx.Node, Any] = dict(zip(self.leaves, args))
        autocasts: dict[fx.Node, Any] = {}
        nesting = 0
        try:
            for node in self.piece.nodes:
                if node in env or node in self.piece.leaves or target_name(node) in _NO_VALUE:
                    continue
                env[node] = self._run(node, env)
                name = target_name(node)
                nesting += (name == "_vmap_increment_nesting") - (name == "_vmap_decrement_nesting")
                if name == "_enter_autocast":
                    autocasts[node] = env[node]
                elif name == "_exit_autocast":
                    autocasts.pop(node.all_input_nodes[0], None)
        finally:
            for _ in range(nesting):
                torch._C._functorch._vmap_decrement_nesting()
            for mode in reversed(autocasts.values()):
                torch.amp.autocast_mode._exit_autocast(mode)
        values = [(p, env.get(n)) for p, n in enumerate(self.piece.nodes)]
        kept = [(p, v) for p, v in values if isinstance(v, torch.Tensor) and not _batched(v)]
        self.returned = [p for p, _ in kept]
        return [v for _, v in kept]

    def _run(self, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
        values, keywords = fx.node.map_arg((node.args, node.kwargs), lambda n: env[n])
        in_place = _IN_PLACE_BITS.get(target_name(node).strip("_"))
        if in_place is not None:
            return getattr(values[0], in_place)(values[1])
        if node.op == "call_method":
            return getattr(values[0], str(node.target))(*values[1:], **keywords)
        if node.target is operator.getitem and _indexes_with_scalars(values[1]):
            return _index(*values)
        if target_name(node) in ("tensor", "as_tensor") and values and isinstance(values[0], bool | int | float):
            return _scalar(*values, **keywords)
        position = _LEVEL_ARGUMENT.get(target_name(node))
        if position is not None:
            values = (*values[:position], values[position] + self.levels, *values[position + 1 :])
        assert callable(node.target)
        return node.target(*values, **keywords)


def _scalar(value: bool | int | float, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
    """torch.tensor of a number, as a factory call that the trace can see through."""
    natural = torch.bool if isinstance(value, bool) else torch.int64 if isinstance(value, int) else None
    return torch.full((), value, dtype=dtype or natural or torch.get_default_dtype(), device=device)


def _indexes_with_scalars(index: Any) -> bool:
    """`x[i, j]` with 0-dim tensors, as mods write it: plain indexing would ask for their values."""
    parts = index if isinstance(index, tuple) else (index,)
    scalars = [p for p in parts if isinstance(p, torch.Tensor) and p.dim() == 0 and p.dtype is not torch.bool]
    return bool(scalars) and all(isinstance(p, torch.Tensor | int) or p == slice(None) for p in parts)


def _index(x: torch.Tensor, index: Any) -> torch.Tensor:
    parts = index if isinstance(index, tuple) else (index,)
    tensors = [
        None if isinstance(p, slice) else p if isinstance(p, torch.Tensor) else torch.full((), p, device=x.device)
        for p in parts
    ]
    return torch.ops.aten.index.Tensor(x, tensors)


def _batched(value: torch.Tensor) -> bool:
    return torch._C._functorch.is_batchedtensor(value)


def _shadow_of(tracer: AtenTracer, values: dict[int, torch.Tensor], mutates: bool) -> Shadow:
    """The shadow of a slice, of whose nodes the `values` are known by position."""
    value = {position: tracer.node_of(tensor) for position, tensor in values.items()}
    positions: dict[fx.Node, list[int]] = {}
    for position, node in value.items():
        positions.setdefault(node, []).append(position)
    tracer.graph.output(list(value.values()))
    return Shadow(tracer.graph, value, positions, tracer.constants, mutates)


__all__ = ["Shadow", "SymScalar", "trace"]
