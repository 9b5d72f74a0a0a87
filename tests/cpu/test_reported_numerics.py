"""What users of neighbouring systems reported about numbers: rows that see nothing, scores beyond half precision."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fa4_inductor.kernels.reference import attention_reference
from fa4_inductor.spec import parse_spec
from tests.models.helpers import counters, fused

SEQLEN, HEAD_DIM = 8, 16


def two_layers(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """The second layer attends to rows that saw nothing in the first."""
    for _ in range(2):
        x = F.scaled_dot_product_attention(x, x, x, attn_mask=keep)
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_rows_that_see_nothing_are_zero_and_stay_apart(dtype: torch.dtype) -> None:
    """pytorch/pytorch#103963: zeros in those rows, in each layer, and nothing of them in the others."""
    x = torch.randn(1, 2, SEQLEN, HEAD_DIM, dtype=dtype)
    keep = torch.ones(SEQLEN, SEQLEN, dtype=torch.bool).tril()
    keep[4:] = False
    run = fused(two_layers, implementation="reference")
    with torch.no_grad():
        got, exact, eager = run.model(x, keep), two_layers(x.double(), keep), two_layers(x, keep)
    assert counters()["fused"] == 2
    assert torch.equal(got[:, :, 4:], torch.zeros_like(got[:, :, 4:]))
    band = 0.5 * torch.finfo(dtype).eps * exact.abs().max()
    assert (got - exact).abs().max() <= 2 * (eager - exact).abs().max() + band


def test_their_log_sum_exp_is_minus_infinity() -> None:
    q = torch.randn(1, 2, SEQLEN, HEAD_DIM)
    spec = parse_spec("fa4/1; aux=; sizes=0; scale=0.25; score=score; keep=q_idx <= 3; empty_row=zero")
    _, lse = attention_reference(q, q, q, [], spec, need_lse=True)
    assert torch.equal(lse[:, :, 4:], torch.full((1, 2, 4), -torch.inf))
    expected = torch.logsumexp(0.25 * q @ q.mT, -1)[:, :, :4]  # the natural logarithm
    torch.testing.assert_close(lse[:, :, :4], expected)


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """As models write it for half precision: product in the dtype of q and k, softmax in float32."""
    scores = torch.matmul(q, k.transpose(-1, -2)) * HEAD_DIM**-0.5
    later = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
    scores = scores.masked_fill(later, torch.finfo(scores.dtype).min)
    return torch.matmul(torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype), v)


def test_fp16_scores_that_overflow_in_eager_are_finite_when_fused() -> None:
    """huggingface/transformers#33317: q.k passes 65504 before it is scaled; better than eager, which gives NaN."""
    q, k, v = torch.randn(3, 1, 2, 128, HEAD_DIM).half()
    q, k = q * 100, k * 100
    run = fused(causal_attention, implementation="reference")
    with torch.no_grad():
        got, exact = run.model(q, k, v), causal_attention(q.double(), k.double(), v.double())
        assert causal_attention(q, k, v).isnan().any()
    assert counters()["fused"] == 1
    assert (got - exact).abs().max() <= torch.finfo(torch.float16).eps * exact.abs().max()


def test_in_range_fused_and_eager_agree() -> None:
    """The counterpart of the test above: without the overflow eager is the yardstick."""
    q, k, v = torch.randn(3, 1, 2, 128, HEAD_DIM).half()
    run = fused(causal_attention, implementation="reference")
    with torch.no_grad():
        got, eager = run.model(q, k, v), causal_attention(q, k, v)
        exact = causal_attention(q.double(), k.double(), v.double())
    assert counters()["fused"] == 1
    band = 0.5 * torch.finfo(torch.float16).eps * exact.abs().max()
    assert (got - exact).abs().max() <= 2 * (eager - exact).abs().max() + band
