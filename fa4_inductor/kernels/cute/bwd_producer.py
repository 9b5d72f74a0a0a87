"""The producer warp of the backward: K and V of the key tile once, then Q, dO and the row statistics by query tile."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from fa4_inductor.kernels.cute import ops
from fa4_inductor.kernels.cute.bwd_tiles import QueryTiles
from fa4_inductor.kernels.cute.producer import RingLoad, advance
from fa4_inductor.kernels.cute.static import TraceObject


class BwdBarriers(TraceObject):
    """mbarrier pointers of one CTA: K and V together, full/empty pairs for each stage of the rings of Q and dO."""

    def __init__(self, storage, num_stages: int):
        self.num_stages = num_stages
        self.kv_full = storage.kv_bar.data_ptr()
        self.q_full, self.q_empty = (storage.q_bars.data_ptr() + i * num_stages for i in range(2))
        self.do_full, self.do_empty = (storage.do_bars.data_ptr() + i * num_stages for i in range(2))

    def initialize(self, consumer_warps: int) -> None:
        """One thread: set the arrival counts. TMA arrives once per load, each consumer warp once per release."""
        cute.arch.mbarrier_init(self.kv_full, 1)
        for s in range(self.num_stages):
            cute.arch.mbarrier_init(self.q_full + s, 1)
            cute.arch.mbarrier_init(self.do_full + s, 1)
            cute.arch.mbarrier_init(self.q_empty + s, consumer_warps)
            cute.arch.mbarrier_init(self.do_empty + s, consumer_warps)


class BwdLoads(TraceObject):
    """TMA atoms with coordinate tensors, and the row statistics, of one CTA."""

    def __init__(self, bwd, smem, q, k, v, do, stats: cute.Tensor):
        self.bwd, self.smem, self.q, self.k, self.v, self.do, self.stats = bwd, smem, q, k, v, do, stats
        bits = 32 * bwd.tile_m
        self.row_copy = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32, num_bits_per_copy=bits)

    def keys(self, kv_head: Int32, b: Int32) -> tuple:
        """Loads of K and of V by slabs of 64 keys."""
        bwd, smem = self.bwd, self.smem
        b_k = ops.select(self.k[1].shape[3] == 1, Int32(0), b)
        b_v = ops.select(self.v[1].shape[3] == 1, Int32(0), b)
        return (
            RingLoad(*self.k, smem.k, (64, bwd.tile_d), (kv_head, b_k)),
            RingLoad(*self.v, smem.v, (64, bwd.tile_dv), (kv_head, b_v)),
        )

    def queries(self, h: Int32, b: Int32) -> tuple:
        """Loads of Q and of dO by query tile."""
        bwd, smem = self.bwd, self.smem
        return (
            RingLoad(*self.q, smem.q, (bwd.tile_m, bwd.tile_d), (h, b)),
            RingLoad(*self.do, smem.do, (bwd.tile_m, bwd.tile_dv), (h, b)),
        )

    @cute.jit
    def statistic(self, row: Int32, smem: cute.Tensor, slot: Int32, bar: cute.Pointer):
        """One row of `stats` into slot `slot` of `smem` (tile_m, stage)."""
        with cute.arch.elect_one():
            cute.copy(self.row_copy, self.stats[row, None], smem[None, slot], mbar_ptr=bar)


@cute.jit
def _acquire(full: cute.Pointer, empty: cute.Pointer, phase: Int32, num_bytes: cutlass.Constexpr[int]):
    cute.arch.mbarrier_wait(empty, phase ^ 1)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, num_bytes)


@cute.jit
def produce(
    bwd: cutlass.Constexpr,
    ctx: cutlass.Constexpr,
    bars: cutlass.Constexpr,
    loads: cutlass.Constexpr,
    n: Int32,
    heads: cutlass.Constexpr,
    b: Int32,
    num_m: Int32,
    num_heads: Int32,
):
    """Main loop of the producer warp: all query tiles of the CTA's query heads that see the key tile."""
    load_k, load_v = loads.keys(heads.kv_head, b)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(bars.kv_full, bwd.k_bytes + bwd.v_bytes)
    for w in cutlass.range_constexpr(2):
        load_k(2 * n + w, w, bars.kv_full)
        load_v(2 * n + w, w, bars.kv_full)
    index, phase = Int32(0), Int32(0)
    for g in cutlass.range(heads.count, unroll=1):
        h = heads.first + g
        load_q, load_do = loads.queries(h, b)
        tiles = QueryTiles(bwd.program, ctx, b, h, n, bwd.tile_m, bwd.tile_n)
        for m in cutlass.range(tiles.first, tiles.end, unroll=1):
            row = (b * num_heads + h) * num_m + m
            q_full, do_full = bars.q_full + index, bars.do_full + index
            _acquire(q_full, bars.q_empty + index, phase, bwd.q_bytes)
            load_q(m, index, q_full)
            first = bwd.stat_rows * row
            loads.statistic(first, loads.smem.lse, index, q_full)
            if cutlass.const_expr(bwd.program.may_fill):
                loads.statistic(first + 2, loads.smem.norm, index, q_full)
            _acquire(do_full, bars.do_empty + index, phase, bwd.do_bytes)
            load_do(m, index, do_full)
            loads.statistic(first + 1, loads.smem.delta, index, do_full)
            index, phase = advance(index, phase, bwd.num_stages)
