"""Tiles that must be computed again because their fixed softmax shift did not hold.

After the key tile visited first a row keeps the shift it has, so the softmax needs no maximum and O no rescale.
Softmax is shift invariant: with 8 exponent bits in P and in the sums, any shift is exact to rounding as long as the row
sum stays within [2^-60, 2^90] and O below 2^100. That is verified when the query tile ends. A tile that fails
is marked here, and after the CTA's last tile every marked one runs again with a running maximum.
"""

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from fa4_inductor.kernels.cute import fragment, ops
from fa4_inductor.kernels.cute.softmax import LOWEST_SHIFT
from fa4_inductor.kernels.cute.static import TraceObject

REDO_WORDS = 32  # the last word says whether any tile is marked
MAX_ROUNDS = 32 * (REDO_WORDS - 1)
_ANY = REDO_WORDS - 1
_SUM_LOW, _SUM_HIGH, _O_HIGH = 2.0**-60, 2.0**90, 2.0**100


class RedoList(TraceObject):
    """A bit per round of the CTA in shared memory, and the mbarrier that ends the consumers' first pass."""

    def __init__(self, storage, enabled: bool):
        self.enabled = enabled
        self.bar = storage.verdict.data_ptr()
        self.words = cute.make_tensor(storage.redo.data_ptr(), cute.make_layout(REDO_WORDS))

    def clear(self) -> None:
        """By one warp, before the CTA-wide barrier."""
        if self.enabled:
            self.words[cute.arch.lane_idx()] = Int32(0)

    def initialize(self, consumer_warps: int) -> None:
        if self.enabled:
            cute.arch.mbarrier_init(self.bar, consumer_warps)

    def wait(self) -> Boolean:
        """Whether any tile has to run again, once all consumer warps have arrived."""
        cute.arch.mbarrier_wait(self.bar, 0)
        return self.words[_ANY] != 0

    def marked(self, round_: Int32) -> Boolean:
        return ((self.words[round_ // 32] >> (round_ % 32)) & 1) != 0

    @cute.jit
    def mark(self, round_: Int32, failed: Boolean, lane: Int32):
        """By every consumer warp after a tile that ran with a fixed shift."""
        if cute.arch.vote_any_sync(failed):
            if lane % 32 == 0:
                cute.arch.atomic_or(self.words.iterator + round_ // 32, Int32(1) << (round_ % 32))
                cute.arch.atomic_or(self.words.iterator + _ANY, Int32(1))


def shift_failed(
    row_sums: list, shifts: list, own_arithmetic: bool, q_rows: tuple, seqlen_q: Int32, acc_o: cute.Tensor
) -> Boolean:
    """Whether a row's sum or O left the range in which the fixed shift is exact; NaN counts as failed.

    So does a shift that is a fill (finfo.min, -1e9), where tiles with a fixed shift have arithmetic of their own: they
    do not round such scores as the others do. A row without a shift has kept no key.
    """
    o = fragment.flat(acc_o)
    largest = [Float32(0.0) for _ in range(fragment.ROWS)]
    for i in range(cute.size(o)):
        r = fragment.row_of(i)
        largest[r] = ops.fmax(largest[r], ops.fabs(o[i]))
    failed = Boolean(False)
    for r in range(fragment.ROWS):
        held = (row_sums[r] >= _SUM_LOW) & (row_sums[r] <= _SUM_HIGH) & (largest[r] <= _O_HIGH)
        if own_arithmetic:
            held = held & (shifts[r] > LOWEST_SHIFT)
        held = held | ((shifts[r] == -Float32.inf) & (row_sums[r] == 0.0))
        failed = failed | ((held == False) & (q_rows[r] < seqlen_q))  # noqa: E712
    return failed
