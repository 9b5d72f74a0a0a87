"""Keys appended to a cache: the offset of the queries is seqlen_k - seqlen_q, no size of its own."""

from __future__ import annotations

import pytest
import torch

from tests.cases.oracle import checked

WINDOW = 5


def _attention(q: torch.Tensor, k: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
    keys = torch.cat([past, k], 2)
    q_pos = torch.arange(q.shape[2])[:, None] + past.shape[2]
    kv_pos = torch.arange(keys.shape[2])
    keep = (kv_pos <= q_pos) & (kv_pos > q_pos - WINDOW)
    return torch.matmul((q @ keys.mT).masked_fill(~keep, -torch.inf).softmax(-1), keys)


@pytest.mark.parametrize(
    ("seqlen_q", "keep"),
    [
        (1, "kv_idx >= seqlen_k - 5"),
        (4, "(kv_idx <= q_idx + seqlen_k - seqlen_q) & (kv_idx >= q_idx + seqlen_k - seqlen_q - 4)"),
    ],
    ids=["decode", "chunk"],
)
def test_program(seqlen_q: int, keep: str) -> None:
    function, report = checked(_attention, dynamic=True)
    with torch.no_grad():
        for past in (7, 9):
            q, k = torch.randn(2, 2, 3, seqlen_q, 8).double()
            function(q, k, torch.randn(2, 3, past, 8).double())
    assert report.programs == [f"fa4/1; aux=; sizes=0; scale=1.0; score=score; keep={keep}; empty_row=nan"]
    assert report.error < 1e-12


def test_another_length_stays_a_size() -> None:
    """Near-miss: an offset that is no difference of the two lengths."""

    def attention(q: torch.Tensor, k: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        keep = torch.arange(k.shape[2]) <= torch.arange(q.shape[2])[:, None] + other.shape[0]
        return torch.matmul((q @ k.mT).masked_fill(~keep, -torch.inf).softmax(-1), k)

    function, report = checked(attention, dynamic=True)
    with torch.no_grad():
        function(torch.randn(2, 3, 4, 8).double(), torch.randn(2, 3, 9, 8).double(), torch.randn(5))
    (program,) = report.programs
    assert "sizes=1" in program and "keep=kv_idx <= q_idx + size0" in program
    assert report.error < 1e-12
