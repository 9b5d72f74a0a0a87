"""docs/supported.md: written from records, complete, with tables and links that hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.coverage import document

ROOT = Path(__file__).resolve().parents[2]
RUN = {
    "command": "python -m benchmarks.coverage",
    "date": "2026-01-02T03:04:05+00:00",
    "commit": "abc1234",
    "versions": {"torch": "2.13.0", "transformers": "5.24.0"},
}
HEADER = dict(backend="fa4", dtype="float32", padding="auto", options={}, run=RUN)
HEAD, TAIL = "fa4/1; aux=bool[2]; sizes=0; scale=0.25", "empty_row=mean"
CAUSAL = f"{HEAD}; score=score; keep=(kv_idx <= q_idx) & aux0[b, kv_idx]; {TAIL}"
PLAIN = f"{HEAD}; score=score; keep=True; {TAIL}"
SINK = f"{HEAD}; score=tanh(score); keep=True; sink=aux0[h]; {TAIL}"
LONG = f"{HEAD}; score=score; keep={' | '.join(['aux0[q_idx, kv_idx]'] * 9)}; {TAIL}"


def fused(program: str) -> dict[str, Any]:
    return dict(location="m.py:1", status="fused", program=program, reason=None, detail="")


def declined(reason: str, line: int, detail: str = "p_1 is also used by add_2") -> dict[str, Any]:
    return dict(location=f"m.py:{line}", status="declined", program=None, reason=reason, detail=detail)


def record(model: str, impl: str, *outcomes: dict[str, Any], **fields: Any) -> dict[str, Any]:
    count = sum(outcome["status"] == "fused" for outcome in outcomes)
    counted = dict(sites=len(outcomes), fused=count, outcomes=list(outcomes), cls=f"{model.title()}Model", chains={})
    return HEADER | dict(model=model, impl=impl, status="ok") | counted | fields


def unmeasured(model: str, impl: str, status: str, reason: str) -> dict[str, Any]:
    return HEADER | dict(model=model, impl=impl, status=status, reason=reason)


RECORDS = [
    *(record(name, impl, fused(CAUSAL)) for name in ("a", "b", "c", "d") for impl in ("eager", "sdpa")),
    record("mixed", "eager", fused(CAUSAL), fused(LONG), fused(PLAIN)),
    unmeasured("mixed", "sdpa", "skip", "ValueError: Mixed does not support an attention implementation through SDPA"),
    record("left", "eager", fused(SINK), declined("probs_escape", 7), declined("probs_escape", 9), sites=4),
    record("broken", "eager", fused(PLAIN), status="wrong", rel_err=0.5),
    unmeasured("slow", "eager", "timeout", "> 120 s"),
    record("convolution", "eager"),
    record("by_hand", "eager", fused(PLAIN), fused(CAUSAL), sites=0),
    unmeasured("part", "eager", "skip", "LookupError: in no AutoModel mapping"),
    unmeasured("odd", "eager", "skip", "RuntimeError: KeyError: `x |\n y"),
    record("linear", "eager", fused(PLAIN), declined("unsupported_op", 3, "a sum | no softmax"), sites=1),
    record("a", "eager", backend="inductor-passes", sites=1, fused=0),
    record("broken", "eager", fused(PLAIN), dtype="bfloat16", status="crash", reason="Error: no | such"),
]


def tables(text: str) -> list[list[list[str]]]:
    """The tables of a Markdown text, as rows of cells."""
    found: list[list[list[str]]] = [[]]
    for line in text.splitlines():
        if line.startswith("|"):
            found[-1].append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
        elif found[-1]:
            found.append([])
    return [table for table in found if table]


def check_format(text: str) -> None:
    """Tables are rectangular with a rule under their heads, links inside the document have their target, once."""
    for table in tables(text):
        assert len({len(row) for row in table}) == 1, table[:2]
        assert set(table[1]) == {"---"}
        assert len(table) > 2
    anchors = re.findall(r'<a id="([^"]+)">', text)
    assert len(anchors) == len(set(anchors))
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= set(anchors)
    for tag in ("details", "summary"):
        assert text.count(f"<{tag}>") == text.count(f"</{tag}>")
    for line in text.splitlines():
        assert line.count("`") % 2 == 0, line
        assert line == line.rstrip(), line


def cells(text: str, model: str) -> list[str]:
    """The row of an architecture, without its name."""
    (row,) = [r for table in tables(text) for r in table if r[0].startswith(f'<a id="model-{model}"')]
    return row[1:]


def section(text: str, title: str) -> str:
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_format() -> None:
    check_format(document.render(RECORDS))


def test_the_summary_has_a_row_per_run() -> None:
    head, _, *rows = tables(section(document.render(RECORDS), "Summary"))[0]
    assert [(row[0], row[1], row[2]) for row in rows] == [
        ("fa4", "eager", "bfloat16"),
        ("fa4", "eager", "float32"),
        ("fa4", "sdpa", "float32"),
        ("inductor-passes", "eager", "float32"),
    ]
    eager = dict(zip(head, rows[1]))
    assert eager["attempted"] == "13"
    assert (eager["built"], eager["with attention"]) == ("10", "8")
    assert (eager["sites"], eager["fused"], eager["fused, %"]) == ("13", "10", "76.9")
    assert (eager["all sites fused"], eager["wrong"], eager["crash"], eager["timeout"]) == ("7", "1", "0", "1")


def test_says_when_with_what_and_how() -> None:
    text = document.render(RECORDS)
    assert "2026-01-02; commit abc1234; torch 2.13.0, transformers 5.24.0" in text
    assert "\n    python -m benchmarks.coverage\n" in text


def test_architectures_of_one_program_share_a_table() -> None:
    text = document.render(RECORDS)
    shared = section(text, "Architectures").split("\n### ")[1]
    assert shared.startswith("4 architectures: P1\n\n- [P1](#p1) `keep = (kv_idx <= q_idx) & aux0[b, kv_idx]`\n")
    assert cells(text, "a") == ["AModel", "1/1", "1/1"]
    assert cells(text, "mixed")[:3] == ["MixedModel", "3/3", "not offered"]
    assert len(re.findall(r"\[P\d\]", cells(text, "mixed")[3])) == 3


def test_long_programs_are_folded_and_keep_their_bars() -> None:
    rows = tables(section(document.render(RECORDS), "Programs"))[0]
    (cell,) = [row[1] for row in rows if "details" in row[1]]
    shown, _, whole = cell.partition("</summary>")
    assert "..." in shown
    assert whole.count("\\|") == 8
    assert sum(row[1] == document.PLAIN for row in rows) == 1
    assert sum(row[1] == "`score = tanh(score); sink = aux0[h]`" for row in rows) == 1


def test_what_is_not_fused_has_its_reason_and_place() -> None:
    text = document.render(RECORDS)
    left = section(text, "Not fused")
    assert "| `probs_escape` | 2 |" in left
    assert "| `unsupported_op`" not in left  # "linear" has all of its sites fused
    assert cells(text, "linear")[-1] == "besides the sites counted: 1 `unsupported_op` at m.py:3: a sum \\| no softmax"
    why = "2 `probs_escape` at m.py:7, 9: p is also used by add<br>1 in no captured graph, or not recognised as a site"
    assert f"| [left](#model-left) | {why} |" in left
    assert cells(text, "left") == ["LeftModel", "1/4", "", cells(text, "left")[3], why]
    assert "**wrong** (eager, float32): error 5.0e-01" in cells(text, "broken")[-1]
    assert "**crash** (eager, bfloat16): Error: no \\| such" in left
    assert cells(text, "slow")[1] == "timeout"


def test_a_site_that_was_not_counted_makes_up_for_none() -> None:
    text = document.render(RECORDS)
    assert cells(text, "by_hand")[1::3] == ["2/0", "2 more than counted: only softmax ops and fused calls are"]
    text = document.render(
        [record("a", "eager", *[fused(PLAIN)] * 3, sites=1), record("b", "eager", fused(PLAIN), sites=3)]
    )
    assert "| 4 | 2 | 50.0 |" in section(text, "Summary")


def test_nothing_left_is_said() -> None:
    assert "Every site of every run above is fused" in document.render([record("a", "eager", fused(PLAIN))])


def test_what_was_not_measured_is_listed() -> None:
    rest = section(document.render(RECORDS), "Without attention, and not measured")
    assert "1 without softmax attention</summary>\n\nconvolution\n" in rest
    assert "not for AutoModel</summary>\n\npart\n" in rest
    assert "- odd: `RuntimeError: KeyError: x | y`" in rest


def test_the_last_record_of_a_measurement_counts() -> None:
    repaired = [*RECORDS, record("broken", "eager", fused(PLAIN))]
    assert cells(document.render(repaired), "broken")[1:3] == ["1/1", ""]
    assert "float32): error" not in document.render(repaired)


def test_records_of_other_backends_alone_are_no_document() -> None:
    with pytest.raises(ValueError, match="backend fa4"):
        document.render([record("a", "eager", backend="inductor-passes")])


def test_the_document_in_the_project_is_well_formed() -> None:
    text = document.PATH.read_text()
    check_format(text)
    assert "python -m benchmarks.coverage" in text
