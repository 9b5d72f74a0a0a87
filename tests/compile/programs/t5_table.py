"""score = score + aux0[clamp(kv_idx - q_idx + 16, 0, 32), h]."""

from fa4_inductor.kernels.cute import ops

PLAIN = False
MASKED = False
BOUND_LOG2 = None
HAS_SINK = False
EMPTY_ROW = "nan"
MAY_BE_EMPTY = False
RAW_SCORE = True
AUX = (("float32", 2),)


def uniform(ctx, b, h):
    return (ctx.softmax_scale * ops.LOG2_E,)


def score(ctx, s, b, h, q_idx, kv_idx, u, r, c):
    bucket = ops.clamp(kv_idx - q_idx + 16, 0, 32)
    return s * u[0] + ctx.aux[0][bucket, h] * ops.LOG2_E


def shifted_score(ctx, s, b, h, q_idx, kv_idx, u, r, c, shift):
    bucket = ops.clamp(kv_idx - q_idx + 16, 0, 32)
    return ops.fma(ctx.aux[0][bucket, h], ops.LOG2_E, ops.fma(s, u[0], shift))
