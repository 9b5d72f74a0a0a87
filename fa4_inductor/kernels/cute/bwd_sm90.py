"""BwdSm90: the sm_90a backward attention kernel (one producer warp with TMA, two consumer warpgroups with wgmma).

One CTA per key tile and key head walks the query tiles that see it, for all query heads of the group (or a share of
them, for few key heads). dK and dV stay in registers, dQ is added up in global memory in fp32. P is recomputed from the
LSE (FlashAttention-2, arXiv 2307.08691); the transposed products are those of FlashAttention-3 (arXiv 2407.08608).
`bwd_build.build_backward` compiles it.
"""

from types import ModuleType, SimpleNamespace

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from fa4_inductor.kernels.cute.bwd_consumer import BwdConsumer, consume
from fa4_inductor.kernels.cute.bwd_fills import FillRows
from fa4_inductor.kernels.cute.bwd_producer import BwdBarriers, BwdLoads, produce
from fa4_inductor.kernels.cute.bwd_rows import THREADS, QueryGradient, RowStatistics
from fa4_inductor.kernels.cute.bwd_tiles import HeadShare, tile_columns
from fa4_inductor.kernels.cute.operands import head_major, slab_layout, transposed_stages
from fa4_inductor.kernels.cute.program import Program, ProgramContext

_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = 240, 24


class BwdSm90:
    """Backward attention for one static configuration; call it inside cute.compile (bwd_build.py has the arguments).

    Args:
        program: module emitted with `gradient`. dtype: cutlass.BFloat16 or Float16. head_dim, head_dim_v: multiples of
            8 up to 128, of the user's tensors; tiles have 64 or 128 columns, TMA fills those behind the last one with
            zeros. group: query heads per key/value head. tile_m: query rows per tile, 64 or 128.

    dQ of a query tile is split between the warpgroups by rows (tile_m 128) or by columns (64).
    """

    tile_n = 128
    num_stages = 2
    threads = 384

    def __init__(self, program: ModuleType, dtype, head_dim: int, head_dim_v: int, group: int, tile_m: int):
        self.program = Program(program)
        self.dtype, self.group, self.tile_m = dtype, group, tile_m
        self.head_dim, self.head_dim_v = head_dim, head_dim_v
        self.tile_d, self.tile_dv = tile_columns(head_dim), tile_columns(head_dim_v)
        size = dtype.width // 8
        self.k_bytes = self.tile_n * self.tile_d * size
        self.v_bytes = self.tile_n * self.tile_dv * size
        self.stat_rows = 4 if self.program.may_fill else 2  # LSE, delta and, for fills, norm and a flag
        self.q_bytes = tile_m * (self.tile_d * size + (8 if self.program.may_fill else 4))
        self.do_bytes = tile_m * (self.tile_dv * size + 4)
        self.dq_by_rows = tile_m == 128
        self.keeps_half = tile_m == 128 and dtype is cutlass.BFloat16 and not self.program.has_score_grad
        self.dq_shape = (64, self.tile_d if self.dq_by_rows else self.tile_d // 2)

    def tiled_mma(self) -> tuple:
        """wgmma of one warpgroup for S^T and dP^T, dV, dK, and its part of dQ."""
        k, mn = OperandMajorMode.K, OperandMajorMode.MN
        smem, registers = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM

        def mma(a_major, b_major, columns: int, a_source):
            shape = (1, 1, 1), (64, columns)
            return hopper.make_trivial_tiled_mma(self.dtype, self.dtype, a_major, b_major, Float32, *shape, a_source)

        return (
            mma(k, k, self.tile_m, smem),
            mma(k, mn, self.tile_dv, registers),
            mma(k, mn, self.tile_d, registers),
            mma(mn, mn, self.dq_shape[1], smem),
        )

    def layouts(self) -> SimpleNamespace:
        """Shared-memory layouts: k, v (64, D, slab), q, do (tile_m, D, stage), ds (64, tile_m, 2 * slot + slab)."""
        return SimpleNamespace(
            k=slab_layout(self.dtype, 64, self.tile_d, 2),
            v=slab_layout(self.dtype, 64, self.tile_dv, 2),
            q=slab_layout(self.dtype, self.tile_m, self.tile_d, self.num_stages),
            do=slab_layout(self.dtype, self.tile_m, self.tile_dv, self.num_stages),
            ds=slab_layout(self.dtype, 64, self.tile_m, 4),
        )

    def storage(self, layouts: SimpleNamespace):
        """Shared-memory struct of one CTA."""
        bars = cute.struct.MemRange[Int64, 2 * self.num_stages]

        def buffer(size: int, dtype=self.dtype):
            return cute.struct.Align[cute.struct.MemRange[dtype, size], 1024]

        class Storage:
            pass

        Storage.__annotations__ = {
            "kv_bar": cute.struct.MemRange[Int64, 1],
            "q_bars": bars,
            "do_bars": bars,
            "lse": buffer(self.num_stages * self.tile_m, Float32),
            "norm": buffer(self.num_stages * self.tile_m if self.program.may_fill else 2, Float32),
            "delta": buffer(self.num_stages * self.tile_m, Float32),
            **{name: buffer(cute.cosize(layout)) for name, layout in vars(layouts).items()},
        }
        return cute.struct(Storage)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        do: cute.Tensor,
        lse: cute.Tensor,
        grad_lse,
        dq: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        stats: cute.Tensor,
        accumulator: cute.Tensor,
        turns,
        learned,
        softmax_scale: Float32,
        aux,
        sizes,
        stream,
    ):
        batch, num_heads, seqlen_q = q.shape[0], q.shape[1], q.shape[2]
        seqlen_k, num_slots = k.shape[2], dk.shape[1]
        num_m = (seqlen_q + self.tile_m - 1) // self.tile_m
        num_n = (seqlen_k + self.tile_n - 1) // self.tile_n
        rows = [num_m, num_heads, batch]
        lengths = (seqlen_q, seqlen_k)
        scratch = (stats, accumulator, turns)
        self.before(
            q, k, out, do, lse, grad_lse, *scratch, softmax_scale, aux, sizes, num_m, num_heads, *lengths
        ).launch(grid=rows, block=[THREADS, 1, 1], stream=stream)
        layouts = self.layouts()
        slab = [0, 1]
        load = cpasync.CopyBulkTensorTileG2SOp()
        shapes = ((self.tile_m, self.tile_d), (64, self.tile_d), (64, self.tile_dv), (self.tile_m, self.tile_dv))
        tma_q, tma_k, tma_v, tma_do = (
            cpasync.make_tiled_tma_atom(load, t, cute.select(layout, mode=slab), shape)
            for t, layout, shape in zip(
                map(head_major, (q, k, v, do)), (layouts.q, layouts.k, layouts.v, layouts.do), shapes
            )
        )
        self.kernel(
            tma_q.atom,
            tma_q.tma_tensor,
            tma_k.atom,
            tma_k.tma_tensor,
            tma_v.atom,
            tma_v.tma_tensor,
            tma_do.atom,
            tma_do.tma_tensor,
            stats,
            accumulator,
            turns,
            learned,
            dk,
            dv,
            softmax_scale,
            aux,
            sizes,
            num_m,
            num_heads,
            num_slots // k.shape[1],
            *lengths,
        ).launch(grid=[num_n, num_slots, batch], block=[self.threads, 1, 1], stream=stream, min_blocks_per_mp=1)
        self.after(accumulator, dq, softmax_scale, num_m, num_heads, seqlen_q).launch(
            grid=rows, block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def before(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        out: cute.Tensor,
        do: cute.Tensor,
        lse: cute.Tensor,
        grad_lse,
        stats: cute.Tensor,
        accumulator: cute.Tensor,
        turns,
        softmax_scale: Float32,
        aux,
        sizes,
        num_m: Int32,
        num_heads: Int32,
        seqlen_q: Int32,
        seqlen_k: Int32,
    ):
        m, h, b = cute.arch.block_idx()
        ctx = ProgramContext(aux, sizes, seqlen_q, seqlen_k, softmax_scale)
        rows = RowStatistics(self, ctx, out, do, lse, grad_lse, stats, accumulator, turns)
        row = (b * num_heads + h) * num_m + m
        rows(m, h, b, row)
        if cutlass.const_expr(self.program.may_fill):
            FillRows(self, ctx, q, k, lse, stats)(m, h, b, row)

    @cute.kernel
    def after(
        self,
        accumulator: cute.Tensor,
        dq: cute.Tensor,
        softmax_scale: Float32,
        num_m: Int32,
        num_heads: Int32,
        seqlen_q: Int32,
    ):
        m, h, b = cute.arch.block_idx()
        QueryGradient(self, accumulator, dq)(m, h, b, (b * num_heads + h) * num_m + m, seqlen_q, softmax_scale)

    @cute.kernel
    def kernel(
        self,
        atom_q,
        m_q,
        atom_k,
        m_k,
        atom_v,
        m_v,
        atom_do,
        m_do,
        stats: cute.Tensor,
        accumulator: cute.Tensor,
        turns,
        learned,
        dk: cute.Tensor,
        dv: cute.Tensor,
        softmax_scale: Float32,
        aux,
        sizes,
        num_m: Int32,
        num_heads: Int32,
        splits: Int32,
        seqlen_q: Int32,
        seqlen_k: Int32,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for atom in (atom_q, atom_k, atom_v, atom_do):
                cpasync.prefetch_descriptor(atom)
        storage = cutlass.utils.SmemAllocator().allocate(self.storage(self.layouts()))
        bars = BwdBarriers(storage, self.num_stages)
        if warp == 0:
            with cute.arch.elect_one():
                bars.initialize(8)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        smem = self._smem_tensors(storage)
        ctx = ProgramContext(aux, sizes, seqlen_q, seqlen_k, softmax_scale)
        n, slot, b = cute.arch.block_idx()
        if cutlass.const_expr(turns is not None):  # nobody may wait for a key tile that starts later
            n = (seqlen_k + self.tile_n - 1) // self.tile_n - 1 - n
        heads = HeadShare(self.group, slot, splits)
        if warp < 4:
            cute.arch.setmaxregister_decrease(_PRODUCER_REGISTERS)
            if warp == 0:
                operands = ((atom_q, m_q), (atom_k, m_k), (atom_v, m_v), (atom_do, m_do))
                produce(self, ctx, bars, BwdLoads(self, smem, *operands, stats), n, heads, b, num_m, num_heads)
        else:
            cute.arch.setmaxregister_increase(_CONSUMER_REGISTERS)
            tidx, _, _ = cute.arch.thread_idx()
            wg = cute.arch.make_warp_uniform(tidx // 128 - 1)
            consumer = BwdConsumer(self, ctx, bars, smem, wg, tidx % 128, learned)
            consume(consumer, stats, accumulator, turns, dk, dv, n, heads, slot, b, num_m, num_heads)

    def _smem_tensors(self, storage) -> SimpleNamespace:
        tensors = {
            name: getattr(storage, name).get_tensor(layout.outer, swizzle=layout.inner)
            for name, layout in vars(self.layouts()).items()
        }
        rows = cute.make_layout((self.tile_m, self.num_stages))
        pairs = cute.make_layout((self.tile_m // 2, self.num_stages))
        for name in ("lse", "delta", "norm") if self.program.may_fill else ("lse", "delta"):
            tensors[name] = getattr(storage, name).get_tensor(rows)
            pointer = cute.recast_ptr(tensors[name].iterator, dtype=Int64)
            tensors[f"{name}_pairs"] = cute.make_tensor(pointer, pairs)
        for name in ("k", "q", "do", "ds"):
            tensors[f"{name}_t"] = transposed_stages(tensors[name])
        return SimpleNamespace(**tensors)
