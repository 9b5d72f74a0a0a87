"""SplitSm90: the sm_90a attention kernel for few query rows, where the time goes into reading K and V once.

One CTA computes 64 packed rows (packed.py) against one run of key tiles: a TMA warp streams K and V through a ring, one
consumer warpgroup does the arithmetic. With more than one split per (batch, key head), partial results go through a
workspace and a second, small kernel merges them (Flash-Decoding; PyTorch blog, October 2023). `build.build_split`
compiles both as one function.
"""

from types import ModuleType, SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import cpasync

from fa4_inductor.kernels.cute import ops
from fa4_inductor.kernels.cute.operands import (
    attention_mma,
    head_major,
    padded_head_dim,
    slab_layout,
    transposed_stages,
)
from fa4_inductor.kernels.cute.packed import TILE_M, PackedCoordinates, PackedRows, split_keys
from fa4_inductor.kernels.cute.producer import Barriers, RingLoad, load_keys
from fa4_inductor.kernels.cute.program import Program, ProgramContext
from fa4_inductor.kernels.cute.split_combine import THREADS as COMBINE_THREADS
from fa4_inductor.kernels.cute.split_combine import Combine, Results, Workspace, store_partial, store_results
from fa4_inductor.kernels.cute.split_consumer import SplitConsumer

_CONSUMER_WARPS = 4


# Keys up to which a kernel without splits lets the next one start early: for more, that gains less than it costs.
_SHORT_SEQLEN_K = 512


@cute.jit
def _follow(early: Boolean):
    """Programmatic dependent launch: the next kernel may start (if `early`, else when this one's CTAs have ended), and
    this one goes on when those before it are done.

    What comes before this call overlaps with the kernel before; nothing in it may touch global memory. A kernel that
    was started early has to make the same call before it reads what this one writes.

    CTAs that start early take what places there are, two of them on an SM that was idle and none on another: with 128
    CTAs on 132 SMs that costs 15 % of a long kernel (engineering log, entry 59).
    """
    if early:
        cute.arch.griddepcontrol_launch_dependents()
    cute.arch.griddepcontrol_wait()


class SplitSm90:
    """Split-KV attention for one static configuration; call it inside cute.compile (see build.py for the arguments).

    Args:
        program: emitted module without DENSE. dtype: cutlass.BFloat16 or Float16. head_dim, head_dim_v: of the user's
            tensors. group: query heads per key/value head. config: SplitConfig.

    Raises:
        ValueError: if the configuration does not fit into shared memory.
    """

    def __init__(self, program: ModuleType, dtype, head_dim: int, head_dim_v: int, group: int, config):
        self.program = Program(program)
        self.dtype, self.group, self.config = dtype, group, config
        self.head_dim, self.head_dim_v = head_dim, head_dim_v
        self.tile_d, self.tile_dv = padded_head_dim(head_dim), padded_head_dim(head_dim_v)
        if not config.fits(self.tile_d, self.tile_dv):
            raise ValueError(f"{config} needs more shared memory than an SM has at head dims {head_dim}, {head_dim_v}")
        size = dtype.width // 8
        self.k_bytes = config.tile_n * self.tile_d * size
        self.v_bytes = config.tile_n * self.tile_dv * size
        self.optimistic = self.bounded = False

    def tiled_mma(self) -> tuple:
        """wgmma for Q K^T and P V."""
        return attention_mma(self.dtype, self.config.tile_n, self.tile_dv)

    def layouts(self) -> SimpleNamespace:
        """Shared-memory layouts: q (64, D, 1), k, v (tile_n, D, stage)."""
        tile_n, stages = self.config.tile_n, self.config.num_stages
        return SimpleNamespace(
            q=slab_layout(self.dtype, TILE_M, self.tile_d, 1),
            k=slab_layout(self.dtype, tile_n, self.tile_d, stages),
            v=slab_layout(self.dtype, tile_n, self.tile_dv, stages),
        )

    def storage(self, layouts: SimpleNamespace):
        """Shared-memory struct of one CTA."""
        bars = cute.struct.MemRange[cutlass.Int64, 2 * self.config.num_stages]

        class Storage:
            pass

        Storage.__annotations__ = {"q_bars": cute.struct.MemRange[cutlass.Int64, 2], "k_bars": bars, "v_bars": bars} | {
            name: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout)], 1024]
            for name, layout in vars(layouts).items()
        }
        return cute.struct(Storage)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        lse,
        v_mean,
        softmax_scale: Float32,
        aux,
        sizes,
        workspace,
        num_splits: Int32,
        stream,
    ):
        layouts = self.layouts()
        k, v = head_major(k), head_major(v)
        load, tile_n = cpasync.CopyBulkTensorTileG2SOp(), self.config.tile_n
        tma_k, tma_v = (
            cpasync.make_tiled_tma_atom(load, x, cute.select(layout, mode=[0, 1]), (tile_n, d))
            for x, layout, d in ((k, layouts.k, self.tile_d), (v, layouts.v, self.tile_dv))
        )
        num_m = (q.shape[2] * self.group + TILE_M - 1) // TILE_M
        num_bh = q.shape[0] * k.shape[2]
        self.kernel(
            q, tma_k.atom, tma_k.tma_tensor, tma_v.atom, tma_v.tma_tensor, out, lse, v_mean, softmax_scale, aux, sizes,
            workspace, num_m, num_splits, k.shape[0],
        ).launch(
            grid=[num_m * num_splits * num_bh, 1, 1],
            block=[32 * (_CONSUMER_WARPS + 1), 1, 1],
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=self.config.ctas_per_sm,
            preferred_smem_carveout=100,  # percent; without it the DSL asks the driver of this machine
        )  # fmt: skip
        if cutlass.const_expr(self.config.split):
            self.combine(out, lse, v_mean, softmax_scale, aux, sizes, workspace, num_splits, k.shape[0]).launch(
                grid=[num_bh * self.group * q.shape[2], 1, 1],
                block=[COMBINE_THREADS, 1, 1],
                stream=stream,
                use_pdl=True,
            )

    @cute.kernel
    def kernel(
        self,
        q,
        atom_k,
        m_k,
        atom_v,
        m_v,
        out,
        lse,
        v_mean,
        softmax_scale: Float32,
        aux,
        sizes,
        workspace,
        num_m: Int32,
        num_splits: Int32,
        seqlen_k: Int32,
    ):
        config = cutlass.const_expr(self.config)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == _CONSUMER_WARPS:
            cpasync.prefetch_descriptor(atom_k)
            cpasync.prefetch_descriptor(atom_v)
        layouts = self.layouts()
        storage = cutlass.utils.SmemAllocator().allocate(self.storage(layouts))
        bars = Barriers(storage, config.num_stages)
        if warp == 0:
            with cute.arch.elect_one():
                bars.initialize(_CONSUMER_WARPS)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        _follow(Boolean(config.split) | (seqlen_k <= _SHORT_SEQLEN_K))
        ctx = ProgramContext(aux, sizes, q.shape[2], seqlen_k, softmax_scale)
        cta, _, _ = cute.arch.block_idx()
        m_tile, rest = cta % num_m, cta // num_m
        split, bh = rest % num_splits, rest // num_splits
        num_kv_heads = q.shape[1] // self.group
        b = bh // num_kv_heads
        kv_head = bh - b * num_kv_heads
        rows = PackedRows(self.group, m_tile, b, kv_head, q.shape[2])
        keys = split_keys(self.program, ctx, rows, config.tile_n, split, num_splits)
        smem_q, smem_k, smem_v = (
            getattr(storage, name).get_tensor(layout.outer, swizzle=layout.inner)
            for name, layout in vars(layouts).items()
        )
        if warp == _CONSUMER_WARPS:
            self.produce(bars, keys, self._load(atom_k, m_k, smem_k, self.tile_d, rows, keys),
                         self._load(atom_v, m_v, smem_v, self.tile_dv, rows, keys))  # fmt: skip
        else:
            lane, _, _ = cute.arch.thread_idx()
            smem = SimpleNamespace(q=smem_q, k=smem_k, v_transposed=transposed_stages(smem_v), dense=[])
            consumer = SplitConsumer(self, ctx, bars, smem, softmax_scale, 0, lane)
            at = PackedCoordinates(self.program, ctx, rows, lane, keys.origin)
            consumer.load_queries(q, smem_q[None, None, 0], rows)
            consumer.run(at, keys)
            if cutlass.const_expr(config.split):
                num_bh = q.shape[0] * num_kv_heads
                to = Workspace(workspace, num_splits, num_bh, rows.total, self.head_dim_v)
                store_partial(consumer, at, rows, to, split, bh)
            else:
                store_results(consumer, at, rows, Results(self, ctx, out, lse, v_mean))

    def _load(self, atom, tensor: cute.Tensor, smem: cute.Tensor, tile_d: int, rows: PackedRows, keys) -> RingLoad:
        b = ops.select(tensor.shape[3] == 1, Int32(0), rows.b)
        shifted = cute.domain_offset((keys.origin, 0, 0, 0), tensor)
        return RingLoad(atom, shifted, smem, (self.config.tile_n, tile_d), (rows.kv_head, b))

    @cute.jit
    def produce(
        self, bars: cutlass.Constexpr, keys: cutlass.Constexpr, load_k: cutlass.Constexpr, load_v: cutlass.Constexpr
    ):
        """The producer warp: all key tiles of the split through the rings."""
        if keys.count > 0:
            load_keys(self, bars, load_k, load_v, keys, Int32(0), Int32(0))

    @cute.kernel
    def combine(
        self, out, lse, v_mean, softmax_scale: Float32, aux, sizes, workspace, num_splits: Int32, seqlen_k: Int32
    ):
        _follow(Boolean(True))
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctx = ProgramContext(aux, sizes, out.shape[2], seqlen_k, softmax_scale)
        total = out.shape[2] * self.group
        num_kv_heads = out.shape[1] // self.group
        bh = cta // total
        packed = cta - bh * total
        b = bh // num_kv_heads
        rows = PackedRows(self.group, Int32(0), b, bh - b * num_kv_heads, out.shape[2])
        workspace = Workspace(workspace, num_splits, out.shape[0] * num_kv_heads, total, self.head_dim_v)
        Combine(self, ctx, workspace, Results(self, ctx, out, lse, v_mean), rows, bh)(packed, tid)
