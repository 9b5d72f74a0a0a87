"""Logits with terms that are contractions themselves, and attention over more than one sequence dimension."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from fa4_inductor.errors import DeclineReason
from tests.cases.case import BATCH, CAUSAL, HEAD_DIM, HEADS, SEQLEN, Case, program

SCALE = HEAD_DIM**-0.5


def scores_of(q, k):
    return q @ k.transpose(-1, -2) * SCALE


# --- relative positions ---------------------------------------------------------------------------------------------
def content_to_position(q, k, v, table):
    """DeBERTa c2p: q against a table of relative positions, gathered by distance."""
    i = torch.arange(SEQLEN)
    distance = (i[:, None] - i[None] + SEQLEN - 1).expand(BATCH, HEADS, -1, -1)
    c2p = torch.gather(q @ table.mT, -1, distance)
    return ((q @ k.mT + c2p) / math.sqrt(2 * HEAD_DIM)).softmax(-1) @ v


def disentangled(q, k, v, table):
    """DeBERTa: content to position and position to content."""
    i = torch.arange(SEQLEN)
    distance = i[:, None] - i[None] + SEQLEN - 1
    scale = 1 / math.sqrt(3 * HEAD_DIM)
    c2p = torch.gather(q @ table.mT * scale, -1, distance.expand(BATCH, HEADS, -1, -1))
    p2c = torch.gather(k @ table.mT * scale, -1, (2 * SEQLEN - 2 - distance).expand(BATCH, HEADS, -1, -1)).mT
    return (q @ k.mT * scale + c2p + p2c).softmax(-1) @ v


def relative_shift(q, k, v, r, u, w):
    """Transformer-XL: (q + u) k^T + shift((q + w) r^T); the shift pads, reshapes and drops."""
    ac = (q + u[:, None]) @ k.mT
    bd = (q + w[:, None]) @ r.mT
    bd = F.pad(bd, (1, 0)).view(BATCH, HEADS, SEQLEN + 1, SEQLEN)[:, :, 1:].view_as(bd)
    i = torch.arange(SEQLEN)
    scores = ((ac + bd) * SCALE).masked_fill(i[None] > i[:, None], -torch.inf)
    return scores.softmax(-1) @ v


def relative_shift_xlnet(q, k, v, r):
    bd = torch.einsum("bhid,hjd->bhij", q, r)
    bd = bd.reshape(BATCH, HEADS, 2 * SEQLEN, SEQLEN)[:, :, 1:, :].reshape(BATCH, HEADS, SEQLEN, 2 * SEQLEN - 1)
    bd = torch.index_select(bd, 3, torch.arange(SEQLEN))
    return ((torch.einsum("bhid,bhjd->bhij", q, k) + bd) * SCALE).softmax(-1) @ v


def skewed(q, k, v, r):
    """Music Transformer skewing."""
    rel = F.pad(q @ r.mT, (1, 0)).reshape(BATCH, HEADS, SEQLEN + 1, SEQLEN)[:, :, 1:]
    keep = torch.ones(SEQLEN, SEQLEN, dtype=torch.bool).tril()
    return ((q @ k.mT + rel) * SCALE).masked_fill(~keep, -torch.inf).softmax(-1) @ v


def shaw_keys(q, k, v, table):
    """Relative key embeddings by clipped distance."""
    i = torch.arange(SEQLEN)
    embedding = table[(i[None] - i[:, None]).clamp(-4, 4) + 4]
    relative = torch.einsum("bhld,lrd->bhlr", q, embedding)
    return ((q @ k.mT + relative) * SCALE).softmax(-1) @ v


def relative_key_query(q, k, v, table):
    i = torch.arange(SEQLEN)
    embedding = table[i[:, None] - i[None] + SEQLEN - 1]
    rq, rk = torch.einsum("bhld,lrd->bhlr", q, embedding), torch.einsum("bhrd,lrd->bhlr", k, embedding)
    return ((q @ k.mT + rq + rk) * SCALE).softmax(-1) @ v


def decomposed_positions(q, k, v, rh, rw):
    """SAM, MViT: one bias by row and one by column of an image of 4 x 6."""
    x = q.view(BATCH, HEADS, 4, 6, HEAD_DIM)
    h = torch.einsum("bnhwc,hkc->bnhwk", x, rh)
    w = torch.einsum("bnhwc,wkc->bnhwk", x, rw)
    scores = (q @ k.mT * SCALE).view(BATCH, HEADS, 4, 6, 4, 6) + h[..., :, None] + w[..., None, :]
    return scores.view(BATCH, HEADS, SEQLEN, SEQLEN).softmax(-1) @ v


def t5_buckets(q, k, v, weight):
    i = torch.arange(SEQLEN)
    n = i[None] - i[:, None]
    sign = (n > 0).to(torch.long) * 8
    n = n.abs()
    large = 4 + (torch.log(n.float() / 4) / math.log(32 / 4) * 4).to(torch.long)
    bucket = sign + torch.where(n < 4, n, torch.min(large, torch.full_like(large, 7)))
    bias = F.embedding(bucket, weight).permute(2, 0, 1)[None]
    return (q @ k.mT + bias).softmax(-1) @ v


def continuous_table(q, k, v, table, weight):
    """Swin v2: a small MLP gives the table, an index buffer spreads it; cosine scores with a clamped temperature."""
    i = torch.arange(SEQLEN)
    bias = 16 * torch.sigmoid(F.linear(table, weight)[(i[None] - i[:, None] + SEQLEN - 1).view(-1)])
    bias = bias.view(SEQLEN, SEQLEN, HEADS).permute(2, 0, 1).contiguous()
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    return (q @ k.mT + bias).softmax(-1) @ v


# --- several contractions -------------------------------------------------------------------------------------------
def two_products(q, k, v):
    """q k^T in two halves of the features: the second is a computed bias."""
    return ((q[..., :8] @ k[..., :8].mT + q[..., 8:] @ k[..., 8:].mT) * SCALE).softmax(-1) @ v


def squared_distance(q, k, v):
    """-|q - k|^2 expanded."""
    d = q.square().sum(-1, keepdim=True) - 2 * q @ k.mT + k.square().sum(-1)[:, :, None]
    return (-0.5 * d).softmax(-1) @ v


def squared_distance_direct(q, k, v):
    """-|q - k|^2 with the difference written out: no contraction at all."""
    return (-(q[:, :, :, None] - k[:, :, None]).square().sum(-1)).softmax(-1) @ v


def cdist(q, k, v):
    return (-torch.cdist(q, k)).softmax(-1) @ v


def additive_attention(q, k, v, w):
    """Bahdanau: w . tanh(q + k)."""
    return (torch.tanh(q[:, :, :, None] + k[:, :, None]) @ w).softmax(-1) @ v


def invariant_points(q, k, v, points_q, points_k, pair, weights):
    """AlphaFold 2, invariant point attention: scalar scores, a pair bias and distances between points of each frame."""
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * math.sqrt(1 / (3 * HEAD_DIM))
    scores = scores + math.sqrt(1 / 3) * pair.permute(0, 3, 1, 2)
    gap = points_q[:, :, None] - points_k[:, None]  # (B, S, S, H, P, 3)
    distance = (gap**2).sum(-1).sum(-1) * F.softplus(weights) * (-0.5 * math.sqrt(1 / (3 * 9)))
    return (scores + distance.permute(0, 3, 1, 2)).softmax(-1) @ v


def invariant_points_pair(q, k, v, pair, z):
    """The probabilities also weigh the pair representation."""
    p = (scores_of(q, k) + pair.permute(0, 3, 1, 2)).softmax(-1)
    return p @ v, torch.einsum("bhqk,bqkc->bqhc", p, z)


# --- more dimensions ------------------------------------------------------------------------------------------------
def evoformer_row(q, k, v, mask, pair, gate):
    """(B, N, H, S, D): a mask bias by row and a pair bias by head, both added in place; then a gate."""
    q, k, v = (torch.stack([t, t.sin(), t.cos()], 1) for t in (q, k, v))
    scores = torch.matmul(q * SCALE, k.transpose(-1, -2))
    scores += (1e9 * (mask - 1))[:, :, None, None, :]
    scores += pair.permute(0, 3, 1, 2)[:, None]
    out = torch.matmul(torch.softmax(scores, -1), v).transpose(-2, -3)
    return (out * torch.sigmoid(gate)).flatten(-2)


def evoformer_column(q, k, v, mask):
    """The same module on a transposed stack: rows and columns trade places."""
    x, y, z = (torch.stack([t, t.sin(), t.cos()], -3).permute(0, 3, 2, 1, 4) for t in (q, k, v))  # (B, S, N, H, D)
    x, y, z = (t.transpose(-2, -3) for t in (x, y, z))  # (B, S, H, N, D)
    scores = torch.einsum("bshqd,bshkd->bshqk", x, y) * SCALE
    scores = scores + (1e9 * (mask - 1)).transpose(1, 2)[:, :, None, None, :]
    return torch.einsum("bshqk,bshkd->bsqhd", scores.softmax(-1), z)


def triangle_start(q, k, v, bias, mask):
    """Triangle attention: one row of the pair matrix per batch entry, with a bias that does not depend on the row."""
    q, k, v = (torch.stack([t, t.sin()], 1) for t in (q, k, v))
    scores = q @ k.mT * SCALE + bias[:, None] + (1e9 * (mask - 1))[:, None, None, None, None]
    return scores.softmax(-1) @ v


def shifted_windows(q, k, v, table, index):
    """Swin: 2 images of 4 windows of 6 tokens; relative table plus a shift mask by window."""
    def windows(t):
        return t.view(BATCH, HEADS, 4, 6, HEAD_DIM).permute(0, 2, 1, 3, 4).reshape(BATCH * 4, HEADS, 6, HEAD_DIM)

    q, k, v = map(windows, (q, k, v))
    scores = q * SCALE @ k.mT
    scores = scores + table[index.view(-1)].view(6, 6, -1).permute(2, 0, 1).contiguous()[None]
    region = torch.zeros(4, 6)
    region[2:] = 1
    region[:, 3:] += 2
    mask = region[:, None] - region[:, :, None]
    mask = mask.masked_fill(mask != 0, -100.0).masked_fill(mask == 0, 0.0)
    scores = scores.view(BATCH, 4, HEADS, 6, 6) + mask[None, :, None]
    return scores.view(-1, HEADS, 6, 6).softmax(-1) @ v


def axial_rows(q, k, v):
    """(B, H, 4, 6, D) over the second axis only."""
    q, k, v = (t.view(BATCH, HEADS, 4, 6, HEAD_DIM) for t in (q, k, v))
    p = torch.einsum("bhrid,bhrjd->bhrij", q, k).mul(SCALE).softmax(-1)
    return torch.einsum("bhrij,bhrjd->bhrid", p, v).reshape(BATCH, HEADS, SEQLEN, HEAD_DIM)


def axial_columns(q, k, v):
    q, k, v = (t.view(BATCH, HEADS, 4, 6, HEAD_DIM) for t in (q, k, v))
    p = torch.einsum("bhixd,bhjxd->bhxij", q, k).mul(SCALE).softmax(-1)
    return torch.einsum("bhxij,bhjxd->bhixd", p, v).reshape(BATCH, HEADS, SEQLEN, HEAD_DIM)


def two_key_dimensions(q, k, v):
    """A softmax over both image axes, flattened."""
    k, v = (t.view(BATCH, HEADS, 4, 6, HEAD_DIM) for t in (k, v))
    scores = torch.einsum("bhqd,bhxyd->bhqxy", q, k) * SCALE
    p = scores.flatten(-2).softmax(-1).view_as(scores)
    return torch.einsum("bhqxy,bhxyd->bhqd", p, v)


def grid_to_grid(q, k, v):
    """Queries and keys both on a grid."""
    q, k, v = (t.view(BATCH, HEADS, 4, 6, HEAD_DIM) for t in (q, k, v))
    scores = torch.einsum("bhijd,bhxyd->bhijxy", q, k) * SCALE
    p = scores.reshape(BATCH, HEADS, 4, 6, SEQLEN).softmax(-1)
    return torch.einsum("bhijk,bhkd->bhijd", p, v.flatten(2, 3))


def channels(q, k, v):
    """XCiT, Restormer: attention between channels; sequence and features trade places."""
    q, k, v = (t.transpose(-1, -2) for t in (q, k, v))
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    return ((q @ k.mT).softmax(-1) @ v).transpose(-1, -2)


def no_heads(q, k, v):
    """One head, 3-D, as in diffusion decoders: (B, C, N) convolutions as operands."""
    q, k, v = (t[:, 0].mT for t in (q, k, v))
    p = torch.bmm(q.permute(0, 2, 1), k).mul(SCALE).softmax(2)
    return torch.bmm(v, p.permute(0, 2, 1))


def non_local(q, k, v):
    """Video: frames and positions of the keys merged into one sequence."""
    q, k, v = (t[:, 0].view(BATCH, 4, 6, HEAD_DIM) for t in (q, k, v))
    p = torch.einsum("bthc,bsgc->bthsg", q, k).view(BATCH, SEQLEN, SEQLEN).softmax(-1)
    return (p @ v.view(BATCH, SEQLEN, HEAD_DIM)).view(BATCH, 4, 6, HEAD_DIM)


def query_chunks(q, k, v):
    """A Python loop over blocks of queries, causal."""
    out = []
    for start in range(0, SEQLEN, 8):
        i = torch.arange(start, start + 8)
        scores = scores_of(q[:, :, start : start + 8], k)
        out.append(scores.masked_fill(torch.arange(SEQLEN)[None] > i[:, None], -torch.inf).softmax(-1) @ v)
    return torch.cat(out, 2)


def query_chunks_short_keys(q, k, v):
    """Each block of queries reads only the keys before its end."""
    out = []
    for start in range(0, SEQLEN, 8):
        end = start + 8
        i = torch.arange(start, end)
        scores = scores_of(q[:, :, start:end], k[:, :, :end])
        scores = scores.masked_fill(torch.arange(end)[None] > i[:, None], float("-inf"))
        out.append(scores.softmax(-1) @ v[:, :, :end])
    return torch.cat(out, 2)


def local_blocks(q, k, v):
    """Blocks of 8 queries against their own and the previous block."""
    def neighbours(t):
        t = t.view(BATCH, HEADS, 3, 8, HEAD_DIM)
        return torch.cat([F.pad(t, (0, 0, 0, 0, 1, 0))[:, :, :-1], t], 3)

    q = q.view(BATCH, HEADS, 3, 8, HEAD_DIM)
    scores = q @ neighbours(k).mT * SCALE
    i, j = torch.arange(8)[:, None] + 8, torch.arange(16)[None]
    keep = (j <= i) & ((torch.arange(3)[:, None, None] > 0) | (j >= 8))
    return (scores.masked_fill(~keep, -torch.inf).softmax(-1) @ neighbours(v)).view(BATCH, HEADS, SEQLEN, HEAD_DIM)


def attention_pool(q, k, v, probe):
    """One learned query for all of the batch."""
    query = probe.expand(BATCH, HEADS, 1, HEAD_DIM)
    return (scores_of(query, k).softmax(-1) @ v).flatten(1)


def data_temperature(q, k, v):
    """A temperature computed from the queries."""
    return (q @ k.mT * torch.exp(q.mean(-1, keepdim=True))).softmax(-1) @ v


def log_length_scale(q, k, v):
    """log-n scaling by position."""
    factor = torch.log(torch.arange(1, SEQLEN + 1, dtype=q.dtype)) / math.log(512)
    return ((q * factor[:, None].clamp(min=1)) @ k.mT * SCALE).softmax(-1) @ v


def _randn(*shapes):
    def draw():
        generator = torch.Generator().manual_seed(0)
        return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)

    return draw


def _row_mask():
    return ((torch.rand(BATCH, 3, SEQLEN, generator=torch.Generator().manual_seed(0)) > 0.2).double(),)


def _window_index():
    return (torch.randint(0, 9, (6, 6), generator=torch.Generator().manual_seed(0)),)


B, H, S, D = BATCH, HEADS, SEQLEN, HEAD_DIM
PLAIN = (axial_rows, axial_columns, two_key_dimensions, grid_to_grid, no_heads)
_CHUNKS = (program(keep=CAUSAL), program(keep="kv_idx <= q_idx + 8"), program(keep="kv_idx <= q_idx + 16"))
_DISTANCE = "q_idx - kv_idx + 23"
CASES = (
    # Relative positions
    Case("content_to_position", content_to_position,
         program(f"(score + aux0[b, h, q_idx, {_DISTANCE}]) * {1 / math.sqrt(2 * D)}", scale=1.0), "float64[4]",
         extra=_randn((H, 2 * S - 1, D))),
    Case("disentangled", disentangled, extra=_randn((H, 2 * S - 1, D))),
    *(Case(f.__name__, f, program("(score + aux0[b, h, q_idx + 1, kv_idx]) * 0.25", CAUSAL, scale=1.0), "float64[4]",
           extra=extra)
      for f, extra in ((relative_shift, _randn((H, S, D), (H, D), (H, D))), (skewed, _randn((S, D))))),
    *(Case(f.__name__, f, program("(score + aux0[b, h, q_idx, kv_idx]) * 0.25", scale=1.0), "float64[4]", extra=extra)
      for f, extra in ((relative_shift_xlnet, _randn((H, 2 * S, D))), (shaw_keys, _randn((9, D))))),
    Case("relative_key_query", relative_key_query, extra=_randn((2 * S - 1, D))),
    Case("decomposed_positions", decomposed_positions, extra=_randn((4, 4, D), (6, 6, D)),
         program=program("score + aux0[b, h, q_idx // 6, q_idx % 6, kv_idx // 6]"
                         " + aux1[b, h, q_idx // 6, q_idx % 6, kv_idx % 6]"), aux="float64[5],float64[5]"),
    Case("t5_buckets", t5_buckets, extra=_randn((16, H))),
    Case("continuous_table", continuous_table,
         program("score + sigmoid(aux0[kv_idx - q_idx + 23, h]) * 16.0", scale=1.0), "float64[2]",
         extra=_randn((2 * S - 1, 2), (H, 2))),
    # Several contractions
    Case("two_products", two_products, program("(score + aux0[b, h, q_idx, kv_idx]) * 0.25", scale=1.0), "float64[4]"),
    Case("squared_distance", squared_distance, aux="float64[3],float64[3]",
         program=program("(aux0[b, h, q_idx] - score + aux1[b, h, kv_idx]) * -0.5", scale=2.0)),
    Case("invariant_points", invariant_points, extra=_randn((B, S, H, 4, 3), (B, S, H, 4, 3), (B, S, S, H), (H,))),
    Case("invariant_points_pair", invariant_points_pair, sites=2, extra=_randn((B, S, S, H), (B, S, S, 5)),
         declines=(DeclineReason.PROBS_ESCAPE, DeclineReason.UNSUPPORTED_LAYOUT)),
    # More dimensions
    Case("evoformer_row", evoformer_row, program("score + aux0[b, h // 4, kv_idx] + aux1[b, q_idx, kv_idx, h % 4]"),
         "float64[3],float64[4]", extra=lambda: (*_row_mask(), *_randn((B, S, S, H), (B, 3, S, H, D))())),
    Case("evoformer_column", evoformer_column, program("score + aux0[b // 24, kv_idx, b % 24]"), "float64[3]",
         extra=_row_mask),
    Case("triangle_start", triangle_start, extra=_randn((B, H, S, S), (B,))),
    Case("shifted_windows", shifted_windows, extra=lambda: (*_randn((9, H))(), *_window_index())),
    *(Case(f.__name__, f, program()) for f in PLAIN),
    *(Case(f.__name__, f, program(scale=1.0)) for f in (channels, non_local)),
    Case("local_blocks", local_blocks, program(keep="(kv_idx <= q_idx + 8) & ((h % 3 >= 1) | (kv_idx >= 8))")),
    *(Case(f.__name__, f, sites=3, programs=_CHUNKS) for f in (query_chunks, query_chunks_short_keys)),
    Case("attention_pool", attention_pool, program(), extra=_randn((1, H, 1, D))),
    Case("data_temperature", data_temperature, program("score * aux0[b, h, q_idx]", scale=1.0), "float64[3]"),
    Case("log_length_scale", log_length_scale),
    # No product of q and k
    *(Case(f.__name__, f, sites=0) for f in (squared_distance_direct, cdist)),
    Case("additive_attention", additive_attention, sites=0, extra=_randn((D,))),
)  # fmt: skip
