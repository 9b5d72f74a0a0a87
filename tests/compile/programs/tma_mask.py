"""keep = aux0[b, q_idx, kv_idx], the mask through TMA."""

PLAIN = True
MASKED = True
BOUND_LOG2 = None
HAS_SINK = False
EMPTY_ROW = "zero"
MAY_BE_EMPTY = True
AUX = (("bool", 3),)
DENSE = (0,)


def keep(ctx, b, h, q_idx, kv_idx, u, r, c, d):
    return d[0] != 0


def kv_range(ctx, b, h, q_lo, q_hi):
    return 0, ctx.seqlen_k


def kv_full(ctx, b, h, q_lo, q_hi):
    return 0, 0


def dense_index(ctx, b, h):
    return ((b,),)
