"""The FlexAttention corpus: every example becomes its program and agrees with eager, or declines with its reason."""

from __future__ import annotations

import pytest
import torch

from tests.cases import flex_calls, flex_masks, flex_scores
from tests.cases.flex_case import FlexCase
from tests.cases.oracle import checked

CASES = (*flex_masks.CASES, *flex_scores.CASES, *flex_calls.CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_example(case: FlexCase) -> None:
    function, report = checked(case.call)
    with torch.no_grad():
        function(*case.inputs())
    assert len(report.sites) == case.sites, report.sites
    if case.decline is not None:
        assert [d.reason for d in report.declined] == [case.decline], report.sites
        return
    assert not report.declined, report.declined
    assert report.error < 1e-5
    if case.program is not None:
        assert set(report.programs) == {case.text}
