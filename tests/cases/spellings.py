"""The same attention in many spellings: scale, softmax, products, layouts, dropout that does nothing."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from tests.cases.case import BATCH, HEAD_DIM, HEADS, KV_HEADS, SEQLEN, Case, program

SCALE = HEAD_DIM**-0.5


def plain(q, k, v):
    return torch.softmax(q @ k.transpose(-1, -2) * SCALE, -1) @ v


def divided(q, k, v):
    return torch.matmul(F.softmax(torch.matmul(q, k.mT) / math.sqrt(HEAD_DIM), dim=-1), v)


def scaled_q(q, k, v):
    return torch.softmax((q * SCALE) @ k.transpose(-1, -2), -1) @ v


def scaled_both(q, k, v):
    return torch.softmax((q * SCALE**0.5) @ (k * SCALE**0.5).transpose(-1, -2), -1) @ v


def tensor_scale(q, k, v):
    return torch.softmax(q @ k.transpose(-1, -2) / torch.full((), 4.0, dtype=q.dtype), -1) @ v


def odd_scale(q, k, v):
    return torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(8), -1) @ v


def unit_scale(q, k, v):
    return torch.softmax(q @ k.transpose(-1, -2), -1) @ v


def scalar_parameter(q, k, v, t):
    return torch.softmax(q @ k.transpose(-1, -2) / t, -1) @ v


def head_parameter(q, k, v, t):
    return torch.softmax(q @ k.transpose(-1, -2) * t, -1) @ v


def head_parameter_on_q(q, k, v, t):
    return torch.softmax((q * t) @ k.transpose(-1, -2), -1) @ v


def log_head_parameter(q, k, v, t):
    return torch.softmax(q @ k.transpose(-1, -2) * t.clamp(max=2.0).exp(), -1) @ v


def einsum(q, k, v):
    p = torch.einsum("bhqd,bhkd->bhqk", q, k).mul(SCALE).softmax(-1)
    return torch.einsum("bhqk,bhkd->bhqd", p, v)


def einsum_bshd(q, k, v):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    p = torch.softmax(torch.einsum("bqhd,bkhd->bhqk", q, k) * SCALE, dim=-1)
    return torch.einsum("bhqk,bkhd->bqhd", p, v)


def flat_bmm(q, k, v):
    q, k, v = (t.reshape(BATCH * HEADS, -1, HEAD_DIM) for t in (q, k, v))
    p = F.softmax(torch.bmm(q, k.transpose(1, 2)) * SCALE, dim=-1)
    return torch.bmm(p, v).view(BATCH, HEADS, -1, HEAD_DIM).transpose(1, 2)


def baddbmm(q, k, v):
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    scores = torch.baddbmm(q.new_empty(q.shape[0], q.shape[1], k.shape[1]), q, k.mT, beta=0, alpha=SCALE)
    return scores.softmax(-1).bmm(v)


def hand_written(q, k, v):
    scores = q @ k.transpose(-1, -2) * SCALE
    scores = scores - scores.amax(-1, keepdim=True)
    e = scores.exp()
    return (e / e.sum(-1, keepdim=True)) @ v


def hand_written_max(q, k, v):
    scores = q @ k.transpose(-1, -2) * SCALE
    e = torch.exp(scores - scores.max(dim=-1, keepdim=True).values)
    return torch.matmul(torch.div(e, torch.sum(e, dim=-1, keepdim=True)), v)


def log_sum_exp(q, k, v):
    scores = q @ k.transpose(-1, -2) * SCALE
    return torch.exp(scores - torch.logsumexp(scores, -1, keepdim=True)) @ v


def casts(q, k, v):
    scores = q @ k.transpose(-1, -2) * SCALE
    return F.softmax(scores, dim=-1, dtype=torch.float64).to(q.dtype) @ v


def idle_dropout(q, k, v):
    p = F.dropout(torch.softmax(q @ k.transpose(-1, -2) * SCALE, -1), p=0.3, training=False)
    return F.dropout(p, p=0.0, training=True) @ v


def repeated_kv(q, k, v):
    def repeat(x):
        return x[:, :, None].expand(BATCH, KV_HEADS, 2, x.shape[2], HEAD_DIM).reshape(BATCH, HEADS, -1, HEAD_DIM)

    return torch.softmax(q @ repeat(k).transpose(2, 3) * SCALE, -1) @ repeat(v)


def interleaved_kv(q, k, v):
    k, v = (t.repeat_interleave(2, dim=1) for t in (k, v))
    return torch.softmax(q @ k.transpose(2, 3) * SCALE, -1) @ v


def multi_query(q, k, v):
    return torch.softmax(q @ k.transpose(2, 3) * SCALE, -1) @ v


def fused_qkv(q, k, v):
    qkv = torch.stack([q, k, v], 2).permute(0, 3, 1, 2, 4).reshape(BATCH, SEQLEN, -1).sin()
    q, k, v = qkv.view(BATCH, SEQLEN, HEADS, 3, HEAD_DIM).unbind(3)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return (torch.softmax(q @ k.mT * SCALE, -1) @ v).transpose(1, 2).reshape(BATCH, SEQLEN, -1)


def chunked_qkv(q, k, v):
    packed = torch.cat([t.transpose(1, 2).reshape(BATCH, SEQLEN, -1) for t in (q, k, v)], -1).cos()
    q, k, v = (t.view(BATCH, SEQLEN, HEADS, HEAD_DIM).transpose(1, 2) for t in packed.chunk(3, -1))
    return torch.softmax(q @ k.mT * SCALE, -1) @ v


def single_head(q, k, v):
    q, k, v = (t[:, 0] for t in (q, k, v))
    return torch.softmax(q @ k.mT * SCALE, -1) @ v


def two_dimensional(q, k, v):
    q, k, v = (t[0, 0] for t in (q, k, v))
    return torch.softmax(q @ k.mT * SCALE, -1) @ v


def one_query(q, k, v):
    return torch.softmax(q[:, :, -1:] @ k.mT * SCALE, -1) @ v


def one_key(q, k, v):
    return torch.softmax(q @ k[:, :, :1].mT * SCALE, -1) @ v[:, :, :1]


def transposed_scores(q, k, v):
    return torch.softmax((k @ q.mT).mT * SCALE, -1) @ v


def transposed_probabilities(q, k, v):
    return torch.softmax(k @ q.mT * SCALE, -2).mT @ v


def five_dimensional(q, k, v):
    q, k, v = (t.reshape(BATCH, 2, HEADS // 2, SEQLEN, HEAD_DIM) for t in (q, k, v))
    return torch.softmax(q @ k.mT * SCALE, -1) @ v


def grouped_einsum(q, k, v):
    q = q.view(BATCH, KV_HEADS, HEADS // KV_HEADS, SEQLEN, HEAD_DIM)
    p = (torch.einsum("bhgqd,bhkd->bhgqk", q, k) * SCALE).softmax(-1)
    return torch.einsum("bhgqk,bhkd->bhgqd", p, v)


def six_dimensional(q, k, v):
    """Two batch-like dimensions and two head-like ones, none of them a view of the input."""
    q, k, v = (t.reshape(BATCH, 1, 2, 2, SEQLEN, HEAD_DIM).expand(-1, 3, -1, -1, -1, -1).sin() for t in (q, k, v))
    return torch.softmax(q @ k.mT * SCALE, -1) @ v


def in_place(q, k, v):
    scores = q @ k.mT
    scores *= SCALE
    scores.add_(0.5)
    return scores.softmax(-1) @ v


def sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def sdpa_grouped(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, scale=0.1, enable_gqa=True)


def sdpa_three_dimensional(q, k, v):
    return F.scaled_dot_product_attention(q[:, 0], k[:, 0], v[:, 0])


def cross(q, k, v):
    return torch.softmax(q @ k.mT * SCALE, -1) @ v


_FULL = program()
_SDPA = program(empty_row="zero")
CASES = (
    *(
        Case(f.__name__, f, _FULL)
        for f in (
            plain, divided, scaled_q, scaled_both, tensor_scale, einsum, einsum_bshd, flat_bmm, baddbmm, hand_written,
            hand_written_max, log_sum_exp, casts, idle_dropout, fused_qkv, chunked_qkv, single_head, two_dimensional,
            one_query, one_key, five_dimensional, transposed_scores,
        )
    ),
    Case("odd_scale", odd_scale, program(scale=1 / math.sqrt(8))),
    Case("unit_scale", unit_scale, program(scale=1.0)),
    Case("scalar_parameter", scalar_parameter, program("score / aux0[()]", scale=1.0), "float64[0]",
         extra=lambda: (torch.tensor(3.0, dtype=torch.float64),)),
    Case("head_parameter", head_parameter, program("score * aux0[h]", scale=1.0), "float64[1]",
         extra=lambda: (torch.rand(HEADS, 1, 1, dtype=torch.float64),)),
    Case("head_parameter_on_q", head_parameter_on_q, program("score * aux0[h]", scale=1.0), "float64[1]",
         extra=lambda: (torch.rand(HEADS, 1, 1, dtype=torch.float64),)),
    Case("log_head_parameter", log_head_parameter, program("score * aux0[h]", scale=1.0), "float64[1]",
         extra=lambda: (torch.rand(HEADS, 1, 1, dtype=torch.float64),)),
    Case("repeated_kv", repeated_kv, _FULL, kv_heads=KV_HEADS),
    Case("interleaved_kv", interleaved_kv, _FULL, kv_heads=KV_HEADS),
    Case("multi_query", multi_query, _FULL, kv_heads=1),
    Case("grouped_einsum", grouped_einsum, _FULL, kv_heads=KV_HEADS),
    Case("six_dimensional", six_dimensional, _FULL),
    Case("cross", cross, _FULL, seqlen_k=40),
    Case("in_place", in_place, program("score + 0.5")),
    Case("sdpa", sdpa, _SDPA),
    Case("sdpa_grouped", sdpa_grouped, program(scale=0.1, empty_row="zero"), kv_heads=KV_HEADS),
    Case("sdpa_three_dimensional", sdpa_three_dimensional, _SDPA),
    Case("transposed_probabilities", transposed_probabilities, _FULL),
)  # fmt: skip
