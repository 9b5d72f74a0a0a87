"""keep = (kv_idx <= q_idx) & (kv_idx > q_idx - size0)."""

PLAIN = True
MASKED = True
BOUND_LOG2 = None
HAS_SINK = False
EMPTY_ROW = "nan"
MAY_BE_EMPTY = True
NUM_SIZES = 1


def row(ctx, b, h, q_idx, u):
    return (q_idx - ctx.sizes[0],)


def keep(ctx, b, h, q_idx, kv_idx, u, r, c):
    return (kv_idx <= q_idx) & (kv_idx > r[0])


def kv_range(ctx, b, h, q_lo, q_hi):
    return q_lo - ctx.sizes[0] + 1, q_hi + 1


def kv_full(ctx, b, h, q_lo, q_hi):
    return q_hi - ctx.sizes[0] + 1, q_lo + 1
