"""Expanding a composite call leaves its value alone; settling gives the graph back or drops the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from fa4_inductor import backend, explain
from fa4_inductor.capture import composites
from fa4_inductor.capture.fx_view import target_name
from fa4_inductor.settings import Settings

EMBED, HEADS = 16, 2
CALL = "multi_head_attention_forward"


def _capture(function: Callable[..., Any], *args: torch.Tensor, dynamic: bool = False) -> fx.GraphModule:
    graphs: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    with torch.no_grad():
        torch.compile(function, backend=keep, dynamic=dynamic)(*args)
    (gm,) = graphs
    return gm


def _module() -> nn.MultiheadAttention:
    torch.manual_seed(0)
    return nn.MultiheadAttention(EMBED, HEADS, batch_first=True).eval()


def _x() -> torch.Tensor:
    return torch.randn(2, 5, EMBED)


def _names(gm: fx.GraphModule) -> list[str]:
    return [target_name(n) for n in gm.graph.nodes]


@pytest.mark.parametrize("dynamic", [False, True])
def test_collapse_gives_the_graph_back(dynamic: bool) -> None:
    module = _module()
    gm = _capture(lambda x: module(x, x, x), _x(), dynamic=dynamic)
    text = str(gm.graph)
    expansions = composites.expand(gm.graph)
    gm.graph.lint()
    assert len(expansions) == 1 and "softmax" in _names(gm)
    assert all("example_value" in n.meta for n in expansions[0].nodes)
    composites.settle(expansions, fused=())
    gm.graph.lint()
    assert str(gm.graph) == text


def test_kept_expansion_drops_the_call() -> None:
    module = _module()
    gm = _capture(lambda x: module(x, x, x, need_weights=False)[0], _x())
    (expansion,) = composites.expand(gm.graph)
    site = next(n for n in expansion.nodes if target_name(n) == "scaled_dot_product_attention")
    composites.settle([expansion], fused={site})
    gm.graph.lint()
    assert CALL not in _names(gm) and "scaled_dot_product_attention" in _names(gm)


def test_expansion_keeps_the_value() -> None:
    layer = nn.TransformerEncoderLayer(EMBED, HEADS, 32, batch_first=True).eval()
    gm = _capture(lambda x: layer(x), _x())
    inputs = [torch.randn(n.meta["example_value"].shape) for n in gm.graph.find_nodes(op="placeholder")]
    expected = gm(*inputs)
    assert len(composites.expand(gm.graph)) == 1
    gm.recompile()
    torch.testing.assert_close(gm(*inputs), expected)


def test_other_strides_stay_whole() -> None:
    module = _module()
    gm = _capture(lambda x: module(x, x, x, need_weights=False)[0], _x())
    call = next(n for n in gm.graph.nodes if target_name(n) == CALL)
    (result,) = call.users
    value = result.meta["example_value"]
    with value.fake_mode:
        result.meta["example_value"] = value.transpose(0, 1).contiguous().transpose(0, 1)
    text = str(gm.graph)
    assert composites.expand(gm.graph) == [] and str(gm.graph) == text


def test_tensor_of_another_kind_stays_whole() -> None:
    module = _module()
    gm = _capture(lambda x: module(x, x, x, need_weights=False)[0], _x())
    call = next(n for n in gm.graph.nodes if target_name(n) == CALL)
    del call.args[0].meta["example_value"]
    text = str(gm.graph)
    assert composites.expand(gm.graph) == [] and str(gm.graph) == text


def test_failure_half_way_leaves_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    module = _module()
    gm = _capture(lambda x: module(x, x, x, need_weights=False)[0], _x())
    text = str(gm.graph)

    def fail(*args: Any) -> Any:
        raise composites.CannotRecord("no")

    monkeypatch.setattr(composites, "_result_node", fail)
    assert composites.expand(gm.graph) == [] and str(gm.graph) == text


def test_backend_leaves_calls_with_nothing_fused() -> None:
    module = _module()
    gm = _capture(lambda x: module(x, x, x), _x())
    text = str(gm.graph)
    assert backend.fuse(gm, Settings()) == [] and str(gm.graph) == text


def test_backend_runs_the_fused_site() -> None:
    layer, x = nn.TransformerEncoderLayer(EMBED, HEADS, 32, batch_first=True).eval(), _x()
    gm = _capture(lambda x: layer(x), x)
    text = str(gm.graph)
    (before,) = backend.fuse(gm, Settings(implementation="reference"))
    assert "attention" in _names(gm) and not {"softmax", "_transformer_encoder_layer_fwd"} & set(_names(gm))
    before.restore()
    assert before.module is gm and str(gm.graph) == text


def test_compiled_model_agrees_with_eager() -> None:
    layer, x = nn.TransformerEncoderLayer(EMBED, HEADS, 32, batch_first=True).eval(), _x()
    compiled = torch.compile(layer, backend="fa4", options={"fa4.implementation": "reference", "fa4.strict": True})
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), layer(x))


def test_explain_tells_of_the_site() -> None:
    module = _module()
    with torch.no_grad():
        report = explain(lambda x: module(x, x, x, need_weights=False)[0], _x())
    (site,) = report.sites
    assert site.status in ("fused", "matched") and site.program is not None
