"""Masks over structured sequences: packed documents, prefixes, blocks, windows, images inside text, caches."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fa4_inductor.errors import DeclineReason
from tests.cases.case import BATCH, CAUSAL, HEAD_DIM, SEQLEN, Case, padding, program

SCALE = HEAD_DIM**-0.5
MIN = torch.finfo(torch.float32).min


def attend(q, k, v, keep, fill=-torch.inf):
    return (q @ k.mT * SCALE).masked_fill(~keep, fill).softmax(-1) @ v


def arange(n=SEQLEN):
    return torch.arange(n)


def causal():
    return arange()[None] <= arange()[:, None]


def segment_ids(q, k, v, seg):
    return attend(q, k, v, (seg[:, None, :, None] == seg[:, None, None, :]) & causal())


def searchsorted(q, k, v, cu):
    doc = torch.searchsorted(cu, arange(), right=True)
    return attend(q, k, v, (doc[:, None] == doc[None]) & causal())


def bucketize(q, k, v, cu):
    doc = torch.bucketize(arange(), cu, right=True)
    return attend(q, k, v, doc[:, None] == doc[None])


def repeat_interleave(q, k, v, lengths):
    doc = torch.repeat_interleave(arange(3), lengths, output_size=SEQLEN)
    return attend(q, k, v, (doc[:, None] == doc[None]) & causal())


def cumulative_starts(q, k, v, starts):
    doc = starts.cumsum(-1)
    return attend(q, k, v, (doc[:, None, :, None] == doc[:, None, None, :]) & causal())


def restarting_positions(q, k, v, position):
    doc = (position == 0).cumsum(-1) - 1
    return attend(q, k, v, (doc[:, None, :, None] == doc[:, None, None, :]) & causal())


def end_of_text(q, k, v, ids):
    """Documents end at token 0: an exclusive count of separators."""
    doc = F.pad((ids == 0).long().cumsum(-1)[:, :-1], (1, 0))
    return attend(q, k, v, (doc[:, None, :, None] == doc[:, None, None, :]) & causal())


def block_lists(q, k, v):
    """torch.block_diag of triangles, for lengths known when the graph is captured."""
    keep = torch.block_diag(*(torch.ones(n, n).tril() for n in (5, 12, 7))).bool()
    return attend(q, k, v, keep)


def outer_product_mask(q, k, v, mask):
    m = mask.to(q.dtype)
    return attend(q, k, v, (m[:, :, None] * m[:, None, :])[:, None] > 0, MIN)


def outer_bmm_mask(q, k, v, mask):
    m = mask.to(q.dtype)
    keep = torch.bmm(m[:, :, None], m[:, None, :]).bool()[:, None]
    return attend(q, k, v, keep, MIN)


def prefix(q, k, v, length):
    i, j = arange()[:, None], arange()[None]
    return attend(q, k, v, ((j <= i) | (j < length[:, None, None]))[:, None])


def prefix_constant(q, k, v):
    keep = torch.ones(SEQLEN, SEQLEN, dtype=torch.bool).tril()
    keep[:, :7] = True
    return attend(q, k, v, keep)


def prefix_slices(q, k, v):
    mask = torch.zeros(SEQLEN, SEQLEN, dtype=q.dtype)
    mask[:7, 7:] = -torch.inf
    mask[7:, 7:] = torch.full((SEQLEN - 7, SEQLEN - 7), -torch.inf, dtype=q.dtype).triu(1)
    return (q @ k.mT * SCALE + mask).softmax(-1) @ v


def image_blocks(q, k, v, token_type):
    """Bidirectional between tokens of one image, causal elsewhere."""
    is_image = token_type == 1
    starts = is_image & ~F.pad(is_image, (1, 0))[:, :-1]
    group = torch.where(is_image, starts.int().cumsum(-1) - 1, -1)
    same = (group[:, :, None] == group[:, None, :]) & is_image[:, :, None] & is_image[:, None, :]
    return attend(q, k, v, (causal() | same)[:, None])


def token_type_mask(q, k, v, token_type):
    both = (token_type[:, :, None] == 1) & (token_type[:, None, :] == 1)
    return attend(q, k, v, (causal()[None] | both)[:, None], MIN)


def chunk_offsets(q, k, v, start):
    """Llama 4: chunks counted from the left padding."""
    i, j = arange()[:, None], arange()[None]
    keep = ((i - start[:, None, None]) // 8 == (j - start[:, None, None]) // 8) & (j <= i)
    return attend(q, k, v, keep[:, None], MIN)


def dilated(q, k, v):
    i, j = arange()[:, None], arange()[None]
    return attend(q, k, v, ((i - j) % 3 == 0) & (j <= i))


def dilated_window(q, k, v):
    gap = arange()[:, None] - arange()[None]
    return attend(q, k, v, (gap.abs() <= 6) & (gap.remainder(2) == 0))


def strided_sparse(q, k, v):
    """Sparse Transformer: a local window or every fourth column."""
    i, j = arange()[:, None], arange()[None]
    return attend(q, k, v, (j <= i) & ((i - j < 4) | (j % 4 == 3)))


def window_or_global(q, k, v):
    """BC-17: a window and a few global columns."""
    i, j = arange()[:, None], arange()[None]
    return attend(q, k, v, (j <= i) & ((i - j < 8) | (j < 4)))


def window_or_global_sdpa(q, k, v):
    i, j = arange()[:, None], arange()[None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(j <= i) & ((i - j < 8) | (j < 4)))


def window_or_global_additive(q, k, v):
    i, j = arange()[:, None], arange()[None]
    mask = torch.zeros(SEQLEN, SEQLEN, dtype=q.dtype).masked_fill(~((j <= i) & ((i - j < 8) | (j < 4))), MIN)
    return (q @ k.mT * SCALE + mask).softmax(-1) @ v


def global_tokens(q, k, v, is_global):
    """BigBird-like: a window, or a global token on either side."""
    near = (arange()[:, None] - arange()[None]).abs() <= 3
    keep = near | is_global[:, :, None] | is_global[:, None, :]
    return attend(q, k, v, keep[:, None])


def neighbourhood_2d(q, k, v):
    """NATTEN on a 4 x 6 image, kernel 3."""
    y, x = arange() // 6, arange() % 6
    keep = ((y[:, None] - y[None]).abs() <= 1) & ((x[:, None] - x[None]).abs() <= 1)
    return attend(q, k, v, keep)


def causal_frames(q, k, v):
    """Video: full attention inside a frame of 6 tokens, causal between frames."""
    frame = arange().div(6, rounding_mode="floor")
    return attend(q, k, v, frame[:, None] >= frame[None])


def tree(q, k, v, ancestors):
    """Speculative decoding: a prefix and a dense tree mask behind it."""
    keep = torch.cat([torch.ones(SEQLEN, SEQLEN - 6, dtype=torch.bool), F.pad(ancestors, (0, 0, SEQLEN - 6, 0))], 1)
    keep = keep & causal()
    return attend(q, k, v, keep)


def one_hot_comparison(q, k, v, ids):
    """Same token, by a contraction of one-hot codes."""
    code = F.one_hot(ids, 3).to(q.dtype)
    return attend(q, k, v, (code @ code.mT)[:, None] > 0.5)


def static_cache(q, k, v, position):
    """BC-26: keys of a cache of 40, of which the current positions and what is before them are valid."""
    keep = torch.arange(40)[None] <= position[:, None]
    return attend(q, k, v, keep[None, None], MIN)


def static_cache_ring(q, k, v, position):
    """A sliding cache: slot t holds position t + n * 40."""
    slot = torch.arange(40)
    newest = position[-1]
    held = newest - (newest - slot) % 40
    keep = (held >= 0) & (held[None] <= position[:, None]) & (held[None] > position[:, None] - 16)
    return attend(q, k, v, keep)


def offset_tensor(q, k, v, past):
    keep = torch.arange(40)[None] <= arange()[:, None] + past
    return attend(q, k, v, keep)


def lengths_tensor(q, k, v, lengths):
    return attend(q, k, v, (arange() < lengths[:, None])[:, None, None])


def both_lengths(q, k, v, lengths):
    valid = arange() < lengths[:, None]
    return attend(q, k, v, (valid[:, :, None] & valid[:, None, :])[:, None], MIN)


def band_part(q, k, v):
    keep = torch.ones(SEQLEN, SEQLEN).triu(-3).tril(5) == 1
    return attend(q, k, v, keep)


def triangle_indices(q, k, v):
    keep = torch.ones(SEQLEN, SEQLEN, dtype=torch.bool)
    rows, columns = torch.triu_indices(SEQLEN, SEQLEN, 1)
    keep[rows, columns] = False
    return attend(q, k, v, keep)


def cumulative_ones(q, k, v):
    """Positions counted by cumsum of ones, from 1."""
    i = torch.ones(SEQLEN, dtype=torch.long).cumsum(0)
    return attend(q, k, v, i[None] <= i[:, None])


def padded_positions(q, k, v, mask):
    """Left padding: positions from a cumsum of the mask; causal by position and padded by mask."""
    position = (mask.long().cumsum(-1) - 1).masked_fill(~mask, 1)
    keep = (position[:, None, :] <= position[:, :, None]) & mask[:, None, :]
    return attend(q, k, v, keep[:, None], MIN)


def finfo_stack(q, k, v, mask):
    """Causal and padding, both of finfo.min, filled one into the other as older decoders do."""
    causal_mask = torch.full((SEQLEN, SEQLEN), MIN, dtype=q.dtype).triu(1)[None, None].expand(BATCH, 1, -1, -1).clone()
    empty = causal_mask[..., :SEQLEN].eq(0.0) * mask[:, None, None, :].eq(0.0)
    causal_mask = causal_mask.masked_fill(empty, MIN)
    return (q @ k.mT * SCALE + causal_mask).softmax(-1) @ v


def expanded_inverted(q, k, v, mask):
    inverted = 1.0 - mask[:, None, None, :].expand(BATCH, 1, SEQLEN, SEQLEN).to(q.dtype)
    bias = inverted.masked_fill(inverted.to(torch.bool), torch.finfo(q.dtype).min)
    return (q @ k.mT * SCALE + bias).softmax(-1) @ v


def log_mask(q, k, v, mask):
    """log of a 0/1 mask: 0 and -inf."""
    return (q @ k.mT * SCALE + mask[:, None, None].to(q.dtype).log()).softmax(-1) @ v


def cross_padding(q, k, v, mask):
    return attend(q, k, v, mask[:, None, None], MIN)


def eye_excluded(q, k, v):
    """Attend to everything but oneself."""
    return attend(q, k, v, ~torch.eye(SEQLEN, dtype=torch.bool))


def diagonal_filled(q, k, v):
    scores = q @ k.mT * SCALE
    scores.diagonal(dim1=-2, dim2=-1).fill_(-torch.inf)
    return scores.softmax(-1) @ v


def scattered_mask(q, k, v, index):
    """A mask made by scatter: data."""
    keep = torch.zeros(BATCH, 1, SEQLEN, SEQLEN, dtype=torch.bool).scatter(-1, index, True)
    return attend(q, k, v, keep)


def top_k_mask(q, k, v):
    """Scores below the eighth largest of a row are dropped: depends on all scores of the row."""
    scores = q @ k.mT * SCALE
    limit = scores.topk(8, -1).values[..., -1:]
    return scores.masked_fill(scores < limit, -torch.inf).softmax(-1) @ v


def above_the_mean(q, k, v):
    scores = q @ k.mT * SCALE
    return scores.masked_fill(scores.mean(-1, keepdim=True) > scores, -torch.inf).softmax(-1) @ v


def without_the_least(q, k, v):
    scores = q @ k.mT * SCALE
    return scores.masked_fill(scores.amin(-1, keepdim=True) >= scores, -torch.inf).softmax(-1) @ v


def doubled_fill(q, k, v, mask):
    """finfo.min times 2 is -inf."""
    bias = (1.0 - mask[:, None, None].to(q.dtype)) * torch.finfo(q.dtype).min * 2
    return (q @ k.mT * SCALE + bias).softmax(-1) @ v


def score_in_mask(q, k, v, mask):
    scores = q @ k.mT * SCALE
    return scores.masked_fill((scores > 3) & ~mask[:, None, None], -torch.inf).softmax(-1) @ v


def _pad():
    return (padding(),)


def _ints(high, *shape):
    return lambda: (torch.randint(0, high, shape, generator=torch.Generator().manual_seed(1)),)


def _bools(*shape):
    return lambda: (torch.rand(shape, generator=torch.Generator().manual_seed(0)) > 0.7,)


def _segments():
    return (torch.tensor([[0] * 5 + [1] * 12 + [2] * 7, [0] * 20 + [3] * 4]),)


def _restarts():
    return (torch.cat([arange(5), arange(12), arange(7)]).repeat(BATCH, 1),)


_SAME = "aux0[b, q_idx] == aux0[b, kv_idx]"
_DOCUMENTS = dict(program=program(keep=f"({CAUSAL}) & ({_SAME})"), aux="int64[2]")
_SHARED = dict(program=program(keep=f"({CAUSAL}) & (aux0[q_idx] == aux0[kv_idx])"), aux="int64[1]")
_WINDOW = f"({CAUSAL}) & ((kv_idx >= q_idx - 7) | (kv_idx <= 3))"
_BOTH_PADDED = dict(program=program(keep="aux0[b, q_idx] & aux0[b, kv_idx]", empty_row="mean"), aux="bool[2]")
_PAD_CAUSAL = program(keep=f"({CAUSAL}) & aux0[b, kv_idx]", empty_row="mean")
CASES = (
    # Packed documents
    Case("segment_ids", segment_ids, extra=_segments, **_DOCUMENTS),
    Case("cumulative_starts", cumulative_starts, extra=_ints(2, BATCH, SEQLEN), **_DOCUMENTS),
    Case("restarting_positions", restarting_positions, extra=_restarts, **_DOCUMENTS),
    Case("end_of_text", end_of_text, extra=_ints(4, BATCH, SEQLEN), **_DOCUMENTS),
    Case("searchsorted", searchsorted, extra=lambda: (torch.tensor([5, 17, 24]),), **_SHARED),
    Case("repeat_interleave", repeat_interleave, extra=lambda: (torch.tensor([5, 12, 7]),), **_SHARED),
    Case("bucketize", bucketize, program(keep="aux0[q_idx] == aux0[kv_idx]"), "int64[1]",
         extra=lambda: (torch.tensor([5, 17, 24]),)),
    Case("block_lists", block_lists),
    Case("outer_product_mask", outer_product_mask, extra=_pad, **_BOTH_PADDED),
    Case("outer_bmm_mask", outer_bmm_mask, program(keep="bool(aux0[b, q_idx, kv_idx])", empty_row="mean"), "float64[3]",
         extra=_pad),
    Case("both_lengths", both_lengths, extra=lambda: (torch.tensor([24, 9]),), **_BOTH_PADDED),
    # Prefixes, images inside text
    Case("prefix", prefix, extra=lambda: (torch.tensor([3, 9]),)),
    Case("prefix_constant", prefix_constant, program(keep="~((kv_idx >= q_idx + 1) & (kv_idx >= 7))")),
    Case("prefix_slices", prefix_slices),
    Case("image_blocks", image_blocks, extra=_ints(2, BATCH, SEQLEN)),
    Case("token_type_mask", token_type_mask, extra=_ints(2, BATCH, SEQLEN)),
    Case("tree", tree, extra=_bools(6, 6)),
    # Windows and sparse patterns
    Case("chunk_offsets", chunk_offsets, extra=lambda: (torch.tensor([0, 5]),)),
    Case("dilated", dilated, program(keep=f"({CAUSAL}) & ((q_idx - kv_idx) % 3 == 0)")),
    Case("dilated_window", dilated_window, program(keep="(abs(q_idx - kv_idx) <= 6) & ((q_idx - kv_idx) % 2 == 0)")),
    Case("strided_sparse", strided_sparse, program(keep=f"({CAUSAL}) & ((kv_idx >= q_idx - 3) | (kv_idx % 4 == 3))")),
    Case("window_or_global", window_or_global, program(keep=_WINDOW)),
    Case("window_or_global_sdpa", window_or_global_sdpa, program(keep=_WINDOW, empty_row="zero")),
    Case("window_or_global_additive", window_or_global_additive, program(keep=_WINDOW, empty_row="mean")),
    Case("global_tokens", global_tokens, extra=_bools(BATCH, SEQLEN)),
    Case("neighbourhood_2d", neighbourhood_2d,
         program(keep="(abs(q_idx % 6 - kv_idx % 6) <= 1) & (abs(q_idx // 6 - kv_idx // 6) <= 1)")),
    Case("causal_frames", causal_frames, program(keep="kv_idx // 6 <= q_idx // 6")),
    Case("band_part", band_part, program(keep="(kv_idx <= q_idx + 5) & (kv_idx >= q_idx - 3)")),
    *(Case(f.__name__, f, program(keep="kv_idx != q_idx")) for f in (eye_excluded, diagonal_filled)),
    Case("cumulative_ones", cumulative_ones, program(keep=CAUSAL)),
    Case("triangle_indices", triangle_indices, program(keep="aux0[q_idx, kv_idx]"), "bool[2]"),
    # Caches, lengths, padding
    Case("static_cache", static_cache, program(keep="kv_idx <= aux0[q_idx]", empty_row="mean"), "int64[1]",
         extra=lambda: (torch.arange(8, 8 + SEQLEN),), seqlen_k=40),
    Case("static_cache_ring", static_cache_ring, extra=lambda: (torch.arange(80, 80 + SEQLEN),), seqlen_k=40),
    Case("offset_tensor", offset_tensor, extra=lambda: (torch.tensor(7),), seqlen_k=40),
    Case("lengths_tensor", lengths_tensor, program(keep="aux0[b, kv_idx]"), "bool[2]",
         extra=lambda: (torch.tensor([24, 9]),)),
    Case("padded_positions", padded_positions, extra=_pad),
    Case("finfo_stack", finfo_stack, _PAD_CAUSAL, "bool[2]", extra=_pad),
    Case("expanded_inverted", expanded_inverted, program(keep="aux0[b, kv_idx]", empty_row="mean"), "bool[2]",
         extra=_pad),
    Case("doubled_fill", doubled_fill, program(keep="aux0[b, kv_idx]"), "bool[2]", extra=_pad, dtype=torch.float32),
    Case("log_mask", log_mask, program(keep="aux0[b, kv_idx]"), "bool[2]", extra=_pad),
    Case("cross_padding", cross_padding, program(keep="aux0[b, kv_idx]", empty_row="mean"), "bool[2]",
         extra=lambda: (torch.arange(40) < torch.tensor([[40], [30]]),), seqlen_k=40),
    # Masks that are data, or depend on the scores
    Case("one_hot_comparison", one_hot_comparison, program(keep="aux0[b, q_idx, kv_idx] > 0.5"), "float64[3]",
         extra=_ints(3, BATCH, SEQLEN)),
    Case("scattered_mask", scattered_mask, program(keep="aux0[b, q_idx, kv_idx]"), "bool[3]",
         extra=_ints(SEQLEN, BATCH, 1, SEQLEN, 9)),
    Case("score_in_mask", score_in_mask, program("where((score > 3.0) & ~aux0[b, kv_idx], -inf, score)"), "bool[2]",
         extra=_pad),
    Case("top_k_mask", top_k_mask, decline=DeclineReason.PROBS_ESCAPE),
    Case("above_the_mean", above_the_mean, decline=DeclineReason.PROBS_ESCAPE),
    Case("without_the_least", without_the_least, decline=DeclineReason.UNSUPPORTED_OP),
)  # fmt: skip
