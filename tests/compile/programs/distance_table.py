"""score = score + aux0[0, h, kv_idx - q_idx + (seqlen_q - 1)], a table of neighbouring entries."""

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
AUX = (("float32", 3),)
UNIT_STRIDE = (0,)


def uniform(ctx, b, h):
    return ctx.aux[0].shape[2] - 1, ctx.softmax_scale * ops.LOG2_E


def row(ctx, b, h, q_idx, u):
    return ((ctx.seqlen_q - q_idx) - 1,)


def score(ctx, s, b, h, q_idx, kv_idx, u, r, c):
    entry = Float32(ops.entry(ctx.aux[0][0, h, None], ops.clamp_index(kv_idx + r[0], u[0])))
    return ops.fma(s, u[1], pops.mul_rz(entry, ops.LOG2_E))


def shifted_score(ctx, s, b, h, q_idx, kv_idx, u, r, c, shift):
    entry = Float32(ops.entry(ctx.aux[0][0, h, None], ops.clamp_index(kv_idx + r[0], u[0])))
    return pops.fma_rz(entry, ops.LOG2_E, ops.fma(s, u[1], shift))
