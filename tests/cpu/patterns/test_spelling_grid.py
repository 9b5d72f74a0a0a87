"""BC-03 (pytorch/pytorch#195412, #195782, #111190): the same maths in other spellings is one site with one program."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from tests.cases.case import CAUSAL, HEAD_DIM
from tests.cases.oracle import checked

SCALES = ("mul", "div", "on_q", "on_both")
STATIC = list(itertools.product(SCALES, ("after", "before"), ("plain", "fp32"), ("matmul", "bmm"), (False,)))
GRID = [*STATIC, *((scale, "after", "fp32", product, True) for scale in SCALES for product in ("matmul", "bmm"))]


def _attention(scale: str, order: str, softmax: str, product: str):
    c = HEAD_DIM**-0.5

    def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if product == "matmul":
            return torch.matmul(a, b)
        batch, heads = a.shape[:2]
        flat = (t.expand(batch, heads, -1, -1).reshape(batch * heads, *t.shape[2:]) for t in (a, b))
        return torch.bmm(*flat).view(batch, heads, a.shape[2], b.shape[3])

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if scale == "on_q":
            q = q * c
        if scale == "on_both":
            q, k = q * c**0.5, k * c**0.5
        scores = multiply(q, k.transpose(-1, -2))
        scores = scores * c if scale == "mul" else scores / (1 / c) if scale == "div" else scores
        length = q.shape[-2]
        mask = torch.full((length, length), -torch.inf, dtype=q.dtype).triu(1)
        scores = scores + mask if order == "after" else mask + scores
        p = scores.softmax(-1) if softmax == "plain" else F.softmax(scores, -1, dtype=torch.float32).to(q.dtype)
        return multiply(p, v)

    return function


@pytest.mark.parametrize(("scale", "order", "softmax", "product", "dynamic"), GRID, ids=lambda x: str(x))
def test_cell(scale: str, order: str, softmax: str, product: str, dynamic: bool) -> None:
    function, report = checked(_attention(scale, order, softmax, product), dynamic=dynamic)
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 4, 24, HEAD_DIM, generator=generator) for _ in range(3))
    with torch.no_grad():
        function(q, k, v)
    assert report.programs == [f"fa4/1; aux=; sizes=0; scale=0.25; score=score; keep={CAUSAL}; empty_row=nan"]
    assert report.error < 1e-5
