"""Views, shared-memory layouts and wgmma shapes of the operands, which all sm_90a kernels share."""

import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils import LayoutEnum


def padded_head_dim(head_dim: int) -> int:
    """The head dim a tile has in shared memory: TMA fills the columns behind the last one with zeros."""
    return 96 if head_dim == 80 else head_dim


def slab_layout(dtype, rows: int, columns: int, stages: int):
    """Shared-memory layout (rows, columns, stages) with `columns` contiguous, in the widest swizzle that fits."""
    kind = hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, dtype, columns)
    return cute.tile_to_shape(warpgroup.make_smem_layout_atom(kind, dtype), (rows, columns, stages), order=(0, 1, 2))


def transposed_stages(tensor: cute.Tensor) -> cute.Tensor:
    """(n, d, stage) seen as (d, n, stage)."""
    n, d, stages = tensor.shape
    return cute.composition(tensor, cute.make_ordered_layout((d, n, stages), order=(1, 0, 2)))


def head_major(tensor: cute.Tensor) -> cute.Tensor:
    """(B, H, S, D) seen as (S, D, H, B)."""
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=[2, 3, 1, 0]))


def attention_mma(dtype, tile_n: int, tile_dv: int, q_in_registers: bool = False) -> tuple:
    """wgmma of one warpgroup for Q K^T (Q from shared memory or registers) and for P V (P from registers)."""
    major, shared, registers = OperandMajorMode, warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM
    q_source = registers if q_in_registers else shared
    qk = hopper.make_trivial_tiled_mma(dtype, dtype, major.K, major.K, Float32, (1, 1, 1), (64, tile_n), q_source)
    pv = hopper.make_trivial_tiled_mma(dtype, dtype, major.K, major.MN, Float32, (1, 1, 1), (64, tile_dv), registers)
    return qk, pv
