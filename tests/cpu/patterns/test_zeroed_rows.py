"""Probabilities of dropped keys set to 0 after the softmax: rows without keys become 0 instead of NaN or a mean."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fa4_inductor.errors import DeclineReason
from tests.cases.oracle import Report, checked

KEEP = torch.rand(2, 1, 5, 5, generator=torch.Generator().manual_seed(0)) > 0.5
KEEP[0, 0, 2] = False
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


def _run(after: After, fill: float, bias: torch.Tensor | None = None) -> Report:
    def attention(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: torch.Tensor, b: torch.Tensor
    ) -> torch.Tensor:
        scores = q @ k.transpose(-1, -2) * 0.25
        scores = scores if bias is None else scores + b
        return after(torch.softmax(scores.masked_fill(~keep, fill), -1), keep) @ v

    compiled, report = checked(attention)
    inputs = (*(torch.randn(2, 3, 5, 8) for _ in range(3)), KEEP, bias)
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
    bias = torch.zeros(5, 5)
    bias[1] = -torch.inf
    report = _run(ZEROED["where"], -torch.inf, bias)
    assert [d.reason for d in report.declined] == [DeclineReason.EMPTY_ROWS] and not report.matches


def test_parameters_are_real_numbers() -> None:
    bias = torch.nn.Parameter(torch.randn(5, 5))
    score = "score + aux1[q_idx, kv_idx]"
    text = f"aux=bool[3],float32[2]; sizes=0; scale=0.25; score={score}; keep=aux0[b, q_idx, kv_idx]; empty_row=zero"
    assert _run(ZEROED["where"], -torch.inf, bias).programs == [f"fa4/1; {text}"]


def test_products_are_real_numbers() -> None:
    """DeBERTa's content-to-position term: a product of its own, gathered by distance."""

    def attention(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor
    ) -> torch.Tensor:
        distance = torch.arange(5)[:, None] - torch.arange(5)[None] + 4
        term = (q @ positions.mT).gather(-1, distance.expand(2, 3, 5, 5))
        scores = (q @ k.mT + term).masked_fill(~keep, torch.finfo(q.dtype).min)
        return scores.softmax(-1).masked_fill(~keep, 0.0) @ v

    compiled, report = checked(attention)
    inputs = (*(torch.randn(2, 3, 5, 8) for _ in range(3)), torch.randn(2, 3, 9, 8), KEEP)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*inputs), attention(*inputs))
    assert len(report.matches) == 1 and "empty_row=zero" in report.programs[0]
