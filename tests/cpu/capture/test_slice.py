"""Slices and shadows: where they stop, what they include, when two are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from fa4_inductor.capture.fx_view import is_mutation, location, mutated_storages, storage_keys, target_name
from fa4_inductor.capture.shadow import Shadow, trace
from fa4_inductor.capture.slice import GraphIndex, Slice, backward_slice, has_softmax_above
from fa4_inductor.errors import DeclineReason, DeclineSite


def _graph(function: Callable[..., Any], *args: Any) -> fx.GraphModule:
    graphs: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    with torch.no_grad():
        torch.compile(function, backend=backend)(*args)
    (gm,) = graphs
    return gm


def _last(gm: fx.GraphModule, name: str) -> fx.Node:
    return [n for n in gm.graph.nodes if target_name(n) == name][-1]


def _slice(gm: fx.GraphModule, node: fx.Node) -> Slice:
    return backward_slice([node], node, GraphIndex(gm.graph))


def test_stops_at_opaque_ops_and_remote_contractions() -> None:
    w = torch.randn(4, 4)

    def f(x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.layer_norm(x @ w, (4,)).relu()
        return torch.matmul(y, torch.matmul(torch.matmul(y, w), w)).exp()

    gm = _graph(f, torch.randn(4, 4))
    piece = _slice(gm, _last(gm, "matmul"))
    names = {target_name(n): n in piece.leaves for n in piece.nodes if target_name(n)}
    assert names["layer_norm"] and not names["relu"]
    assert sum(target_name(n) == "matmul" and n in piece.leaves for n in piece.nodes) == 1


def test_softmax_behind_an_opaque_op_is_no_anchor() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        near = torch.matmul(x.softmax(-1) * 2, x)
        return torch.matmul(torch.topk(near.softmax(-1), 4).values, x)

    gm = _graph(f, torch.randn(4, 4))
    first, second = (n for n in gm.graph.nodes if target_name(n) == "matmul")
    assert has_softmax_above(first)
    assert not has_softmax_above(second)


def test_an_exponential_is_an_anchor_where_it_is_divided_by_a_sum() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        e = (x @ x.mT).exp()
        near = torch.matmul(e / e.sum(-1, keepdim=True), x)
        decayed = torch.matmul((x @ x.mT) * (x.sum(-1) - 1).exp(), x)
        return near + decayed

    gm = _graph(f, torch.randn(4, 4))
    anchors = [has_softmax_above(n) for n in gm.graph.nodes if target_name(n) == "matmul"]
    assert anchors.count(True) == 1


def test_equal_layers_have_equal_keys() -> None:
    def f(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for scale in (0.5, 0.5, 0.5, 0.25):
            x = torch.nn.functional.layer_norm(torch.matmul((x @ x.mT * scale + mask).softmax(-1), x), (8,))
        return x

    gm = _graph(f, torch.randn(8, 8), torch.zeros(8, 8))
    anchors = [n for n in gm.graph.nodes if target_name(n) == "matmul" and has_softmax_above(n)]
    keys = [_slice(gm, n).key() for n in anchors]
    assert len(keys) == 4
    assert keys[1] == keys[2]
    assert keys[3] != keys[2]


def test_mutations_before_the_site_belong_to_the_slice() -> None:
    def f(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(0, torch.tensor([1, 2]), x[:2])
        row = cache[0]
        out = torch.matmul(x.softmax(-1), cache)
        row.add_(1.0)
        return out

    gm = _graph(f, torch.randn(4, 4), torch.zeros(4, 4))
    piece = _slice(gm, _last(gm, "matmul"))
    names = [target_name(n) for n in piece.nodes]
    assert "index_copy_" in names and "add_" not in names
    shadow = trace(piece)
    assert shadow.mutates
    cache = next(i for i, n in enumerate(piece.nodes) if n.op == "placeholder" and "cache" in n.name)
    assert shadow.value[cache].target is torch.ops.aten.index_copy.default


def test_overwritten_value_has_no_node() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x + 1.0
        p = torch.exp(y)
        y.mul_(2.0)
        return torch.matmul(p, y)

    gm = _graph(f, torch.randn(4, 4))
    piece = _slice(gm, _last(gm, "matmul"))
    shadow = trace(piece)
    added = next(n for n in shadow.graph.nodes if n.target is torch.ops.aten.add.Tensor)
    assert added not in shadow.positions


def test_opaque_mutation_declines() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x + 1.0
        torch.nn.init.zeros_(y[0])
        y.uniform_()
        return torch.matmul(y.softmax(-1), x)

    gm = _graph(f, torch.randn(4, 4))
    with pytest.raises(DeclineSite) as refusal:
        _slice(gm, _last(gm, "matmul"))
    assert refusal.value.reason is DeclineReason.MUTATION


@pytest.mark.parametrize("broken", [False, True])
def test_tracing_leaves_no_functorch_level_behind(broken: bool) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        keep = torch.vmap(torch.vmap(lambda i, j: j <= i, (None, 0)), (0, None))(torch.arange(4), torch.arange(4))
        return torch.matmul(torch.where(keep, x, 0.0).softmax(-1), x)

    gm = _graph(f, torch.randn(4, 4))
    piece = _slice(gm, _last(gm, "matmul"))
    if broken:
        next(n for n in piece.nodes if target_name(n) == "le").target = _fails
    before = torch._C._functorch.peek_interpreter_stack()
    if broken:
        with pytest.raises(DeclineSite):
            trace(piece)
    else:
        shadow: Shadow = trace(piece)
        assert any(n.target is torch.ops.aten.le.Tensor for n in shadow.graph.nodes)
    assert torch._C._functorch.peek_interpreter_stack() == before


def _fails(*args: Any) -> Any:
    raise ValueError("no such op")


def test_operators_with_a_trailing_underscore_are_no_mutations() -> None:
    gm = _graph(lambda x: (x > 0) & (x < 1) | (x > 2), torch.randn(3))
    assert not any(is_mutation(n) for n in gm.graph.nodes)
    gm = _graph(lambda x: x.clone().add_(1), torch.randn(3))
    assert [target_name(n) for n in gm.graph.nodes if is_mutation(n)] == ["add_"]


def test_location_is_the_users_line() -> None:
    gm = _graph(lambda x: torch.nn.functional.softmax(x, -1), torch.randn(3))
    assert location(_last(gm, "softmax")).startswith("test_slice.py:")


def test_out_may_be_a_tuple() -> None:
    graph = fx.Graph()
    x, values, indices = (graph.placeholder(name) for name in ("x", "values", "indices"))
    node = graph.call_function(torch.max, (x, 1), {"out": (values, indices)})
    for n, example in ((x, torch.randn(2, 3)), (values, torch.zeros(2)), (indices, torch.zeros(2, dtype=torch.int64))):
        n.meta["example_value"] = example
    assert is_mutation(node)
    assert mutated_storages(node) == storage_keys(values) | storage_keys(indices)
