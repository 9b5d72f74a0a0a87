"""Writes docs/flex_gallery.md: the FlexAttention examples of tests/cases, as what each is understood.

    python -m benchmarks.flex_gallery

The test that runs the examples (tests/cpu/patterns/test_flex_gallery.py) compares each with its row of the document.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.coverage.document import PLAIN, code, folded, plain, short_program
from tests.cases import flex_calls, flex_grids, flex_masks, flex_scores
from tests.cases.flex_case import FlexCase
from tests.cases.oracle import Report, checked

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "flex_gallery.md"
SECTIONS = {
    "Masks": flex_masks.CASES,
    "Masks over images and videos": flex_grids.CASES,
    "Score modifications": flex_scores.CASES,
    "Ways of calling": flex_calls.CASES,
}
INTRODUCTION = """\
# FlexAttention gallery

The examples of the public [attention-gym](https://github.com/meta-pytorch/attention-gym) gallery, written anew as cases
(`tests/cases/flex_*.py`), and ways of calling `flex_attention`. Each is compiled by Dynamo, matched, and compared with
eager `flex_attention`. A program is given without softmax_scale and the rule of empty rows, and `aux` stands for a
captured tensor; [architecture.md](architecture.md) explains the notation. Sizes are small: 64 tokens, 4 heads of 16. An
example that declines runs as torch compiles it.

Written by `python -m benchmarks.flex_gallery` with torch {version}; the tests hold it to what they see.
"""
VERSION = torch.__version__.split("+")[0].rpartition(".")[0]
"""Other versions may decompose an op otherwise, and so print another program of the same meaning."""


def run(case: FlexCase) -> Report:
    """The sites of one example and their errors against eager."""
    torch._dynamo.reset()
    function, report = checked(case.call)
    with torch.no_grad():
        function(*case.inputs())
    return report


def row(case: FlexCase, report: Report) -> str:
    """The line of the table for one example."""
    texts = dict.fromkeys(short_program(text) for text in report.programs)
    understood = [text if text == PLAIN else folded(text, code) for text in texts]
    understood += [f"left alone, {folded(f'{d.reason.value}: {d.detail}', plain)}" for d in report.declined]
    return (
        f"| {case.name} | {case.origin or '-'} | {len(report.matches)}/{len(report.sites)} | {'; '.join(understood)} |"
    )


def render(reports: dict[str, Sequence[tuple[FlexCase, Report]]]) -> str:
    """The document."""
    every = [(case, report) for section in reports.values() for case, report in section]
    ours = sum(not case.origin for case, _ in every)
    whole = sum(len(report.matches) == len(report.sites) for _, report in every)
    total = (
        f"{len(every)} examples ({len(every) - ours} from the gallery), {whole} fused, {len(every) - whole} left alone."
    )
    parts = [INTRODUCTION.format(version=VERSION), total]
    for title, section in reports.items():
        table = ["| example | in the gallery | fused/sites | program, or why not |", "|---|---|---|---|"]
        parts.append("\n".join([f"## {title}", "", *table, *(row(case, report) for case, report in section)]))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def main() -> None:
    reports = {title: [(case, run(case)) for case in cases] for title, cases in SECTIONS.items()}
    DOCUMENT.write_text(render(reports))


if __name__ == "__main__":
    main()
