"""Sites whose result is changed by the graph: factors by row, and outputs that are sums of several attentions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.models.helpers import counters, fused

Function = Callable[..., torch.Tensor]


def _inputs(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    make = torch.Generator().manual_seed(0)
    return [torch.randn(2, 4, 6, 8, generator=make).to(dtype) for _ in range(3)]


def differential(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    (q1, q2), (k1, k2) = q.chunk(2, -1), k.chunk(2, -1)
    p = torch.softmax(q1 @ k1.mT, -1) - weight[:, None, None].to(q.dtype) * torch.softmax(q2 @ k2.mT, -1)
    return (p @ v).transpose(1, 2).flatten(2)


def head_masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (torch.softmax(q @ k.mT, -1, dtype=torch.float32).to(q.dtype) * weight[:, None, None].to(q.dtype)) @ v


def half_capped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """SDPA can run the second term and not the first."""
    scores = q @ k.mT
    return (torch.softmax(scores.tanh(), -1) + torch.softmax(scores * 2, -1)) @ v


def _run(function: Function, dtype: torch.dtype = torch.float32, **options: object) -> torch.Tensor:
    args = [*_inputs(dtype), torch.tensor([0.5, 1.0, -0.25, 0.0])]
    with torch.no_grad():
        expected = function(*(a.double() for a in args))
        result = fused(function, **options).model(*args)
        eager = function(*args)
    assert (result.dtype, result.shape) == (eager.dtype, eager.shape)
    limit = 2 * (eager.double() - expected).abs().max() + 2 * torch.finfo(dtype).eps
    assert (result.double() - expected).abs().max() <= limit
    return result


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("implementation", ["reference", "sdpa"])
@pytest.mark.parametrize(("function", "sites"), [(differential, 2), (head_masked, 1)])
def test_fused(function: Function, sites: int, implementation: str, dynamic: bool) -> None:
    _run(function, implementation=implementation, dynamic=dynamic)
    assert counters()["fused"] == sites


@pytest.mark.parametrize("function", [differential, head_masked])
def test_half_precision(function: Function) -> None:
    _run(function, torch.bfloat16, implementation="reference")


def test_a_sum_is_fused_as_a_whole_or_not_at_all() -> None:
    _run(half_capped, implementation="sdpa")
    assert counters()["fused"] == 0
    assert counters()["declined.not_faster"] == counters()["declined.unsupported_program"] == 1
    _run(half_capped, implementation="reference")
    assert counters()["fused"] == 2
