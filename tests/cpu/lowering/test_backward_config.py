"""What sites may train on the kernel: only what has run on a GPU, unless asked for."""

import dataclasses

import pytest
import torch
from emit_cases import spec_of

from fa4_inductor.analysis import facts
from fa4_inductor.errors import Declined
from fa4_inductor.lowering import backward_config
from fa4_inductor.lowering.support import Operands, Supported, supports_cute
from fa4_inductor.runtime.target import target_for

TRAINED = Operands(torch.bfloat16, 2, 4, 4, 256, 256, 64, 64, needs_grad=True)
PLAIN = spec_of("score")


def answer(operands: Operands, spec=PLAIN):
    return supports_cute(spec, facts(spec), operands, target_for("cuda", "sm_90a"))


def test_what_has_run_is_supported():
    assert isinstance(answer(TRAINED), Supported)
    assert isinstance(answer(dataclasses.replace(TRAINED, head_dim=128, head_dim_v=128)), Supported)


@pytest.mark.parametrize(
    ("operands", "score", "what"),
    [
        (dataclasses.replace(TRAINED, head_dim=96, head_dim_v=96), "score", "head dims"),
        (dataclasses.replace(TRAINED, learned_aux=True), "score + aux0[h]", "captured tensors"),
        (TRAINED, "score + aux0[kv_idx]", "fills"),
    ],
)
def test_what_has_not_waits_to_be_asked_for(operands, score, what, monkeypatch):
    spec = spec_of(score, aux="float32[1]")
    refusal = answer(operands, spec)
    assert isinstance(refusal, Declined) and refusal.reason.value == "needs_grad" and what in refusal.detail
    assert isinstance(answer(dataclasses.replace(operands, needs_grad=False), spec), Supported)
    monkeypatch.setenv(backward_config.ENABLED_BY, "1")
    assert isinstance(answer(operands, spec), Supported)


def test_a_fixed_order_waits_too(monkeypatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    refusal = answer(TRAINED)
    assert isinstance(refusal, Declined) and "fixed order" in refusal.detail
    monkeypatch.setenv(backward_config.ENABLED_BY, "1")
    assert isinstance(answer(TRAINED), Supported)
