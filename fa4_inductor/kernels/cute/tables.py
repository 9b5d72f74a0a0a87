"""Tables over the distance kv_idx - q_idx (lowering.hoist) and vectors over the key, in the order of the accumulator.

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
        pairs = [_load_pair(self.dtype, address + _STEP * k * pair_bytes) for k in range(-1, size // 4)]
        return [[pairs[(col >> 1) + 1 - r][col & 1] for col in range(size // 2)] for r in range(fragment.ROWS)]


class ColumnRead(TraceObject):
    """Reads one vector over the keys, of which a thread's columns are neighbouring pairs.

    Args:
        vectors: (..., Sk) in global memory; rows begin at multiples of two elements. at: indices of the modes before.
    """

    def __init__(self, vectors: cute.Tensor, at: tuple):
        lead = (i if isinstance(i, int) else ops.clamp_index(i, n - 1) for i, n in zip(at, vectors.shape))
        self.vector = vectors[(*lead, None)]

    def __call__(self, kv_first: Int32, size: int, mask: bool) -> list[list[Float32]]:
        """As `TableRead`. kv_first: kv_idx of the thread's first column. mask: some columns may lie behind the end."""
        dtype, length = self.vector.element_type, self.vector.shape[0]
        columns = range(size // fragment.ROWS)
        if mask:
            at = [kv_first + _STEP * (col >> 1) + (col & 1) for col in columns]
            values = [Float32(ops.entry(self.vector, ops.clamp_index(i, length - 1))) for i in at]
        else:
            # full tiles end inside, so this changes nothing; it keeps a vector that is too short from being overrun
            first = ops.imin(kv_first, ops.imax(length - (_STEP * (size // 4) - 6), 0) & -2)
            address = self.vector.iterator.toint() + Int64(Uint32(first)) * (dtype.width // 8)
            pairs = [_load_pair(dtype, address + _STEP * k * dtype.width // 8) for k in range(size // 4)]
            values = [pairs[col >> 1][col & 1] for col in columns]
        return [values] * fragment.ROWS


def _load_pair(dtype, address: Int64) -> tuple[Float32, Float32]:
    if dtype is cutlass.BFloat16:
        word = cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=4)
        return ops.unpack_bf16(cute.make_tensor(word, cute.make_layout(1))[0])
    pointer = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=8)
    pair = cute.make_tensor(pointer, cute.make_layout(2)).load()
    return pair[0], pair[1]
