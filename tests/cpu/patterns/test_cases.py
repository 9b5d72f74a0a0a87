"""Every case of the corpus: the program it becomes and float64 agreement with eager, or the reason to decline."""

from __future__ import annotations

import pytest
import torch

from tests.cases import (
    changed_probabilities,
    computed_bias,
    documents,
    masks,
    near_misses,
    probabilities,
    scores,
    spellings,
)
from tests.cases.case import Case
from tests.cases.oracle import checked

ALL = (*spellings.CASES, *masks.CASES, *scores.CASES, *probabilities.CASES, *computed_bias.CASES, *documents.CASES)
ALL += (*changed_probabilities.CASES, *near_misses.CASES)
DYNAMIC = (*spellings.CASES[:12], *masks.CASES, *scores.CASES, *probabilities.CASES[::2], *computed_bias.CASES[::4])
DYNAMIC += documents.CASES[::4]


@pytest.mark.parametrize("case", ALL, ids=lambda c: c.name)
def test_case(case: Case) -> None:
    function, report = checked(case.function)
    with torch.no_grad():
        function(*case.inputs())
    assert len(report.sites) == case.sites, report.sites
    assert tuple(d.reason for d in report.declined) == case.reasons, report.declined
    assert report.error < (1e-12 if case.dtype is torch.float64 else 2e-2)
    if case.program is not None or case.programs:
        assert set(report.programs) == case.texts
    if case.epilogue is not None:
        assert " + ".join(str(m.epilogue and m.epilogue.value) for m in report.matches) == case.epilogue


@pytest.mark.parametrize("case", [c for c in DYNAMIC if not c.reasons], ids=lambda c: c.name)
def test_case_with_dynamic_shapes(case: Case) -> None:
    function, report = checked(case.function, dynamic=True)
    with torch.no_grad():
        function(*case.inputs())
    assert not report.declined, report.declined
    assert len(report.matches) == case.sites
    assert report.error < (1e-12 if case.dtype is torch.float64 else 2e-2)
