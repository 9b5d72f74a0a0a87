"""Random attention-like graphs: each is matched and equal to eager, or declined with a reason."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fa4_inductor.errors import DeclineReason
from tests.cases.oracle import checked

SEEDS = 40
Tensor = torch.Tensor


@dataclass
class Sizes:
    batch: int
    kv_heads: int
    group: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int

    @classmethod
    def draw(cls, choose: Callable[..., Any]) -> Sizes:
        q = choose([1, 5, 8])
        return cls(choose([1, 2, 3]), choose([1, 2]), choose([1, 2]), q, choose([q, q, 1, 9]), choose([4, 8]))


class Graph:
    """A seeded function of (q, k, v, pad, bias, slopes) with all its choices made up front."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.sizes = Sizes.draw(draw.choice)
        self.layout = draw.randrange(3)
        self.repeat = draw.randrange(3)
        self.scale = draw.randrange(4)
        self.modifiers = [draw.randrange(10) for _ in range(draw.randrange(4))]
        self.softmax = draw.randrange(4)
        self.tail = draw.choice(["plain", "plain", "clone", "dropout", "weighted", "escape", "einsum"])
        self.write = draw.random() < 0.1
        self.dynamic = draw.random() < 0.2

    def inputs(self) -> tuple[Tensor, ...]:
        n = self.sizes
        heads = n.kv_heads * n.group
        make = torch.Generator().manual_seed(11)
        shapes = [(n.batch, h, s, n.head_dim) for h, s in ((heads, n.seqlen_q), *((n.kv_heads, n.seqlen_k),) * 2)]
        q, k, v = (torch.randn(s, generator=make, dtype=torch.float64) for s in shapes)
        pad = torch.rand(n.batch, n.seqlen_k, generator=make) > 0.3
        bias = torch.randn(n.batch, 1, n.seqlen_q, n.seqlen_k, generator=make, dtype=torch.float64)
        return q, k, v, pad, bias, torch.rand(heads, generator=make, dtype=torch.float64)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, pad: Tensor, bias: Tensor, slopes: Tensor) -> Any:
        if self.layout == 1:
            q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
        if self.layout == 2:
            q, k = q + 0.1, k.sin()
        k, v = self._repeat(k), self._repeat(v)
        scores = self._scores(q, k)
        if self.write and self.layout == 2:
            q.mul_(2.0)
        for modifier in self.modifiers:
            scores = self._modified(scores, modifier, pad, bias, slopes)
        p = self._probabilities(scores, slopes)
        if self.tail == "escape":
            return p @ v, p.sum()
        if self.tail == "einsum":
            return torch.einsum("bhqk,bhkd->bqhd", p, v)
        changes = {"clone": torch.clone, "dropout": lambda x: F.dropout(x, 0.5, False), "weighted": lambda x: x * bias}
        return changes.get(self.tail, lambda x: x)(p) @ v

    def _repeat(self, t: Tensor) -> Tensor:
        group = self.sizes.group
        if group == 1:
            return t
        if self.repeat == 0:
            return t[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2)
        return t.repeat_interleave(group, 1) if self.repeat == 1 else t.repeat(1, group, 1, 1)

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        if self.scale == 0:
            return q @ k.mT * 0.3
        if self.scale == 1:
            return (q * 0.5) @ (k * 0.5).mT
        return torch.einsum("bhqd,bhkd->bhqk", q, k) / 2.0 if self.scale == 2 else torch.matmul(q, k.transpose(2, 3))

    def _modified(self, x: Tensor, kind: int, pad: Tensor, bias: Tensor, slopes: Tensor) -> Tensor:
        i, j = torch.arange(self.sizes.seqlen_q)[:, None], torch.arange(self.sizes.seqlen_k)[None]
        low = torch.finfo(torch.float32).min
        return (
            lambda: x.masked_fill(j > i, -torch.inf),
            lambda: torch.where(pad[:, None, None], x, low),
            lambda: x + bias,
            lambda: x + (1 - pad[:, None, None].to(x.dtype)) * low,
            lambda: x + slopes[:, None, None] * (j - i).to(x.dtype),
            lambda: x + torch.where(i - j < 3, 0.0, -torch.inf).to(x.dtype),
            lambda: 5 * torch.tanh(x / 5),
            lambda: x.masked_fill(i // 2 != j // 2, low),
            lambda: x * slopes[None, :, None, None],
            lambda: x + torch.full((i.numel(), j.numel()), float("-inf"), dtype=x.dtype).triu(1),
        )[kind]()

    def _probabilities(self, scores: Tensor, slopes: Tensor) -> Tensor:
        if self.softmax == 1:
            e = (scores - scores.amax(-1, keepdim=True)).exp()
            return e / e.sum(-1, keepdim=True)
        if self.softmax == 2:
            sink = slopes[None, :, None, None].expand(*scores.shape[:-1], 1)
            return torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        return scores.softmax(-1)


def _outcome(seed: int) -> list[DeclineReason]:
    graph = Graph(seed)
    function, report = checked(graph.__call__, dynamic=graph.dynamic)
    with torch.no_grad():
        function(*graph.inputs())
    assert report.error < 1e-6, (graph.__dict__, report.programs)
    reasons = [d.reason for d in report.declined]
    assert DeclineReason.INTERNAL_ERROR not in reasons, report.declined
    return reasons


@pytest.mark.parametrize("first", range(0, SEEDS, 10))
def test_matched_and_equal_or_declined(first: int) -> None:
    reasons = []
    for seed in range(first, first + 10):
        torch._dynamo.reset()
        reasons.append(_outcome(seed))
    assert sum(not r for r in reasons) >= 5, "a matcher that declines everything proves nothing"
