"""keep = kv_idx <= aux0[q_idx]: queries at any positions of a cache, of which the slots behind may hold anything."""

from cutlass import Int32

from fa4_inductor.kernels.cute import ops
from fa4_inductor.kernels.cute import program_ops as pops

PLAIN = True
MASKED = True
BOUND_LOG2 = None
HAS_SINK = False
EMPTY_ROW = "nan"
MAY_BE_EMPTY = True
AUX = (("int64", 1),)


def _end(ctx, q_idx):
    return pops.saturate(ctx.aux[0][ops.clamp(q_idx, 0, Int32(ctx.aux[0].shape[0]) - 1)]) + 1


def row(ctx, b, h, q_idx, u):
    return (_end(ctx, q_idx),)


def keep(ctx, b, h, q_idx, kv_idx, u, r, c):
    return kv_idx < r[0]


def kv_range(ctx, b, h, q_lo, q_hi):
    return 0, ctx.seqlen_k


def kv_full(ctx, b, h, q_lo, q_hi):
    return 0, 0


def row_range(ctx, b, h, q_idx):
    return 0, _end(ctx, q_idx)


def row_full(ctx, b, h, q_idx):
    return 0, _end(ctx, q_idx)
