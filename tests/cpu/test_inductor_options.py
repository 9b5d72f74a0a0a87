"""What Inductor is told: the user's options, and when dead buffers are freed at once."""

import pytest
import torch
from torch import fx

from fa4_inductor import backend
from fa4_inductor.inductor_options import inductor_patches, memory_patches
from fa4_inductor.runtime.ops import ATTENTION


def graph_with(target, shape, device):
    """A graph of one call of `target` on a fake query; what is behind the query plays no part."""
    graph = fx.Graph()
    query = graph.placeholder("q")
    with torch._subclasses.FakeTensorMode():
        query.meta["example_value"] = torch.empty(shape, dtype=torch.bfloat16, device=device)
    graph.output(graph.call_function(target, (query,)))
    return fx.GraphModule({}, graph)


@pytest.mark.parametrize(
    "target, shape, device, frees",
    [
        (ATTENTION, (1, 8, 4096, 64), "cuda", True),
        (ATTENTION, (1, 8, 4095, 64), "cuda", False),
        (ATTENTION, (1, 8, 4096, 64), "cpu", False),
        (torch.relu, (1, 8, 4096, 64), "cuda", False),
    ],
)
def test_large_dead_buffers_are_freed_on_gpus(target, shape, device, frees):
    expected = {"allow_buffer_reuse": False} if frees else {}
    assert memory_patches(graph_with(target, shape, device)) == expected


def test_the_options_of_the_user_win(monkeypatch):
    seen = []
    monkeypatch.setattr(backend, "memory_patches", lambda gm: {"allow_buffer_reuse": False})
    monkeypatch.setattr(backend, "_compile", lambda gm, inputs, patches: seen.append(patches) or gm.forward)
    for options in (None, {"allow_buffer_reuse": True}):
        torch._dynamo.reset()
        torch.compile(torch.nn.ReLU(), backend="fa4", options=options)(torch.randn(3))
    assert seen == [{"allow_buffer_reuse": False}, {"allow_buffer_reuse": True}]


def test_modes_become_options_and_options_win():
    assert inductor_patches("reduce-overhead", {})["triton.cudagraphs"] is True
    assert inductor_patches("reduce-overhead", {"triton.cudagraphs": False})["triton.cudagraphs"] is False
    assert inductor_patches("default", {"max-autotune": True}) == {"max_autotune": True}
