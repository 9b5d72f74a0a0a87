"""Rows of which every kept score is the fill of an additive mask, for the backward.

The LSE of such a row has no bits left for the number of its keys, so P = exp2(score - LSE) cannot be had from it.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from fa4_inductor.kernels.cute import ops
from fa4_inductor.kernels.cute.softmax import LOWEST_SHIFT
from fa4_inductor.kernels.cute.static import TraceObject

THREADS = 256
_VECTOR = 8  # half-type elements of a 16-byte access
_LOWEST = -3.4028234663852886e38


class FillRows(TraceObject):
    """One CTA per query tile, a warp per row: for rows of fills the maximum of the scores instead of the LSE, and
    [norm], log2 of the sum of exp2(score - maximum); 0 for other rows. [flag]: 1 if the tile has such a row.
    """

    def __init__(self, bwd, ctx, q, k, lse, stats):
        self.bwd, self.ctx, self.q, self.k, self.lse, self.stats = bwd, ctx, q, k, lse, stats

    @cute.jit
    def __call__(self, m: Int32, h: Int32, b: Int32, row: Int32):
        bwd = cutlass.const_expr(self.bwd)
        tidx, _, _ = cute.arch.thread_idx()
        warp, lane = tidx // 32, tidx % 32
        if tidx == 0:
            self.stats[4 * row + 3, 0] = Float32(0.0)
        cute.arch.sync_threads()  # the LSE of all rows has been written, too
        warps = cutlass.const_expr(THREADS // 32)
        for i in cutlass.range(bwd.tile_m // warps, unroll=1):
            local = i * warps + warp
            q_idx = m * bwd.tile_m + local
            safe = ops.imin(q_idx, self.ctx.seqlen_q - 1)
            lse = self.lse[b, h, safe]
            norm = Float32(0.0)
            if (q_idx < self.ctx.seqlen_q) & (lse <= LOWEST_SHIFT) & (lse > -Float32.inf):
                maximum, norm = self.row(b, h, safe, lane)
                if lane == 0:
                    self.stats[4 * row, local] = maximum
                    self.stats[4 * row + 3, 0] = Float32(1.0)
            if lane == 0:
                self.stats[4 * row + 2, local] = norm

    @cute.jit
    def row(self, b: Int32, h: Int32, q_idx: Int32, lane: Int32):
        """Maximum of the kept scores of a row in log2 units, and log2 of their sum relative to it."""
        maximum, total = Float32(_LOWEST), Float32(0.0)
        for kv in cutlass.range(lane, self.ctx.seqlen_k, 32, unroll=1):
            score = self.score(b, h, q_idx, kv)
            larger = ops.fmax(maximum, score)
            total = total * ops.exp2(maximum - larger) + ops.exp2(score - larger)
            maximum = larger
        of_row = maximum
        for step in cutlass.range_constexpr(5):
            of_row = ops.fmax(of_row, cute.arch.shuffle_sync_bfly(of_row, offset=16 >> step))
        total = total * ops.exp2(maximum - of_row)
        for step in cutlass.range_constexpr(5):
            total = total + cute.arch.shuffle_sync_bfly(total, offset=16 >> step)
        return of_row, ops.log2(ops.fmax(total, Float32(1.0)))

    def score(self, b: Int32, h: Int32, q_idx: Int32, kv: Int32) -> Float32:
        """One score in log2 units, -inf for a dropped key."""
        program, ctx = self.bwd.program, self.ctx
        b_k = ops.select(self.k.shape[0] == 1, Int32(0), b)
        product = Float32(0.0)
        for part in range(self.bwd.head_dim // _VECTOR):
            values = []
            for t in (self.q[b, h, q_idx, None], self.k[b_k, h // self.bwd.group, kv, None]):
                registers = cute.make_rmem_tensor((_VECTOR,), self.bwd.dtype)
                cute.autovec_copy(cute.local_tile(t, (_VECTOR,), (part,)), registers)
                values.append(registers)
            for i in range(_VECTOR):
                product = ops.fma(Float32(values[0][i]), Float32(values[1][i]), product)
        u = program.uniform(ctx, b, h)
        where = (b, h, q_idx, kv, u, program.row(ctx, b, h, q_idx, u), program.column(ctx, b, h, kv, u))
        score = program.score(ctx, product, *where)
        kept = program.keep(ctx, *where) if program.masked else Boolean(True)
        return ops.select(kept, score, -Float32.inf)
