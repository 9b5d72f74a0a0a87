"""Normalise O, settle empty rows, and write O (through shared memory, by TMA) and the LSE."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync, warp

from fa4_inductor.kernels.cute import fragment, ops
from fa4_inductor.kernels.cute.static import TraceObject

_STORE_BARRIER = 4  # named barriers 4..6: the output slab of one warpgroup
_WARPGROUP = 128


class OutputStore(TraceObject):
    """Writes the output of one warpgroup: 64 rows of O and of the LSE.

    Args:
        atom, out: TMA store atom and its coordinate tensor (Sq, Dv, Hq, B).
        smem: (64, tile_dv) output slab of this warpgroup.
        lse: (B, Hq, Sq) float32 or None. v_mean: (B or 1, Hkv, Dv) float32 or None.
    """

    def __init__(self, atom, out: cute.Tensor, smem: cute.Tensor, lse, v_mean):
        self.atom, self.out, self.smem, self.lse, self.v_mean = atom, out, smem, lse, v_mean

    def normalize(self, consumer, at) -> list:
        """O <- O / row sum, or what an empty row gets. Returns the LSE of the thread's two rows."""
        program, o = consumer.fwd.program, fragment.flat(consumer.o)
        scales, lses, empties = consumer.softmax.finish(consumer.ctx, at.b, at.h, at.q_rows)
        settle_empty = program.may_be_empty and program.empty_row != "zero"
        for i in range(cute.size(o)):
            r = fragment.row_of(i)
            value = o[i] * scales[r]
            if settle_empty:
                value = ops.select(empties[r], self._empty_value(consumer, at, i), value)
            o[i] = value
        return lses

    def _empty_value(self, consumer, at, i: int) -> Float32:
        fwd = consumer.fwd
        if fwd.program.empty_row == "nan":
            return Float32(float("nan"))
        column = fragment.thread_column(consumer.lane) + fragment.column_of(i)
        column = ops.imin(column, fwd.head_dim_v - 1)
        b = ops.select(self.v_mean.shape[0] == 1, Int32(0), at.b)
        return self.v_mean[b, at.h // fwd.group, column]

    @cute.jit
    def write_lse(self, consumer: cutlass.Constexpr, at: cutlass.Constexpr, lses: cutlass.Constexpr):
        if cutlass.const_expr(self.lse is not None):
            if consumer.lane % 4 == 0:
                for r in cutlass.range_constexpr(fragment.ROWS):
                    if at.q_rows[r] < consumer.ctx.seqlen_q:
                        self.lse[at.b, at.h, at.q_rows[r]] = lses[r]

    @cute.jit
    def __call__(self, consumer: cutlass.Constexpr, at: cutlass.Constexpr):
        fwd = cutlass.const_expr(consumer.fwd)
        lses = self.normalize(consumer, at)
        self.write_lse(consumer, at, lses)
        half = cute.make_rmem_tensor_like(consumer.o, fwd.dtype)
        fragment.convert_to_half(consumer.o, half)
        barrier = _STORE_BARRIER + consumer.wg
        if consumer.lane < 32:
            # until it is written, not only read: a tile that runs again writes the same rows, in no defined order
            cute.arch.cp_async_bulk_wait_group(0, read=False)
        cute.arch.barrier(barrier_id=barrier, number_of_threads=_WARPGROUP)
        copy_atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), fwd.dtype)
        thread_copy = cute.make_tiled_copy_C(copy_atom, consumer.mma_pv).get_slice(consumer.lane)
        cute.copy(copy_atom, thread_copy.retile(half), thread_copy.partition_D(self.smem))
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=barrier, number_of_threads=_WARPGROUP)
        if consumer.lane < 32:
            tile = cute.local_tile(self.out[None, None, at.h, at.b], (64, fwd.tile_dv), (at.slab, 0))
            source, target = cpasync.tma_partition(
                self.atom, 0, cute.make_layout(1), cute.group_modes(self.smem, 0, 2), cute.group_modes(tile, 0, 2)
            )
            cute.copy(self.atom, source, target)
            cute.arch.cp_async_bulk_commit_group()
            if cutlass.const_expr(fwd.output_aliases_q):
                cute.arch.cp_async_bulk_wait_group(0, read=True)
        if cutlass.const_expr(fwd.output_aliases_q):
            consumer.release(consumer.bars.q_empty)

    @cute.jit
    def drain(self, consumer: cutlass.Constexpr):
        """Keep shared memory alive until the last store has read it."""
        if consumer.lane < 32:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
