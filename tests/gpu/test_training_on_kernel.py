"""Unmodified models in training on a Hopper GPU: every site trains on our kernels, within the error of eager."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fa4_inductor import model_zoo
from fa4_inductor.lowering import backward_config
from tests.models.helpers import counters, fused

CUTE = {"implementation": "cute", "strict": True}


@pytest.fixture(autouse=True)
def _untried_too(monkeypatch):
    monkeypatch.setenv(backward_config.ENABLED_BY, "1")


def trained(name: str, attn: str = "eager") -> model_zoo.Case:
    case = model_zoo.build(name, attn, dtype=torch.bfloat16, device="cuda")
    case.model.requires_grad_(True).train()
    for module in case.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    return case


def gradients(case: model_zoo.Case, model: Callable[..., Any]) -> torch.Tensor:
    """The gradients of all parameters, in one row."""
    output = model(**case.inputs)
    first = output.logits if "logits" in output else output.last_hidden_state
    case.model.zero_grad()
    (first if case.keep is None else first[case.keep]).float().square().mean().backward()
    return torch.cat([p.grad.float().flatten() for p in case.model.parameters() if p.grad is not None])


def relative(got: torch.Tensor, truth: torch.Tensor) -> float:
    return float((got - truth).norm() / truth.norm())


@pytest.mark.parametrize(
    ("name", "attn"),
    [
        ("llama", "eager"),
        ("llama", "sdpa"),
        ("mistral", "eager"),
        ("gpt2", "eager"),
        ("bert", "eager"),
        ("bloom", "eager"),
        ("gpt_oss", "eager"),
        ("t5", "eager"),
    ],
)
def test_gradients_lose_no_more_than_eager(name: str, attn: str) -> None:
    case = trained(name, attn)
    theirs = gradients(case, case.model)
    single = dataclasses.replace(case, model=copy.deepcopy(case.model).float())
    truth = gradients(single, single.model)
    run = fused(case.model, **CUTE)
    ours = gradients(case, run.model)
    assert counters()["fused"] == counters()["found"] == case.sites, counters()
    assert bool(ours.isfinite().all())
    assert relative(ours, truth) <= 1.5 * relative(theirs, truth) + 1e-3, (
        relative(ours, truth),
        relative(theirs, truth),
    )


def test_a_loss_goes_down_as_in_eager() -> None:
    losses = []
    for compiled in (False, True):
        torch.manual_seed(0)
        case = trained("llama")
        model = torch.compile(case.model, backend="fa4") if compiled else case.model
        optimizer = torch.optim.AdamW(case.model.parameters(), lr=1e-3)
        ids = case.inputs["input_ids"]
        history = []
        for _ in range(20):
            logits = model(**case.inputs).logits.float()
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history.append(float(loss))
        losses.append(history)
    eager, ours = losses
    assert counters()["fused"] > 0
    assert eager[-1] < 0.8 * eager[0]
    assert max(abs(a - b) / a for a, b in zip(eager, ours, strict=True)) < 0.05, losses
