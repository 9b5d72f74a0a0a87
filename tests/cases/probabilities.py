"""Other spellings of the softmax, and what is done to P: factors, zeros, cleaned NaNs, sums of several softmaxes."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.cases.case import BATCH, CAUSAL, HEAD_DIM, HEADS, SEQLEN, Case, padding, program

SCALE = HEAD_DIM**-0.5
MIN = torch.finfo(torch.float32).min


def scores_of(q, k):
    return q @ k.transpose(-1, -2) * SCALE


def causal():
    i = torch.arange(SEQLEN)
    return i[None] <= i[:, None]


# --- the softmax itself ---------------------------------------------------------------------------------------------
def exponential_of_log_softmax(q, k, v):
    return scores_of(q, k).log_softmax(-1).exp() @ v


def log_softmax_fp32(q, k, v):
    return F.log_softmax(scores_of(q, k), -1, dtype=torch.float64).exp().to(q.dtype) @ v


def softmin(q, k, v):
    return F.softmin(-scores_of(q, k), -1) @ v


def masked_log_sum_exp(q, k, v):
    scores = scores_of(q, k).masked_fill(~causal(), -torch.inf)
    return (scores - scores.logsumexp(-1, keepdim=True)).exp() @ v


def hand_written_log_sum_exp(q, k, v):
    scores = scores_of(q, k)
    top = scores.amax(-1, keepdim=True)
    lse = (scores - top).exp().sum(-1, keepdim=True).log() + top
    return torch.exp(scores - lse) @ v


def detached_maximum(q, k, v):
    scores = scores_of(q, k)
    e = torch.exp(scores - scores.max(-1, keepdim=True)[0].detach())
    return (e / e.sum(-1, keepdim=True)) @ v


def times_reciprocal(q, k, v):
    scores = scores_of(q, k)
    e = (scores - scores.amax(-1, keepdim=True)).exp()
    return (e * (1.0 / e.sum(-1, keepdim=True))) @ v


def reciprocal_call(q, k, v):
    e = scores_of(q, k).exp()
    return (e * e.sum(-1, keepdim=True).reciprocal()) @ v


def base_two(q, k, v):
    scores = scores_of(q, k) * 1.4426950408889634
    e = torch.exp2(scores - scores.amax(-1, keepdim=True))
    return (e / e.sum(-1, keepdim=True)) @ v


def clamped_normaliser(q, k, v):
    """A floor under the sum changes nothing: after the maximum is subtracted the sum is at least 1."""
    scores = scores_of(q, k)
    e = (scores - scores.amax(-1, keepdim=True)).exp()
    return (e / e.sum(-1, keepdim=True).clamp(min=1e-6)) @ v


def epsilon_normaliser(q, k, v):
    scores = scores_of(q, k)
    e = (scores - scores.amax(-1, keepdim=True)).exp()
    return (e / (e.sum(-1, keepdim=True) + 1e-9)) @ v


def masked_exponentials(q, k, v):
    """The mask multiplies the exponentials."""
    scores = scores_of(q, k)
    e = (scores - scores.amax(-1, keepdim=True)).exp() * causal()
    return (e / e.sum(-1, keepdim=True)) @ v


def sum_with_sink(q, k, v, sinks):
    scores = scores_of(q, k)
    e, extra = scores.exp(), sinks[:, None, None].exp()
    return (e / (e.sum(-1, keepdim=True) + extra)) @ v


def zero_column(q, k, v):
    """softmax1 through a column of zeros behind the scores."""
    scores = scores_of(q, k)
    scores = torch.cat([scores, scores.new_zeros(BATCH, HEADS, SEQLEN, 1)], -1)
    return scores.softmax(-1)[..., :-1] @ v


def narrowed_sink(q, k, v, sinks):
    column = sinks.view(1, HEADS, 1, 1).expand(BATCH, HEADS, SEQLEN, 1)
    p = torch.cat([column, scores_of(q, k)], -1).softmax(-1)
    return p.narrow(-1, 1, SEQLEN) @ v


# --- factors on P ---------------------------------------------------------------------------------------------------
def head_mask(q, k, v, m):
    return (scores_of(q, k).softmax(-1) * m.view(1, -1, 1, 1)) @ v


def query_gate(q, k, v, g):
    return (scores_of(q, k).softmax(-1) * g[:, None, :, None]) @ v


def constant_factor(q, k, v):
    return (scores_of(q, k).softmax(-1) * 0.5) @ v


def divided_probabilities(q, k, v):
    return (scores_of(q, k).softmax(-1) / 0.9) @ v


def scalar_gate(q, k, v, t):
    return (t * scores_of(q, k).softmax(-1)) @ v


def head_mask_bshd(q, k, v, m):
    p = scores_of(q, k).softmax(-1) * m.view(1, -1, 1, 1)
    return torch.einsum("bhqk,bhkd->bqhd", p, v)


def head_mask_merged(q, k, v, m):
    p = scores_of(q, k).masked_fill(~causal(), MIN).softmax(-1) * m.view(1, -1, 1, 1)
    return (p @ v).transpose(1, 2).reshape(BATCH, SEQLEN, -1)


def padded_queries_zeroed(q, k, v, mask):
    """Rows of padding set to 0 after the softmax."""
    p = scores_of(q, k).masked_fill(~mask[:, None, None, :], MIN).softmax(-1)
    return (p * mask[:, None, :, None].to(p.dtype)) @ v


# --- zeros and NaNs -------------------------------------------------------------------------------------------------
def nan_to_zero(q, k, v, mask):
    p = scores_of(q, k).masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.nan_to_num(p, 0.0) @ v


def nan_to_zero_method(q, k, v, mask):
    p = scores_of(q, k).masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num()
    return p @ v


def nan_where(q, k, v, mask):
    p = scores_of(q, k).masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.where(p.isnan(), 0.0, p) @ v


def nan_filled(q, k, v, mask):
    p = scores_of(q, k).masked_fill(~mask, -torch.inf).softmax(-1)
    return p.masked_fill(torch.isnan(p), 0.0) @ v


def empty_rows_zeroed(q, k, v, mask):
    p = scores_of(q, k).masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.where((~mask).all(-1, keepdim=True), 0.0, p) @ v


def empty_rows_zeroed_min(q, k, v, mask):
    p = scores_of(q, k).masked_fill(~mask, MIN).softmax(-1)
    return p.masked_fill(~mask.any(-1, keepdim=True), 0.0) @ v


def times_mask(q, k, v, mask):
    p = scores_of(q, k).masked_fill(~mask, MIN).softmax(-1)
    return (p * mask) @ v


def times_float_mask(q, k, v, mask):
    p = scores_of(q, k).masked_fill(~mask, MIN).softmax(-1)
    return (p * mask.to(p.dtype)) @ v


def nan_output(q, k, v, mask):
    """The clean-up after the product."""
    return torch.nan_to_num(scores_of(q, k).masked_fill(~mask, -torch.inf).softmax(-1) @ v)


def additive_nan_to_zero(q, k, v, mask):
    bias = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)
    return torch.nan_to_num((scores_of(q, k) + bias).softmax(-1)) @ v


def unmasked_empty_rows(q, k, v, mask):
    """Rows without a key see every key instead."""
    keep = mask | ~mask.any(-1, keepdim=True)
    return scores_of(q, k).masked_fill(~keep, -torch.inf).softmax(-1) @ v


# --- several softmaxes ----------------------------------------------------------------------------------------------
def differential(q, k, v, lam):
    q1, q2, k1, k2 = (*q.chunk(2, -1), *k.chunk(2, -1))
    p1, p2 = (torch.softmax(a @ b.mT * SCALE, -1) for a, b in ((q1, k1), (q2, k2)))
    return (p1 - lam * p2) @ v


def differential_causal(q, k, v, lam):
    q1, q2, k1, k2 = (*q.chunk(2, -1), *k.chunk(2, -1))
    mask = torch.triu(torch.full((SEQLEN, SEQLEN), float("-inf"), dtype=q.dtype), 1)
    p1, p2 = (torch.softmax(a @ b.mT * SCALE + mask, -1) for a, b in ((q1, k1), (q2, k2)))
    return (p1 - lam.view(1, -1, 1, 1) * p2) @ v


def differential_heads(q, k, v, lam):
    """The published form: twice the heads, one softmax, then pairs of heads are subtracted."""
    p = scores_of(q, k).softmax(-1).view(BATCH, HEADS // 2, 2, SEQLEN, SEQLEN)
    p = p[:, :, 0] - lam * p[:, :, 1]
    return p @ torch.cat(v.chunk(2, 1), -1)


def average_of_two(q, k, v):
    return ((scores_of(q, k).softmax(-1) + scores_of(k, q).softmax(-1)) / 2) @ v


def mixture(q, k, v, w):
    """Local and global attention mixed by a gate."""
    i = torch.arange(SEQLEN)
    scores = scores_of(q, k)
    local = scores.masked_fill((i[None] - i[:, None]).abs() > 3, -torch.inf).softmax(-1)
    return (w * local + (1 - w) * scores.softmax(-1)) @ v


def chosen_by_row(q, k, v, t):
    return torch.where((t > 0.5)[:, None], scores_of(q, k).softmax(-1), scores_of(k, q).softmax(-1)) @ v


def empty_row_mask():
    """bool (B, 1, S, S) with a row that keeps nothing."""
    keep = torch.rand(BATCH, 1, SEQLEN, SEQLEN, generator=torch.Generator().manual_seed(3)) > 0.5
    keep[0, 0, 2] = False
    return (keep,)


def uniform(*shape):
    return lambda: (torch.rand(shape, dtype=torch.float64) + 0.1,)


def each(*functions, **options):
    return (Case(f.__name__, f, **options) for f in functions)


_KEEP = "aux0[b, q_idx, kv_idx]"
_HEAD = uniform(HEADS)
_MASK = dict(aux="bool[3]", extra=empty_row_mask)
_HEAD_SINK = dict(program=program(sink="aux0[h]", empty_row="zero"), aux="float64[1]", extra=_HEAD)
CASES = (
    *each(exponential_of_log_softmax, log_softmax_fp32, softmin, hand_written_log_sum_exp, detached_maximum,
            times_reciprocal, reciprocal_call, base_two, clamped_normaliser, program=program()),
    *each(masked_log_sum_exp, masked_exponentials, program=program(keep=CAUSAL)),
    Case("epsilon_normaliser", epsilon_normaliser, program(), dtype=torch.float32),
    Case("zero_column", zero_column, program(sink="0.0", empty_row="zero")),
    *each(sum_with_sink, narrowed_sink, **_HEAD_SINK),
    Case("constant_factor", constant_factor, program(), epilogue="score * 0.5"),
    Case("divided_probabilities", divided_probabilities, program(), epilogue=f"score * {1 / 0.9}"),
    *each(head_mask, head_mask_bshd, program=program(), extra=_HEAD, epilogue="score * aux0[h]"),
    Case("head_mask_merged", head_mask_merged, program(keep=CAUSAL, empty_row="mean"), extra=_HEAD),
    Case("query_gate", query_gate, program(), extra=uniform(BATCH, SEQLEN), epilogue="score * aux0[b, q_idx]"),
    Case("scalar_gate", scalar_gate, program(), extra=uniform(), epilogue="score * aux0[()]"),
    Case("padded_queries_zeroed", padded_queries_zeroed, program(keep="aux0[b, kv_idx]", empty_row="mean"), "bool[2]",
         extra=lambda: (padding(),), epilogue="score * float(aux0[b, q_idx])"),
    *each(nan_to_zero, nan_to_zero_method, nan_where, nan_filled, times_mask, times_float_mask, additive_nan_to_zero,
            program=program(keep=_KEEP, empty_row="zero"), **_MASK),
    Case("empty_rows_zeroed", empty_rows_zeroed, program(keep=_KEEP), epilogue="where(aux0[b, q_idx], 0.0, score)",
         **_MASK),
    Case("empty_rows_zeroed_min", empty_rows_zeroed_min, program(keep=_KEEP, empty_row="mean"),
         epilogue="where(aux0[b, q_idx], score, 0.0)", **_MASK),
    Case("nan_output", nan_output, program(keep=_KEEP), **_MASK),
    Case("unmasked_empty_rows", unmasked_empty_rows, extra=empty_row_mask),
    *each(differential, differential_heads, program=program(), extra=uniform(), sites=2,
            epilogue="None + -(score * aux0[()])"),
    Case("differential_causal", differential_causal, program(keep=CAUSAL), extra=_HEAD, sites=2,
         epilogue="None + -(score * aux0[h])"),
    Case("average_of_two", average_of_two, program(), sites=2, epilogue="score * 0.5 + score * 0.5"),
    Case("mixture", mixture, extra=uniform(), sites=2, epilogue="score * aux0[()] + score * aux0[()]"),
    Case("chosen_by_row", chosen_by_row, extra=uniform(SEQLEN), sites=2,
         epilogue="where(aux0[q_idx], score, 0.0) + where(aux0[q_idx], 0.0, score)"),
)  # fmt: skip
