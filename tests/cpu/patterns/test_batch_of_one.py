"""A batch of one has the program, and so the kernel, of a larger batch; parameters have no batch in either."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.cases.oracle import checked

HEADS, SEQLEN = 2, 12


def _padding(batch: int) -> torch.Tensor:
    return torch.arange(SEQLEN) < torch.arange(SEQLEN, SEQLEN - batch, -1)[:, None]


def _documents(batch: int) -> torch.Tensor:
    return torch.arange(SEQLEN) // torch.arange(3, 3 + batch)[:, None]


def _same_document(scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return scores.masked_fill((ids[:, None, :, None] != ids[:, None, None, :]), -torch.inf)


Masked = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
MASKS: dict[str, tuple[Masked, Callable[[int], torch.Tensor], str]] = {
    "padding": (lambda s, m: s.masked_fill(~m[:, None, None, :], -1e30), _padding, "aux0[b, kv_idx]"),
    "square": (
        lambda s, m: torch.where(m, s, -torch.inf),
        lambda batch: _padding(batch)[:, None, None, :] & torch.ones(SEQLEN, SEQLEN, dtype=torch.bool).tril(),
        "aux0[b, q_idx, kv_idx]",
    ),
    "additive": (
        torch.add,
        lambda batch: torch.where(_padding(batch)[:, None, None, :], 0.0, -1.0).repeat(1, 1, SEQLEN, 1),
        "aux0[b, q_idx, kv_idx]",
    ),
    "documents": (_same_document, _documents, "aux0[b, q_idx] == aux0[b, kv_idx]"),
    "bias parameter": (torch.add, lambda batch: torch.randn(1, HEADS, SEQLEN, SEQLEN), "aux0[h, q_idx, kv_idx]"),
    "one length": (
        lambda s, n: s.masked_fill(torch.arange(SEQLEN)[None, None, None] >= n, -torch.inf),
        lambda batch: torch.tensor(SEQLEN - 2),
        "~aux0[kv_idx]",
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_program(name: str) -> None:
    masked, mask, text = MASKS[name]
    for batch in (1, 3):
        torch._dynamo.reset()
        function, report = checked(lambda q, k, v, m: torch.matmul(masked(q @ k.mT, m).softmax(-1), v))
        with torch.no_grad():
            function(*torch.randn(3, batch, HEADS, SEQLEN, 8).double(), mask(batch))
        assert len(report.programs) == 1, report.sites
        assert text in report.programs[0], (batch, report.programs)
        assert report.error < 1e-5
