"""keep = aux0[b, kv_idx]; a row that sees no key gets the mean of V."""

from fa4_inductor.kernels.cute import ops

PLAIN = True
MASKED = True
BOUND_LOG2 = None
HAS_SINK = False
EMPTY_ROW = "mean"
MAY_BE_EMPTY = True
AUX = (("bool", 2),)
UNIT_STRIDE = (0,)


def column(ctx, b, h, kv_idx, u):
    return (ops.entry(ctx.aux[0][b, None], ops.clamp_index(kv_idx, ctx.seqlen_k - 1)) != 0,)


def keep(ctx, b, h, q_idx, kv_idx, u, r, c):
    return c[0]


def kv_range(ctx, b, h, q_lo, q_hi):
    return 0, ctx.seqlen_k


def kv_full(ctx, b, h, q_lo, q_hi):
    return 0, ctx.seqlen_k


def keep_column(ctx, b, h, kv_idx, u, c):
    return c[0]
