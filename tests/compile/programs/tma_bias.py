"""score = score + aux0[h, q_idx, kv_idx], the bias through TMA."""

from cutlass import Float32

from fa4_inductor.kernels.cute import ops
from fa4_inductor.kernels.cute import program_ops as pops

PLAIN = False
MASKED = False
BOUND_LOG2 = None
HAS_SINK = False
EMPTY_ROW = "nan"
MAY_BE_EMPTY = False
RAW_SCORE = True
AUX = (("bfloat16", 3),)
DENSE = (0,)


def uniform(ctx, b, h):
    return (ctx.softmax_scale * ops.LOG2_E,)


def score(ctx, s, b, h, q_idx, kv_idx, u, r, c, d):
    return ops.fma(s, u[0], pops.mul_rz(Float32(d[0]), ops.LOG2_E))


def shifted_score(ctx, s, b, h, q_idx, kv_idx, u, r, c, shift, d):
    return pops.fma_rz(Float32(d[0]), ops.LOG2_E, ops.fma(s, u[0], shift))


def dense_index(ctx, b, h):
    return ((h,),)
