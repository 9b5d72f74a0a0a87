"""keep = (kv_idx <= q_idx) & (aux0[b, kv_idx] == aux0[b, q_idx]), for document ids that never decrease."""

from cutlass import Int32

from fa4_inductor.kernels.cute import ops

PLAIN = True
MASKED = True
BOUND_LOG2 = None
HAS_SINK = False
EMPTY_ROW = "nan"
MAY_BE_EMPTY = False
AUX = (("int64", 2),)
UNIT_STRIDE = (0,)


def row(ctx, b, h, q_idx, u):
    return (Int32(ops.entry(ctx.aux[0][b, None], ops.clamp_index(q_idx, ctx.seqlen_q - 1))),)


def column(ctx, b, h, kv_idx, u):
    return (Int32(ops.entry(ctx.aux[0][b, None], ops.clamp_index(kv_idx, ctx.seqlen_k - 1))),)


def keep(ctx, b, h, q_idx, kv_idx, u, r, c):
    return (kv_idx <= q_idx) & (c[0] == r[0])


def kv_range(ctx, b, h, q_lo, q_hi):
    return 0, q_hi + 1


def kv_full(ctx, b, h, q_lo, q_hi):
    return 0, 0
