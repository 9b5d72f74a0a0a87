"""flex_attention with the log-sum-exp of its rows: one op gives both; other statistics are left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from fa4_inductor.errors import DeclineReason
from tests.cases.flex_calls import activation_without_softmax, merged_halves
from tests.cases.oracle import checked

SEQLEN = 32


def _qkv(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(5)
    return tuple(torch.randn(2, heads, SEQLEN, 16, generator=generator, dtype=dtype) for heads in (4, 2, 2))


def _late_start() -> BlockMask:
    """The first rows keep nothing: their log-sum-exp is -inf."""
    return create_block_mask(lambda b, h, q, k: (q >= k) & (k >= 4), None, None, SEQLEN, SEQLEN, device="cpu")


def _attention(q: Any, k: Any, v: Any, mask: Any) -> Any:
    out, aux = flex_attention(q, k, v, None, mask, enable_gqa=True, return_aux=AuxRequest(lse=True))
    return out, aux.lse


def _with_maxima(q: Any, k: Any, v: Any, mask: Any) -> Any:
    """What return_aux=AuxRequest(max_scores=True) does on a GPU."""
    flex = torch._higher_order_ops.flex_attention
    out, _, maxima = flex(q, k, v, lambda s, b, h, i, j: s, mask.as_tuple(), 0.25, {})
    return out, maxima


def _lse_alone(q: Any, k: Any, v: Any, mask: Any) -> Any:
    return _attention(q, k, v, mask)[1]


@pytest.mark.parametrize("example", [activation_without_softmax, merged_halves])
def test_examples_run_on_one_op(example: Any) -> None:
    q, k, v = (torch.randn(2, 4, 64, 16, generator=torch.Generator().manual_seed(i)) for i in range(3))
    compiled = torch.compile(example, backend="fa4", options={"fa4.implementation": "reference"})
    with torch.no_grad():
        expected, got = (f(q, k, v, None, None) for f in (example, compiled))
    sites = 1 if example is activation_without_softmax else 2
    assert counters["fa4"]["fused"] == sites
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_log_sum_exp_of_rows_without_keys() -> None:
    inputs = (*_qkv(), _late_start())
    compiled = torch.compile(_attention, backend="fa4", options={"fa4.implementation": "reference"})
    with torch.no_grad():
        expected, got = _attention(*inputs), compiled(*inputs)
    assert counters["fa4"]["fused"] == 1
    assert torch.isneginf(got[1][:, :, :4]).all()
    torch.testing.assert_close(got, expected)


def test_sdpa_cannot_give_it() -> None:
    compiled = torch.compile(_attention, backend="fa4", options={"fa4.implementation": "sdpa", "fa4.strict": True})
    with torch.no_grad(), pytest.raises(Exception, match="log-sum-exp"):
        compiled(*_qkv(), _late_start())


@pytest.mark.parametrize(
    ("attention", "dtype", "reason"),
    [
        (_with_maxima, torch.float32, DeclineReason.PROBS_ESCAPE),
        (_lse_alone, torch.float32, DeclineReason.PROBS_ESCAPE),
        (_attention, torch.float64, DeclineReason.UNSUPPORTED_DTYPE),
    ],
)
def test_near_misses_decline(attention: Any, dtype: torch.dtype, reason: DeclineReason) -> None:
    function, report = checked(attention)
    with torch.no_grad():
        function(*_qkv(dtype), _late_start())
    assert [d.reason for d in report.declined] == [reason]
    assert not report.matches
