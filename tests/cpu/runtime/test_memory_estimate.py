"""The estimate that Inductor plans memory with, where a version of torch frees the outputs before the first step."""

from __future__ import annotations

import pytest
import torch
from torch._inductor import memory
from torch._inductor.codegen import wrapper

from fa4_inductor.runtime import memory_estimate

REAL = memory.estimate_peak_memory


def as_in_torch_2_11(nodes, inputs, outputs):
    _, steps = REAL(nodes, inputs, outputs)
    freed = sum(b.mpi_buffer.size_free for n in nodes for b in n.get_outputs() if b.get_name() in outputs)
    steps = [step - freed for step in steps]
    return max(0, *steps), steps


@pytest.fixture
def estimates(monkeypatch):
    """What is estimated while a graph is compiled: (with this torch's own function, with the one in place)."""
    seen = []

    def watched(*args):
        seen.append((REAL(*args), in_place(*args)))
        return seen[-1][1]

    def begin(self):
        nonlocal in_place
        in_place = memory.estimate_peak_memory
        monkeypatch.setattr(memory, "estimate_peak_memory", watched)
        init(self)
        monkeypatch.setattr(memory, "estimate_peak_memory", in_place)

    in_place, init = REAL, wrapper.EfficientPeakEstimate.__init__
    monkeypatch.setattr(wrapper.EfficientPeakEstimate, "__init__", begin)
    return seen


def compiled_once():
    torch._dynamo.reset()
    f = torch.compile(lambda x, y: (x @ y).relu() @ y, backend="fa4", options={"force_disable_caches": True})
    with torch.no_grad():
        f(torch.randn(8, 16), torch.randn(16, 16))


@pytest.mark.skipif(memory_estimate._frees_outputs_first(memory), reason="needs a right estimate to compare with")
@pytest.mark.parametrize("affected", [True, False])
def test_an_estimate_without_the_outputs_is_mended(monkeypatch, estimates, affected):
    monkeypatch.setattr(memory, "estimate_peak_memory", as_in_torch_2_11)
    monkeypatch.setattr(memory_estimate, "_frees_outputs_first", lambda module: affected)
    compiled_once()
    assert estimates
    for own, used in estimates:
        assert (own == used) == affected and own[0] > 0
    assert memory.estimate_peak_memory is as_in_torch_2_11


def test_a_right_estimate_is_left_alone():
    with memory_estimate.outputs_counted():
        assert (memory.estimate_peak_memory is REAL) == hasattr(memory, "peak_memory_from_buf_info_list")
