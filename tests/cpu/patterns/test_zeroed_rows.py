"""Probabilities of dropped keys set to 0 after the softmax: rows without keys become 0 instead of NaN or a mean."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fa4_inductor.errors import DeclineReason
from tests.cases.oracle import Report, checked

KEEP = torch.rand(2, 1, 5, 5, generator=torch.Generator().manual_seed(0)) > 0.5
KEEP[0, 0, 2] = False
BIAS = torch.zeros(5, 5)
BIAS[1] = -torch.inf
After = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

ZEROED: dict[str, After] = {
    "masked_fill": lambda p, keep: p.masked_fill(~keep, 0.0),
    "where": lambda p, keep: torch.where(keep, p, 0.0),
    "in_place": lambda p, keep: p.masked_fill_(keep == 0, 0),
}
CHANGED: dict[str, After] = {
    "other_mask": lambda p, keep: p.masked_fill(~keep.transpose(-1, -2), 0.0),
    "kept_keys": lambda p, keep: p.masked_fill(keep, 0.0),
    "first_key": lambda p, keep: torch.where(torch.arange(5) > 0, p, 0.0),
    "other_value": lambda p, keep: p.masked_fill(~keep, 0.5),
}


def _run(after: After, fill: float, bias: bool = False) -> Report:
    def attention(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: torch.Tensor, b: torch.Tensor
    ) -> torch.Tensor:
        scores = q @ k.transpose(-1, -2) * 0.25
        scores = scores + b if bias else scores
        return after(torch.softmax(scores.masked_fill(~keep, fill), -1), keep) @ v

    compiled, report = checked(attention)
    inputs = (*(torch.randn(2, 3, 5, 8) for _ in range(3)), KEEP, BIAS)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*inputs), attention(*inputs), equal_nan=True)
    assert report.error < 2e-6
    return report


@pytest.mark.parametrize("fill", [-torch.inf, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("after", ZEROED)
def test_rows_without_keys_become_zero(after: str, fill: float) -> None:
    text = "fa4/1; aux=bool[3]; sizes=0; scale=0.25; score=score; keep=aux0[b, q_idx, kv_idx]; empty_row=zero"
    assert _run(ZEROED[after], fill).programs == [text]


@pytest.mark.parametrize("after", CHANGED)
def test_any_other_change_declines(after: str) -> None:
    report = _run(CHANGED[after], -torch.inf)
    assert [d.reason for d in report.declined] == [DeclineReason.NOT_ATTENTION] and not report.matches


def test_bias_that_may_empty_a_row_declines() -> None:
    report = _run(ZEROED["where"], -torch.inf, bias=True)
    assert [d.reason for d in report.declined] == [DeclineReason.NOT_ATTENTION] and not report.matches
