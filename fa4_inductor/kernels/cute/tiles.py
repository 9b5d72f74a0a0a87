"""Which tiles a CTA works on: the order of query tiles, and the classes of key tiles of one query tile.

Everything here is scalar Int32 arithmetic that the producer warp and the consumer warpgroups both evaluate; they must agree.
"""

from cutlass import Int32

from fa4_inductor.kernels.cute import ops
from fa4_inductor.kernels.cute.program import Program, ProgramContext
from fa4_inductor.kernels.cute.static import TraceObject


def decode_tile(
    tile: Int32, num_m: Int32, num_heads: Int32, num_bh: Int32, section: Int32, longest_first: bool
) -> tuple[Int32, Int32, Int32]:
    """(m_tile, h, b) of a linear tile number.

    (b, h) pairs are cut into sections whose K and V fit in L2 together; inside a section all pairs of one m_tile come
    first. With `longest_first` m_tile descends, so that causal work is issued from long to short.
    """
    per_section = num_m * section
    first_bh = tile // per_section * section
    inside = tile - first_bh * num_m
    width = ops.imin(section, num_bh - first_bh)
    m_tile = inside // width
    bh = first_bh + inside - m_tile * width
    if longest_first:
        m_tile = num_m - 1 - m_tile
    b = bh // num_heads
    return m_tile, bh - b * num_heads, b


class KeyTiles(TraceObject):
    """Key tiles of one query tile, in the order they are visited.

    First the masked tiles right of the full ones (descending), then the masked tiles left of them (descending), then the
    full ones (descending). Full tiles run without mask code. At least one tile counts as masked: the first visited.

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
