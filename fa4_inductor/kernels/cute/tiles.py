"""Which tiles a CTA works on: the order of query tiles, and the classes of key tiles of one query tile.

Everything here is scalar Int32 arithmetic that the producer warp and the consumer warpgroups both evaluate: they must
agree.
"""

import cutlass.cute as cute
from cutlass import Boolean, Int32

from fa4_inductor.kernels.cute import ops
from fa4_inductor.kernels.cute.program import Program, ProgramContext
from fa4_inductor.kernels.cute.static import TraceObject


class TileOrder(TraceObject):
    """Which query tiles a CTA computes, and in which order.

    A long tile and a short one of the same head, m and num_m - 1 - m, form a pair: pairs cost the same under causal
    masks as under none, so dealing them out evenly balances the CTAs without any run-time counter. The last pairs are
    dealt out as single tiles, long ones first, in rounds of alternating direction, so that no CTA waits for
    a whole pair.

    (b, h) are cut into sections whose K and V fit in L2 together; a section is finished before the next one starts.

    Every field is a kernel parameter, read from the constant bank where it is used: as values computed in the kernel they
    would take uniform registers away from the main loop.

    Attributes:
        num_m: query tiles per (b, h). num_heads: of q. num_bh: batch * num_heads. section: (b, h) per section.
        num_pairs: per (b, h). even_rounds: rounds that deal out pairs, two per pair. first_single: pairs dealt out so.
        left: pairs whose tiles are dealt out singly. rounds: in all.
    """

    FIELDS = ("num_m", "num_heads", "num_bh", "section", "num_pairs", "even_rounds", "first_single", "left", "rounds")

    def __init__(self, fields: tuple, cta: Int32, width: Int32):
        for name, value in zip(self.FIELDS, fields):
            setattr(self, name, value)
        self.cta, self.width = cta, width

    @staticmethod
    def plan(num_m: Int32, num_heads: Int32, num_bh: Int32, section: Int32, width: Int32) -> tuple:
        """Host side: the fields for `width` CTAs, in the order of FIELDS."""
        num_pairs = (num_m + 1) // 2
        pairs = num_pairs * num_bh
        pair_rounds = ops.imax(pairs // width - 1, 0)
        first_single = pair_rounds * width
        left = pairs - first_single
        even_rounds = 2 * pair_rounds
        rounds = even_rounds + (2 * left + width - 1) // width
        return num_m, num_heads, num_bh, section, num_pairs, even_rounds, first_single, left, rounds

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
        b = bh // self.num_heads
        long_tile = self.num_m - 1 - rank
        exists = (paired | (position < 2 * self.left)) & ((rank != long_tile) | (is_short == False))  # noqa: E712
        # integer divisions leave the uniform registers; what branches and loop bounds derive from has to come back, or the
        # compiler takes the whole tile for divergent code and keeps the wgmma descriptors in vector registers
        m_tile, h = ops.select(is_short, rank, long_tile), bh - b * self.num_heads
        exists = cute.arch.vote_any_sync(exists)
        return exists, ops.warp_uniform(m_tile), ops.warp_uniform(h), ops.warp_uniform(b)


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
        self.last_full = f_hi - 1
        self.n_right = n_hi - f_hi
        self.edge = self.n_right + (f_lo - n_lo)
        self.count = n_hi - n_lo
        self.num_masked = ops.imax(self.edge, 1)

    def first(self) -> Int32:
        """Key tile visited first."""
        return ops.select(self.edge > 0, self.masked(Int32(0)), self.full(Int32(0)))

    def masked(self, j: Int32) -> Int32:
        """Key tile of the j-th visited tile, for j < edge."""
        return ops.select(j < self.n_right, self.n_hi - 1 - j, self.f_lo - 1 + self.n_right - j)

    def full(self, j: Int32) -> Int32:
        """Key tile of the j-th visited tile, for j >= edge."""
        return self.last_full + self.edge - j

    def tile(self, j: Int32) -> Int32:
        """Key tile of the j-th visited tile."""
        return ops.select(j < self.edge, self.masked(j), self.full(j))


def key_tiles(
    program: Program, ctx: ProgramContext, b: Int32, h: Int32, q_lo: Int32, q_hi: Int32, tile_n: int, all_masked
) -> KeyTiles:
    """Classes of the key tiles for query rows q_lo..q_hi inclusive.

    all_masked: Boolean or bool; True puts every visited tile into the masked class.
    """
    seqlen_k = ctx.seqlen_k
    lo, hi, full_lo, full_hi = Int32(0), seqlen_k, Int32(0), seqlen_k
    if program.masked:
        lo, hi = (Int32(x) for x in program.module.kv_range(ctx, b, h, q_lo, q_hi))
        lo, hi = ops.imax(lo, 0), ops.imin(hi, seqlen_k)
        full_lo, full_hi = (Int32(x) for x in program.module.kv_full(ctx, b, h, q_lo, q_hi))
        full_lo, full_hi = ops.imax(full_lo, lo), ops.imin(full_hi, hi)
    n_lo = lo // tile_n
    n_hi = ops.select(hi > lo, (hi + tile_n - 1) // tile_n, n_lo)
    f_lo = (full_lo + tile_n - 1) // tile_n
    f_hi = full_hi // tile_n
    no_full = (f_hi <= f_lo) | all_masked
    f_lo = ops.select(no_full, n_lo, f_lo)
    f_hi = ops.select(no_full, n_lo, f_hi)
    return KeyTiles(n_lo, n_hi, f_lo, f_hi)
