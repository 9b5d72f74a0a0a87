"""The rules of measurement: the error limit comes from eager's own error, times are interleaved."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from fa4_inductor import measure

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import e2e
import generate
import results_io


def test_error_limit_is_twice_eagers_plus_a_rounding() -> None:
    reference = torch.tensor([1.0, -4.0], dtype=torch.float64)
    eager = torch.tensor([1.0, -4.01])
    band = 0.5 * torch.finfo(torch.float32).eps * 4
    good = measure.compare(torch.tensor([1.0, -4.0199]), eager, reference)
    assert good.ok
    assert good.bound == pytest.approx(0.02 + band, rel=1e-4)
    assert not measure.compare(torch.tensor([1.0, -4.021]), eager, reference).ok
    assert measure.compare(eager, eager, reference).ok


def test_not_a_number_is_never_within_the_limit() -> None:
    reference = torch.ones(2, dtype=torch.float64)
    assert not measure.compare(torch.tensor([1.0, float("nan")]), torch.ones(2), reference).ok
    assert not measure.compare(torch.tensor([1.0, float("inf")]), torch.ones(2), reference).ok


def test_other_shape_or_dtype_is_not_comparable() -> None:
    reference = torch.ones(2, dtype=torch.float64)
    with pytest.raises(ValueError, match="not comparable"):
        measure.compare(torch.ones(2, dtype=torch.bfloat16), torch.ones(2), reference)


def test_calls_are_interleaved() -> None:
    calls: list[str] = []
    functions = {name: (lambda n=name: calls.append(n)) for name in ("a", "b")}
    times = measure.medians_ms(functions, "cpu", rounds=2, warmup=1)
    assert "".join(calls) == "ab" + "abab"
    assert set(times) == {"a", "b"}


def test_slow_calls_get_fewer_rounds() -> None:
    calls: list[str] = []
    measure.medians_ms({"a": lambda: calls.append("a")}, "cpu", rounds=9, warmup=0, budget_s=0.0)
    assert len(calls) == 3


def test_result_files_name_command_and_versions(tmp_path: Path) -> None:
    facts = results_io.provenance("cpu")
    rows = [dict(model="llama", ms=1.5), dict(model="bert")]
    path = results_io.write("x", facts, rows, [results_io.markdown_table(rows, ["model", "ms"])], tmp_path)
    text = path.read_text()
    assert facts["command"] in text
    assert f"torch {torch.__version__}" in text
    assert "| bert |  |" in text
    assert (tmp_path / "x.json").exists()


def test_the_recorded_command_leaves_out_where_results_went() -> None:
    argv = ["benchmarks/models.py", "--out", "/somewhere", "--device", "cpu", "--out=/else"]
    assert results_io._command(argv) == "python benchmarks/models.py --device cpu"


def test_summary_compares_with_the_best_of_each_kind() -> None:
    def row(backend: str, attn: str, ms: float, gib: float) -> dict:
        return dict(model="llama", backend=backend, attn=attn, ms=ms, peak_gib=gib)

    rows = [row("fa4", "eager", 10, 2), row("inductor", "sdpa", 15, 1.5), row("inductor", "flex_attention", 12, 3)]
    (line,) = e2e.summary([*rows, dict(model="llama", backend="inductor", attn="eager", note="failed: out of memory")])
    assert (line["best_attn"], line["speedup"]) == ("flex_attention", 1.2)
    assert (line["lean_attn"], line["lowest_inductor_gib"]) == ("sdpa", 1.5)
    assert e2e.summary(rows[1:]) == []


def test_generation_is_compared_per_cache() -> None:
    def row(cache: str, backend: str, attn: str, tokens_s: float) -> dict:
        return dict(model="llama", batch="1", prompt="512", cache=cache, backend=backend, attn=attn, tokens_s=tokens_s)

    rows = [row("static", "fa4", "sdpa", 300), row("static", "inductor", "sdpa", 200)]
    rows += [row("static", "inductor", "flex_attention", 250), row("dynamic", "fa4", "sdpa", 100)]
    (line,) = generate.summary(rows)
    assert (line["cache"], line["best_attn"], line["ratio"]) == ("static", "flex_attention", 1.2)


def test_a_failing_worker_becomes_a_note() -> None:
    child = e2e.child("no_such_model", "eager", "inductor")
    child.start(threads=1)
    child.time_once()
    row = child.finish()
    assert "unknown model" in row["note"]
    assert "ms" not in row
