"""Dense aux tiles: [q_idx, kv_idx] blocks that TMA brings in beside K, read in the order of the wgmma accumulator.

A tile is stored as one slab of 64 query rows per consumer warpgroup and stage, in the widest swizzle that fits. Half
types are read with ldmatrix, whose 8x8 blocks are the accumulator's; other widths in pairs of neighbouring columns.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import CopyUniversalOp, warp

from fa4_inductor.kernels.cute import fragment, ops
from fa4_inductor.kernels.cute.static import TraceObject


def query_major(aux: cute.Tensor) -> cute.Tensor:
    """(..., Sq, Sk) seen as (Sq, Sk, ...)."""
    rank = len(aux.shape)
    return cute.make_tensor(aux.iterator, cute.select(aux.layout, mode=[rank - 2, rank - 1, *range(rank - 2)]))


class DenseRead(TraceObject):
    """Reads the slab of one warpgroup.

    Args:
        smem: (64, tile_n, num_consumers * stage) slabs. mma_qk, acc: of S, whose register order the result has.
    """

    def __init__(self, smem: cute.Tensor, mma_qk, acc: cute.Tensor, wg: Int32, lane: Int32, num_consumers: int):
        self.smem, self.shape, self.wg, self.num_consumers = smem, acc.shape, wg, num_consumers
        self.dtype = smem.element_type
        if self.dtype.width == 16:
            self.atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), self.dtype)
        else:
            self.atom = cute.make_copy_atom(CopyUniversalOp(), self.dtype, num_bits_per_copy=2 * self.dtype.width)
        self.copy = cute.make_tiled_copy_C(self.atom, mma_qk).get_slice(lane)

    def __call__(self, slot: Int32) -> list:
        """The thread's elements of the tile in ring slot `slot`, in accumulator order; bf16 as Float32."""
        registers = cute.make_rmem_tensor(self.shape, self.dtype)
        slab = self.smem[None, None, slot * self.num_consumers + self.wg]
        cute.copy(self.atom, self.copy.partition_S(slab), self.copy.retile(registers))
        if self.dtype is cutlass.BFloat16:
            words = fragment.flat(cute.recast_tensor(fragment.flat(registers), Int32))
            return [x for i in range(cute.size(words)) for x in ops.unpack_bf16(words[i])]
        elements = fragment.flat(registers)
        return [elements[i] for i in range(cute.size(elements))]
