"""Query tiles dealt out while the kernel runs, for tile maps: what a tile costs is data, so no order balances the CTAs.

The producer warp takes the next tile off a counter in global memory when it has issued the last load of the one before,
and publishes it to the consumers through a list in shared memory, which also remembers what a redone round was. Which
CTA computes a tile changes from run to run, its result does not.
"""

import cutlass.cute as cute
from cutlass import Boolean, Int32

from fa4_inductor.kernels.cute import ops
from fa4_inductor.kernels.cute.tiles import TileOrder

MAX_CLAIMS = 384  # rounds of a CTA: what fits beside the mbarriers, into memory that is set aside anyway
_UNKNOWN, _NONE = -1, (1 << 31) - 1
_WARP = 32


class ClaimedOrder(TileOrder):
    """Sections of (b, h) one after the other, in each the last query tiles first.

    Args:
        shape: the arguments of TileOrder. counter: int32 (1,), 0 when the launch begins.
        claims: pointer to MAX_CLAIMS words of shared memory.
    """

    dynamic = True

    def __init__(self, shape: tuple, counter: cute.Tensor, claims: cute.Pointer):
        super().__init__(*shape)
        self.counter, self.claims = counter, claims
        self.rounds = Int32(MAX_CLAIMS)  # more than there are: `tile` tells the end

    def clear(self) -> None:
        """By one warp, before the CTA-wide barrier."""
        claims = cute.make_tensor(self.claims, cute.make_layout(MAX_CLAIMS))
        for i in range(MAX_CLAIMS // _WARP):
            round_ = cute.arch.lane_idx() + i * _WARP
            claims[round_] = ops.select(round_ == 0, self.cta, _UNKNOWN)

    @cute.jit
    def claim(self, round_: Int32):
        """Take the tile of a round, by the producer warp. A full list ends the CTA's rounds: the others do the rest."""
        with cute.arch.elect_one():
            item = Int32(_NONE)
            if round_ < MAX_CLAIMS - 1:
                item = self.width + cute.arch.atomic_add(self.counter.iterator, Int32(1), sem="relaxed", scope="gpu")
            cute.arch.store(self.claims + round_, item, sem="release", scope="cta", ss="cta")

    @cute.jit
    def _claimed(self, round_: Int32) -> Int32:
        """What was published for the round, waiting for it."""
        item = Int32(_UNKNOWN)
        while item == _UNKNOWN:
            item = cute.arch.load(self.claims + round_, Int32, sem="acquire", scope="cta", ss="cta")
        return cute.arch.make_warp_uniform(item)

    def tile(self, round_: Int32) -> tuple[Boolean, Int32, Int32, Int32]:
        """(exists, m_tile, h, b) of one round of this CTA; after the first that does not exist there are none."""
        item = self._claimed(round_)
        exists = item < self.num_m * self.num_bh
        item = ops.select(exists, item, Int32(0))
        per_section = self.num_m * self.section
        first_bh = item // per_section * self.section
        inside = item - first_bh * self.num_m
        heads = ops.imax(ops.imin(self.section, self.num_bh - first_bh), 1)
        rank = inside // heads
        bh = first_bh + inside - rank * heads
        b, h = self._batch_and_head(bh)
        return exists, self.num_m - 1 - rank, h, b
