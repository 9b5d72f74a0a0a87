"""score_mods of the attention-gym gallery, written anew: biases, caps, tables, graphs, activations, pages."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import noop_mask

from fa4_inductor.errors import DeclineReason
from tests.cases.flex_case import BATCH, CAUSAL, HEADS, SEQLEN, FlexCase, Mod
from tests.cases.flex_masks import PAGE, PAGES, causal, page_owner, paged


def unchanged(score, b, h, q_idx, kv_idx):
    return score


def causal_in_score(score, b, h, q_idx, kv_idx):
    return torch.where(q_idx >= kv_idx, score, -float("inf"))


def relative(score, b, h, q_idx, kv_idx):
    return score + (q_idx - kv_idx)


def by_head(score, b, h, q_idx, kv_idx):
    return score + 2 * h


def checkerboard(score, b, h, q_idx, kv_idx):
    score = torch.where(torch.abs(kv_idx - q_idx) % 2 == 1, score * 0.5, score)
    return torch.where(torch.abs(kv_idx - q_idx) % 2 == 0, score * 2.0, score)


def alibi_formula(heads: int = HEADS):
    def bias(score, b, h, q_idx, kv_idx):
        return score + (kv_idx - q_idx) * torch.exp2(-((h + 1) * 8.0 / heads))

    return bias


def alibi_slopes():
    slopes = torch.exp2(-8.0 * torch.arange(1, HEADS + 1) / HEADS)
    return lambda score, b, h, q_idx, kv_idx: score + slopes[h] * (kv_idx - q_idx)


def softcap(cap):
    """`cap` is an int, a float or a 0-dim tensor."""
    return lambda score, b, h, q_idx, kv_idx: cap * torch.tanh(score / cap)


@torch.library.custom_op("fa4_inductor_cases::fast_tanh", mutates_args=())
def fast_tanh(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x)


@fast_tanh.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@fast_tanh.register_vmap
def _(info, in_dims, x):
    return torch.tanh(x), in_dims[0]


def softcap_by_custom_op(cap: int):
    return lambda score, b, h, q_idx, kv_idx: cap * fast_tanh(score / cap)


def sandwich():
    """Position products of sinusoids: a table by distance, a factor by head."""
    frequencies = 1.0 / 10000 ** (2 * torch.arange(8) / 16)
    distances = torch.arange(2 * SEQLEN) - (SEQLEN - 1.0)
    table = torch.cos(distances.abs()[:, None] * frequencies).sum(-1)
    factor = HEADS / (8.0 * torch.arange(1.0, HEADS + 1))
    offset = SEQLEN - 1
    return lambda score, b, h, q_idx, kv_idx: score + table[q_idx - kv_idx + offset] * factor[h]


def graph_distances():
    """Graphormer: a bias by head and by the distance of two nodes."""
    distances = torch.randint(0, 6, (BATCH, SEQLEN, SEQLEN), dtype=torch.int32)
    bias = torch.randn(HEADS, 6)
    return lambda score, b, h, q_idx, kv_idx: score + bias[h, distances[b, q_idx, kv_idx]]


def graph_edges(steps: int = 3):
    """Graphormer: the mean of biases of the edges on a path."""
    edges = torch.randint(0, 5, (BATCH, SEQLEN, SEQLEN, steps), dtype=torch.int32)
    length = torch.randint(0, steps + 1, (BATCH, SEQLEN, SEQLEN), dtype=torch.int32)
    tables = [t.contiguous() for t in torch.randn(HEADS, steps, 5).unbind(1)]

    def bias(score, b, h, q_idx, kv_idx):
        n, total = length[b, q_idx, kv_idx], 0.0
        for i, table in enumerate(tables):
            total = total + torch.where(n > i, table[h, edges[b, q_idx, kv_idx, i]], 0.0)
        return score + total / torch.clamp(n, min=1)

    return bias


def activation(function, offset: float = 1.0):
    """log(f(s) + offset): the softmax then divides f(s) + offset by its sum."""
    return lambda score, b, h, q_idx, kv_idx: torch.log(function(score) + offset)


def rope_term(scale: float = 0.25):
    """Latent attention (MLA): the product of the rotary parts of q and k is added to the score."""
    q_rope, k_rope = torch.randn(BATCH, HEADS, SEQLEN, 8), torch.randn(BATCH, 1, SEQLEN, 8)

    def mod(score, b, h, q_idx, kv_idx):
        return score + scale * torch.dot(q_rope[b, h, q_idx], k_rope[b, h // HEADS, kv_idx])

    return mod


def paged_score(inner: Mod):
    owner = page_owner()

    def mod(score, b, h, q_idx, kv_idx):
        block = owner[b, kv_idx // PAGE]
        logical = block * PAGE + kv_idx % PAGE
        return torch.where(block >= 0, inner(score, b, h, q_idx, logical), -float("inf"))

    return mod


def outside_window_penalty(size: int):
    """A score that drops to a finite floor outside a window is no mask."""
    return lambda score, b, h, q_idx, kv_idx: torch.where((q_idx - kv_idx).abs() > size, score - 5.0, score)


def t5_bias(buckets: int = 16, farthest: int = 40):
    table = torch.randn(buckets, HEADS)

    def mod(score, b, h, q_idx, kv_idx):
        distance = kv_idx - q_idx
        half = buckets // 2
        bucket = torch.where(distance > 0, half, 0)
        distance = torch.abs(distance)
        near = half // 2
        ratio = torch.log(torch.clamp(distance, min=1) / near) / math.log(farthest / near)
        far = torch.clamp(near + (ratio * (half - near)).to(torch.int64), max=half - 1)
        return score + table[bucket + torch.where(distance < near, distance, far), h]

    return mod


def bias_table():
    table = torch.randn(HEADS, 2 * SEQLEN - 1)
    return lambda score, b, h, q_idx, kv_idx: score + table[h, q_idx - kv_idx + SEQLEN - 1]


def dense_bias():
    bias = torch.randn(BATCH, 1, SEQLEN, SEQLEN)
    return lambda score, b, h, q_idx, kv_idx: score + bias[b, 0, q_idx, kv_idx]


def temperature_by_head():
    temperature = torch.rand(HEADS) + 0.5
    return lambda score, b, h, q_idx, kv_idx: score / temperature[h]


def length_scaling(trained: int):
    """Log-length scaling: sharper for queries beyond the trained length."""
    return lambda score, b, h, q_idx, kv_idx: score * torch.clamp(torch.log2(q_idx + 2.0) / math.log2(trained), min=1.0)


def composed(*mods: Mod):
    def mod(score, b, h, q_idx, kv_idx):
        for inner in mods:
            score = inner(score, b, h, q_idx, kv_idx)
        return score

    return mod


def learned_sink_tokens(count: int, strength: float):
    return lambda score, b, h, q_idx, kv_idx: score + strength * (kv_idx < count)


def above(threshold: float):
    """A threshold on the score itself; rows below it everywhere give 0."""
    return lambda score, b, h, q_idx, kv_idx: torch.where(score > threshold, score, -float("inf"))


def document_penalty():
    document = torch.arange(SEQLEN) // 20
    penalty = torch.tensor(2.5)

    def mod(score, b, h, q_idx, kv_idx):
        return torch.where(document[q_idx] == document[kv_idx], score, score - penalty)

    return mod


def _case(name, origin, score, text=None, aux="", keep="True", **more):
    program = None if text is None else f"{text}; keep={keep}; empty_row=zero"
    return FlexCase(name, origin, score_mod=score, program=program, aux=aux, **more)


CASES = (
    _case("unchanged", "examples/flex_attn", lambda: unchanged, "scale=0.25; score=score"),
    _case("causal_in_score", "examples/flex_attn", lambda: causal_in_score, "scale=0.25; score=score", keep=CAUSAL),
    _case("relative", "examples/paged_attention", lambda: relative),
    _case("by_head", "examples/paged_attention", lambda: by_head),
    _case("checkerboard", "examples/flex_attn", lambda: checkerboard),
    _case("alibi_formula", "mods/alibi", alibi_formula),
    _case("alibi_slopes", "examples/flex_attn", alibi_slopes, mask=lambda: causal),
    _case("softcap", "mods/softcapping", lambda: softcap(20), "scale=0.0125; score=tanh(score) * 20.0"),
    _case("softcap_with_float", "mods/softcapping", lambda: softcap(20.0), "scale=0.0125; score=tanh(score) * 20.0"),
    _case("softcap_with_tensor", "", lambda: softcap(torch.tensor(20.0))),
    _case("softcap_by_custom_op", "mods/softcapping", lambda: softcap_by_custom_op(20),
          decline=DeclineReason.UNSUPPORTED_OP),
    _case("sandwich", "mods/sandwich", sandwich, mask=lambda: causal),
    _case("graph_distances", "mods/graphormer", graph_distances),
    _case("graph_edges", "mods/graphormer", graph_edges),
    _case("gelu_activation", "mods/activation", lambda: activation(F.gelu)),
    _case("relu_activation", "mods/activation", lambda: activation(torch.relu)),
    _case("sigmoid_activation", "mods/activation", lambda: activation(torch.sigmoid)),
    _case("rope_term", "mods/latent_attention", rope_term, decline=DeclineReason.UNSUPPORTED_OP),
    _case("paged_relative", "examples/paged_attention", lambda: paged_score(relative), mask=lambda: paged(noop_mask),
          mask_sizes=(BATCH, None), kv_batch=1, seqlen_k=PAGE * PAGES),
    _case("outside_window_penalty", "examples/debug_score_mod", lambda: outside_window_penalty(4)),
    _case("t5_bias", "", t5_bias),
    _case("bias_table", "", bias_table, "scale=0.25; score=score + aux0[h, q_idx - kv_idx + 63]", "float32[2]"),
    _case("dense_bias", "", dense_bias),
    _case("temperature_by_head", "", temperature_by_head),
    _case("length_scaling", "", lambda: length_scaling(16), mask=lambda: causal),
    _case("softcap_then_alibi", "", lambda: composed(softcap(20), alibi_formula()), mask=lambda: causal),
    _case("sink_tokens", "", lambda: learned_sink_tokens(4, 1.5)),
    _case("document_penalty", "", document_penalty),
    _case("above_threshold", "", lambda: above(1.0)),
)  # fmt: skip
