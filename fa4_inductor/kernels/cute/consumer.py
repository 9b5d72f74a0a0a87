"""A consumer warpgroup: S = Q K^T, softmax, O += P V for its 64 query rows.

S of the next key tile is issued before PV of this one, so that the softmax runs while the tensor cores work.
"""

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import warp, warpgroup

from fa4_inductor.kernels.cute import fragment, ops
from fa4_inductor.kernels.cute.dense import DenseRead
from fa4_inductor.kernels.cute.producer import advance
from fa4_inductor.kernels.cute.redo import shift_failed
from fa4_inductor.kernels.cute.softmax import Softmax
from fa4_inductor.kernels.cute.static import TraceObject
from fa4_inductor.kernels.cute.tables import ColumnRead, TableRead
from fa4_inductor.kernels.cute.tiles import key_tiles

_ORDER_BARRIER = 1  # named barriers 1..3: whose turn it is to issue wgmma
_QUERY_BARRIER = 7  # named barriers 7..9: a warpgroup has scaled its Q
_WARPGROUP = 128


def issue_gemm(tiled_mma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, zero: bool) -> None:
    """Issue acc (+)= a @ b over all k blocks as one wgmma group, without waiting."""
    warpgroup.fence()
    atom = cute.make_mma_atom(tiled_mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, not zero)
    for k in range(cute.size(a.shape[2])):
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


class Consumer(TraceObject):
    """Everything a warpgroup needs during its tiles: operand descriptors, accumulators, barriers, softmax state."""

    def __init__(self, fwd, ctx, bars, smem, softmax_scale: Float32, wg: Int32, lane: Int32):
        self.fwd, self.ctx, self.bars = fwd, ctx, bars
        self.wg, self.lane = wg, lane
        self.mma_qk, self.mma_pv = fwd.tiled_mma()
        qk, pv = self.mma_qk.get_slice(0), self.mma_pv.get_slice(0)
        config = fwd.config
        self.q_smem = smem.q[None, None, wg]
        if config.q_in_registers:
            self.q = qk.make_fragment_A(qk.partition_shape_A((64, fwd.tile_d)))
        else:
            self.q = qk.make_fragment_A(qk.partition_A(self.q_smem))
        self.k = qk.make_fragment_B(qk.partition_B(smem.k))
        self.v = pv.make_fragment_B(pv.partition_B(smem.v_transposed))
        self.s = cute.make_rmem_tensor(qk.partition_shape_C((64, config.tile_n)), Float32)
        self.o = cute.make_rmem_tensor(pv.partition_shape_C((64, fwd.tile_dv)), Float32)
        self.p = pv.make_fragment_A(pv.partition_shape_A((64, config.tile_n)))
        self.q_words = smem.q_words[None, wg] if fwd.program.accumulated is not None else None
        self.dense = [DenseRead(tile, self.mma_qk, self.s, wg, lane, config.num_consumers) for tile in smem.dense]
        self.softmax = Softmax(fwd.program, softmax_scale, config.polynomial_exp2 if fwd.bounded else None)
        # rows may come to their first key in a full tile
        program = fwd.program
        self.seeds_full_tiles = program.has_keep_column or program.may_fill or program.tile_map is not None
        self.ordered = config.order_warpgroups and config.num_consumers > 1

    # -- ordering between warpgroups ------------------------------------------------------------------------------

    def order_init(self) -> None:
        """Let warpgroup 0 go first: the call of every warpgroup together counts as one arrival on its barrier."""
        if self.ordered:
            self._order_first()

    @cute.jit
    def _order_first(self):
        if self.wg == self.fwd.config.num_consumers - 1:
            cute.arch.barrier_arrive(barrier_id=_ORDER_BARRIER, number_of_threads=2 * _WARPGROUP)

    def order_wait(self) -> None:
        if self.ordered:
            cute.arch.barrier(barrier_id=_ORDER_BARRIER + self.wg, number_of_threads=2 * _WARPGROUP)

    def order_pass(self) -> None:
        if self.ordered:
            last = self.fwd.config.num_consumers - 1
            following = ops.select(self.wg == last, Int32(0), self.wg + 1)
            cute.arch.barrier_arrive(barrier_id=_ORDER_BARRIER + following, number_of_threads=2 * _WARPGROUP)

    @cute.jit
    def release(self, empty: cute.Pointer):
        """One arrival per warp on an empty barrier."""
        if self.lane % 32 == 0:
            cute.arch.mbarrier_arrive(empty)

    def release_read(self, empty: cute.Pointer) -> None:
        """The same for a buffer that threads have read themselves and TMA writes next: the reads have to be over, not
        only issued, and a fence orders them with what another proxy does (PTX ISA, async proxy)."""
        cute.arch.fence_view_async_shared()
        # every lane has read before lane 0 releases the buffer
        cute.arch.sync_warp()
        self.release(empty)

    def load_query(self) -> None:
        """Q from shared memory into registers, where the configuration wants it there."""
        if self.fwd.config.q_in_registers:
            atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), self.fwd.dtype)
            copy = cute.make_tiled_copy_A(atom, self.mma_qk)
            thread = copy.get_slice(self.lane)
            cute.copy(copy, thread.partition_S(self.q_smem), thread.retile(self.q))
        if self.fwd.frees_q_early:
            self.release_read(self.bars.q_empty)

    # -- the steps ------------------------------------------------------------------------------------------------

    def scale_queries(self) -> None:
        """Multiply the warpgroup's Q by the softmax scale, a power of two: then S can take a bias in its own unit."""
        factor = ops.pack_half2(self.ctx.softmax_scale, self.ctx.softmax_scale, self.fwd.dtype)
        for i in range(cute.size(self.q_words) // (4 * _WARPGROUP)):
            words = cute.local_tile(self.q_words, (4,), (self.lane + i * _WARPGROUP,))
            values = cute.make_rmem_tensor((4,), Int32)
            cute.autovec_copy(words, values)
            for w in range(4):
                values[w] = ops.mul_bf16x2(values[w], factor)
            cute.autovec_copy(values, words)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=_QUERY_BARRIER + self.wg, number_of_threads=_WARPGROUP)

    def dense_tiles(self, index: Int32, mask: bool) -> list[list | None]:
        """The dense tiles of slot `index` in registers, as far as scores, or scores and mask, need them."""
        needed = range(len(self.dense)) if mask else self.fwd.program.dense_in_score
        return [read(index) if i in needed else None for i, read in enumerate(self.dense)]

    def release_keys(self, empty: cute.Pointer) -> None:
        """Free a slot of K, and of the dense tiles that travel with it."""
        if self.dense:
            self.release_read(empty)
        else:
            self.release(empty)

    def ahead(self, at, n: Int32, mask: bool, dense: list[list | None]) -> SimpleNamespace:
        """What the scores of key tile n need from memory: column values, whether keep_column drops nothing, dense tiles
        and entries of tables.

        Issued while the tensor cores compute S, so that the loads have arrived by then.
        """
        softmax, ctx, tile_n, size = self.softmax, self.ctx, self.fwd.config.tile_n, cute.size(self.s)
        kv_first = n * tile_n + fragment.thread_column(self.lane)
        tables = [read(kv_first - at.q_rows[0], ctx.seqlen_q, size) for read in at.tables]
        tables += [read(kv_first, size, mask) for read in at.columns]
        columns = softmax.columns(ctx, at.b, at.h, kv_first, at.u, size, mask)
        all_kept = None
        if not mask and self.fwd.program.has_keep_column:
            all_kept = softmax.all_columns_kept(ctx, at.b, at.h, n * tile_n, tile_n, at.u)
        return SimpleNamespace(dense=dense, tables=tables, columns=columns, all_kept=all_kept)

    def scores(self, n: Int32, at, ahead: SimpleNamespace, mask: bool, shifted: bool = False) -> None:
        """Turn the raw S of key tile n into program scores; shifted: minus the softmax shift."""
        softmax, ctx, tile_n = self.softmax, self.ctx, self.fwd.config.tile_n
        kv_first = n * tile_n + fragment.thread_column(self.lane)
        softmax.apply_program(self.s, ctx, at, kv_first, ahead, mask, shifted)
        if ahead.all_kept is not None:
            softmax.mask_columns(ahead.all_kept, self.s, ctx, at.b, at.h, kv_first, at.u)
        if mask and not self.fwd.program.has_interval:
            softmax.mask_edge(self.s, kv_first, (n + 1) * tile_n, ctx.seqlen_k)

    def first(self, at, n: Int32, index: Int32, phase: Int32) -> None:
        """First key tile of a query tile: S, softmax, P; its PV is left to the next step."""
        cute.arch.mbarrier_wait(self.bars.k_full + index, phase)
        issue_gemm(self.mma_qk, self.s, self.q, self.k[None, None, None, index], zero=True)
        ahead = self.ahead(at, n, True, self.dense_tiles(index, True))
        warpgroup.wait_group(0)
        self.release_keys(self.bars.k_empty + index)
        self.scores(n, at, ahead, mask=True)
        if not self.fwd.bounded:
            self.softmax.shift(self.s)
            if self.fwd.optimistic and self.fwd.program.shares_shift:
                self.softmax.join()
        self.softmax.exponentiate(self.s, self.fwd.bounded, finite=False)
        fragment.convert_to_half(self.s, self.p)

    def step(self, at, n: Int32, index: Int32, phase: Int32, mask: bool, fixed_shift: bool) -> tuple:
        """S of key tile n overlapped with PV of the tile before it (slot `index`); returns the slot of tile n.

        fixed_shift: rows that have a shift keep it (see redo.py).
        """
        bars, softmax, bounded = self.bars, self.softmax, self.fwd.bounded
        shifted = fixed_shift and not bounded and self.fwd.program.has_shifted_score
        v_index, v_phase = index, phase
        index, phase = advance(index, phase, self.fwd.config.num_stages)
        cute.arch.mbarrier_wait(bars.k_full + index, phase)
        accumulated = self.fwd.program.accumulated if shifted else None
        if accumulated is not None:
            dense = self.dense_tiles(index, mask)
            s = fragment.flat(self.s)
            for i in range(cute.size(s)):
                s[i] = Float32(dense[accumulated][i])
        self.order_wait()
        issue_gemm(self.mma_qk, self.s, self.q, self.k[None, None, None, index], zero=accumulated is None)
        cute.arch.mbarrier_wait(bars.v_full + v_index, v_phase)
        issue_gemm(self.mma_pv, self.o, self.p, self.v[None, None, None, v_index], zero=False)
        self.order_pass()
        ahead = self.ahead(at, n, mask, self.dense_tiles(index, mask) if accumulated is None else dense)
        warpgroup.wait_group(1)
        self.release_keys(bars.k_empty + index)
        self.scores(n, at, ahead, mask, shifted)
        if not fixed_shift:
            grew = softmax.shift(self.s)
        elif not bounded and (mask or self.seeds_full_tiles):
            softmax.seed(self.s, shifted)
        softmax.exponentiate(self.s, shifted or bounded, finite=not (mask or self.fwd.program.has_keep_column))
        warpgroup.wait_group(0)
        self.release(bars.v_empty + v_index)
        fragment.convert_to_half(self.s, self.p)
        if not fixed_shift:
            softmax.rescale(grew, self.o)
        return index, phase

    def last(self, index: Int32, phase: Int32) -> tuple:
        """PV of the last key tile; returns the slot after it."""
        cute.arch.mbarrier_wait(self.bars.v_full + index, phase)
        issue_gemm(self.mma_pv, self.o, self.p, self.v[None, None, None, index], zero=False)
        warpgroup.wait_group(0)
        self.release(self.bars.v_empty + index)
        return advance(index, phase, self.fwd.config.num_stages)

    @cute.jit
    def tile(self, at: cutlass.Constexpr, keys: cutlass.Constexpr, fixed_shift: Boolean, index: Int32, phase: Int32):
        """All key tiles of one query tile; leaves the unnormalised O in registers. Returns the ring state.

        fixed_shift: the first tile's shift is kept in the others; else all of them are masked, and the maximum runs.
        """
        optimistic, bounded = cutlass.const_expr(self.fwd.optimistic), cutlass.const_expr(self.fwd.bounded)
        self.first(at, keys.tile(Int32(0)), index, phase)
        running = keys.num_masked
        if cutlass.const_expr(optimistic):
            running = ops.select(fixed_shift, Int32(1), keys.num_masked)
        if cutlass.const_expr(not bounded):
            for j in cutlass.range(1, running, unroll=1):
                index, phase = self.step(at, keys.tile(j), index, phase, True, False)
        if cutlass.const_expr(optimistic and self.fwd.program.masked):
            for j in cutlass.range(running, keys.num_masked, unroll=1):
                index, phase = self.step(at, keys.tile(j), index, phase, True, True)
            if cutlass.const_expr(not (bounded or self.seeds_full_tiles)):
                self.softmax.settle(keys.count > keys.num_masked)
        for j in cutlass.range(keys.num_masked, keys.count, unroll=1):
            index, phase = self.step(at, keys.tile(j), index, phase, False, optimistic)
        index, phase = self.last(index, phase)
        return index, phase


class TileCoordinates(TraceObject):
    """Where one thread is: batch, head, the q_idx of its two rows, and the program's uniform and row values."""

    def __init__(self, fwd, ctx, m_tile: Int32, h: Int32, b: Int32, wg: Int32, lane: Int32):
        self.m_tile, self.h, self.b = m_tile, h, b
        self.slab = m_tile * fwd.config.num_consumers + wg
        first = self.slab * 64 + fragment.thread_row(lane)
        self.q_rows = (first, first + 8)
        self.u = fwd.program.uniform(ctx, b, h)
        self.rows = tuple(fwd.program.row(ctx, b, h, q, self.u) for q in self.q_rows)
        program = fwd.program
        self.tables = [
            TableRead(ctx.aux[slot], lead) for slot, lead in zip(program.tables, program.table_index(ctx, b, h))
        ]
        self.columns = [
            ColumnRead(ctx.aux[slot], lead) for slot, lead in zip(program.columns, program.column_index(ctx, b, h))
        ]


@cute.jit
def consume(consumer: cutlass.Constexpr, redo: cutlass.Constexpr, order: cutlass.Constexpr, store: cutlass.Constexpr):
    """Main loop of a consumer warpgroup, over the same rounds as the producer."""
    fwd, ctx = consumer.fwd, consumer.ctx
    consumer.order_init()
    index, phase, q_phase = Int32(0), Int32(0), Int32(0)
    step, rounds, limit = Int32(0), order.rounds, order.rounds
    while step < limit:
        again = step >= rounds
        round_ = step
        todo = Boolean(True)
        if cutlass.const_expr(redo.enabled):
            round_ = ops.select(again, step - rounds, step)
            todo = redo.marked(round_) | (step < rounds)
        exists, m_tile, h, b = order.tile(round_)
        if exists & todo:
            q_lo = m_tile * fwd.config.tile_m
            q_hi = ops.imin(q_lo + fwd.config.tile_m, ctx.seqlen_q) - 1
            keys = key_tiles(fwd.program, ctx, b, h, m_tile, q_lo, q_hi, fwd.config.tile_n, again)
            at = TileCoordinates(fwd, ctx, m_tile, h, b, consumer.wg, consumer.lane)
            fixed_shift = (keys.count > 1) & (again == False) & fwd.optimistic  # noqa: E712
            consumer.softmax.reset(fixed_shift)
            if cutlass.const_expr(fwd.program.shares_shift):
                consumer.softmax.take_row_scores(ctx, at)
            consumer.o.fill(0.0)
            cute.arch.mbarrier_wait(consumer.bars.q_full, q_phase)
            q_phase = q_phase ^ 1
            if cutlass.const_expr(fwd.program.accumulated is not None):
                consumer.scale_queries()
            consumer.load_query()
            if keys.count > 0:
                index, phase = consumer.tile(at, keys, fixed_shift, index, phase)
            if cutlass.const_expr(not (fwd.output_aliases_q or fwd.frees_q_early)):
                consumer.release(consumer.bars.q_empty)
            consumer.softmax.reduce_sums()
            if cutlass.const_expr(redo.enabled):
                if fixed_shift:
                    sums = [consumer.softmax.row_sum[r] for r in range(fragment.ROWS)]
                    own = fwd.program.has_shifted_score
                    failed = shift_failed(sums, consumer.softmax.shifts(), own, at.q_rows, ctx.seqlen_q, consumer.o)
                    redo.mark(round_, failed, consumer.lane)
            store(consumer, at)
        step += 1
        if cutlass.const_expr(order.dynamic):
            if (step <= rounds) & (exists == False):  # noqa: E712
                step, rounds, limit = step - 1, step - 1, step - 1
        if cutlass.const_expr(redo.enabled):
            if step == rounds:
                consumer.release(redo.bar)
                if redo.wait():
                    limit = 2 * rounds
    store.drain(consumer)
