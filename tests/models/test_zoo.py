"""Unmodified Hugging Face models: every site understood, no S x S operand, repeat_kv gone, error within its limit."""

from __future__ import annotations

import pytest
import torch

from fa4_inductor import model_zoo

from .helpers import TINY, counters, error, fused

KV_HEADS = {"llama": 2, "mistral": 2, "gemma2": 1, "gpt_oss": 2, "qwen3": 2}


@pytest.mark.parametrize(("name", "attn"), TINY)
def test_every_site_is_understood(name: str, attn: str) -> None:
    case = model_zoo.build(name, attn)
    run = fused(case.model, implementation="reference")
    result = error(case, run.model)
    found = counters()
    assert (found["found"], found["matched"], found["fused"]) == (case.sites,) * 3, found
    assert result.ok, result
    assert len(run.calls) == case.sites
    for call in run.calls:
        scores = call.q.shape[2] * call.k.shape[2]
        assert all(aux.numel() < scores for aux in call.aux), [tuple(aux.shape) for aux in call.aux]
        assert call.k.shape[1] == KV_HEADS.get(name, call.q.shape[1])


@pytest.mark.parametrize(("name", "attn"), TINY)
def test_automatic_choice_is_right(name: str, attn: str) -> None:
    case = model_zoo.build(name, attn)
    result = error(case, fused(case.model).model)
    assert result.ok, result
    assert counters()["matched"] == case.sites


@pytest.mark.parametrize(("name", "attn"), [pair for pair in TINY if pair[0] not in ("vit", "mpt")])
def test_one_dynamic_graph_serves_all_sizes(name: str, attn: str) -> None:
    case = model_zoo.build(name, attn)
    run = fused(case.model, dynamic=True, implementation="reference")
    for batch, seqlen in ((2, 96), (3, 65), (4, 130)):
        sized = case.resized(batch, seqlen)
        result = error(sized, run.model)
        assert result.ok, (batch, seqlen, result)
    assert run.graphs == 1
    assert counters()["matched"] == counters()["found"] == case.sites


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "t5", "bert"])
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    case = model_zoo.build(name, dtype=dtype)
    result = error(case, fused(case.model, implementation="reference").model)
    assert result.ok, result
    assert counters()["fused"] == case.sites


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_a_batch_of_one_keeps_its_heads(name: str) -> None:
    """Not read as one batch entry per key head, whose output would need a copy to (B, S, H, D)."""
    case = model_zoo.build(name, batch=1)
    run = fused(case.model, implementation="reference")
    assert error(case, run.model).ok
    for call in run.calls:
        assert (call.q.shape[:2], call.k.shape[:2]) == ((1, 4), (1, 2))


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss"])
def test_a_batch_of_one_has_the_programs_of_any_batch(name: str) -> None:
    """Dynamo makes a graph of its own for it; the kernels are the same ones."""
    case = model_zoo.build(name)
    run = fused(case.model, dynamic=True, implementation="reference")
    assert error(case.resized(3, 65), run.model).ok
    programs = {call.program for call in run.calls}
    assert error(case.resized(1, 96), run.model).ok
    assert run.graphs == 2
    assert {call.program for call in run.calls} == programs


def test_through_inductor() -> None:
    case = model_zoo.build("llama")
    result = error(case, torch.compile(case.model, backend="fa4"))
    assert result.ok, result
    assert counters()["matched"] == case.sites


def test_sites_count_once_where_dynamo_starts_again() -> None:
    """With a dynamic scale Inductor makes Dynamo capture the graph a second time."""
    case = model_zoo.build("gpt2")
    fused(case.model)  # clears counters
    result = error(case.resized(3, 65), torch.compile(case.model, backend="fa4", dynamic=True))
    assert result.ok, result
    assert counters()["found"] == counters()["matched"] == case.sites


def test_active_dropout_is_left_alone() -> None:
    case = model_zoo.build("bert")
    case.model.train()
    run = fused(case.model, implementation="reference")
    with torch.no_grad():
        run.model(**case.inputs)
    assert counters()["declined.dropout"] == case.sites, counters()
    assert run.calls == []
