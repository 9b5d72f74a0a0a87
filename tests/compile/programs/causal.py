"""keep = kv_idx <= q_idx."""

PLAIN = True
MASKED = True
BOUND_LOG2 = None
HAS_SINK = False
EMPTY_ROW = "nan"
MAY_BE_EMPTY = False


def keep(ctx, b, h, q_idx, kv_idx, u, r, c):
    return kv_idx <= q_idx


def kv_range(ctx, b, h, q_lo, q_hi):
    return 0, q_hi + 1


def kv_full(ctx, b, h, q_lo, q_hi):
    return 0, q_lo + 1
