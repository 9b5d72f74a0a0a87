"""Almost-attention: each must be left alone with its reason, or be understood for what it really computes."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fa4_inductor.errors import DeclineReason
from tests.cases.case import BATCH, HEAD_DIM, HEADS, SEQLEN, Case, padding, program

SCALE = HEAD_DIM**-0.5


def scores_of(q, k):
    return q @ k.transpose(-1, -2) * SCALE


def probabilities_returned(q, k, v):
    p = scores_of(q, k).softmax(-1)
    return p @ v, p


def probabilities_in_loss(q, k, v):
    p = scores_of(q, k).softmax(-1)
    return (p @ v) + p.mean()


def scores_returned(q, k, v):
    scores = scores_of(q, k)
    return scores.softmax(-1) @ v, scores


def unscaled_scores_returned(q, k, v):
    scores = q @ k.mT
    return (scores * SCALE).softmax(-1) @ v, scores


def two_values(q, k, v):
    p = scores_of(q, k).softmax(-1)
    return p @ v, p @ v.sin()


def probabilities_written_out(q, k, v, out):
    p = scores_of(q, k).softmax(-1)
    out.copy_(p)
    return p @ v


def scores_written_later(q, k, v):
    scores = scores_of(q, k)
    result = scores.softmax(-1) @ v
    scores.add_(1.0)
    return result, scores


def softmax_over_queries(q, k, v):
    return scores_of(q, k).softmax(-2) @ v


def log_probabilities(q, k, v):
    return scores_of(q, k).log_softmax(-1) @ v


def active_dropout(q, k, v):
    return F.dropout(scores_of(q, k).softmax(-1), 0.5, training=True) @ v


def sdpa_dropout(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)


def weighted_probabilities(q, k, v, w):
    return (scores_of(q, k).softmax(-1) * w) @ v


def top_scores(q, k, v):
    values, _ = scores_of(q, k).softmax(-1).topk(4, dim=-1)
    return values @ v[:, :, :4]


def partial_columns(q, k, v):
    return scores_of(q, k).softmax(-1)[..., :10] @ v[:, :, :10]


def wrong_normaliser(q, k, v):
    e = scores_of(q, k).exp()
    return (e / e.sum(-2, keepdim=True)) @ v


def other_normaliser(q, k, v):
    scores = scores_of(q, k)
    return (scores.exp() / (scores * 2).exp().sum(-1, keepdim=True)) @ v


def keys_from_a_weight(q, k, v, w):
    gates = (q[:, 0] @ w).softmax(-1)
    return torch.einsum("bse,bed->bsd", gates, v[:, 0, :5])


def router(q, k, v, gates):
    return torch.bmm(gates.softmax(-1), v[:, 0, :5])


def integer_inputs(q, k, v):
    q, k, v = ((t * 4).long() for t in (q, k, v))
    return (q @ k.mT).double().softmax(-1).long() @ v


def query_written_between(q, k, v):
    q = q + 0.5
    scores = scores_of(q, k)
    q.mul_(2.0)
    return scores.softmax(-1) @ v + q


def mask_written_between(q, k, v, mask):
    scores = scores_of(q, k).masked_fill(mask[:, None, None], -torch.inf)
    mask.logical_not_()
    return scores.softmax(-1) @ v + mask.sum()


def inverted_mask_written_between(q, k, v, mask):
    """~mask is a tensor of its own, which keeps the value that the scores saw."""
    scores = scores_of(q, k).masked_fill(~mask[:, None, None], -torch.inf)
    mask.logical_not_()
    return scores.softmax(-1) @ v + mask.sum()


def mask_written_before(q, k, v, mask):
    mask = mask.clone()
    mask[:, :3] = True
    return scores_of(q, k).masked_fill(~mask[:, None, None], -torch.inf).softmax(-1) @ v


def query_written_after(q, k, v):
    q = q + 0.5
    result = scores_of(q, k).softmax(-1) @ v
    q.mul_(2.0)
    return result + q


def key_not_transposed(q, k, v):
    """BC-01 (b): head count equal to head_dim, so that a wrong permutation has the right shape."""
    x = torch.cat([q, k, v, q.sin()], 1).transpose(1, 2)  # (B, S, 16, 16)
    key = x.permute(0, 3, 2, 1)  # (B, D, H, S): heads and features trade places
    return (x.transpose(1, 2) @ key * SCALE).softmax(-1) @ x.transpose(1, 2)


def square_key(q, k, v):
    """BC-01 (c): N = S = D, K permuted (2, 0, 1) is not K-transpose."""
    q, k, v = (t[:, :, :16].reshape(-1, 16, 16)[:8].repeat(2, 1, 1).contiguous() for t in (q, k, v))
    return torch.bmm(torch.bmm(q, k.permute(2, 0, 1)).softmax(-1), v)


def head_features(q, k, v):
    """BC-01 (a): K as (B, H, D, S) by one permute."""
    key = k.transpose(1, 2).permute(0, 2, 3, 1)
    return (q @ key * SCALE).softmax(-1) @ v


def shifted_slices(q, k, v):
    keep = torch.arange(9)[:, None] + 3 >= torch.arange(SEQLEN)[None]
    return (q[:, :, 3:12] @ k.mT).masked_fill(~keep, -torch.inf).softmax(-1) @ v


def reversed_keys(q, k, v):
    return scores_of(q, k.flip(2)).softmax(-1) @ v


def half_the_features(q, k, v):
    return (q[..., :8] @ k[..., 8:].mT).softmax(-1) @ v[..., 4:12]


def mismatched_heads(q, k, v):
    return scores_of(q, k[:, [1, 0, 3, 2]]).softmax(-1) @ v


def constants_beyond_float32(q, k, v, mask):
    """Two float64 masks that add up to a third level stay in the score, where float32 cannot hold them."""
    pad = torch.where(mask[:, None, None], 0.0, torch.full((), -1e300, dtype=q.dtype))
    causal = torch.where(torch.arange(SEQLEN)[None] <= torch.arange(SEQLEN)[:, None], 0.0, -1e38).to(q.dtype)
    return (scores_of(q, k) + pad + causal).softmax(-1) @ v


def _w():
    return (torch.rand(SEQLEN, SEQLEN, dtype=torch.float64),)


R = DeclineReason
CASES = (
    *(
        Case(f.__name__, f, decline=R.PROBS_ESCAPE)
        for f in (probabilities_returned, probabilities_in_loss, scores_returned, unscaled_scores_returned,
                  scores_written_later)
    ),
    Case("probabilities_written_out", probabilities_written_out, decline=R.PROBS_ESCAPE,
         extra=lambda: (torch.zeros(BATCH, HEADS, SEQLEN, SEQLEN, dtype=torch.float64),)),
    Case("softmax_over_queries", softmax_over_queries, sites=0),
    Case("active_dropout", active_dropout, decline=R.DROPOUT),
    Case("sdpa_dropout", sdpa_dropout, decline=R.DROPOUT),
    Case("weighted_probabilities", weighted_probabilities, decline=R.NOT_ATTENTION, extra=_w),
    Case("log_probabilities", log_probabilities, decline=R.NOT_ATTENTION),
    Case("top_scores", top_scores, sites=0),
    Case("partial_columns", partial_columns, decline=R.UNSUPPORTED_OP),
    Case("wrong_normaliser", wrong_normaliser, decline=R.UNSUPPORTED_OP),
    Case("other_normaliser", other_normaliser, decline=R.NOT_ATTENTION),
    Case("keys_from_a_weight", keys_from_a_weight, program(scale=1.0),
         extra=lambda: (torch.rand(HEAD_DIM, 5, dtype=torch.float64),)),
    Case("router", router, sites=0, extra=lambda: (torch.rand(BATCH, SEQLEN, 5, dtype=torch.float64),)),
    Case("integer_inputs", integer_inputs, decline=R.NOT_ATTENTION),
    Case("query_written_between", query_written_between, decline=R.MUTATION),
    Case("mask_written_between", mask_written_between, decline=R.MUTATION, extra=lambda: (~padding(),)),
    Case("inverted_mask_written_between", inverted_mask_written_between, extra=lambda: (padding(),)),
    Case("constants_beyond_float32", constants_beyond_float32, decline=R.UNSUPPORTED_DTYPE,
         extra=lambda: (padding(),)),
    Case("mask_written_before", mask_written_before, extra=lambda: (padding(),)),
    Case("query_written_after", query_written_after, program()),
    Case("key_not_transposed", key_not_transposed),
    Case("square_key", square_key),
    Case("head_features", head_features, program()),
    Case("shifted_slices", shifted_slices, program(keep="kv_idx <= q_idx + 3", scale=1.0)),
    Case("reversed_keys", reversed_keys, program()),
    Case("half_the_features", half_the_features, program(scale=1.0)),
    Case("mismatched_heads", mismatched_heads, program()),
)  # fmt: skip
