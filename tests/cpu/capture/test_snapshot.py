"""A snapshot gives back nodes that were erased, arguments that were changed, names and meta."""

from __future__ import annotations

import torch
from torch import fx

from fa4_inductor.capture.snapshot import Snapshot


def _lines(gm: fx.GraphModule) -> list[str]:
    return [f"{n.format_node()} {sorted(n.meta.items())}" for n in gm.graph.nodes]


def test_whatever_happens_to_the_graph_is_undone() -> None:
    gm = fx.symbolic_trace(lambda x, y=2.0: torch.where(x > 0, torch.softmax(x * y, dim=-1)[..., 1:], 0.5))
    for i, node in enumerate(gm.graph.nodes):
        node.meta["i"] = i
    before, x = _lines(gm), torch.randn(3, 1)
    code, expected = gm.code, gm(x, 3.0)
    snapshot = Snapshot(gm)
    softmax = next(n for n in gm.graph.nodes if n.target is torch.softmax)
    softmax.meta["i"] = "changed"
    softmax.name = "other"
    with gm.graph.inserting_before(softmax):
        replacement = gm.graph.call_function(torch.relu, softmax.args[:1])
    softmax.replace_all_uses_with(replacement)
    gm.graph.erase_node(softmax)
    next(n for n in gm.graph.nodes if n.target is torch.where).kwargs = {"changed": True}
    gm.recompile()
    assert _lines(gm) != before
    for _ in range(2):
        snapshot.restore()
        gm.graph.lint()
        assert (_lines(gm), gm.code) == (before, code)
        torch.testing.assert_close(gm(x, 3.0), expected)
