"""Which tiles a CTA works on: the order of query tiles, and the classes of key tiles of one query tile.

Everything here is scalar Int32 arithmetic that the producer warp and the consumer warpgroups both evaluate: they must
agree.
"""

import cutlass.cute as cute
from cutlass import Boolean, Int32

from fa4_inductor.kernels.cute import ops
from fa4_inductor.kernels.cute.program import Program, ProgramContext
from fa4_inductor.kernels.cute.static import TraceObject

MAP_HEADER = 2  # entries before the first tile in a row of a tile map


class TileOrder(TraceObject):
    """Which query tiles a CTA computes, and in which order.

    A long tile and a short one of the same head, m and num_m - 1 - m, form a pair: pairs cost the same under causal
    masks as under none, so dealing them out evenly balances the CTAs without any run-time counter. The last pairs are
    dealt out as single tiles, long ones first, in rounds of alternating direction, so that no CTA waits for
    a whole pair.

    (b, h) are cut into sections whose K and V fit in L2 together; a section is finished before the next one starts.
    They are counted head by head of one batch entry, or batch entry by batch entry of one key head, so that what the
    batch shares is read while it is in L2.

    Args:
        num_m: query tiles per (b, h). num_heads: of q. num_bh: batch * num_heads. section: (b, h) per section.
        cta, width: this CTA and the number of CTAs. group: query heads per key head. batch_inner: the second order.
    """

    dynamic = False

    def __init__(
        self,
        num_m: Int32,
        num_heads: Int32,
        num_bh: Int32,
        section: Int32,
        cta: Int32,
        width: Int32,
        group: int,
        batch_inner: bool,
    ):
        self.num_m, self.num_heads, self.num_bh, self.section = num_m, num_heads, num_bh, section
        self.cta, self.width, self.group, self.batch_inner = cta, width, group, batch_inner
        self.num_pairs = (num_m + 1) // 2
        pairs = self.num_pairs * num_bh
        pair_rounds = ops.imax(pairs // width - 1, 0)
        self.first_single = pair_rounds * width
        self.left = pairs - self.first_single
        self.even_rounds = 2 * pair_rounds
        self.rounds = self.even_rounds + (2 * self.left + width - 1) // width

    def tile(self, round_: Int32) -> tuple[Boolean, Int32, Int32, Int32]:
        """(exists, m_tile, h, b) of one round of this CTA; b and h are in range only if it exists."""
        paired = round_ < self.even_rounds
        j = round_ - self.even_rounds
        position = j * self.width + ops.select(j % 2 == 1, self.width - 1 - self.cta, self.cta)
        short_half = position >= self.left
        single = self.first_single + ops.select(short_half, 2 * self.left - 1 - position, position)
        pair = ops.select(paired, round_ // 2 * self.width + self.cta, single)
        is_short = (paired & (round_ % 2 == 1)) | ((paired == False) & short_half)  # noqa: E712
        per_section = self.num_pairs * self.section
        first_bh = pair // per_section * self.section
        inside = pair - first_bh * self.num_pairs
        heads = ops.imax(ops.imin(self.section, self.num_bh - first_bh), 1)
        rank = inside // heads
        bh = first_bh + inside - rank * heads
        b, h = self._batch_and_head(bh)
        long_tile = self.num_m - 1 - rank
        exists = (paired | (position < 2 * self.left)) & ((rank != long_tile) | (is_short == False))  # noqa: E712
        return exists, ops.select(is_short, rank, long_tile), h, b

    def _batch_and_head(self, bh: Int32) -> tuple[Int32, Int32]:
        if not self.batch_inner:
            b = bh // self.num_heads
            return b, bh - b * self.num_heads
        batch, kv = self.num_bh // self.num_heads, bh // self.group
        kv_head = kv // batch
        return kv - kv_head * batch, kv_head * self.group + bh - kv * self.group


class KeyTiles(TraceObject):
    """Key tiles of one query tile, in the order they are visited.

    First the masked tiles right of the full ones (descending), then the masked tiles left of them (descending), then
    the full ones (descending). Full tiles run without mask code. At least one tile counts as masked: the first visited.

    Attributes:
        count: tiles visited; 0 means every row is empty.
        num_masked: of these, how many run the masked body.
    """

    def __init__(self, n_lo: Int32, n_hi: Int32, f_lo: Int32, f_hi: Int32):
        self.n_hi = n_hi
        self.f_lo = f_lo
        self.f_hi = f_hi
        self.n_right = n_hi - f_hi
        self.edge = self.n_right + (f_lo - n_lo)
        self.count = n_hi - n_lo
        self.num_masked = ops.imax(self.edge, 1)

    def tile(self, j: Int32) -> Int32:
        """Key tile number of the j-th visited tile."""
        left = self.f_lo - 1 + self.n_right - j
        full = self.f_hi - 1 + self.edge - j
        masked = ops.select(j < self.n_right, self.n_hi - 1 - j, left)
        return ops.select(j < self.edge, masked, full)


class ListedTiles(TraceObject):
    """Key tiles of one query tile as a tile map lists them (spec.attention.TileMap): masked ones from the front of its
    row, full ones from the end. Attributes as in `KeyTiles`.

    all_masked: Boolean; every tile runs the masked body.
    """

    def __init__(self, row: cute.Tensor, all_masked: Boolean):
        self.row = row
        self.listed_masked = cute.arch.make_warp_uniform(row[1])
        self.count = cute.arch.make_warp_uniform(row[0])
        self.num_masked = ops.select(all_masked, self.count, ops.imax(self.listed_masked, 1))

    def tile(self, j: Int32) -> Int32:
        """Key tile number of the j-th visited tile."""
        from_end = self.row.shape[0] - 1 - (j - self.listed_masked)
        return self.row[ops.select(j < self.listed_masked, MAP_HEADER + j, from_end)]


def visited_tiles(program: Program, ctx: ProgramContext, b: Int32, h: Int32, q_lo: Int32, q_hi: Int32, tile_n: int):
    """[n_lo, n_hi): key tiles outside of it are dropped by all rows q_lo..q_hi."""
    lo, hi = (Int32(x) for x in program.module.kv_range(ctx, b, h, q_lo, q_hi))
    lo, hi = ops.imax(lo, 0), ops.imin(hi, ctx.seqlen_k)
    n_lo = lo // tile_n
    return n_lo, ops.select(hi > lo, (hi + tile_n - 1) // tile_n, n_lo)


def key_tiles(
    program: Program,
    ctx: ProgramContext,
    b: Int32,
    h: Int32,
    m_tile: Int32,
    q_lo: Int32,
    q_hi: Int32,
    tile_n: int,
    all_masked: Boolean,
) -> KeyTiles | ListedTiles:
    """The key tiles to visit for query rows q_lo..q_hi inclusive, those of query tile m_tile.

    all_masked: True puts every visited tile into the masked class.
    """
    if program.tile_map is not None:
        tile_map = ctx.aux[program.tile_map]
        one_for_all = (ops.imin(b, tile_map.shape[0] - 1), ops.imin(h, tile_map.shape[1] - 1))
        return ListedTiles(tile_map[(*one_for_all, m_tile, None)], all_masked)
    seqlen_k = ctx.seqlen_k
    lo, hi, full_lo, full_hi = Int32(0), seqlen_k, Int32(0), seqlen_k
    if program.masked:
        lo, hi = (Int32(x) for x in program.module.kv_range(ctx, b, h, q_lo, q_hi))
        lo, hi = ops.imax(lo, 0), ops.imin(hi, seqlen_k)
        full_lo, full_hi = (Int32(x) for x in program.module.kv_full(ctx, b, h, q_lo, q_hi))
    return classify(lo, hi, full_lo, full_hi, tile_n, all_masked)


def classify(lo: Int32, hi: Int32, full_lo: Int32, full_hi: Int32, tile_n: int, all_masked) -> KeyTiles:
    """Tiles of the keys [lo, hi), of which [full_lo, full_hi) need no mask; all_masked as in `key_tiles`."""
    full_lo, full_hi = ops.imax(full_lo, lo), ops.imin(full_hi, hi)
    n_lo = lo // tile_n
    n_hi = ops.select(hi > lo, (hi + tile_n - 1) // tile_n, n_lo)
    f_lo = (full_lo + tile_n - 1) // tile_n
    f_hi = full_hi // tile_n
    no_full = (f_hi <= f_lo) | all_masked
    f_lo = ops.select(no_full, n_lo, f_lo)
    f_hi = ops.select(no_full, n_lo, f_hi)
    return KeyTiles(n_lo, n_hi, f_lo, f_hi)
