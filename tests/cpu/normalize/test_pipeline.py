"""Each pass: what it removes, what it must keep, and that the map to the captured graph moves with the values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fa4_inductor.capture.fx_view import target_name
from fa4_inductor.capture.shadow import Shadow, trace
from fa4_inductor.capture.slice import GraphIndex, Slice, backward_slice
from fa4_inductor.normalize import PASSES, normalize
from fa4_inductor.normalize.pipeline import drop_copies, drop_identity_casts, drop_identity_views

aten = torch.ops.aten


def _shadow(function: Callable[..., Any], *args: torch.Tensor) -> tuple[Slice, Shadow]:
    graphs: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    with torch.no_grad():
        torch.compile(function, backend=backend)(*args)
    root = graphs[0].graph.output_node().args[0][0]
    piece = backward_slice([root], root, GraphIndex(graphs[0].graph))
    return piece, trace(piece)


def _targets(shadow: Shadow) -> list[Any]:
    return [n.target for n in shadow.graph.nodes if n.op == "call_function"]


def test_copies_go_and_their_nodes_move() -> None:
    piece, shadow = _shadow(lambda x: x.mT.contiguous().clone() + 1, torch.randn(3, 4))
    copy = next(i for i, n in enumerate(piece.nodes) if target_name(n) == "clone")
    assert aten.clone.default in _targets(shadow)
    drop_copies(shadow)
    assert aten.clone.default not in _targets(shadow)
    assert shadow.value[copy].target in (aten.transpose.int, aten.permute.default)
    assert copy in shadow.positions[shadow.value[copy]]


def test_a_copy_that_is_written_keeps_both_values() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y.add_(1.0)
        return y * x

    piece, shadow = _shadow(f, torch.randn(3))
    normalize(shadow)
    (x,) = (i for i, n in enumerate(piece.nodes) if n.op == "placeholder")
    copy = next(i for i, n in enumerate(piece.nodes) if target_name(n) == "clone")
    assert shadow.value[x].op == "placeholder"
    assert shadow.value[copy].target is aten.add.Tensor


def test_only_identity_casts_go() -> None:
    _, shadow = _shadow(lambda x: x.to(torch.float64).to(torch.float32) + 1, torch.randn(3))
    drop_identity_casts(shadow)
    assert _targets(shadow).count(aten._to_copy.default) == 2


def test_only_identity_views_go() -> None:
    _, shadow = _shadow(lambda x: torch.matmul(x, x.mT.expand(2, 4, 3, 3)), torch.randn(2, 4, 3, 3))
    before = _targets(shadow).count(aten.expand.default)
    drop_identity_views(shadow)
    assert _targets(shadow).count(aten.expand.default) < before
    _, shadow = _shadow(lambda x: x[None].expand(2, 3) * 2, torch.randn(3))
    drop_identity_views(shadow)
    assert aten.expand.default in _targets(shadow)


def test_passes_keep_every_value() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.to(torch.float32).reshape(3, 4).detach().expand(3, 4).clone()
        return torch.matmul(y, y.t().contiguous()).contiguous()

    x = torch.randn(3, 4)
    piece, shadow = _shadow(f, x)
    for run in (*PASSES, normalize):
        run(shadow)
        module = fx.GraphModule(shadow.constants, shadow.graph)
        torch.testing.assert_close(module(x)[-1], f(x))
    assert len(shadow.value) == len(piece.nodes)
