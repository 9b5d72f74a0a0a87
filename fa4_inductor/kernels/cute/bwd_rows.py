"""Row-wise work around the backward: delta and the LSE in the kernel's units before it, dQ in a half type after it."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from fa4_inductor.kernels.cute import fragment, ops
from fa4_inductor.kernels.cute.bwd_tiles import next_visitor
from fa4_inductor.kernels.cute.softmax import LOWEST_SHIFT
from fa4_inductor.kernels.cute.static import TraceObject

THREADS = 256
_VECTOR = 8  # half-type elements of a 16-byte access


class RowStatistics(TraceObject):
    """One CTA per query tile: `stats` rows [LSE in log2 units], [delta], and a dQ accumulator of zeros. With `turns`,
    the key tile whose dQ comes first, once per consumer warpgroup.

    delta = rowsum(out * dO) - dLSE. Rows that keep nothing, and rows behind the last one, get an LSE of +inf, so that
    their P is 0; those of nothing but fills, too, until `bwd_fills.FillRows` knows better.
    """

    def __init__(self, bwd, ctx, out, do, lse, grad_lse, stats, accumulator, turns):
        self.bwd, self.ctx, self.out, self.do, self.lse, self.grad_lse = bwd, ctx, out, do, lse, grad_lse
        self.stats, self.accumulator, self.turns = stats, accumulator, turns

    @cute.jit
    def __call__(self, m: Int32, h: Int32, b: Int32, row: Int32):
        bwd = cutlass.const_expr(self.bwd)
        seqlen_q = self.ctx.seqlen_q
        tidx, _, _ = cute.arch.thread_idx()
        lanes = cutlass.const_expr(bwd.tile_dv // _VECTOR)
        rows_at_once = cutlass.const_expr(THREADS // lanes)
        for i in cutlass.range_constexpr(bwd.tile_m // rows_at_once):
            local = i * rows_at_once + tidx // lanes
            q_idx = m * bwd.tile_m + local
            exists = q_idx < seqlen_q
            safe = ops.imin(q_idx, seqlen_q - 1)
            total = self.product(b, h, safe, tidx % lanes)
            for step in cutlass.range_constexpr(lanes.bit_length() - 1):
                total = total + cute.arch.shuffle_sync_bfly(total, offset=lanes >> (step + 1))
            if tidx % lanes == 0:
                self.write(b, h, safe, row, local, exists, total)
        words = cutlass.const_expr(bwd.tile_m * bwd.tile_d // 4)
        address = self.accumulator[row, None].iterator.toint()
        for i in cutlass.range_constexpr(words // THREADS):
            zeros = cute.make_rmem_tensor((4,), Float32)
            zeros.fill(0.0)
            cute.autovec_copy(zeros, ops.vector_at(address + Int64((i * THREADS + tidx) * 16), Float32, 4))
        if cutlass.const_expr(self.turns is not None):
            if tidx == 0:
                last = (self.ctx.seqlen_k - 1) // bwd.tile_n
                first = next_visitor(bwd, self.ctx, b, h, m, last)
                self.turns[row, 0] = first
                self.turns[row, 1] = first

    def product(self, b: Int32, h: Int32, q_idx: Int32, part: Int32) -> Float32:
        """sum(out * dO) over 8 elements of a row."""
        total = Float32(0.0)
        values = []
        parts = self.bwd.head_dim_v // _VECTOR
        inside = part < parts
        for t in (self.out, self.do):
            vector = cute.local_tile(t[b, h, q_idx, None], (_VECTOR,), (ops.imin(part, parts - 1),))
            registers = cute.make_rmem_tensor((_VECTOR,), self.bwd.dtype)
            cute.autovec_copy(vector, registers)
            values.append(registers)
        for i in range(_VECTOR):
            total = ops.fma(Float32(values[0][i]), Float32(values[1][i]), total)
        return ops.select(inside, total, Float32(0.0))

    def write(
        self, b: Int32, h: Int32, q_idx: Int32, row: Int32, local: Int32, exists: Boolean, total: Float32
    ) -> None:
        """LSE and delta of one row."""
        lse = self.lse[b, h, q_idx]
        alive = has_keys = exists & (lse > LOWEST_SHIFT)
        if self.bwd.program.may_fill:  # `FillRows` replaces the LSE of rows of fills
            has_keys = exists & (lse > -Float32.inf)
        if self.grad_lse is not None:
            total = total - self.grad_lse[b, h, q_idx]
        first = self.bwd.stat_rows * row
        self.stats[first, local] = ops.select(alive, lse * ops.LOG2_E, Float32.inf)
        self.stats[first + 1, local] = ops.select(has_keys, total, Float32(0.0))


class QueryGradient(TraceObject):
    """One CTA per query tile: dQ = accumulator * softmax_scale, out of register order (`BwdConsumer.add_dq`)."""

    def __init__(self, bwd, accumulator, dq):
        self.bwd, self.accumulator, self.dq = bwd, accumulator, dq

    @cute.jit
    def __call__(self, m: Int32, h: Int32, b: Int32, row: Int32, seqlen_q: Int32, factor: Float32):
        bwd = cutlass.const_expr(self.bwd)
        tidx, _, _ = cute.arch.thread_idx()
        wg, lane = tidx // 128, tidx % 128
        rows, columns = cutlass.const_expr(bwd.dq_shape)
        first_row = ops.select(Boolean(bwd.dq_by_rows), wg * rows, Int32(0)) + fragment.thread_row(lane)
        first_column = ops.select(Boolean(bwd.dq_by_rows), Int32(0), wg * columns) + fragment.thread_column(lane)
        address = self.accumulator[row, None].iterator.toint()
        chunks = cutlass.const_expr(rows * columns // 128 // 4)
        values = cute.make_rmem_tensor((4, chunks), Float32)
        for j in cutlass.range_constexpr(chunks):
            chunk = ops.vector_at(address + Int64((j * THREADS + tidx) * 16), Float32, 4)
            cute.autovec_copy(chunk, values[None, j])
        for r in cutlass.range_constexpr(fragment.ROWS):
            q_idx = m * bwd.tile_m + first_row + 8 * r
            if q_idx < seqlen_q:
                target = self.dq[b, h, q_idx, None].iterator.toint() + Int64(2 * first_column)
                for j in cutlass.range_constexpr(chunks):
                    if first_column + 8 * j < bwd.head_dim:
                        low, high = values[2 * r, j] * factor, values[2 * r + 1, j] * factor
                        ops.vector_at(target + 16 * j, Int32, 1)[0] = ops.pack_half2(low, high, bwd.dtype)
