"""find_sites as a whole: order, sharing between layers, locations, and what happens when the matcher itself fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from fa4_inductor.errors import Declined, DeclineReason
from fa4_inductor.patterns import AttentionMatch, find_sites, sites


def _graph(function: Callable[..., Any], *args: Any) -> fx.GraphModule:
    graphs: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    with torch.no_grad():
        torch.compile(function, backend=backend)(*args)
    return graphs[0]


def _layers(x: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(8, 8, dtype=torch.bool).tril()
    for _ in range(4):
        x = torch.nn.functional.layer_norm(x, (4,))
        scores = (x @ x.mT).masked_fill(~mask, -torch.inf)
        x = torch.matmul(scores.softmax(-1), x)
    return x


def test_sites_come_in_graph_order_and_equal_layers_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gm = _graph(_layers, torch.randn(2, 3, 8, 4))
    traced = []
    trace = sites.trace
    monkeypatch.setattr(sites, "trace", lambda piece: traced.append(piece) or trace(piece))
    found = find_sites(gm)
    order = {n: i for i, n in enumerate(gm.graph.nodes)}
    assert all(isinstance(s, AttentionMatch) for s in found), found
    assert [order[s.output] for s in found] == sorted(order[s.output] for s in found)
    assert len(found) == 4
    assert len(traced) == 1
    assert len({s.spec.text for s in found}) == 1
    assert len({s.q.node for s in found}) == 4
    assert all(s.location.startswith("test_sites.py:") for s in found)


def test_matching_leaves_the_graph_alone() -> None:
    gm = _graph(_layers, torch.randn(2, 3, 8, 4))
    before = gm.print_readable(print_output=False)
    find_sites(gm)
    assert gm.print_readable(print_output=False) == before


def test_a_bug_of_ours_is_a_decline(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise ZeroDivisionError("boom")

    gm = _graph(_layers, torch.randn(2, 3, 8, 4))
    monkeypatch.setattr(sites, "trace", fails)
    found = find_sites(gm)
    assert [type(s) for s in found] == [Declined] * 4
    assert {s.reason for s in found if isinstance(s, Declined)} == {DeclineReason.INTERNAL_ERROR}


def test_a_graph_that_cannot_be_read_is_one_decline(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise ZeroDivisionError("boom")

    monkeypatch.setattr(sites, "GraphFacts", fails)
    (site,) = find_sites(_graph(_layers, torch.randn(2, 3, 8, 4)))
    assert isinstance(site, Declined) and site.reason is DeclineReason.INTERNAL_ERROR


def test_tensor_subclasses_decline() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    x = torch.randn(2, 8, 4)
    gm = _graph(lambda t: torch.matmul((t @ t.mT).softmax(-1), t), TwoTensor(x, x.clone()))
    assert [s.reason for s in find_sites(gm) if isinstance(s, Declined)] == [DeclineReason.TENSOR_SUBCLASS]


def test_sizes_are_nodes_of_the_graph() -> None:
    def f(q: torch.Tensor, k: torch.Tensor, n: int) -> torch.Tensor:
        keep = torch.arange(k.shape[2])[None] <= torch.arange(q.shape[2])[:, None] + n
        return torch.matmul((q @ k.mT).masked_fill(~keep, -torch.inf).softmax(-1), k)

    graphs: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    with torch.no_grad():
        torch.compile(f, backend=backend, dynamic=True)(torch.randn(2, 3, 8, 4), torch.randn(2, 3, 9, 4), 5)
    (match,) = find_sites(graphs[0])
    assert isinstance(match, AttentionMatch), match
    assert match.spec.num_sizes == len(match.sizes) == 1
    assert match.spec.text.endswith("keep=kv_idx <= q_idx + size0; empty_row=nan")
    assert isinstance(match.sizes[0], fx.Node)
