"""The kernel that classes the tiles of a mask: which key tiles a tile of query rows has to visit, and how.

    compiled = build_tile_map(program, tile_m, tile_n, aux=(("int32", 2),), num_sizes=0)
    compiled(out, seqlen_q, seqlen_k, aux, sizes)        # on the current CUDA stream

out is int32 (B or 1, Hq or 1, ceil(Sq / tile_m), 2 + ceil(Sk / tile_n)), any strides; `spec.attention.TileMap` says
what stands in it. A batch or head dimension of 1 needs a mask that is the same for all. Sq, Sk >= 1.

One CTA per tile of query rows, one warp per key tile. A tile is classed by the extremes of what its rows and keys
compare (analysis.tile_test); where keep reads one element per score, a tile that these leave open is read through.
"""

from types import ModuleType
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.runtime import make_fake_stream

from fa4_inductor.kernels.cute import ops
from fa4_inductor.kernels.cute.build import DTYPES, aux_operands, dynamic_tensor
from fa4_inductor.kernels.cute.program import Program, ProgramContext
from fa4_inductor.kernels.cute.static import TraceObject
from fa4_inductor.kernels.cute.tiles import MAP_HEADER, visited_tiles

_WARPS = 16
_WARP = 32
_CHUNK = 1024  # key tiles classed before they are written out
_VECTOR_BYTES = 16  # that a lane reads of a dense tensor in one access
_BYTES_AT_ONCE = 128  # that a lane reads before a verdict is tried: 64 KiB per SM in flight
_SINGLES_AT_ONCE = 32  # the same at the ragged edge, in elements
_EMPTY, _MASKED, _FULL = 0, 1, 2


class TileMapKernel(TraceObject):
    """Classes the tiles of one mask; call it inside cute.compile.

    Args:
        program: module of `lowering.emit_program.emit_tile_test`. tile_m, tile_n: rows and keys of a tile.
        dense_bytes: the largest element of its dense tensors; 0 without any.
    """

    def __init__(self, program: ModuleType, tile_m: int, tile_n: int, dense_bytes: int):
        self.program, self.module = Program(program), program
        self.tile_m, self.tile_n = tile_m, tile_n
        # tiles begin at multiples of 16 keys, rows of dense tensors at multiples of 16 bytes
        self.vector = _VECTOR_BYTES // dense_bytes if dense_bytes else 1

    @cute.jit
    def __call__(self, out: cute.Tensor, seqlen_q: Int32, seqlen_k: Int32, aux, sizes, stream):
        batch, heads, num_m, _ = out.shape
        self.kernel(out, seqlen_q, seqlen_k, aux, sizes).launch(
            grid=[num_m * heads * batch, 1, 1], block=[_WARP * _WARPS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, out: cute.Tensor, seqlen_q: Int32, seqlen_k: Int32, aux, sizes):
        _, heads, num_m, width = out.shape
        cta, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        bh, m_tile = cta // num_m, cta % num_m
        b, h = bh // heads, bh % heads
        ctx = ProgramContext(aux, sizes, seqlen_q, seqlen_k, Float32(1.0))
        classes = cutlass.utils.SmemAllocator().allocate_tensor(Int32, cute.make_layout(_CHUNK))
        q_lo = m_tile * self.tile_m
        q_hi = ops.imin(q_lo + self.tile_m, seqlen_q) - 1
        n_lo, n_hi = visited_tiles(self.program, ctx, b, h, q_lo, q_hi, self.tile_n)
        rows = self._extremes(self.module.row_values, ctx, b, h, q_lo, q_hi, self.tile_m)
        listed = out[b, h, m_tile, None]
        masked, full = Int32(0), Int32(0)
        while n_hi > n_lo:
            count = ops.imin(n_hi - n_lo, _CHUNK)
            for i in cutlass.range(warp, count, _WARPS, unroll=1):
                found = self._class(ctx, b, h, q_lo, q_hi, n_hi - 1 - i, rows)
                if cute.arch.lane_idx() == 0:
                    classes[i] = found
            cute.arch.sync_threads()
            if warp == 0:
                masked, full = self._append(classes, listed, n_hi, count, masked, full, width)
            cute.arch.sync_threads()
            n_hi = n_hi - count
        if cute.arch.thread_idx()[0] == 0:
            listed[0] = masked + full
            listed[1] = masked

    def _extremes(self, values: Any, ctx: ProgramContext, b, h, first: Int32, last: Int32, length: int) -> tuple:
        """(least, greatest) over the indices first..last of each of `values`; `length` is their greatest number."""
        found: list[list] = []
        for i in range((length + _WARP - 1) // _WARP):
            index = ops.imin(first + cute.arch.lane_idx() + i * _WARP, last)
            for j, value in enumerate(values(ctx, b, h, index)):
                if i == 0:
                    found.append([Int32(value), Int32(value)])
                else:
                    found[j] = [ops.imin(found[j][0], value), ops.imax(found[j][1], value)]
        redux = cute.arch.warp_redux_sync
        return tuple((redux(least, "min"), redux(greatest, "max")) for least, greatest in found)

    @cute.jit
    def _class(
        self,
        ctx: cutlass.Constexpr,
        b: Int32,
        h: Int32,
        q_lo: Int32,
        q_hi: Int32,
        n: Int32,
        rows: cutlass.Constexpr,
    ) -> Int32:
        """Class of key tile n. A tile that reaches behind the last key is never full, since its keys there are none."""
        kv_lo = n * self.tile_n
        kv_end = kv_lo + self.tile_n
        kv_hi = ops.imin(kv_end, ctx.seqlen_k) - 1
        columns = self._extremes(self.module.column_values, ctx, b, h, kv_lo, kv_hi, self.tile_n)
        possible, certain = self.module.tile_test(ctx, b, h, q_lo, q_hi, kv_lo, kv_hi, rows, columns)
        ends_inside = kv_end <= ctx.seqlen_k
        found = ops.select(possible, ops.select(Boolean(certain) & ends_inside, _FULL, _MASKED), _EMPTY)
        if cutlass.const_expr(self.module.TEST_ELEMENTS):
            if found == _MASKED:
                if ends_inside:
                    found = self._class_of_elements(ctx, b, h, q_lo, q_hi, kv_lo, self.vector)
                else:
                    found = self._class_of_elements(ctx, b, h, q_lo, q_hi, kv_lo, 1)
        return found

    @cute.jit
    def _class_of_elements(
        self,
        ctx: cutlass.Constexpr,
        b: Int32,
        h: Int32,
        q_lo: Int32,
        q_hi: Int32,
        kv_lo: Int32,
        vector: cutlass.Constexpr[int],
    ) -> Int32:
        """The class by every element, until both kept and dropped ones are seen: each lane reads groups of `vector`
        keys. A tile behind whose last key others follow is read in whole groups; at the ragged edge `vector` is 1."""
        program, lane = self.program, cute.arch.lane_idx()
        groups = self.tile_n // vector
        lanes = min(groups, _WARP)
        rows = _WARP // lanes  # the lanes left over read what the next access reads, too
        kv_hi = ops.imin(kv_lo + self.tile_n, ctx.seqlen_k) - 1
        firsts = [
            kv_lo + ops.imin(lane % lanes + i * _WARP, groups - 1) * vector
            for i in range((groups + _WARP - 1) // _WARP)
        ]
        at_once = _BYTES_AT_ONCE // _VECTOR_BYTES if vector > 1 else _SINGLES_AT_ONCE
        at_once = max(at_once // len(firsts), 1)
        u = program.uniform(ctx, b, h)
        keys = [[ops.imin(first + e, kv_hi) for e in range(vector)] for first in firsts]
        columns = [[program.column(ctx, b, h, key, u) for key in group] for group in keys]
        some_kept, some_dropped = Boolean(False), kv_lo + self.tile_n > ctx.seqlen_k
        q_first = q_lo
        while (q_first <= q_hi) & ((some_kept & some_dropped) == Boolean(False)):
            kept, dropped = some_kept, some_dropped
            for i in cutlass.range_constexpr(at_once):
                q_idx = ops.imin(q_first + i * rows + lane // lanes, q_hi)
                r = program.row(ctx, b, h, q_idx, u)
                for group, values in zip(keys, columns):
                    dense = self._dense(ctx, b, h, q_idx, group[0], vector)
                    for e in cutlass.range_constexpr(vector):
                        keep = program.keep(ctx, b, h, q_idx, group[e], u, r, values[e], tuple(d[e] for d in dense))
                        kept = kept | keep
                        dropped = dropped | (keep == Boolean(False))
            some_kept = cute.arch.vote_any_sync(kept)
            some_dropped = cute.arch.vote_any_sync(dropped)
            q_first += at_once * rows
        return ops.select(some_kept, ops.select(some_dropped, _MASKED, _FULL), _EMPTY)

    def _dense(self, ctx: ProgramContext, b, h, q_idx: Int32, key: Int32, vector: int) -> list:
        """`vector` elements of each dense load of the program, in one access: those of `key` and the keys behind it."""
        found = []
        for slot, lead in zip(self.program.dense, self.program.dense_index(ctx, b, h)):
            row = ctx.aux[slot][(*lead, q_idx, None)]
            size = row.element_type.width // 8
            address = row.iterator.toint() + Int64(key) * size
            pointer = cute.make_ptr(row.element_type, address, cute.AddressSpace.gmem, assumed_align=vector * size)
            found.append(cute.make_tensor(pointer, cute.make_layout(vector)).load())
        return found

    @cute.jit
    def _append(
        self,
        classes: cute.Tensor,
        listed: cute.Tensor,
        n_hi: Int32,
        count: Int32,
        masked: Int32,
        full: Int32,
        width: Int32,
    ):
        """Write the chunk's masked tiles behind the `masked` ones before, its full ones before the `full`; by one warp.

        classes[i] is that of tile n_hi - 1 - i. Returns the new numbers of both.
        """
        lane = cute.arch.lane_idx()
        for first in cutlass.range(0, count, _WARP, unroll=1):
            i = first + lane
            found = ops.select(i < count, classes[ops.imin(i, count - 1)], _EMPTY)
            masks = cute.arch.vote_ballot_sync(found == _MASKED)
            fulls = cute.arch.vote_ballot_sync(found == _FULL)
            below = cute.arch.lanemask_lt()
            if found == _MASKED:
                listed[MAP_HEADER + masked + Int32(cute.arch.popc(masks & below))] = n_hi - 1 - i
            if found == _FULL:
                listed[width - 1 - full - Int32(cute.arch.popc(fulls & below))] = n_hi - 1 - i
            masked = masked + Int32(cute.arch.popc(masks))
            full = full + Int32(cute.arch.popc(fulls))
        return masked, full


def build_tile_map(
    program: ModuleType,
    tile_m: int,
    tile_n: int,
    *,
    aux: tuple[tuple[str, int], ...] = (),
    num_sizes: int = 0,
    options: str = "",
) -> Any:
    """Compile the kernel; needs no GPU when CUTE_DSL_ARCH=sm_90a is set.

    Args:
        program: module of `lowering.emit_program.emit_tile_test`, importable from a real file.
        tile_m, tile_n: query rows and keys of a tile.
        aux: (dtype name, rank) of each aux tensor; "bool" is received as uint8.
        num_sizes: number of run-time integers. options: further cute.compile options.

    Returns:
        The compiled function; its call signature is in this module's docstring.
    """
    dense_bytes = max((DTYPES[aux[slot][0]].width // 8 for slot in getattr(program, "DENSE", ())), default=0)
    return cute.compile(
        TileMapKernel(program, tile_m, tile_n, dense_bytes),
        dynamic_tensor(Int32, 4),
        Int32(1),
        Int32(1),
        aux_operands(aux, getattr(program, "UNIT_STRIDE", ()), getattr(program, "DENSE", ())),
        tuple(Int32(1) for _ in range(num_sizes)) or None,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi {options}".strip(),
    )
