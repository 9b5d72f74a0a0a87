"""Tables over the distance kv_idx - q_idx (lowering.hoist), read in the order of the wgmma accumulator.

A thread's rows are 8 apart and its columns come in pairs 8 apart, so the entries of its second row are those of its
first row one pair earlier: 17 pairs serve 64 scores. A table has the pair that begins at each distance, so every pair
is one aligned load, at an address known at trace time but for one base per tile.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from fa4_inductor.kernels.cute import fragment, ops
from fa4_inductor.kernels.cute.static import TraceObject

PADDING = 256  # lowering.hoist.PADDING: pairs before that of the smallest distance
_STEP = 8  # from one pair of a thread's columns to the next


class TableRead(TraceObject):
    """Reads one table of one head.

    Args:
        table: (B or 1, H or 1, length, 2) in global memory, contiguous. at: indices of the first two modes.
    """

    def __init__(self, table: cute.Tensor, at: tuple):
        last = [n - 1 for n in table.shape[:2]]
        b, h = (i if isinstance(i, int) else ops.imin(i, n) for i, n in zip(at, last))
        self.dtype = table.element_type
        self.base = table[b, h, 0, None].iterator.toint()

    def __call__(self, distance: Int32, seqlen_q: Int32, size: int) -> list[list[Float32]]:
        """Entries of the thread's columns in its two rows: [row][column].

        Args:
            distance: kv_idx of the thread's first column minus q_idx of its first row. size: scores per thread.
        """
        pair_bytes = self.dtype.width // 4
        address = self.base + Int64(Uint32(distance + (seqlen_q + (PADDING - 1)))) * pair_bytes
        pairs = [self._pair(address + _STEP * k * pair_bytes) for k in range(-1, size // 4)]
        return [[pairs[(col >> 1) + 1 - r][col & 1] for col in range(size // 2)] for r in range(fragment.ROWS)]

    def _pair(self, address: Int64) -> tuple[Float32, Float32]:
        if self.dtype is cutlass.BFloat16:
            word = cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=4)
            return ops.unpack_bf16(cute.make_tensor(word, cute.make_layout(1))[0])
        pointer = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=8)
        pair = cute.make_tensor(pointer, cute.make_layout(2)).load()
        return pair[0], pair[1]
