"""Calls that Dynamo keeps whole although attention is inside: shown as the torch calls they consist of.

`F.multi_head_attention_forward` is in Dynamo's graph as one call, and so are the fast paths of
`nn.MultiheadAttention` and `nn.TransformerEncoderLayer`. `expand` writes the torch calls of such a call in front of it
and lets its users read their results. The call itself stays, unused, until `settle` knows whether an attention inside
was fused: if so it goes, if not its users get it back and the graph is what it was.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import types
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from fa4_inductor.capture.fx_view import example, is_mutation, shape_exprs, size_expr, target_name, tensors_of
from fa4_inductor.capture.native_attention import encoder_layer, multi_head_attention
from fa4_inductor.capture.record import CannotRecord, Recorder

log = logging.getLogger(__name__)


def _without_overrides(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with its own body even under a function mode, which `has_torch_function` would hand the call to."""
    assert isinstance(function, types.FunctionType)
    names = {**function.__globals__, "has_torch_function": lambda *_: False}
    body = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    body.__kwdefaults__ = function.__kwdefaults__
    return body


_BODIES: dict[Any, Callable[..., Any]] = {
    F.multi_head_attention_forward: _without_overrides(F.multi_head_attention_forward)
}
_NATIVE: dict[str, Callable[..., Any]] = {
    "_native_multi_head_attention": multi_head_attention,
    "_transformer_encoder_layer_fwd": encoder_layer,
}


@dataclass(frozen=True)
class Expansion:
    """One expanded call.

    Attributes:
        call: the call itself, unused now. nodes: what it consists of, in graph order.
        results: (node that held a result, node that holds it now); the former is `call` or a getitem of it.
        unpacked: all getitems of `call`.
    """

    call: fx.Node
    nodes: tuple[fx.Node, ...]
    results: tuple[tuple[fx.Node, fx.Node], ...]
    unpacked: tuple[fx.Node, ...]


def is_composite(node: fx.Node) -> bool:
    """Is this a call that `expand` knows?"""
    return _body_of(node) is not None


def expand(graph: fx.Graph) -> list[Expansion]:
    """Expand the composite calls of a graph in place. A call that cannot be expanded stays as it is."""
    found = []
    for call in [n for n in graph.nodes if is_composite(n)]:
        try:
            expansion = _expand(call)
        except Exception as error:
            if type(error).__name__ == "TensorifyScalarRestartAnalysis":
                raise
            log.debug("%s stays whole: %s: %s", call.name, type(error).__name__, error)
            continue
        found.append(expansion)
    return found


def settle(expansions: Collection[Expansion], fused: Collection[fx.Node]) -> None:
    """Drop the calls whose expansion holds one of the `fused` sites; give the other calls back to their users."""
    for expansion in expansions:
        if any(node in fused for node in expansion.nodes):
            for node in (*expansion.unpacked, expansion.call):
                node.graph.erase_node(node)
        else:
            _collapse(expansion)


def _collapse(expansion: Expansion) -> None:
    inside = set(expansion.nodes)
    for before, now in expansion.results:
        now.replace_all_uses_with(before, delete_user_cb=lambda user: user not in inside)
    _erase_unused(expansion.nodes, keep=(), mutations=True)


def _erase_unused(nodes: Collection[fx.Node], keep: Collection[fx.Node], mutations: bool) -> None:
    """Erase what nobody uses. Writes go only with the whole expansion: what they write to was made inside it."""
    for node in reversed(list(nodes)):
        removable = mutations or not (is_mutation(node) or target_name(node) == "dropout")
        if not node._erased and not node.users and node not in keep and removable:
            node.graph.erase_node(node)


def _body_of(node: fx.Node) -> Callable[..., Any] | None:
    if node.op != "call_function":
        return None
    if node.target in _BODIES:
        return _BODIES[node.target]
    return _NATIVE.get(target_name(node)) if _is_native(node.target) else None


def _is_native(target: Any) -> bool:
    return isinstance(target, types.BuiltinFunctionType | torch._ops.OpOverload | torch._ops.OpOverloadPacket)


def _expand(call: fx.Node) -> Expansion:
    """Raises `CannotRecord`; the graph is then unchanged."""
    body = _body_of(call)
    assert body is not None
    value = example(call)
    unpacked = tuple(call.users) if isinstance(value, tuple | list) else ()
    if any(u.target is not operator.getitem or not isinstance(u.args[1], int) for u in unpacked):
        raise CannotRecord("its results are used as one tuple")
    _check_inputs(call)
    recorder = Recorder(call)
    try:
        with _state_at(call), recorder.recording():
            args, kwargs = fx.node.map_arg((call.args, call.kwargs), example)
            result = body(*args, **kwargs)
        outputs = [(u, result[u.args[1]]) for u in unpacked if u.users] or ([] if unpacked else [(call, result)])
        results = tuple((before, _result_node(recorder, before, now)) for before, now in outputs)
    except Exception:
        recorder.undo()
        raise
    for before, now in results:
        before.replace_all_uses_with(now)
    _erase_unused(recorder.nodes, keep=[now for _, now in results], mutations=False)
    nodes = tuple(n for n in recorder.nodes if not n._erased)
    return Expansion(call, nodes, results, unpacked)


def _check_inputs(call: fx.Node) -> None:
    for node in call.all_input_nodes:
        if example(node) is None:
            raise CannotRecord(f"{node.name} has no example value")
        for tensor in tensors_of(example(node)):
            if type(tensor) is not FakeTensor or tensor.layout is not torch.strided or tensor.is_nested:
                raise CannotRecord(f"{node.name} is no plain tensor")


def _result_node(recorder: Recorder, before: fx.Node, now: Any) -> fx.Node:
    want = example(before)
    if not isinstance(now, torch.Tensor) or not isinstance(want, torch.Tensor):
        raise CannotRecord(f"{before.name} is no tensor")
    have, expected = ((t.dtype, t.device, shape_exprs(t)) for t in (now, want))
    if have != expected or _strides_differ(now, want):
        raise CannotRecord(f"the calls give {have} {now.stride()}, the graph has {expected} {want.stride()}")
    return recorder.node_of(now)


def _strides_differ(now: torch.Tensor, want: torch.Tensor) -> bool:
    """Are two strides known to differ, in a dimension where a user of the tensor could tell?"""
    gaps = [size_expr(a) - size_expr(b) for a, b, n in zip(now.stride(), want.stride(), now.shape) if size_expr(n) != 1]
    return any(gap.is_number and gap != 0 for gap in gaps)


@contextlib.contextmanager
def _state_at(call: fx.Node) -> Iterator[None]:
    """The modes under which Dynamo computed the value of `call`: grad mode, and the autocasts open at that place."""
    needs_grad = any(tensor.requires_grad for tensor in tensors_of(example(call)))
    open_casts: dict[fx.Node, Any] = {}
    for node in call.graph.nodes:
        if node is call:
            break
        if target_name(node) == "_enter_autocast":
            open_casts[node] = None
        elif target_name(node) == "_exit_autocast":
            open_casts.pop(node.all_input_nodes[0], None)
    with torch.set_grad_enabled(needs_grad), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        entered = [torch.amp.autocast_mode._enter_autocast(*node.args) for node in open_casts]
        try:
            yield
        finally:
            for mode in reversed(entered):
                torch.amp.autocast_mode._exit_autocast(mode)
