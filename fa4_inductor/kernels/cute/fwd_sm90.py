"""FwdSm90: the sm_90a forward attention kernel (one producer warp with TMA, 1-3 consumer warpgroups with wgmma).

Algorithm: FlashAttention-3 (arXiv 2407.08608) with the conditional rescale of FlashAttention-4 (arXiv 2603.05451),
score and keep programs inlined into the softmax, and key tiles classed into empty (never loaded), masked and full.
`build.build_forward` compiles it; this module is the device code's skeleton: layouts, shared memory, roles.
"""

from types import ModuleType, SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from fa4_inductor.kernels.cute import ops
from fa4_inductor.kernels.cute.claims import MAX_CLAIMS, ClaimedOrder
from fa4_inductor.kernels.cute.consumer import Consumer, consume
from fa4_inductor.kernels.cute.dense import query_major
from fa4_inductor.kernels.cute.epilogue import OutputStore
from fa4_inductor.kernels.cute.operands import (
    attention_mma,
    head_major,
    padded_head_dim,
    slab_layout,
    transposed_stages,
)
from fa4_inductor.kernels.cute.producer import Barriers, KeyLoad, RingLoad, produce
from fa4_inductor.kernels.cute.program import Program, ProgramContext
from fa4_inductor.kernels.cute.redo import MAX_ROUNDS, REDO_WORDS, RedoList
from fa4_inductor.kernels.cute.static import TraceObject
from fa4_inductor.kernels.cute.tiles import TileOrder

_REGISTERS = {1: (240, 24), 2: (240, 24), 3: (160, 32)}  # consumer, producer; by number of consumer warpgroups
_L2_BYTES_FOR_KV = 24 << 20  # K and V of one section of heads should stay in L2 (50 MB) where it can be small


class Tma(TraceObject):
    """TMA atoms and coordinate tensors of the loads."""

    def __init__(self, fwd, smem, q, k, v, dense):
        self.fwd, self.smem, self.q, self.k, self.v, self.dense = fwd, smem, q, k, v, dense

    def loads(self, ctx: ProgramContext, m_tile: Int32, h: Int32, b: Int32) -> tuple:
        """Loads of Q by slab, of K (with the dense tiles beside it) and of V by key tile."""
        fwd, smem = self.fwd, self.smem
        b_kv = ops.select(self.k[1].shape[3] == 1, Int32(0), b)
        b_v = ops.select(self.v[1].shape[3] == 1, Int32(0), b)
        kv_tile = fwd.config.tile_n
        load_k = RingLoad(*self.k, smem.k, (kv_tile, fwd.tile_d), (h // fwd.group, b_kv))
        dense = self._dense_loads(ctx, m_tile, h, b)
        in_scores = [x for i, x in enumerate(dense) if i in fwd.program.dense_in_score]
        masks = [x for i, x in enumerate(dense) if i not in fwd.program.dense_in_score]
        return (
            RingLoad(*self.q, smem.q, (64, fwd.tile_d), (h, b)),
            KeyLoad(load_k, in_scores, masks, fwd.mask_bytes, fwd.config.num_consumers),
            RingLoad(*self.v, smem.v, (kv_tile, fwd.tile_dv), (h // fwd.group, b_v)),
        )

    def _dense_loads(self, ctx: ProgramContext, m_tile: Int32, h: Int32, b: Int32) -> list[list[RingLoad]]:
        """Per dense tile, the loads of its slabs."""
        config = self.fwd.config
        tile, first = (64, config.tile_n), m_tile * config.num_consumers
        at = self.fwd.program.dense_index(ctx, b, h)
        return [
            [RingLoad(*d, smem, tile, lead, (first + w, None)) for w in range(config.num_consumers)]
            for d, smem, lead in zip(self.dense, self.smem.dense, at)
        ]


class FwdSm90:
    """Forward attention for one static configuration; call it inside cute.compile (see build.py for the arguments).

    Args:
        program: emitted module. dtype: cutlass.BFloat16 or Float16. head_dim, head_dim_v: of the user's tensors.
        group: query heads per key/value head. config: KernelConfig. num_sms: for the persistent grid.
        aux_types: element types of the aux tensors.

    Raises:
        ValueError: if the configuration does not fit into shared memory.
    """

    def __init__(
        self,
        program: ModuleType,
        dtype,
        head_dim: int,
        head_dim_v: int,
        group: int,
        config,
        num_sms: int,
        aux_types: tuple = (),
    ):
        self.program = Program(program)
        self.dtype, self.group, self.config, self.num_sms = dtype, group, config, num_sms
        self.head_dim, self.head_dim_v = head_dim, head_dim_v
        self.tile_d = padded_head_dim(head_dim)
        self.tile_dv = padded_head_dim(head_dim_v)
        self.dense_types = [aux_types[slot] for slot in self.program.dense]
        dense_bytes = sum(t.width // 8 for t in self.dense_types)
        plan = config.smem(self.tile_d, self.tile_dv, dense_bytes)
        if not plan.fits:
            raise ValueError(f"{config} needs more shared memory than an SM has at head dims {head_dim}, {head_dim_v}")
        self.output_aliases_q = plan.output_aliases_q
        # Q's place in shared memory is free as soon as Q is in registers, if O does not go there
        self.frees_q_early = config.q_in_registers and not plan.output_aliases_q
        size = dtype.width // 8
        self.q_bytes = config.tile_m * self.tile_d * size
        self.v_bytes = config.tile_n * self.tile_dv * size
        self.k_bytes = plan.stage - self.v_bytes
        masks = [t for i, t in enumerate(self.dense_types) if i not in self.program.dense_in_score]
        self.mask_bytes = config.tile_m * config.tile_n * sum(t.width // 8 for t in masks)
        self.threads = 128 * (config.num_consumers + 1)
        # fp16 P has 5 exponent bits, too few for a shift far from the maximum
        self.optimistic = config.optimistic_max and dtype is cutlass.BFloat16
        self.bounded = self.optimistic and self.program.bounded

    def tiled_mma(self) -> tuple:
        """wgmma of one warpgroup for Q K^T and for P V."""
        return attention_mma(self.dtype, self.config.tile_n, self.tile_dv, self.config.q_in_registers)

    def layouts(self) -> SimpleNamespace:
        """Shared-memory layouts: q, o (64, D, warpgroup), k, v (tile_n, D, stage), dense tiles (64, tile_n, slab).

        Slab w of the dense tile in stage s is s * num_consumers + w.
        """
        config = self.config
        return SimpleNamespace(
            q=slab_layout(self.dtype, 64, self.tile_d, config.num_consumers),
            k=slab_layout(self.dtype, config.tile_n, self.tile_d, config.num_stages),
            v=slab_layout(self.dtype, config.tile_n, self.tile_dv, config.num_stages),
            o=slab_layout(self.dtype, 64, self.tile_dv, config.num_consumers),
            dense=[
                slab_layout(t, 64, config.tile_n, config.num_consumers * config.num_stages) for t in self.dense_types
            ],
        )

    def storage(self, layouts: SimpleNamespace):
        """Shared-memory struct of one CTA."""
        stages = self.config.num_stages
        o_size = 0 if self.output_aliases_q else cute.cosize(layouts.o)
        bars = cute.struct.MemRange[cutlass.Int64, 2 * stages]

        def buffer(size: int, dtype=self.dtype):
            return cute.struct.Align[cute.struct.MemRange[dtype, size], 1024]

        class Storage:
            pass

        Storage.__annotations__ = {
            "q_bars": cute.struct.MemRange[cutlass.Int64, 2],
            "k_bars": bars,
            "v_bars": bars,
            "verdict": cute.struct.MemRange[cutlass.Int64, 1],
            "redo": cute.struct.MemRange[cutlass.Int32, REDO_WORDS],
            "claims": cute.struct.MemRange[cutlass.Int32, MAX_CLAIMS if self.config.claim_tiles else 0],
            "q": buffer(cute.cosize(layouts.q)),
            "k": buffer(cute.cosize(layouts.k)),
            "v": buffer(cute.cosize(layouts.v)),
            "o": buffer(o_size),
            **{
                f"dense{i}": buffer(cute.cosize(layout), t)
                for i, (layout, t) in enumerate(zip(layouts.dense, self.dense_types))
            },
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
        stream,
    ):
        layouts = self.layouts()
        q, k, v, out = (head_major(t) for t in (q, k, v, out))
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        slab = [0, 1]
        tma_q = cpasync.make_tiled_tma_atom(load, q, cute.select(layouts.q, mode=slab), (64, self.tile_d))
        tma_k = cpasync.make_tiled_tma_atom(
            load, k, cute.select(layouts.k, mode=slab), (self.config.tile_n, self.tile_d)
        )
        tma_v = cpasync.make_tiled_tma_atom(
            load, v, cute.select(layouts.v, mode=slab), (self.config.tile_n, self.tile_dv)
        )
        tma_o = cpasync.make_tiled_tma_atom(store, out, cute.select(layouts.o, mode=slab), (64, self.tile_dv))
        tma_dense = [
            cpasync.make_tiled_tma_atom(
                load, query_major(aux[slot]), cute.select(layout, mode=slab), (64, self.config.tile_n)
            )
            for slot, layout in zip(self.program.dense, layouts.dense)
        ]
        seqlen_q, num_heads, batch = q.shape[0], q.shape[2], q.shape[3]
        seqlen_k = k.shape[0]
        num_m = (seqlen_q + self.config.tile_m - 1) // self.config.tile_m
        num_bh = num_heads * batch
        kv_bytes = seqlen_k * ((self.tile_d + self.tile_dv) * (self.dtype.width // 8))
        fewest = (self.config.min_heads + self.group - 1) // self.group
        section = ops.imax(Int32(_L2_BYTES_FOR_KV) // kv_bytes, fewest) * self.group
        section = ops.imin(section, num_bh)
        num_tiles = num_m * num_bh
        grid = ops.imin(num_tiles, Int32(self.num_sms))
        most_rounds = cutlass.const_expr(MAX_CLAIMS if self.config.claim_tiles else MAX_ROUNDS)
        grid = ops.imax(grid, num_tiles // (most_rounds - 8) + 1)
        self.kernel(
            tma_q.atom,
            tma_q.tma_tensor,
            tma_k.atom,
            tma_k.tma_tensor,
            tma_v.atom,
            tma_v.tma_tensor,
            tma_o.atom,
            tma_o.tma_tensor,
            tuple((t.atom, t.tma_tensor) for t in tma_dense),
            lse,
            v_mean,
            softmax_scale,
            aux,
            sizes,
            num_m,
            num_heads,
            num_bh,
            section,
            seqlen_q,
            seqlen_k,
        ).launch(grid=[grid, 1, 1], block=[self.threads, 1, 1], stream=stream, min_blocks_per_mp=1)

    @cute.kernel
    def kernel(
        self,
        atom_q,
        m_q,
        atom_k,
        m_k,
        atom_v,
        m_v,
        atom_o,
        m_o,
        dense,
        lse,
        v_mean,
        softmax_scale: Float32,
        aux,
        sizes,
        num_m: Int32,
        num_heads: Int32,
        num_bh: Int32,
        section: Int32,
        seqlen_q: Int32,
        seqlen_k: Int32,
    ):
        config = cutlass.const_expr(self.config)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for atom in (atom_q, atom_k, atom_v, atom_o, *(atom for atom, _ in dense)):
                cpasync.prefetch_descriptor(atom)
        storage = cutlass.utils.SmemAllocator().allocate(self.storage(self.layouts()))
        bars = Barriers(storage, config.num_stages)
        redo = RedoList(storage, self.optimistic and not self.bounded)
        cta, _, _ = cute.arch.block_idx()
        width, _, _ = cute.arch.grid_dim()
        shape = (num_m, num_heads, num_bh, section, cta, width, self.group, self.program.batch_inner)
        order = self._order(aux, shape, storage)
        if warp == 0:
            redo.clear()
            if cutlass.const_expr(order.dynamic):
                order.clear()
            with cute.arch.elect_one():
                bars.initialize(4 * config.num_consumers)
                redo.initialize(4 * config.num_consumers)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        smem = self._smem_tensors(storage)
        ctx = ProgramContext(aux, sizes, seqlen_q, seqlen_k, softmax_scale)
        consumer_registers, producer_registers = _REGISTERS[config.num_consumers]
        if warp < 4:
            cute.arch.setmaxregister_decrease(producer_registers)
            if warp == 0:
                produce(
                    self, ctx, bars, redo, order, Tma(self, smem, (atom_q, m_q), (atom_k, m_k), (atom_v, m_v), dense)
                )
        else:
            cute.arch.setmaxregister_increase(consumer_registers)
            tidx, _, _ = cute.arch.thread_idx()
            wg = cute.arch.make_warp_uniform(tidx // 128 - 1)
            consumer = Consumer(self, ctx, bars, smem, softmax_scale, wg, tidx % 128)
            consume(consumer, redo, order, OutputStore(atom_o, m_o, smem.o[None, None, wg], lse, v_mean))

    def _order(self, aux: tuple | None, shape: tuple, storage) -> TileOrder:
        """How the query tiles are dealt out."""
        if aux is None or not self.config.claim_tiles:
            return TileOrder(*shape)
        return ClaimedOrder(shape, aux[-1], storage.claims.data_ptr())

    def _smem_tensors(self, storage) -> SimpleNamespace:
        layouts = self.layouts()
        q, k, v = (
            field.get_tensor(layout.outer, swizzle=layout.inner)
            for field, layout in ((storage.q, layouts.q), (storage.k, layouts.k), (storage.v, layouts.v))
        )
        if self.output_aliases_q:
            # the output slab of a warpgroup lies inside its own Q slab, so no other warpgroup is involved
            outer = cute.append(
                cute.select(layouts.o.outer, mode=[0, 1]),
                cute.make_layout(self.config.num_consumers, stride=64 * self.tile_d),
            )
            o = storage.q.get_tensor(outer, swizzle=layouts.o.inner)
        else:
            o = storage.o.get_tensor(layouts.o.outer, swizzle=layouts.o.inner)
        dense = [
            getattr(storage, f"dense{i}").get_tensor(layout.outer, swizzle=layout.inner)
            for i, layout in enumerate(layouts.dense)
        ]
        q_words = cute.make_tensor(
            cute.recast_ptr(storage.q.data_ptr(), dtype=Int32),
            cute.make_layout((64 * self.tile_d // 2, self.config.num_consumers)),
        )
        return SimpleNamespace(q=q, k=k, v=v, o=o, v_transposed=transposed_stages(v), dense=dense, q_words=q_words)
