"""Operands of SDPA in every shape it broadcasts: missing and grouped heads, more batch dimensions, other ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.models.helpers import counters, fused

GROUPED = dict(enable_gqa=True)
# query, key and value without (S, D) and the keywords of the call
SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "grouped_3d": ((4,), (2,), (2,), GROUPED),
    "heads_of_k_and_v_differ": ((2, 12), (2, 4), (2, 6), GROUPED),
    "one_head_of_q": ((2, 1), (2, 4), (2, 4), {}),
    "one_query_for_all": ((1, 1), (2, 4), (2, 4), {}),
    "one_head_of_k": ((2, 4), (2, 1), (2, 4), {}),
    "one_head_of_v": ((2, 4), (2, 4), (2, 1), {}),
    "5d": ((2, 3, 4), (2, 3, 4), (2, 3, 4), {}),
    "5d_broadcast_k": ((2, 3, 4), (2, 1, 4), (2, 3, 4), {}),
    "5d_broadcast_q": ((1, 3, 4), (2, 3, 4), (2, 3, 4), {}),
    "5d_with_4d": ((2, 3, 4), (3, 4), (3, 4), {}),
    "5d_grouped": ((2, 3, 4), (2, 3, 2), (1, 3, 2), GROUPED),
    "6d": ((2, 3, 2, 4), (2, 3, 2, 4), (2, 3, 2, 4), {}),
}


def _run(name: str, dynamic: bool) -> None:
    *leading, keywords = SHAPES[name]
    torch.manual_seed(0)
    args = [torch.randn(*lead, length, 16) for lead, length in zip(leading, (5, 7, 7))]
    function: Callable[..., torch.Tensor] = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **keywords)
    with torch.no_grad():
        result = fused(function, implementation="reference", dynamic=dynamic).model(*args)
    torch.testing.assert_close(result, function(*args), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SHAPES)
def test_broadcast_operands_fuse(name: str) -> None:
    _run(name, dynamic=False)
    assert counters()["fused"] == 1, counters()


@pytest.mark.parametrize("name", ["grouped_3d", "one_head_of_q", "5d_broadcast_k"])
def test_broadcast_operands_fuse_with_dynamic_shapes(name: str) -> None:
    _run(name, dynamic=True)
    assert counters()["fused"] == 1, counters()


def test_unknown_head_counts_of_k_and_v_decline() -> None:
    _run("heads_of_k_and_v_differ", dynamic=True)
    assert counters()["declined.unsupported_shape"] == 1, counters()
