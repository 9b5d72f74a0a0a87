"""Score modifications: softcap, ALiBi, tables, bucketed biases, sinks, extra contractions."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fa4_inductor.errors import DeclineReason
from tests.cases.case import BATCH, CAUSAL, HEAD_DIM, HEADS, SEQLEN, Case, program

SCALE = HEAD_DIM**-0.5


def scores_of(q, k):
    return q @ k.transpose(-1, -2) * SCALE


def causal():
    i = torch.arange(SEQLEN)
    return i[None] <= i[:, None]


def softcap(q, k, v):
    return (20.0 * torch.tanh(scores_of(q, k) / 20.0)).softmax(-1) @ v


def softcap_causal(q, k, v):
    scores = torch.tanh(scores_of(q, k) / 20.0) * 20.0
    return scores.masked_fill(~causal(), -torch.inf).softmax(-1) @ v


def alibi(q, k, v, slopes):
    i = torch.arange(SEQLEN)
    bias = slopes[:, None, None] * (i[None, :] - i[:, None]).to(q.dtype)
    return (scores_of(q, k) + bias).softmax(-1) @ v


def alibi_flat(q, k, v, slopes):
    bias = (slopes[None, :, None] * torch.arange(SEQLEN)[None, None]).expand(BATCH, -1, -1).reshape(-1, 1, SEQLEN)
    q, k, v = (t.reshape(BATCH * HEADS, SEQLEN, HEAD_DIM) for t in (q, k, v))
    scores = bias.to(q.dtype).baddbmm(q, k.mT, beta=1.0, alpha=SCALE).view(BATCH, HEADS, SEQLEN, SEQLEN)
    return torch.bmm(scores.softmax(-1).view(BATCH * HEADS, SEQLEN, SEQLEN), v)


def relative_table(q, k, v, table):
    i = torch.arange(SEQLEN)
    index = i[None] - i[:, None] + SEQLEN - 1
    return (scores_of(q, k) + table[index].permute(2, 0, 1)).softmax(-1) @ v


def swin_window(q, k, v, table, index):
    """A relative table through an index buffer, and a shift mask that varies over groups of the batch."""
    bias = table[index.view(-1)].view(SEQLEN, SEQLEN, -1).permute(2, 0, 1).contiguous()
    return (scores_of(q, k) + bias.unsqueeze(0)).softmax(-1) @ v


def sink_column(q, k, v, sinks):
    scores = scores_of(q, k).masked_fill(~causal(), torch.finfo(q.dtype).min)
    column = sinks.reshape(1, -1, 1, 1).expand(BATCH, -1, SEQLEN, -1)
    scores = torch.cat([scores, column], -1)
    scores = scores - scores.max(-1, keepdim=True).values
    return scores.softmax(-1)[..., :-1] @ v


def leading_zero_sink(q, k, v):
    scores = torch.nn.functional.pad(scores_of(q, k), (1, 0), value=0.0)
    return scores.softmax(-1)[..., 1:] @ v


def softmax_plus_one(q, k, v):
    e = scores_of(q, k).exp()
    return (e / (1 + e.sum(-1, keepdim=True))) @ v


def stable_softmax_plus_one(q, k, v):
    scores = scores_of(q, k)
    top = scores.amax(-1, keepdim=True)
    e = (scores - top).exp()
    return (e / (torch.exp(-top) + e.sum(-1, keepdim=True))) @ v


def dense_contraction_bias(q, k, v, embedding):
    """A second contraction in the logits is data to this site."""
    relative = torch.einsum("bhqd,qkd->bhqk", q, embedding)
    return (scores_of(q, k) + relative).softmax(-1) @ v


def temperature_per_row(q, k, v, t):
    return (scores_of(q, k) * t[:, None, :, None]).softmax(-1) @ v


def gated_score(q, k, v):
    scores = scores_of(q, k)
    return (scores * torch.sigmoid(scores)).softmax(-1) @ v


_SLOPES = lambda: (torch.rand(HEADS, dtype=torch.float64),)
def query_over_its_maximum(q, k, v):
    """A reduction of q itself, not of scores: it stays in the graph."""
    return (q / q.abs().amax(-1, keepdim=True) @ k.mT).softmax(-1) @ v


def sdpa_query_over_its_maximum(q, k, v):
    return F.scaled_dot_product_attention(q / q.abs().amax(-1, keepdim=True), k, v)


def scores_over_their_sum(q, k, v):
    scores = q @ k.mT
    return (scores / scores.exp().sum(-1, keepdim=True)).softmax(-1) @ v


def gated(q, k, v, sinks, fill, read=lambda scores: scores):
    scores = scores_of(q, k).masked_fill(~causal(), fill)
    gate = (read(scores).logsumexp(-1) - sinks[None, :, None]).sigmoid()
    return scores.softmax(-1) @ v * gate[..., None]


def sink_as_gate(q, k, v, sinks):
    """What a sink takes from the keys as a gate on the output (Granite's sliding windows)."""
    return gated(q, k, v, sinks, torch.finfo(q.dtype).min)


def gate_beside_infinite_fills(q, k, v, sinks):
    """A row without keys would be NaN."""
    return gated(q, k, v, sinks, -torch.inf)


def gate_of_other_scores(q, k, v, sinks):
    return gated(q, k, v, sinks, torch.finfo(q.dtype).min, lambda scores: scores * 2)


def relaxed_softmax(q, k, v):
    """The row maximum is subtracted from scores scaled down, and they are scaled up again (CogView)."""
    scores = scores_of(q, k) / 32
    return ((scores - scores.amax(-1).unsqueeze(-1)) * 32).softmax(-1) @ v


def maximum_over_queries(q, k, v):
    scores = scores_of(q, k) / 32
    return ((scores - scores.amax(-2, keepdim=True)) * 32).softmax(-1) @ v


def _sinks():
    return (torch.linspace(-2, 2, HEADS, dtype=torch.float64),)


CASES = (
    Case("relaxed_softmax", relaxed_softmax, program()),
    Case("maximum_over_queries", maximum_over_queries, decline=DeclineReason.UNSUPPORTED_OP),
    Case("sink_as_gate", sink_as_gate, program(keep=CAUSAL, sink="aux0[h]", empty_row="zero"), "float64[1]",
         extra=_sinks),
    *(Case(f.__name__, f, decline=DeclineReason.PROBS_ESCAPE, extra=_sinks)
      for f in (gate_beside_infinite_fills, gate_of_other_scores)),
    Case("query_over_its_maximum", query_over_its_maximum, program(scale=1.0)),
    Case("sdpa_query_over_its_maximum", sdpa_query_over_its_maximum, program(empty_row="zero")),
    Case("scores_over_their_sum", scores_over_their_sum, decline=DeclineReason.UNSUPPORTED_OP),
    Case("softcap", softcap, program("tanh(score) * 20.0", scale=0.0125)),
    Case("softcap_causal", softcap_causal, program("tanh(score) * 20.0", CAUSAL, scale=0.0125)),
    Case("alibi", alibi, program("score + aux0[h] * float(kv_idx - q_idx)"), "float64[1]", extra=_SLOPES),
    Case("alibi_flat", alibi_flat, extra=_SLOPES),
    Case("relative_table", relative_table, program("score + aux0[kv_idx - q_idx + 23, h]"), "float64[2]",
         extra=lambda: (torch.randn(2 * SEQLEN - 1, HEADS, dtype=torch.float64),)),
    Case("swin_window", swin_window, extra=lambda: (torch.randn(9, HEADS, dtype=torch.float64),
                                                    torch.randint(0, 9, (SEQLEN, SEQLEN)))),
    Case("sink_column", sink_column, program(keep=CAUSAL, sink="aux0[h]", empty_row="zero"), "float64[1]",
         extra=_SLOPES),
    Case("leading_zero_sink", leading_zero_sink, program(sink="0.0", empty_row="zero")),
    Case("softmax_plus_one", softmax_plus_one, program(sink="0.0", empty_row="zero")),
    Case("stable_softmax_plus_one", stable_softmax_plus_one, program(sink="0.0", empty_row="zero")),
    Case("dense_contraction_bias", dense_contraction_bias, program("score + aux0[b, h, q_idx, kv_idx]"), "float64[4]",
         extra=lambda: (torch.randn(SEQLEN, SEQLEN, HEAD_DIM, dtype=torch.float64),)),
    Case("temperature_per_row", temperature_per_row, program("score * aux0[b, q_idx]"), "float64[2]",
         extra=lambda: (torch.rand(BATCH, SEQLEN, dtype=torch.float64),)),
    Case("gated_score", gated_score, program("score * sigmoid(score)")),
)  # fmt: skip
