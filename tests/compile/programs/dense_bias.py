"""score = score + aux0[h, q_idx, kv_idx]."""

from cutlass import Float32

from fa4_inductor.kernels.cute import ops

PLAIN = False
MASKED = False
BOUND_LOG2 = None
HAS_SINK = False
EMPTY_ROW = "nan"
MAY_BE_EMPTY = False
AUX = (("bfloat16", 3),)


def row(ctx, b, h, q_idx, u):
    return (ops.clamp(q_idx, 0, ctx.seqlen_q - 1),)


def column(ctx, b, h, kv_idx, u):
    return (ops.clamp(kv_idx, 0, ctx.seqlen_k - 1),)


def score(ctx, s, b, h, q_idx, kv_idx, u, r, c):
    return (s + Float32(ctx.aux[0][h, r[0], c[0]])) * ops.LOG2_E
