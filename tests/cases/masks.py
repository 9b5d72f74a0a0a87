"""Masks in many spellings: causal, window, padding, packed documents, finfo.min stacks, SDPA masks, vmap."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fa4_inductor.errors import DeclineReason
from tests.cases.case import BATCH, CAUSAL, HEAD_DIM, HEADS, SEQLEN, Case, lower_triangle, padding, program

SCALE = HEAD_DIM**-0.5
MIN = torch.finfo(torch.float32).min
WINDOW = "(kv_idx <= q_idx) & (kv_idx >= q_idx - 4)"


def scores_of(q, k):
    return q @ k.transpose(-1, -2) * SCALE


def arange(n=SEQLEN):
    return torch.arange(n)


def tril_inf(q, k, v):
    mask = torch.tril(torch.ones(SEQLEN, SEQLEN, dtype=torch.bool))
    return scores_of(q, k).masked_fill(~mask, -torch.inf).softmax(-1) @ v


def triu_additive(q, k, v):
    mask = torch.triu(torch.full((SEQLEN, SEQLEN), -torch.inf, dtype=q.dtype), diagonal=1)
    return (scores_of(q, k) + mask).softmax(-1) @ v


def commuted_additive(q, k, v):
    mask = torch.where(arange()[None] <= arange()[:, None], 0.0, MIN).to(q.dtype)
    return (mask + scores_of(q, k)).softmax(-1) @ v


def where_scalar(q, k, v):
    keep = arange()[:, None] >= arange()[None]
    return torch.where(keep, scores_of(q, k), torch.finfo(q.dtype).min).softmax(-1) @ v


def masked_in_place(q, k, v):
    scores = scores_of(q, k)
    scores.masked_fill_(arange()[None] > arange()[:, None], -torch.inf)
    return scores.softmax(-1) @ v


def bottom_right(q, k, v):
    offset = k.shape[-2] - q.shape[-2]
    keep = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(diagonal=offset)
    return scores_of(q, k).masked_fill(~keep, -torch.inf).softmax(-1) @ v


def window(q, k, v):
    i, j = arange()[:, None], arange()[None]
    return scores_of(q, k).masked_fill(~((j <= i) & (i - j < 5)), -torch.inf).softmax(-1) @ v


def window_by_triangles(q, k, v):
    keep = torch.ones(SEQLEN, SEQLEN, dtype=torch.bool).tril().triu(diagonal=-4)
    return scores_of(q, k).masked_fill(keep.logical_not(), MIN).softmax(-1) @ v


def chunked(q, k, v):
    i, j = arange()[:, None], arange()[None]
    return scores_of(q, k).masked_fill((i // 8 != j // 8) | (j > i), -torch.inf).softmax(-1) @ v


def one_minus_mask(q, k, v, mask):
    bias = (1.0 - mask[:, None, None, :].to(q.dtype)) * torch.finfo(q.dtype).min
    return (scores_of(q, k) + bias).softmax(-1) @ v


def integer_mask(q, k, v, mask):
    return scores_of(q, k).masked_fill(mask[:, None, None, :] == 0, -torch.inf).softmax(-1) @ v


def float_mask(q, k, v, mask):
    bias = (1.0 - mask[:, None, None, :]) * MIN
    return (scores_of(q, k) + bias).softmax(-1) @ v


def user_additive(q, k, v, bias):
    return (scores_of(q, k) + bias).softmax(-1) @ v


def small_fill(q, k, v, mask):
    return scores_of(q, k).masked_fill(~mask[:, None, None], -1e4).softmax(-1) @ v


def nested_fills(q, k, v, mask):
    scores = torch.where(arange()[None] <= arange()[:, None], scores_of(q, k), MIN)
    return scores.masked_fill(~mask[:, None, None], MIN).softmax(-1) @ v


def summed_fills(q, k, v, mask):
    """Two finfo.min in one place overflow to -inf: a row of both kinds is uniform over the places with one of them."""
    lowest = torch.full((), torch.finfo(q.dtype).min, dtype=q.dtype)
    causal = torch.where(arange()[None] <= arange()[:, None], lowest.new_zeros(()), lowest)
    pad = torch.where(mask[:, None, None], lowest.new_zeros(()), lowest)
    return (scores_of(q, k) + causal + pad).softmax(-1) @ v


def summed_fills_in_range(q, k, v, mask):
    """Two fp32 minima add up to a finite float64."""
    causal = torch.where(arange()[None] <= arange()[:, None], 0.0, MIN).to(q.dtype)
    pad = torch.where(mask[:, None, None], 0.0, MIN).to(q.dtype)
    return (scores_of(q, k) + causal + pad).softmax(-1) @ v


def unequal_fills(q, k, v, mask):
    """In a row that keeps nothing the higher fill wins."""
    scores = torch.where(arange()[None] <= arange()[:, None], scores_of(q, k), -1e38)
    return torch.where(mask[:, None, None], scores, -1e37).softmax(-1) @ v


def unequal_fills_summed(q, k, v, mask):
    """Minima of two dtypes (GPT-Neo in bf16): where both drop a key it is -inf."""
    causal = torch.where(arange()[None] <= arange()[:, None], scores_of(q, k), MIN)
    pad = torch.where(mask[:, None, None], 0.0, torch.finfo(torch.bfloat16).min)
    return (causal + pad.to(q.dtype)).softmax(-1) @ v


def clamped_sum(q, k, v, mask):
    lowest = torch.full((), torch.finfo(q.dtype).min, dtype=q.dtype)
    causal = torch.where(arange()[None] <= arange()[:, None], lowest.new_zeros(()), lowest)
    pad = torch.where(mask[:, None, None], lowest.new_zeros(()), lowest)
    scores = torch.max(scores_of(q, k) + causal + pad, lowest)
    return scores.softmax(-1) @ v


def scalar_tensor_fill(q, k, v, mask):
    """GPT-Neo: a causal buffer with a 0-dim tensor as fill, plus an additive mask that overflows with it."""
    lowest = torch.tensor(torch.finfo(q.dtype).min, dtype=q.dtype, device=q.device)
    scores = torch.where(arange()[None] <= arange()[:, None], scores_of(q, k), lowest)
    pad = torch.where(mask[:, None, None], 0 * lowest, lowest)
    return (scores + pad).softmax(-1) @ v


def bfloat16_positions(q, k, v):
    """Positions rounded to bfloat16 before they are compared: 257 <= 256 holds there."""
    i = torch.arange(240, 240 + SEQLEN).to(torch.bfloat16)
    keep = (i[None] - 4) <= i[:, None] - 4
    return scores_of(q, k).masked_fill(~keep, -torch.inf).softmax(-1) @ v


def wrapping_mask(q, k, v, mask):
    """uint8: 0 - 1 = 255."""
    return scores_of(q, k).masked_fill(((mask - 1) > 3)[:, None, None], -torch.inf).softmax(-1) @ v


def expanded_as_scores(q, k, v, mask):
    """The mask takes its shape from the scores, which is no use of them."""
    scores = scores_of(q, k)
    scores = scores + torch.zeros_like(scores)
    return scores.masked_fill((mask == 0)[:, None, None].expand_as(scores), -torch.inf).softmax(-1) @ v


def mask_then_scale(q, k, v):
    bias = torch.triu(torch.full((SEQLEN, SEQLEN), -torch.inf, dtype=q.dtype), 1)
    return ((q @ k.mT + bias) * SCALE).softmax(-1) @ v


def fp32_minimum_narrowed(q, k, v):
    """BC-04: fp16 scores, an fp32 mask of finfo.min, softmax in fp32."""
    keep = arange()[None] <= arange()[:, None]
    mask = torch.where(keep, 0.0, torch.finfo(torch.float32).min)
    scores = q @ k.mT * SCALE + mask
    return F.softmax(scores, -1, dtype=torch.float32).to(q.dtype) @ v


def narrowed_to_inf(q, k, v):
    keep = arange()[None] <= arange()[:, None]
    mask = torch.where(keep, 0.0, torch.finfo(torch.float32).min).to(q.dtype)
    return F.softmax(q @ k.mT * SCALE + mask, -1, dtype=torch.float32).to(q.dtype) @ v


def half_minimum(q, k, v, mask):
    bias = torch.where(mask[:, None, None], 0.0, torch.finfo(q.dtype).min).to(q.dtype)
    return F.softmax(q @ k.mT * SCALE + bias, -1, dtype=torch.float32).to(q.dtype) @ v


def sdpa_causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def sdpa_bool(q, k, v, mask):
    keep = mask[:, None, None, :] & (arange()[None] <= arange()[:, None])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=keep)


def sdpa_formula_bias(q, k, v):
    bias = torch.zeros(SEQLEN, SEQLEN, dtype=q.dtype)
    bias.masked_fill_(torch.ones(SEQLEN, SEQLEN, dtype=torch.bool).triu(1), float("-inf"))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def sdpa_empty_rows(q, k, v):
    """BC-07: rows that keep nothing give 0."""
    keep = (arange()[:, None] < 4) & (arange()[None] <= arange()[:, None])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=keep)


def eager_empty_rows(q, k, v):
    keep = (arange()[:, None] < 4) & (arange()[None] <= arange()[:, None])
    return scores_of(q, k).masked_fill(~keep, MIN).softmax(-1) @ v


def sdpa_user_bias(q, k, v, bias):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def packed_arange(q, k, v):
    """Packed-sequence detection on positions that never restart keeps everything."""
    position = arange()[None].expand(BATCH, -1)
    first = position[:, :1] - 1
    document = (torch.diff(position, prepend=first, dim=-1) != 1).cumsum(-1)
    same = document[:, None, :, None] == document[:, None, None, :]
    return scores_of(q, k).masked_fill(~(same & (arange()[None] <= arange()[:, None])), -torch.inf).softmax(-1) @ v


def packed_documents(q, k, v, position):
    first = position[:, :1] - 1
    document = (torch.diff(position, prepend=first, dim=-1) != 1).cumsum(-1)
    same = document[:, None, :, None] == document[:, None, None, :]
    return scores_of(q, k).masked_fill(~(same & (arange()[None] <= arange()[:, None])), -torch.inf).softmax(-1) @ v


def vmapped(q, k, v, mask):
    def keep(b, i, j):
        return (j <= i) & mask[b, j]

    f = torch.vmap(torch.vmap(torch.vmap(keep, (None, None, 0)), (None, 0, None)), (0, None, None))
    allowed = f(arange(BATCH), arange(), arange())[:, None]
    return scores_of(q, k).masked_fill(~allowed, -torch.inf).softmax(-1) @ v


def vmapped_in_place(q, k, v, mask):
    """vmap levels and in-place ops in one slice."""
    f = torch.vmap(torch.vmap(lambda i, j: j <= i, (None, 0)), (0, None))
    scores = q @ k.mT
    scores *= SCALE
    scores.masked_fill_(~(f(arange(), arange()) & mask[:, None, None]), -torch.inf)
    return scores.softmax(-1) @ v


def assigned_block(q, k, v):
    keep = torch.zeros(SEQLEN, SEQLEN, dtype=torch.bool)
    keep[:, :6] = True
    keep[6:, 6:] = torch.ones(SEQLEN - 6, SEQLEN - 6, dtype=torch.bool).tril()
    return scores_of(q, k).masked_fill(~keep, -torch.inf).softmax(-1) @ v


def dense_user_mask(q, k, v, keep):
    return scores_of(q, k).masked_fill(~keep, -torch.inf).softmax(-1) @ v


def concatenated_masks(q, k, v, other):
    """Two streams of keys (ProphetNet): a causal one and one of which each query sees its own position."""
    i, j = arange()[:, None], arange()[None]
    masks = [torch.where(m, 0.0, MIN).to(q.dtype) for m in (j <= i, i == j)]
    k, v = torch.cat([k, other], 2), torch.cat([v, other], 2)
    return (scores_of(q, k) + torch.cat(masks, 1)).softmax(-1) @ v


def concatenated_fills(q, k, v, other):
    """One stream is masked with -inf, the other with finfo.min: rows without keys are uniform over the second."""
    i, j = arange()[:, None], arange()[None]
    masks = [torch.where(m, 0.0, fill).to(q.dtype) for m, fill in ((j < i, -torch.inf), (i + j < 5, MIN))]
    k, v = torch.cat([k, other], 2), torch.cat([v, other], 2)
    return (scores_of(q, k) + torch.cat(masks, 1)).softmax(-1) @ v


def additive_mask_compared(q, k, v, mask):
    """Of an additive mask only the zeros count (Gemma 4's audio encoder)."""
    causal = torch.where(arange()[None] <= arange()[:, None], 0.0, MIN)
    both = torch.where(mask[:, None, None], causal, MIN)
    return scores_of(q, k).masked_fill(both != 0, -torch.inf).softmax(-1) @ v


def _pad():
    return (padding(),)


def _keys():
    generator = torch.Generator().manual_seed(11)
    return (torch.randn(BATCH, HEADS, SEQLEN, HEAD_DIM, generator=generator, dtype=torch.float64),)


def _positions():
    return (torch.cat([torch.arange(10), torch.arange(SEQLEN - 10)])[None].repeat(BATCH, 1),)


_MEAN_PAD = program(keep="aux0[b, kv_idx]", empty_row="mean")
_CAUSAL_INF = program(keep=CAUSAL)
_CAUSAL_MEAN = program(keep=CAUSAL, empty_row="mean")
_BOTH = f"({CAUSAL}) & aux0[b, kv_idx]"
_HALF = dict(dtype=torch.float16)
CASES = (
    *(Case(f.__name__, f, _CAUSAL_INF) for f in (tril_inf, triu_additive, masked_in_place, packed_arange)),
    *(Case(f.__name__, f, _CAUSAL_MEAN) for f in (commuted_additive, where_scalar)),
    Case("mask_then_scale", mask_then_scale, _CAUSAL_INF),
    Case("bottom_right", bottom_right, program(keep="kv_idx <= q_idx + 16"), seqlen_k=40),
    Case("window", window, program(keep=WINDOW)),
    Case("window_by_triangles", window_by_triangles, program(keep=WINDOW, empty_row="mean")),
    Case("chunked", chunked),
    Case("one_minus_mask", one_minus_mask, _MEAN_PAD, "bool[2]", extra=_pad),
    Case("integer_mask", integer_mask, program(keep="~aux0[b, kv_idx]"), "bool[2]", extra=lambda: (padding().int(),)),
    Case("float_mask", float_mask, program("score + aux0[b, kv_idx]"), "float64[2]",
         extra=lambda: (padding().double(),)),
    Case("user_additive", user_additive, program("score + aux0[h, q_idx, kv_idx]"), "float64[3]",
         extra=lambda: (torch.randn(1, HEADS, SEQLEN, SEQLEN, dtype=torch.float64),)),
    Case("small_fill", small_fill, program("where(aux0[b, kv_idx], score, -10000.0)"), "bool[2]", extra=_pad),
    Case("nested_fills", nested_fills, program(keep=_BOTH, empty_row="mean"), "bool[2]", extra=_pad),
    Case("summed_fills", summed_fills, extra=_pad),
    Case("summed_fills_in_range", summed_fills_in_range, decline=DeclineReason.UNSUPPORTED_DTYPE, extra=_pad),
    Case("unequal_fills", unequal_fills, extra=_pad),
    Case("unequal_fills_summed", unequal_fills_summed, extra=_pad, dtype=torch.float32),
    Case("scalar_tensor_fill", scalar_tensor_fill, extra=_pad),
    Case("bfloat16_positions", bfloat16_positions),
    Case("wrapping_mask", wrapping_mask, program(keep="~aux0[b, kv_idx]"), "bool[2]",
         extra=lambda: (padding().to(torch.uint8),)),
    Case("expanded_as_scores", expanded_as_scores, program(keep="~aux0[b, kv_idx]"), "bool[2]",
         extra=lambda: (padding().int(),)),
    Case("clamped_sum", clamped_sum, program(keep=_BOTH, empty_row="mean"), "bool[2]", extra=_pad),
    Case("fp32_minimum_narrowed", fp32_minimum_narrowed, _CAUSAL_MEAN, **_HALF),
    Case("narrowed_to_inf", narrowed_to_inf, _CAUSAL_INF, **_HALF),
    Case("half_minimum", half_minimum, _MEAN_PAD, "bool[2]", extra=_pad, **_HALF),
    Case("sdpa_causal", sdpa_causal, program(keep=CAUSAL, empty_row="zero")),
    Case("sdpa_bool", sdpa_bool, program(keep=_BOTH, empty_row="zero"), "bool[2]", extra=_pad),
    Case("sdpa_formula_bias", sdpa_formula_bias, program(keep=CAUSAL, empty_row="zero")),
    Case("sdpa_empty_rows", sdpa_empty_rows, program(keep=f"(q_idx <= 3) & ({CAUSAL})", empty_row="zero")),
    Case("eager_empty_rows", eager_empty_rows, program(keep=f"(q_idx <= 3) & ({CAUSAL})", empty_row="mean")),
    Case("sdpa_user_bias", sdpa_user_bias, program("score + aux0[q_idx, kv_idx]", empty_row="zero"), "float64[2]",
         extra=lambda: (torch.randn(SEQLEN, SEQLEN, dtype=torch.float64),)),
    Case("packed_documents", packed_documents, program(keep=f"({CAUSAL}) & (aux0[b, q_idx] == aux0[b, kv_idx])"),
         "int64[2]", extra=_positions),
    Case("vmapped", vmapped, program(keep=_BOTH), "bool[2]", extra=_pad),
    Case("vmapped_in_place", vmapped_in_place, program(keep=_BOTH), "bool[2]", extra=_pad),
    Case("assigned_block", assigned_block),
    Case("additive_mask_compared", additive_mask_compared, program(keep=_BOTH), "bool[2]", extra=_pad),
    Case("concatenated_masks", concatenated_masks,
         program(keep="where(kv_idx <= 23, kv_idx <= q_idx, kv_idx == q_idx + 24)", empty_row="mean"), extra=_keys),
    Case("concatenated_fills", concatenated_fills, extra=_keys),
    Case("dense_user_mask", dense_user_mask, program(keep="aux0[q_idx, kv_idx]"), "bool[2]",
         extra=lambda: (lower_triangle(),)),
)  # fmt: skip
