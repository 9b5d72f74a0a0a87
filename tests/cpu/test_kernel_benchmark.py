"""The corpus of the kernel benchmark means what it says, and its tables add up; nothing is timed here."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch

from fa4_inductor.lowering import config_rows
from fa4_inductor.spec.interpret import Env, evaluate, grid

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import kernel_cases
import kernel_ours
import kernels
import tune_configs
from kernel_cases import NATIVE, PROGRAMS, Case

SMALL = {name: Case(name, 64, 96, 2, 2, 512 if name == "evoformer" else 2) for name in PROGRAMS}


@pytest.fixture(autouse=True)
def short_documents(monkeypatch):
    monkeypatch.setattr(kernel_cases, "DOCUMENT", 20)


@pytest.mark.parametrize("name", PROGRAMS)
def test_flex_attention_gets_the_same_program(name):
    case, program = SMALL[name], PROGRAMS[name]
    aux = program.make_aux(case, "cpu")
    names = grid(case.b, case.heads, case.sq, case.seqlen) | {f"size{i}": n for i, n in enumerate(program.sizes)}
    names["score"] = torch.randn(case.b, case.heads, case.sq, case.seqlen)
    score_mod, mask_mod = program.mods(aux)
    wide = [t.float() if t.is_floating_point() else t for t in aux]
    index = [names[n] for n in ("b", "h", "q_idx", "kv_idx")]
    shape = names["score"].shape
    score = score_mod(names["score"], *index) if score_mod else names["score"]
    torch.testing.assert_close(
        score.float().expand(shape), evaluate(case.spec.score, Env(names, wide)).expand(shape), rtol=1e-2, atol=2e-2
    )
    keep = torch.as_tensor(evaluate(case.spec.keep, Env(names, wide))).expand(shape)
    assert torch.equal((mask_mod(*index) if mask_mod else torch.tensor(True)).expand(shape), keep)
    assert kernel_cases.kept_fraction(case, aux) == pytest.approx(keep.double().mean().item())


@pytest.mark.parametrize("suite", kernel_cases.SUITES)
def test_every_case_has_kernels_and_a_sparsity_to_compare_with(suite):
    for case in kernel_cases.SUITES[suite]():
        for measured in filter(None, (case, case.baseline())):
            if measured.program not in NATIVE:
                assert kernel_ours.keys_of(measured, {})
        baseline = case.baseline()
        assert baseline is None or baseline.baseline() is None or baseline.program != case.program


def test_variants_change_the_configuration_alone():
    case = Case("causal", 128, 4096)
    (key,), (other,) = kernel_ours.keys_of(case, {}), kernel_ours.keys_of(case, {"tile_n": 96})
    assert '"tile_n": 96' in other.config and dataclasses.replace(other, config=key.config) == key


@pytest.mark.parametrize("row", config_rows.ROWS, ids=str)
def test_rows_of_the_table_are_measured_on_cases_that_take_them(row):
    for case in tune_configs.cases(row):
        (key,) = kernel_ours.keys_of(case, {})
        assert config_rows.ROWS[row].items() <= json.loads(key.config).items()
    assert tune_configs.variants(row)[0] == {}


def test_the_table_is_written_as_it_is_read(tmp_path, monkeypatch):
    path = tmp_path / "rows.py"
    path.write_text(tune_configs.PATH.read_text())
    monkeypatch.setattr(tune_configs, "PATH", path)
    rows = {row: {**fields, "tile_n": 96} for row, fields in config_rows.ROWS.items()}
    tune_configs.write(rows, "a GPU")
    space: dict = {}
    exec(path.read_text(), space)
    assert space["ROWS"] == rows and space["GPU"] == "a GPU" and space["__doc__"] == config_rows.__doc__


def test_differential_attention_is_a_difference_of_two():
    case = Case("differential", 8, 12, 2, 2, 1)
    q, k, v, weight = (t.double() for t in NATIVE["differential"].make(case, "cpu"))
    got = NATIVE["differential"].function(q, k, v, weight)
    halves = [
        torch.nn.functional.scaled_dot_product_attention(a, b, v, is_causal=True)
        for a, b in zip(q.chunk(2, 1), k.chunk(2, 1))
    ]
    torch.testing.assert_close(got, halves[0] - weight * halves[1])


def result(name: str, seqlen: int, **ms: float) -> dict:
    case = Case(name, 128, seqlen)
    rates = {k.replace("_", " "): 1 / v for k, v in ms.items()}
    times = {k.replace("_", " "): v for k, v in ms.items()}
    return {
        "case": dataclasses.asdict(case), "ms": times, "tflops": rates, "kv_gb_per_s": rates, "error": 0.0, "notes": {}
    }  # fmt: skip


def test_ratios_and_means():
    results = [
        result("causal", 1024, ours=1.0, fa4=2.0, cudnn=4.0),
        result("causal", 4096, ours=1.0, fa4=8.0),
        result("alibi_causal", 4096, ours=2.0, our_plain=1.0),
    ]
    assert kernels.ratios(results[0]) == {"best peer": 2.0} and kernels.ratios(results[2]) == {"plain": 0.5}
    found = {(line["group"], line["ours over"]): line for line in kernels.means(results)}
    assert found["all", "best peer"]["geometric mean"] == "4.000" and found["all", "best peer"]["lowest"] == "2.00"
    assert found["S >= 4096", "best peer"]["cases"] == 1 and found["S >= 4096", "plain"]["lowest"] == "0.50"
    rows, columns = kernels.rows_of(results, "forward")
    assert rows[0]["/ best peer"] == "2.00" and rows[2]["/ plain"] == "0.50" and set(rows[0]) <= set(columns)


def test_selection():
    cases = kernel_cases.SUITES["programs"]()
    assert {c.program for c in kernels.select(cases, "window,prefix:64")} == {"window", "prefix"}
    assert {c.head_dim for c in kernels.select(cases, "prefix:64")} == {64}
    assert kernels.select(cases, "") == cases and not kernels.select(cases, "prefix:64:1")
    assert kernels.parse_variants("tile_n=96,num_stages=3;optimistic_max=False") == [
        {}, {"tile_n": 96, "num_stages": 3}, {"optimistic_max": False},
    ]  # fmt: skip
