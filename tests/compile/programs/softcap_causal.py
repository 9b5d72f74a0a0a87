"""score = 20 * tanh(score / 20); keep = kv_idx <= q_idx."""

from fa4_inductor.kernels.cute import ops

PLAIN = False
MASKED = True
BOUND_LOG2 = 20.0 * ops.LOG2_E
HAS_SINK = False
EMPTY_ROW = "nan"
MAY_BE_EMPTY = False
RAW_SCORE = True


def uniform(ctx, b, h):
    return (ctx.softmax_scale * (1.0 / 20.0),)


def score(ctx, s, b, h, q_idx, kv_idx, u, r, c):
    return ops.tanh_approx(s * u[0]) * (20.0 * ops.LOG2_E)


def shifted_score(ctx, s, b, h, q_idx, kv_idx, u, r, c, shift):
    return ops.fma(ops.tanh_approx(s * u[0]), 20.0 * ops.LOG2_E, shift)


def keep(ctx, b, h, q_idx, kv_idx, u, r, c):
    return kv_idx <= q_idx


def kv_range(ctx, b, h, q_lo, q_hi):
    return 0, q_hi + 1


def kv_full(ctx, b, h, q_lo, q_hi):
    return 0, q_lo + 1
