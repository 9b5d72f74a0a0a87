"""score = score + aux0[q_idx, kv_idx] in fp32 through TMA; keep = kv_idx <= q_idx."""

from cutlass import Float32

from fa4_inductor.kernels.cute import ops
from fa4_inductor.kernels.cute import program_ops as pops

PLAIN = False
MASKED = True
BOUND_LOG2 = None
HAS_SINK = False
EMPTY_ROW = "nan"
MAY_BE_EMPTY = True
RAW_SCORE = True
AUX = (("float32", 2),)
DENSE = (0,)


def uniform(ctx, b, h):
    return (ctx.softmax_scale * ops.LOG2_E,)


def score(ctx, s, b, h, q_idx, kv_idx, u, r, c, d):
    return ops.fma(s, u[0], pops.mul_rz(Float32(d[0]), ops.LOG2_E))


def shifted_score(ctx, s, b, h, q_idx, kv_idx, u, r, c, shift, d):
    return pops.fma_rz(Float32(d[0]), ops.LOG2_E, ops.fma(s, u[0], shift))


def keep(ctx, b, h, q_idx, kv_idx, u, r, c, d):
    return kv_idx <= q_idx


def kv_range(ctx, b, h, q_lo, q_hi):
    return 0, q_hi + 1


def kv_full(ctx, b, h, q_lo, q_hi):
    return 0, q_lo + 1


def dense_index(ctx, b, h):
    return ((),)
