"""score = score + aux0[h, q_idx, kv_idx]; keep = (kv_idx <= q_idx) & aux1[b, 0, q_idx, kv_idx], both through TMA."""

from cutlass import Float32

from fa4_inductor.kernels.cute import ops
from fa4_inductor.kernels.cute import program_ops as pops

PLAIN = False
MASKED = True
BOUND_LOG2 = None
HAS_SINK = False
EMPTY_ROW = "zero"
MAY_BE_EMPTY = True
AUX = (("float16", 3), ("bool", 4))
DENSE = (0, 1)


def score(ctx, s, b, h, q_idx, kv_idx, u, r, c, d):
    return ops.fma(s, ops.LOG2_E, pops.mul_rz(Float32(d[0]), ops.LOG2_E))


def shifted_score(ctx, s, b, h, q_idx, kv_idx, u, r, c, shift, d):
    return pops.fma_rz(Float32(d[0]), ops.LOG2_E, ops.fma(s, ops.LOG2_E, shift))


def keep(ctx, b, h, q_idx, kv_idx, u, r, c, d):
    return (d[1] != 0) & (kv_idx <= q_idx)


def kv_range(ctx, b, h, q_lo, q_hi):
    return 0, q_hi + 1


def kv_full(ctx, b, h, q_lo, q_hi):
    return 0, 0


def dense_index(ctx, b, h):
    return (h,), (b, 0)
