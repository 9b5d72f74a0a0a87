"""Lengths that change between calls: flex_attention with captured numbers (BC-18), caches with unused slots (BC-26)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention

from tests.cases.oracle import checked
from tests.models.helpers import fused

SLOTS, VALID = 24, 10
Attention = Callable[..., torch.Tensor]


@pytest.mark.parametrize("dynamic", [None, True])
def test_numbers_captured_by_a_score_function(dynamic: bool | None) -> None:
    """BC-18: an offset and a table that depend on the length, a softcap that does not."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, cap: float) -> torch.Tensor:
        offset = q.shape[2] - 1

        def score_mod(s: torch.Tensor, b: object, h: object, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
            return cap * torch.tanh((s + table[i - j + offset]) / cap)

        return flex_attention(q, k, v, score_mod)

    function, report = checked(attention, dynamic=dynamic)
    with torch.no_grad():
        for length in (32, 64, 48):
            function(*torch.randn(3, 2, 2, length, 8), torch.randn(2 * length), 20.0)
    assert not report.declined and 1 <= len(report.matches) <= 2, report.sites
    assert len(report.errors) == 3 and report.error < 1e-5
    assert "q_idx + seqlen_q - kv_idx - 1" in report.programs[-1]


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask)


def _computed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(q.shape[2]) + length - q.shape[2]
    return _sdpa(q, k, v, torch.arange(k.shape[2]) <= positions[:, None])


def _eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.matmul((q @ k.mT * 8**-0.5 + mask).softmax(-1), v)


def _seen(seqlen_q: int) -> torch.Tensor:
    return torch.arange(SLOTS) <= torch.arange(VALID - seqlen_q, VALID)[:, None]


MASKED: dict[str, tuple[Attention, Callable[[int], torch.Tensor], float]] = {
    "bool": (_sdpa, _seen, torch.nan),
    "from the length": (_computed, lambda seqlen_q: torch.tensor(VALID), torch.nan),
    "additive": (_eager, lambda seqlen_q: torch.where(_seen(seqlen_q), 0.0, -torch.inf), 1e4),
}
"""The attention, its mask or length, and what unused slots hold; NaN would spread through an addition in eager too."""


@pytest.mark.parametrize("seqlen_q", [1, 3, VALID])
@pytest.mark.parametrize("name", MASKED)
def test_unused_slots_of_a_cache_do_not_leak(name: str, seqlen_q: int) -> None:
    attention, mask, garbage = MASKED[name]
    q, k, v = torch.randn(2, 2, seqlen_q, 8), *torch.randn(2, 2, 2, SLOTS, 8)
    k[:, :, VALID:], v[:, :, VALID:] = garbage, garbage
    run = fused(attention, implementation="reference")
    with torch.no_grad():
        got = run.model(q, k, v, mask(seqlen_q))
    assert len(run.calls) == 1
    want = _sdpa(q, k[:, :, :VALID], v[:, :, :VALID], _seen(seqlen_q)[:, :VALID])
    torch.testing.assert_close(got, want)


def test_causal_of_sdpa_starts_at_the_first_key() -> None:
    """BC-26: also where there are more keys than queries; a cache counts from the last key instead."""
    function, report = checked(lambda q, k: F.scaled_dot_product_attention(q, k, k, is_causal=True))
    with torch.no_grad():
        function(torch.randn(2, 2, 4, 8).double(), torch.randn(2, 2, 10, 8).double())
    assert [p.split("keep=")[1] for p in report.programs] == ["kv_idx <= q_idx; empty_row=zero"]
    assert report.error < 1e-12
