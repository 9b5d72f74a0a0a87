"""GQA packing: the query rows of all heads that share a key head, as rows of one tile, and the keys such a tile visits.

Packed row i of a (batch, key head) is query row i // group of query head i % group within the group, so that K and V
are read once for all of them and the rows of a tile are neighbours in q_idx.
"""

import cutlass.cute as cute
from cutlass import Int32

from fa4_inductor.kernels.cute import fragment, ops
from fa4_inductor.kernels.cute.program import Program, ProgramContext
from fa4_inductor.kernels.cute.static import TraceObject
from fa4_inductor.kernels.cute.tiles import KeyTiles, classify

TILE_M = 64  # packed rows per tile: the M of one wgmma
_WARP = 32


class PackedRows(TraceObject):
    """The rows of one tile.

    Attributes:
        first: packed row of the tile's first row. count: rows of the tile that exist, at least 1.
        total: packed rows of a (batch, key head).
    """

    def __init__(self, group: int, m_tile: Int32, b: Int32, kv_head: Int32, seqlen_q: Int32):
        self.group, self.b, self.kv_head = group, b, kv_head
        self.first, self.total = m_tile * TILE_M, seqlen_q * group
        self.count = ops.imin(self.total - self.first, TILE_M)

    def query(self, row: Int32) -> tuple[Int32, Int32]:
        """(q_idx, query head) of row `row` of the tile; q_idx is beyond the last where the row does not exist."""
        packed = self.first + row
        q_idx = packed // self.group
        return q_idx, self.kv_head * self.group + packed - q_idx * self.group


class PackedCoordinates(TraceObject):
    """Where one thread is: its two rows, and the program's uniform and row values of each.

    The heads of the two rows differ unless the group is 1, and so does everything a program derives from (b, h).
    `origin`: kv_idx of the first column of key tile 0.
    """

    def __init__(self, program: Program, ctx: ProgramContext, rows: PackedRows, lane: Int32, origin: Int32):
        first = fragment.thread_row(lane)
        self.b, self.origin = rows.b, origin
        self.rows_in_tile = (first, first + 8)
        queries = [rows.query(row) for row in self.rows_in_tile]
        self.q_rows = tuple(q for q, _ in queries)
        self.heads = tuple(h for _, h in queries) if rows.group > 1 else (rows.kv_head,) * fragment.ROWS
        self.same_head = rows.group == 1
        self.u = self.by_head(lambda r: program.uniform(ctx, self.b, self.heads[r]))
        self.rows = tuple(
            program.row(ctx, self.b, self.heads[r], self.q_rows[r], self.u[r]) for r in range(fragment.ROWS)
        )

    def by_head(self, value) -> tuple:
        """value(r) of both rows, computed once where they share their head."""
        first = value(0)
        return (first, first if self.same_head else value(1))


class SplitKeys(TraceObject):
    """The key tiles of one split: a run of those that its query tile visits, in their order.

    Tiles are counted from `origin`, at most 0, such that one ends at the last visited key: no key behind it is read, so
    unused cache slots may hold anything. Columns of negative kv_idx arrive as zeros.

    Attributes:
        count: tiles of this split; 0 is possible. num_masked: as in KeyTiles.
    """

    def __init__(self, tiles: KeyTiles, origin: Int32, split: Int32, num_splits: Int32):
        self.tiles, self.origin = tiles, origin
        per_split = (tiles.count + num_splits - 1) // num_splits
        self.start = split * per_split
        self.count = ops.imax(ops.imin(tiles.count - self.start, per_split), 0)
        self.num_masked = ops.imax(ops.imin(tiles.num_masked - self.start, self.count), 1)

    def tile(self, j: Int32) -> Int32:
        """Number of the j-th visited tile."""
        return self.tiles.tile(self.start + j)


def split_keys(
    program: Program, ctx: ProgramContext, rows: PackedRows, tile_n: int, split: Int32, num_splits: Int32
) -> SplitKeys:
    """Key tiles of one split of the packed rows; called by whole warps, all with one result."""
    lo, hi, full_lo, full_hi = Int32(0), ctx.seqlen_k, Int32(0), ctx.seqlen_k
    if program.masked:
        lo, hi, full_lo, full_hi = _key_range(program, ctx, rows)
    origin = (hi + tile_n - 1) // tile_n * -tile_n + hi
    tiles = classify(lo - origin, hi - origin, full_lo - origin, full_hi - origin, tile_n, False)
    return SplitKeys(tiles, origin, split, num_splits)


def _key_range(program: Program, ctx: ProgramContext, rows: PackedRows) -> tuple:
    """(lo, hi, full_lo, full_hi): the hull of what the rows visit, the intersection of what they keep whole.

    Each lane asks for two rows. Programs whose full tiles would have to test their columns count as without full tiles.
    """
    lo, hi, full_lo, full_hi = ctx.seqlen_k, Int32(0), Int32(0), ctx.seqlen_k
    for part in range(TILE_M // _WARP):
        row = ops.imin(cute.arch.lane_idx() + part * _WARP, rows.count - 1)
        q_idx, h = rows.query(row)
        begin, end = program.row_range(ctx, rows.b, h, q_idx)
        begin, end = ops.imax(begin, 0), ops.imin(end, ctx.seqlen_k)
        empty = begin >= end
        lo = ops.imin(lo, ops.select(empty, ctx.seqlen_k, begin))
        hi = ops.imax(hi, ops.select(empty, Int32(0), end))
        if not program.has_keep_column:
            begin, end = program.row_full(ctx, rows.b, h, q_idx)
            full_lo, full_hi = ops.imax(full_lo, begin), ops.imin(full_hi, end)
    lo, hi = _warp_min(lo), _warp_max(hi)
    lo = ops.imin(lo, hi)
    if program.has_keep_column:
        return lo, hi, lo, lo
    return lo, hi, _warp_max(full_lo), _warp_min(full_hi)


def _warp_min(x: Int32) -> Int32:
    return cute.arch.make_warp_uniform(cute.arch.warp_reduction(x, ops.imin))


def _warp_max(x: Int32) -> Int32:
    return cute.arch.make_warp_uniform(cute.arch.warp_reduction(x, ops.imax))
