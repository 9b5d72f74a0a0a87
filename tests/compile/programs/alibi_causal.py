"""score = score + aux0[h] * float(kv_idx - q_idx); keep = kv_idx <= q_idx.

The row-constant part is kept: the LSE needs it.
"""

from cutlass import Float32

from fa4_inductor.kernels.cute import ops

PLAIN = False
MASKED = True
BOUND_LOG2 = None
HAS_SINK = False
EMPTY_ROW = "nan"
MAY_BE_EMPTY = False
RAW_SCORE = True
AUX = (("float32", 1),)


def uniform(ctx, b, h):
    return ctx.aux[0][h] * ops.LOG2_E, ctx.softmax_scale * ops.LOG2_E


def row(ctx, b, h, q_idx, u):
    return (u[0] * Float32(-q_idx),)


def column(ctx, b, h, kv_idx, u):
    return (u[0] * Float32(kv_idx),)


def score(ctx, s, b, h, q_idx, kv_idx, u, r, c):
    return s * u[1] + (c[0] + r[0])


def keep(ctx, b, h, q_idx, kv_idx, u, r, c):
    return kv_idx <= q_idx


def kv_range(ctx, b, h, q_lo, q_hi):
    return 0, q_hi + 1


def kv_full(ctx, b, h, q_lo, q_hi):
    return 0, q_lo + 1
