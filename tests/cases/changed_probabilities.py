"""P that is no sum of softmaxes with factors by row: each must be left alone with its reason."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fa4_inductor.errors import DeclineReason
from tests.cases.case import BATCH, HEADS, SEQLEN, Case
from tests.cases.probabilities import each, empty_row_mask, epsilon_normaliser, scores_of, uniform


def global_maximum(q, k, v):
    scores = scores_of(q, k)
    e = (scores - scores.max()).exp()
    return (e / e.sum(-1, keepdim=True)) @ v


def large_epsilon(q, k, v):
    scores = scores_of(q, k)
    e = (scores - scores.amax(-1, keepdim=True)).exp()
    return (e / (e.sum(-1, keepdim=True) + 1e-3)) @ v


def large_floor(q, k, v):
    scores = scores_of(q, k)
    e = (scores - scores.amax(-1, keepdim=True)).exp()
    return (e / e.sum(-1, keepdim=True).clamp(min=2.0)) @ v


def floor_without_maximum(q, k, v):
    e = (scores_of(q, k) - 3).exp()
    return (e / e.sum(-1, keepdim=True).clamp(min=0.5)) @ v


def normalised_after_product(q, k, v):
    """The division by the row sum after the product with V."""
    scores = scores_of(q, k)
    e = (scores - scores.amax(-1, keepdim=True)).exp()
    return (e @ v) / e.sum(-1, keepdim=True)


def sink_with_value(q, k, v, sinks):
    """The extra column has a value of its own (zero), as a row of V."""
    column = sinks.view(1, HEADS, 1, 1).expand(BATCH, HEADS, SEQLEN, 1)
    p = torch.cat([scores_of(q, k), column], -1).softmax(-1)
    return p @ F.pad(v, (0, 0, 0, 1))


def key_weights(q, k, v, w):
    """A factor by key: it belongs to V."""
    return (scores_of(q, k).softmax(-1) * w[:, None, None, :]) @ v


def nan_replaced(q, k, v, mask):
    p = scores_of(q, k).masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.nan_to_num(p, 0.5) @ v


def nan_of_difference(q, k, v, mask):
    """A NaN of one softmax hides what the other one is."""
    p = scores_of(q, k).masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.nan_to_num(p - 0.5 * scores_of(k, q).softmax(-1)) @ v


def nan_of_quotient(q, k, v, t):
    """The NaN may come from 0 / 0 in the factor."""
    return torch.nan_to_num(scores_of(q, k).softmax(-1) * (t[:, None] / t[:, None])) @ v


def identity_plus(q, k, v):
    """A residual on P: not a softmax times V only."""
    return (scores_of(q, k).softmax(-1) + torch.eye(SEQLEN, dtype=q.dtype)) @ v


def uniform_plus(q, k, v):
    return (0.9 * scores_of(q, k).softmax(-1) + 0.1 / SEQLEN) @ v


def product_of_two(q, k, v):
    return (scores_of(q, k).softmax(-1) * scores_of(k, q).softmax(-1)) @ v


def squared(q, k, v):
    return scores_of(q, k).softmax(-1) ** 2 @ v


def renormalised(q, k, v, mask):
    """Probabilities divided by their own sum after a mask: a softmax over the kept keys."""
    p = scores_of(q, k).softmax(-1) * mask
    return (p / p.sum(-1, keepdim=True)) @ v


def talking_heads(q, k, v, mix):
    """Heads are mixed after the softmax."""
    return torch.einsum("bhqk,hg->bgqk", scores_of(q, k).softmax(-1), mix) @ v


def talking_scores(q, k, v, mix):
    return torch.einsum("bhqk,hg->bgqk", scores_of(q, k), mix).softmax(-1) @ v


def sigmoid_attention(q, k, v):
    return torch.sigmoid(scores_of(q, k)) @ v


R = DeclineReason
CASES = (
    Case("global_maximum", global_maximum, decline=R.EMPTY_ROWS),
    Case("epsilon_in_double", epsilon_normaliser, decline=R.NOT_ATTENTION),
    Case("large_epsilon", large_epsilon, decline=R.NOT_ATTENTION, dtype=torch.float32),
    Case("large_floor", large_floor, decline=R.NOT_ATTENTION),
    Case("floor_without_maximum", floor_without_maximum, decline=R.NOT_ATTENTION),
    *each(identity_plus, uniform_plus, product_of_two, squared, decline=R.NOT_ATTENTION),
    Case("key_weights", key_weights, decline=R.NOT_ATTENTION, extra=uniform(BATCH, SEQLEN)),
    Case("renormalised", renormalised, decline=R.NOT_ATTENTION, extra=empty_row_mask),
    Case("nan_replaced", nan_replaced, decline=R.NOT_ATTENTION, extra=empty_row_mask),
    Case("nan_of_difference", nan_of_difference, decline=R.NOT_ATTENTION, extra=empty_row_mask),
    Case("nan_of_quotient", nan_of_quotient, decline=R.NOT_ATTENTION, extra=uniform(SEQLEN)),
    Case("sink_with_value", sink_with_value, decline=R.UNSUPPORTED_LAYOUT, extra=uniform(HEADS)),
    Case("talking_scores", talking_scores, decline=R.UNSUPPORTED_LAYOUT, extra=uniform(HEADS, HEADS)),
    Case("talking_heads", talking_heads, sites=0, extra=uniform(HEADS, HEADS)),
    *each(sigmoid_attention, normalised_after_product, sites=0),
)  # fmt: skip
