"""Which query tiles a key tile has to visit, by the closed-form bounds of the mask.

Scalar Int32 arithmetic that the producer warp and the consumer warpgroups both evaluate: they must agree.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from fa4_inductor.kernels.cute import ops
from fa4_inductor.kernels.cute.program import Program, ProgramContext
from fa4_inductor.kernels.cute.static import TraceObject


def tile_columns(head_dim: int) -> int:
    """Columns of a tile in shared memory and of dQ's accumulator (lowering.backward_config.padded_head_dim)."""
    return 64 if head_dim <= 64 else 128


class HeadShare(TraceObject):
    """The query heads of one CTA: [first, first + count) out of the group of key head `kv_head`.

    Args:
        group: query heads per key head. slot: head of dK and dV that the CTA writes; `splits` of them share a key head.
    """

    def __init__(self, group: int, slot: Int32, splits: Int32):
        if group == 1:
            self.kv_head, self.first, self.count = slot, slot, 1
        else:
            self.kv_head, self.count = slot // splits, Int32(group) // splits
            self.first = self.kv_head * group + slot % splits * self.count


class QueryTiles(TraceObject):
    """Query tiles [first, end) that key tile n visits, for one head."""

    def __init__(self, program: Program, ctx: ProgramContext, b: Int32, h: Int32, n: Int32, tile_m: int, tile_n: int):
        self.tile_m, self.seqlen_q = tile_m, ctx.seqlen_q
        k_end = (n + 1) * tile_n
        lo, hi, self.full_lo, self.full_hi = Int32(0), ctx.seqlen_q, Int32(0), ctx.seqlen_q
        if program.masked:
            keys = (n * tile_n, ops.imin(k_end, ctx.seqlen_k) - 1)
            lo, hi = (Int32(x) for x in program.module.q_range(ctx, b, h, *keys))
            self.full_lo, self.full_hi = (Int32(x) for x in program.module.q_full(ctx, b, h, *keys))
            lo, hi = ops.imax(lo, 0), ops.imin(hi, ctx.seqlen_q)
        # a ragged key tile has no full query tiles
        self.full_hi = ops.select(k_end <= ctx.seqlen_k, self.full_hi, Int32(0))
        self.first = lo // tile_m
        self.end = ops.select(hi > lo, (hi + tile_m - 1) // tile_m, self.first)

    def full(self, m: Int32) -> Boolean:
        """Whether all rows of query tile m keep all keys; rows behind the last one are dropped elsewhere."""
        last = ops.imin((m + 1) * self.tile_m, self.seqlen_q)
        return (m * self.tile_m >= self.full_lo) & (last <= self.full_hi)

    def visited(self, m: Int32) -> Boolean:
        """Whether query tile m is one of them."""
        return (m >= self.first) & (m < self.end)


@cute.jit
def next_visitor(bwd: cutlass.Constexpr, ctx: cutlass.Constexpr, b: Int32, h: Int32, m: Int32, n: Int32) -> Int32:
    """The first key tile from n on, descending, that visits query tile m; -1 if there is none."""
    searching = Boolean(n >= 0)
    while searching:
        visited = QueryTiles(bwd.program, ctx, b, h, n, bwd.tile_m, bwd.tile_n).visited(m)
        n = ops.select(visited, n, n - 1)
        searching = (visited == Boolean(False)) & (n >= 0)
    return n
