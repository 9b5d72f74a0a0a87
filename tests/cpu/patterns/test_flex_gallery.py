"""The FlexAttention corpus: every example becomes its program and agrees with eager, or declines with its reason; the
generated document says so."""

from __future__ import annotations

import re

import pytest

from benchmarks.flex_gallery import DOCUMENT, SECTIONS, VERSION, row, run
from tests.cases.flex_case import FlexCase

CASES = [case for cases in SECTIONS.values() for case in cases]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_example(case: FlexCase) -> None:
    report = run(case)
    assert len(report.sites) == case.sites, report.sites
    if case.decline is not None:
        assert [d.reason for d in report.declined] == [case.decline], report.sites
    else:
        assert not report.declined, report.declined
        assert report.error < 1e-5
        if case.program is not None:
            assert set(report.programs) == {case.text}
    text = DOCUMENT.read_text()
    if f"with torch {VERSION};" in text:
        assert row(case, report) in text.splitlines(), "outdated: python -m benchmarks.flex_gallery"


def test_document_lists_the_corpus() -> None:
    text = DOCUMENT.read_text()
    assert re.findall(r"^\| (\w+) \| \S+ \| \d", text, re.MULTILINE) == [case.name for case in CASES]
    left = sum(case.decline is not None for case in CASES)
    assert f"{len(CASES) - left} fused, {left} left alone." in text
