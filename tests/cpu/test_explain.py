"""explain: every site with its place in the user's source, its program, and what becomes of it."""

import inspect
import json

import pytest
import torch
from torch import nn

import fa4_inductor
from fa4_inductor.explain import _ranges


class Block(nn.Module):
    def forward(self, x):
        scores = x @ x.transpose(2, 3) * 0.5
        p = torch.softmax(scores, dim=-1)
        return p @ x


class Model(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def x():
    return torch.randn(1, 2, 8, 64)


def line_of(text):
    source, first = inspect.getsourcelines(Block)
    return first + next(i for i, line in enumerate(source) if text in line)


def test_sites_with_their_place_in_the_source(x):
    with torch.no_grad():
        report = fa4_inductor.explain(Model(), x)
    assert report.graphs == 1 and [site.index for site in report.sites] == [0, 1]
    for site in report.sites:
        assert site.location == f"test_explain.py:{line_of('return p @ x')}"
        assert "scale=0.5" in site.program and "float32 cpu q(1, 2, 8, 64)" in site.shapes


def test_another_target(x, monkeypatch):
    monkeypatch.setenv("FA4_INDUCTOR_TARGET_ARCH", "sm_90a")
    with torch.no_grad():
        report = fa4_inductor.explain(Model(1), x.bfloat16())
    assert (report.sites[0].status, report.sites[0].implementation) == ("fused", "cute")
    assert "bfloat16, head dims 64 and 64, 1 query heads per key head, sm_90a" in report.sites[0].specialised_on


def test_forced_implementation(x, monkeypatch):
    monkeypatch.setenv("FA4_INDUCTOR_IMPLEMENTATION", "reference")
    with torch.no_grad():
        report = fa4_inductor.explain(Model(1), x)
    assert report.sites[0].implementation == "reference"
    assert "1 fused, 0 left" in str(report) and "reference" in str(report)


def test_reasons_of_sites_that_are_left(x):
    def f(x):
        p = torch.softmax(x @ x.transpose(2, 3), dim=-1)
        return p @ x, p

    with torch.no_grad():
        (site,) = fa4_inductor.explain(f, x).sites
    assert site.status == "declined" and site.reason == "probs_escape" and site.detail and site.program is None
    (site,) = fa4_inductor.explain(lambda x: torch.softmax((x @ x.mT).detach(), -1) @ x, x.requires_grad_()).sites
    assert site.status == "matched" and site.reason == "needs_grad" and site.program


def test_the_model_runs_and_is_left_as_it_was(x):
    calls = []

    def f(x):
        torch._dynamo.graph_break()
        calls.append(1)
        return x + 1

    report = fa4_inductor.explain(f, x)
    assert report.sites == () and calls == [1] and "0 attention sites" in str(report)


def test_plain_data(x):
    with torch.no_grad():
        report = fa4_inductor.explain(Model(1), x)
    data = json.loads(json.dumps(report.to_dict()))
    assert data["graphs"] == 1 and set(data["sites"][0]) >= {"index", "location", "status", "program", "reason"}


def test_layers_that_are_alike_share_a_row(x):
    with torch.no_grad():
        report = fa4_inductor.explain(Model(3), x)
    assert report.table().row_count == 1 and "#0-2" in str(report)


@pytest.mark.parametrize("indices, text", [([0], "#0"), ([0, 1, 2, 5], "#0-2, #5"), ([1, 3], "#1, #3")])
def test_ranges(indices, text):
    assert _ranges(indices) == text
