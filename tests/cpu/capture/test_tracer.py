"""The tracer writes the calls that make_fx writes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch._decomp import get_decompositions
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from fa4_inductor.capture.fx_view import tensors_of
from fa4_inductor.capture.tracer import AtenTracer, uncached_autocast

aten = torch.ops.aten
TABLE = get_decompositions([aten.masked_fill, aten.addmm, aten.new_zeros, aten.unbind, aten.lift_fresh_copy])
COPIES = {aten.detach.default, aten.lift_fresh_copy.default}  # make_fx erases those that nobody uses


def _written(x: torch.Tensor) -> torch.Tensor:
    mask = x.new_zeros(x.shape[1], x.shape[1])
    mask[..., 0] = 1.0
    mask.masked_fill_(mask > 0, -1.0)
    return x @ x.mT + mask


def _autocast(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (x @ x.mT).softmax(-1) @ x


FUNCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "softmax": lambda x: (x @ x.mT).softmax(-1) @ x,
    "broadcast matmul": lambda x: torch.matmul(x[:, None], x.mT),
    "linear": lambda x: F.linear(x, x[0].mT @ x[0], x[0, 0]),
    "einsum": lambda x: torch.einsum("bqd,bkd->bqk", x, x),
    "parts": lambda x: torch.cat([p * 2 for p in x.chunk(2, -1)], -1) + x.max(-1, keepdim=True)[0],
    "unbind": lambda x: torch.stack([row + 1 for row in x.unbind(0)]),
    "arange": lambda x: x.masked_fill(torch.arange(x.shape[1])[:, None] > torch.arange(x.shape[2]), -torch.inf),
    "lengths": lambda x: x.reshape(-1, x.shape[1] * x.shape[2]) + x.shape[1],
    "index": lambda x: x[:, torch.arange(x.shape[1]) // 2, None],
    "constant": lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0]),
    "normalised": lambda x: F.layer_norm(x, (4,)) + torch.logsumexp(x, -1, keepdim=True),
    "vmap": lambda x: torch.vmap(lambda row: row @ row.mT)(x),
    "written": _written,
    "autocast": _autocast,
}


def _fake(dynamic: bool) -> torch.Tensor:
    mode = FakeTensorMode(shape_env=ShapeEnv() if dynamic else None)
    sizes = [DimDynamic.STATIC, DimDynamic.DYNAMIC if dynamic else DimDynamic.STATIC, DimDynamic.STATIC]
    context = StatelessSymbolicContext(dynamic_sizes=sizes) if dynamic else None
    return mode.from_tensor(torch.randn(2, 4, 4), symbolic_context=context, source=ConstantSource("x"))


def _calls(graph: fx.Graph) -> list[tuple[Any, ...]]:
    """Tensor calls of a graph: what is called, on which earlier calls, with which constants, and the result's kind."""
    number: dict[fx.Node, Any] = {}
    calls: list[tuple[Any, ...]] = []
    for node in graph.nodes:
        shapes = [str(tuple(t.shape)) for t in tensors_of(node.meta.get("val"))]
        if node.op == "call_function" and node.target in COPIES:
            number[node] = number[node.args[0]]
        elif shapes:
            kind = node.target if node.op == "call_function" else node.op
            arguments = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: _argument(n, number))
            number[node] = ("call", len(calls))
            calls.append((kind, str(arguments) if node.op == "call_function" else "", shapes))
    return calls


def _argument(node: fx.Node, number: dict[fx.Node, Any]) -> Any:
    return number.get(node, str(node.meta.get("val")))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_calls_are_those_of_make_fx(name: str, dynamic: bool) -> None:
    x = _fake(dynamic)
    function = torch.func.functionalize(FUNCTIONS[name], remove="mutations")
    tracer = AtenTracer(TABLE)
    tracer.placeholder(x)
    with torch.no_grad(), x.fake_mode, enable_python_dispatcher():
        with uncached_autocast(), tracer:
            result = function(x)
        expected = make_fx(function, TABLE, "real", _allow_non_fake_inputs=True)(x)
    assert _calls(tracer.graph) == _calls(expected.graph)
    node = tracer.node_of(result)
    assert node.op == "call_function" and node.target is not operator.getitem and node.meta["val"] is result


def test_what_no_call_made_is_a_constant() -> None:
    tracer = AtenTracer({})
    outside = torch.ones(3)
    with tracer:
        result = outside + 1
    (constant,) = tracer.node_of(result).all_input_nodes
    assert constant.op == "get_attr" and getattr(tracer.constants, str(constant.target)) is outside


def test_the_autocast_cache_comes_back() -> None:
    before = torch.is_autocast_cache_enabled()
    with uncached_autocast():
        assert not torch.is_autocast_cache_enabled()
    assert torch.is_autocast_cache_enabled() == before
