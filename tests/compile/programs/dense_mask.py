"""keep = aux0[b, q_idx, kv_idx]; a row that sees no key gives 0 (SDPA's bool mask)."""

from fa4_inductor.kernels.cute import ops

PLAIN = True
MASKED = True
BOUND_LOG2 = None
HAS_SINK = False
EMPTY_ROW = "zero"
MAY_BE_EMPTY = True
AUX = (("bool", 3),)


def row(ctx, b, h, q_idx, u):
    return (ops.clamp(q_idx, 0, ctx.seqlen_q - 1),)


def column(ctx, b, h, kv_idx, u):
    return (ops.clamp(kv_idx, 0, ctx.seqlen_k - 1),)


def keep(ctx, b, h, q_idx, kv_idx, u, r, c):
    return ctx.aux[0][b, r[0], c[0]] != 0


def kv_range(ctx, b, h, q_lo, q_hi):
    return 0, ctx.seqlen_k


def kv_full(ctx, b, h, q_lo, q_hi):
    return 0, 0
