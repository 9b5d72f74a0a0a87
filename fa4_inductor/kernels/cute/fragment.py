"""Where the elements of a wgmma accumulator sit, and how one becomes the A operand of the next wgmma.

Accumulator of m64nNk16 in one thread, by linear register index i (PTX ISA, wgmma .m64nNk16 D fragment):
    row    = 16 * warp + lane // 4 + 8 * ((i >> 1) & 1)
    column = 8 * (i >> 2) + 2 * (lane % 4) + (i & 1)
The A operand of m64nMk16 in registers has the same order, so P needs a conversion to half but no shuffle.
"""

import cutlass.cute as cute
from cutlass import Int32

from fa4_inductor.kernels.cute import ops

ROWS = 2  # accumulator rows a thread holds


def flat(tensor: cute.Tensor) -> cute.Tensor:
    """View of a register tensor by linear register index."""
    return cute.make_tensor(tensor.iterator, cute.make_layout(cute.size(tensor)))


def row_of(i: int) -> int:
    """Which of the thread's two rows register i belongs to."""
    return (i >> 1) & 1


def column_of(i: int) -> int:
    """Column of register i relative to the thread's first column."""
    return 8 * (i >> 2) + (i & 1)


def columns_before(offset: Int32) -> Int32:
    """How many of the thread's columns lie less than `offset` right of its first one; offset >= 0."""
    return 2 * (offset >> 3) + ops.imin(offset & 7, 2)


def thread_row(lane_in_warpgroup: Int32) -> Int32:
    """Row of the thread's first row inside the 64-row slab; the other is 8 further down."""
    return (lane_in_warpgroup // 32) * 16 + (lane_in_warpgroup % 32) // 4


def thread_column(lane_in_warpgroup: Int32) -> Int32:
    """The thread's first column inside the tile."""
    return 2 * (lane_in_warpgroup % 4)


def convert_to_half(source: cute.Tensor, target: cute.Tensor) -> None:
    """Round an fp32 register tensor into a bf16/fp16 one of the same linear order, two values per instruction."""
    src = flat(source)
    dtype = target.element_type
    words = flat(cute.recast_tensor(flat(target), Int32))
    for i in range(cute.size(words)):
        words[i] = ops.pack_half2(src[2 * i], src[2 * i + 1], dtype)
