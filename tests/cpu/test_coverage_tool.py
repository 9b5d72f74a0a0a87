"""The coverage measurement counts what is attention, sees wrong outputs and crashes, and goes on where it stopped."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.coverage import __main__ as command_line
from benchmarks.coverage import backends, configs, measure, summary
from benchmarks.coverage.sites import FusedCalls, Sites


class Attention(nn.Module):
    """Two linear maps and a function of their results (B, S, D) and of the input; `Sites` counts in it."""

    def __init__(self, body: Callable[..., Tensor]) -> None:
        super().__init__()
        self.to_q, self.to_k = nn.Linear(8, 8), nn.Linear(8, 8)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.to_q(x), self.to_k(x), x)


def counted(body: Callable[..., Tensor]) -> Sites:
    model = Attention(body)
    sites = Sites(model)
    with torch.no_grad(), FusedCalls(sites), sites:
        model(torch.randn(2, 6, 8))
    return sites


@pytest.mark.parametrize(
    ("body", "sites", "softmaxes"),
    [
        (lambda q, k, v: torch.softmax(q @ k.mT / 3, -1) @ v, 1, 1),
        (lambda q, k, v: torch.softmax((q @ k.mT).masked_fill(v.new_ones(6, 6).tril() == 0, -1e9), -1) @ v, 1, 1),
        (lambda q, k, v: F.scaled_dot_product_attention(q, k, v), 1, 0),
        (lambda q, k, v: torch.softmax(q @ k.mT, -1), 0, 1),  # nothing is multiplied with the probabilities
        (lambda q, k, v: torch.softmax(q, -1) @ (torch.softmax(k, -1).mT @ v), 0, 2),  # linear attention
        (lambda q, k, v: torch.sigmoid(q @ k.mT) @ v, 0, 0),
    ],
    ids=["plain", "masked", "sdpa", "probabilities", "linear_attention", "sigmoid"],
)
def test_sites_counts_attention(body: Callable[..., Tensor], sites: int, softmaxes: int) -> None:
    seen = counted(body)
    assert (len(seen.found) + seen.fused_calls, seen.softmaxes) == (sites, softmaxes)


def test_chain_names_the_ops_between_the_products() -> None:
    seen = counted(lambda q, k, v: torch.softmax(q @ k.mT * 0.3, -1) @ v)
    assert list(seen.found.values()) == ["bmm mul softmax bmm"]


@pytest.mark.parametrize("impl", ["eager", "sdpa"])
def test_measures_a_model(impl: str) -> None:
    record = measure.measure(measure.Job("llama", impl, options={"fa4.implementation": "reference"}))
    assert record["status"] == "ok", record
    assert (record["sites"], record["fused"], record["left"], record["graph_breaks"]) == (2, 2, 0, 0)
    assert record["sites_softmax" if impl == "eager" else "sites_sdpa"] == 2
    assert [o["status"] for o in record["outcomes"]] == ["fused", "fused"]
    assert "keep=(kv_idx <= q_idx) & aux0[b, kv_idx]" in record["outcomes"][0]["program"]
    assert record["outcomes"][0]["location"].startswith("modeling_llama" if impl == "eager" else "sdpa_attention")


def test_inductor_passes_leave_a_padded_decoder_alone() -> None:
    """The near-miss of the test above: the same sites, and a backend that does not fuse them."""
    record = measure.measure(measure.Job("llama", backend="inductor-passes"))
    assert (record["status"], record["sites"], record["fused"], record["outcomes"]) == ("ok", 2, 0, [])


def _eager(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    return gm.forward


def _off_by_a_tenth(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    return lambda *args: [out * 1.1 if out.is_floating_point() else out for out in gm.forward(*args)]


def _failing(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    raise RuntimeError("no such kernel")


@pytest.mark.parametrize(
    ("backend", "status", "left"), [(_eager, "ok", 2), (_off_by_a_tenth, "wrong", 2), (_failing, "crash", None)]
)
def test_status(monkeypatch: pytest.MonkeyPatch, backend: backends.Backend, status: str, left: int | None) -> None:
    monkeypatch.setattr(measure, "resolve", lambda *_: backend)
    record = measure.measure(measure.Job("bert"))
    assert (record["status"], record["fused"], record.get("left")) == (status, 0, left), record
    assert ("no such kernel" in record.get("reason", "")) == (status == "crash")


def test_sites_left_alone_have_their_reason() -> None:
    on_the_gpu = {"fa4.implementation": "cute"}
    record = measure.measure(measure.Job("bert", options=on_the_gpu))
    assert (record["status"], record["fused"], record["left"]) == ("ok", 0, 2)
    assert {(o["status"], o["reason"]) for o in record["outcomes"]} == {("matched", "unsupported_device")}


def test_what_cannot_be_built_is_skipped_with_its_reason() -> None:
    record = measure.measure(measure.Job("blip_text_model"))
    assert record == {"status": "skip", "reason": "LookupError: in no AutoModel mapping"}


def test_a_process_that_hangs_or_dies_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "measure", lambda job: os._exit(1) if job.model == "dies" else time.sleep(60))
    assert measure.isolated(measure.Job("dies"))["status"] == "crash"
    assert measure.isolated(measure.Job("hangs", timeout=0.2))["status"] == "timeout"


def test_what_cannot_run_eagerly_or_only_so_is_refused() -> None:
    with pytest.raises(ValueError, match="not for inductor"):
        backends.resolve("inductor", "eager")
    with pytest.raises(ValueError, match="--backend inductor"):
        backends.resolve("inductor-passes", "inductor")
    assert backends.resolve("fa4", "eager") is backends.fa4_eager
    assert backends.resolve("fa4", "inductor") is backends.fa4_backend.fa4


def test_configs_are_small_and_keep_each_layer_type() -> None:
    gemma = configs.shrink(configs.default_config("gemma3_text"))
    assert set(gemma.layer_types) == {"full_attention", "sliding_attention"}
    assert gemma.num_hidden_layers == len(gemma.layer_types) <= 3
    assert (gemma.hidden_size, gemma.vocab_size, gemma.sliding_window) == (64, configs.VOCAB, configs.WINDOW)
    assert not gemma.use_cache
    assert configs.shrink(configs.default_config("llama"), cache=True, wide=True).hidden_size == 4096


def test_goes_on_where_it_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measured: list[tuple[str, str]] = []

    def isolated(job: measure.Job) -> measure.Record:
        measured.append((job.model, job.impl))
        status = "crash" if job.model == "t5" else "ok"
        return job.header() | dict(status=status, sites=2, fused=2, wall_s=0.1, chains={"bmm softmax bmm": 2})

    monkeypatch.setattr(command_line, "isolated", isolated)
    out = tmp_path / "r.jsonl"
    assert command_line.main(["--models", "llama,bert", "--out", str(out)]) == 0
    assert command_line.main(["--models", "llama,bert", "--impl", "eager,sdpa", "--out", str(out)]) == 0
    assert measured == [("llama", "eager"), ("bert", "eager"), ("llama", "sdpa"), ("bert", "sdpa")]
    assert command_line.main(["--models", "bert", "--dtype", "bfloat16", "--out", str(out)]) == 0
    assert measured[4:] == [("bert", "eager")]
    assert command_line.main(["--models", "t5", "--out", str(out)]) == 1
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(records) == 6
    assert records[0]["run"]["command"].startswith("python -m benchmarks.coverage --models llama,bert")
    assert "attempted 3, built 3, with attention 3\n  sites 6" in summary.text(records)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ("--models llama,lama", "no model type lama"),
        ("--backend nosuch", "nosuch"),
        ("--backend no.such:backend", "No module named"),
        ("--backend inductor --compile eager", "not for inductor"),
    ],
)
def test_wrong_usage_exits_2(arguments: str, part: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as exit:
        command_line.main(arguments.split())
    assert exit.value.code == 2
    assert part in capsys.readouterr().err


def test_a_broken_result_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text('{"model": "a"}\n{"model"')
    with pytest.raises(ValueError, match=r"r\.jsonl:2 is not a record"):
        summary.read([tmp_path / "r.jsonl"])
