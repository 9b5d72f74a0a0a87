"""A consumer warpgroup of the backward: 64 keys, for which dK and dV stay in registers.

Everything is transposed, keys by queries, so that P and dS come out of their products as the A operands of the next:

    S^T = K Q^T, dP^T = V dO^T, dV += P^T dO, dK += dS^T Q

and dQ = dS K, with dS through shared memory, is added up in global memory.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import warp, warpgroup

from fa4_inductor.kernels.cute import fragment, ops
from fa4_inductor.kernels.cute.bwd_aux import LearnedGradients
from fa4_inductor.kernels.cute.bwd_tiles import QueryTiles, next_visitor
from fa4_inductor.kernels.cute.consumer import issue_gemm
from fa4_inductor.kernels.cute.producer import advance
from fa4_inductor.kernels.cute.static import TraceObject

_DS_BARRIER = 1  # named barrier: dS of both warpgroups is in shared memory
_TURN_BARRIER = 2  # named barriers 2 and 3: the threads of a warpgroup around their turn to add to dQ
_CONSUMERS = 256


class KeyCoordinates(TraceObject):
    """Where one thread is, for one query head: its two keys and the values that the program knows of them."""

    def __init__(self, bwd, ctx, n: Int32, h: Int32, b: Int32, wg: Int32, lane: Int32):
        self.n, self.h, self.b = n, h, b
        first = n * bwd.tile_n + wg * 64 + fragment.thread_row(lane)
        self.keys = (first, first + 8)
        self.u = bwd.program.uniform(ctx, b, h)
        self.columns = tuple(bwd.program.column(ctx, b, h, k, self.u) for k in self.keys)

    def where(self, q_idx: Int32, r: int, row: tuple) -> tuple:
        """Arguments of the program's functions for its key r and a query with these values."""
        return self.b, self.h, q_idx, self.keys[r], self.u, row, self.columns[r]


class BwdConsumer(TraceObject):
    """Operand descriptors, accumulators and the steps of one query tile."""

    def __init__(self, bwd, ctx, bars, smem, wg: Int32, lane: Int32, learned):
        self.learned = LearnedGradients(bwd.program, ctx, learned, lane) if bwd.program.learned else None
        self.bwd, self.ctx, self.bars, self.smem = bwd, ctx, bars, smem
        self.wg, self.lane = wg, lane
        self.unit = ctx.softmax_scale * ops.LOG2_E if bwd.program.plain else Float32(1.0)
        self.mma_s, self.mma_dv, self.mma_dk, self.mma_dq = bwd.tiled_mma()
        s, dv, dk, dq = (mma.get_slice(0) for mma in (self.mma_s, self.mma_dv, self.mma_dk, self.mma_dq))
        self.k = s.make_fragment_A(s.partition_A(smem.k[None, None, wg]))
        self.v = s.make_fragment_A(s.partition_A(smem.v[None, None, wg]))
        self.q = s.make_fragment_B(s.partition_B(smem.q))
        self.do = s.make_fragment_B(s.partition_B(smem.do))
        self.do_t = dv.make_fragment_B(dv.partition_B(smem.do_t))
        self.q_t = dk.make_fragment_B(dk.partition_B(smem.q_t))
        rows, columns = bwd.dq_shape
        slabs = smem.ds_t.shape[2]
        at_row, at_column = (wg, 0) if bwd.dq_by_rows else (0, wg)
        ds_t = cute.local_tile(smem.ds_t, (rows, 64, slabs), (at_row, 0, 0))
        k_t = cute.local_tile(smem.k_t, (columns, 64, 2), (at_column, 0, 0))
        self.ds_a = dq.make_fragment_A(dq.partition_A(ds_t))
        self.k_b = dq.make_fragment_B(dq.partition_B(k_t))
        shape = (64, bwd.tile_m)
        self.s = cute.make_rmem_tensor(s.partition_shape_C(shape), Float32)
        self.dp = cute.make_rmem_tensor(s.partition_shape_C(shape), Float32)
        self.p_half = dv.make_fragment_A(dv.partition_shape_A(shape))
        self.ds_half = dk.make_fragment_A(dk.partition_shape_A(shape))
        self.dk = cute.make_rmem_tensor(dk.partition_shape_C((64, bwd.tile_d)), Float32)
        self.dv = cute.make_rmem_tensor(dv.partition_shape_C((64, bwd.tile_dv)), Float32)
        self.dq = cute.make_rmem_tensor(dq.partition_shape_C(bwd.dq_shape), Float32)
        self.copy_atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), bwd.dtype)
        self.ds_copy = cute.make_tiled_copy_C(self.copy_atom, self.mma_s).get_slice(lane)

    @cute.jit
    def release(self, empty: cute.Pointer):
        """One arrival per warp on an empty barrier."""
        if self.lane % 32 == 0:
            cute.arch.mbarrier_arrive(empty)

    def statistic(self, pairs: cute.Tensor, j: int, index: Int32) -> tuple[Float32, Float32]:
        """The two values of the thread's j-th pair of queries, from (tile_m / 2, stage) pairs."""
        return ops.unpack_floats(pairs[4 * j + self.lane % 4, index])

    def probabilities(self, at: KeyCoordinates, m: Int32, index: Int32, mask: bool) -> None:
        """P^T = exp2(score - LSE) in half precision into `p_half`, and P^T * score' into `s`, which otherwise stays.

        LSE is +inf for rows that keep nothing and for rows behind the last one.
        """
        bwd, ctx, program = self.bwd, self.ctx, self.bwd.program
        s = fragment.flat(self.s)
        words = fragment.flat(cute.recast_tensor(fragment.flat(self.p_half), Int32))
        first = m * bwd.tile_m + fragment.thread_column(self.lane)
        for j in range(bwd.tile_m // 8):
            lse = self.statistic(self.smem.lse_pairs, j, index)
            fills = mask and program.may_fill
            norm = self.statistic(self.smem.norm_pairs, j, index) if fills else (None, None)
            q_idx = [first + 8 * j + e for e in range(2)]
            rows = [program.row(ctx, at.b, at.h, q, at.u) for q in q_idx]
            for r in range(fragment.ROWS):
                p = []
                for e in range(2):
                    i = 4 * j + 2 * r + e
                    value, weighted = self._element(s[i], lse[e], norm[e], at.where(q_idx[e], r, rows[e]), mask)
                    p.append(value)
                    if not (bwd.keeps_half or self.learned):
                        s[i] = weighted
                words[2 * j + r] = ops.pack_half2(p[0], p[1], bwd.dtype)

    def _element(self, raw: Float32, lse: Float32, norm, where: tuple, mask: bool) -> tuple[Float32, Float32]:
        """P and P * score'. norm: what the LSE lacks in a row of fills, None where there is no such row."""
        ctx, program = self.ctx, self.bwd.program
        if program.plain:
            p = ops.exp2(ops.fma(raw, self.unit, -lse))
        else:
            exponent = program.score(ctx, raw, *where) - lse
            p = ops.exp2(exponent if norm is None else ops.fmin(exponent, Float32(0.0)) - norm)
        keep = None
        if mask:
            keep = where[3] < ctx.seqlen_k
            if program.masked:
                keep = keep & program.keep(ctx, *where)
            p = ops.select(keep, p, Float32(0.0))
        if self.learned or not program.has_score_grad:
            return p, p
        # the derivative of a key that does not take part may be anything
        grad = p * program.score_grad(ctx, raw, *where)
        return p, ops.select(p == 0.0, Float32(0.0), grad)

    @cute.jit
    def probabilities_of(self, at: cutlass.Constexpr, m: Int32, index: Int32, full: Boolean):
        """`probabilities` with the mask where the tile is not full."""
        if full:
            self.probabilities(at, m, index, False)
        else:
            self.probabilities(at, m, index, True)

    def score_gradients(self, at: KeyCoordinates, m: Int32, index: Int32) -> None:
        """dS^T / softmax_scale = P^T score' (dP^T - delta) in half precision into `ds_half`."""
        if self.learned:
            self._all_gradients(at, m, index)
            return
        s, dp = fragment.flat(self.s), fragment.flat(self.dp)
        words = fragment.flat(cute.recast_tensor(fragment.flat(self.ds_half), Int32))
        p_words = fragment.flat(cute.recast_tensor(fragment.flat(self.p_half), Int32))
        for j in range(self.bwd.tile_m // 8):
            delta = self.statistic(self.smem.delta_pairs, j, index)
            for r in range(fragment.ROWS):
                p = [s[4 * j + 2 * r + e] for e in range(2)]
                if self.bwd.keeps_half:
                    p = ops.unpack_bf16(p_words[2 * j + r])
                low, high = (p[e] * (dp[4 * j + 2 * r + e] - delta[e]) for e in range(2))
                words[2 * j + r] = ops.pack_half2(low, high, self.bwd.dtype)

    def _all_gradients(self, at: KeyCoordinates, m: Int32, index: Int32) -> None:
        """`score_gradients`, and those of captured tensors, from P^T in half precision and the raw product in `s`."""
        bwd, program, learned = self.bwd, self.bwd.program, self.learned
        s, dp = fragment.flat(self.s), fragment.flat(self.dp)
        words = fragment.flat(cute.recast_tensor(fragment.flat(self.ds_half), Int32))
        p_words = fragment.flat(cute.recast_tensor(fragment.flat(self.p_half), Int32))
        first = m * bwd.tile_m + fragment.thread_column(self.lane)
        learned.begin()
        where: list = []
        for j in range(bwd.tile_m // 8):
            delta = self.statistic(self.smem.delta_pairs, j, index)
            q_idx = [first + 8 * j + e for e in range(2)]
            rows = [program.row(self.ctx, at.b, at.h, q, at.u) for q in q_idx]
            for r in (1, 0):
                p = ops.unpack_half(p_words[2 * j + r], bwd.dtype)
                where = [at.where(q_idx[e], r, rows[e]) for e in range(2)]
                pair = []
                for e in range(2):
                    i = 4 * j + 2 * r + e
                    change = p[e] * (dp[i] - delta[e])
                    dropped = p[e] == 0.0  # the derivatives of a key that does not take part may be anything
                    grads = [
                        ops.select(dropped, Float32(0.0), change * g)
                        for g in program.gradients(self.ctx, s[i], *where[e])
                    ]
                    learned.add(r, e, where[e], tuple(grads[1:]))
                    pair.append(grads[0])
                words[2 * j + r] = ops.pack_half2(*pair, bwd.dtype)
        learned.end(where)

    def flush(self, at: KeyCoordinates) -> None:
        """After the query tiles of a head: what captured tensors get from all of them."""
        if self.learned:
            rows = self.bwd.program.row(self.ctx, at.b, at.h, Int32(0), at.u)
            self.learned.flush([at.where(Int32(0), r, rows) for r in range(fragment.ROWS)])

    def share(self, slot: Int32) -> None:
        """dS^T of this warpgroup into its slab of shared memory; returns when both are there."""
        half = cute.make_tensor(self.ds_half.iterator, self.s.layout)
        slab = self.smem.ds[None, None, 2 * slot + self.wg]
        cute.copy(self.copy_atom, self.ds_copy.retile(half), self.ds_copy.partition_D(slab))
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=_DS_BARRIER, number_of_threads=_CONSUMERS)

    def issue_dq(self, slot: Int32) -> None:
        """This warpgroup's part of dQ = dS K, over the keys of both."""
        warpgroup.fence()
        atom = cute.make_mma_atom(self.mma_dq.op)
        atom.set(warpgroup.Field.ACCUMULATE, False)
        for w in range(2):
            for k in range(cute.size(self.k_b.shape[2])):
                a, b = self.ds_a[None, None, k, 2 * slot + w], self.k_b[None, None, k, w]
                cute.gemm(atom, self.dq, a, b, self.dq)
                atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    @cute.jit
    def wait_for_turn(self, turns: cute.Tensor, row: Int32, n: Int32):
        """Until all key tiles behind n have added their dQ."""
        if self.lane == 0:
            turn = cute.arch.load(turns[row, None].iterator + self.wg, Int32, sem="acquire", scope="gpu")
            while turn != n:
                turn = cute.arch.load(turns[row, None].iterator + self.wg, Int32, sem="acquire", scope="gpu")
        cute.arch.barrier(barrier_id=_TURN_BARRIER + self.wg, number_of_threads=128)

    @cute.jit
    def pass_turn(self, turns: cute.Tensor, row: Int32, at: cutlass.Constexpr, m: Int32, n: Int32, added: Boolean):
        """Let the next key tile add its dQ to this row, if `added`."""
        if added:
            cute.arch.fence_acq_rel_gpu()
            cute.arch.barrier(barrier_id=_TURN_BARRIER + self.wg, number_of_threads=128)
            if self.lane == 0:
                following = next_visitor(self.bwd, self.ctx, at.b, at.h, m, n - 1)
                cute.arch.store(turns[row, None].iterator + self.wg, following, sem="release", scope="gpu")

    def add_dq(self, accumulator: cute.Tensor, row: Int32) -> None:
        """Add dQ to one row of the fp32 accumulator, in the order of the registers: [register / 4][thread][4]."""
        dq = fragment.flat(self.dq)
        thread = self.wg * 128 + self.lane
        address = accumulator[row, None].iterator.toint() + cutlass.Int64(thread * 16)
        for chunk in range(cute.size(dq) // 4):
            values = tuple(dq[4 * chunk + i] for i in range(4))
            ops.add_to_memory(address + chunk * (_CONSUMERS * 16), values)

    def step(
        self, at: KeyCoordinates, m: Int32, row: Int32, ring: tuple, full: Boolean, scratch: tuple, later: Boolean
    ) -> None:
        """One query tile.

        Args:
            row: of the accumulator of dQ and of the turns. ring: slot of Q and dO, its phase, slot of dS.
            full: run without the mask. scratch: accumulator of dQ, turns. later: there was one before, for this head.
        """
        bars, (index, phase, slot), (accumulator, turns) = self.bars, ring, scratch
        cute.arch.mbarrier_wait(bars.q_full + index, phase)
        issue_gemm(self.mma_s, self.s, self.k, self.q[None, None, None, index], zero=True)
        cute.arch.mbarrier_wait(bars.do_full + index, phase)
        issue_gemm(self.mma_s, self.dp, self.v, self.do[None, None, None, index], zero=True)
        warpgroup.wait_group(1)
        self.probabilities_of(at, m, index, full)
        issue_gemm(self.mma_dv, self.dv, self.p_half, self.do_t[None, None, None, index], zero=False)
        if turns is not None:  # by now the additions of the tile before have arrived
            self.pass_turn(turns, row - 1, at, m - 1, at.n, later)
        warpgroup.wait_group(1)
        self.score_gradients(at, m, index)
        self.share(slot)
        self.issue_dq(slot)
        issue_gemm(self.mma_dk, self.dk, self.ds_half, self.q_t[None, None, None, index], zero=False)
        warpgroup.wait_group(1)
        self.release(bars.do_empty + index)
        if turns is not None:
            self.wait_for_turn(turns, row, at.n)
        self.add_dq(accumulator, row)
        warpgroup.wait_group(0)
        self.release(bars.q_empty + index)

    def store(self, gradient: cute.Tensor, target: cute.Tensor, factor, n: Int32, head: Int32, b: Int32) -> None:
        """64 rows of dK or dV, times `factor`, to `target` (B, H, Sk, D)."""
        values = fragment.flat(gradient)
        first = n * self.bwd.tile_n + self.wg * 64 + fragment.thread_row(self.lane)
        for r in range(fragment.ROWS):
            self._store_row(values, target, factor, first + 8 * r, r, head, b)

    @cute.jit
    def _store_row(
        self,
        values: cute.Tensor,
        target: cute.Tensor,
        factor,
        key: Int32,
        r: cutlass.Constexpr,
        head: Int32,
        b: Int32,
    ):
        if key < self.ctx.seqlen_k:
            address = target[b, head, key, None].iterator.toint() + cutlass.Int64(4 * (self.lane % 4))
            for j in cutlass.range_constexpr(target.shape[3] // 8):
                low, high = values[4 * j + 2 * r] * factor, values[4 * j + 2 * r + 1] * factor
                ops.vector_at(address + 16 * j, Int32, 1)[0] = ops.pack_half2(low, high, self.bwd.dtype)


@cute.jit
def consume(
    consumer: cutlass.Constexpr,
    stats: cute.Tensor,
    accumulator: cute.Tensor,
    turns,
    dk: cute.Tensor,
    dv: cute.Tensor,
    n: Int32,
    heads: cutlass.Constexpr,
    slot_of_heads: Int32,
    b: Int32,
    num_m: Int32,
    num_heads: Int32,
):
    """Main loop of a consumer warpgroup, over the same query tiles as the producer.

    slot_of_heads: head of dK and dV to write (`HeadShare`).
    """
    bwd, ctx = consumer.bwd, consumer.ctx
    consumer.dk.fill(0.0)
    consumer.dv.fill(0.0)
    cute.arch.mbarrier_wait(consumer.bars.kv_full, 0)
    index, phase, slot = Int32(0), Int32(0), Int32(0)
    for g in cutlass.range(heads.count, unroll=1):
        h = heads.first + g
        at = KeyCoordinates(bwd, ctx, n, h, b, consumer.wg, consumer.lane)
        tiles = QueryTiles(bwd.program, ctx, b, h, n, bwd.tile_m, bwd.tile_n)
        if cutlass.const_expr(consumer.learned is not None):
            consumer.learned.clear()
        for m in cutlass.range(tiles.first, tiles.end, unroll=1):
            row = (b * num_heads + h) * num_m + m
            scratch, full = (accumulator, turns), tiles.full(m)
            if cutlass.const_expr(bwd.program.may_fill):  # rows of fills take the way of tiles with a mask
                full = full & (stats[bwd.stat_rows * row + 3, 0] == 0.0)
            consumer.step(at, m, row, (index, phase, slot), full, scratch, m > tiles.first)
            index, phase = advance(index, phase, bwd.num_stages)
            slot = slot ^ 1
        if cutlass.const_expr(turns is not None):
            row = (b * num_heads + h) * num_m + tiles.end - 1
            consumer.pass_turn(turns, row, at, tiles.end - 1, n, tiles.end > tiles.first)
        consumer.flush(at)
    consumer.store(consumer.dk, dk, ctx.softmax_scale, n, slot_of_heads, b)
    consumer.store(consumer.dv, dv, Float32(1.0), n, slot_of_heads, b)
