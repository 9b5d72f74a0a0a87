"""Build the sm_90a forward attention kernel: the entry that the runtime calls.

    compiled = build_forward(program, dtype, head_dim, head_dim_v, group,
                             aux=(("uint8", 2), ("float32", 1)), num_sizes=1, need_lse=True, config=config)
    compiled(q, k, v, out, lse, v_mean, softmax_scale, aux, sizes)        # on the current CUDA stream

One compiled function serves every batch size, every number of heads with that group, every length and every stride.

Call signature of `compiled` (TVM-FFI; torch tensors are passed as they are):
    q       (B, Hq, Sq, D)   bf16/fp16; innermost stride 1, other strides and the address multiples of 16 bytes
    k       (B or 1, Hkv, Sk, D), v (B or 1, Hkv, Sk, Dv): same rules; Hq == group * Hkv; Sk >= 1
    out     (B, Hq, Sq, Dv)  same dtype and rules (BSHD memory: a transposed view of a contiguous (B, Sq, Hq, Dv))
    lse     (B, Hq, Sq) float32, any strides; None iff need_lse is False
    v_mean  (B or 1, Hkv, Dv) float32, the mean of v over all Sk keys; None unless needs_v_mean(program)
    softmax_scale  float > 0 for PLAIN programs, any float otherwise
    aux     tuple of tensors of the dtypes and ranks given (bool tensors are passed as their uint8 view; any strides,
            naturally aligned; those of the program's DENSE slots obey the rules of q); None if there are none
            with config.claim_tiles there is one more at the end: int32 (1,), 0, which the kernel counts up
    sizes   tuple of int (int32); None if there are none
Not launched for B * Hq * Sq == 0 or Sk == 0: the host fills out and lse in those cases.
"""

from types import ModuleType
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_tensor
from cutlass.runtime import make_fake_stream

from fa4_inductor.kernels.cute.fwd_sm90 import FwdSm90
from fa4_inductor.kernels.cute.program import needs_v_mean
from fa4_inductor.kernels.cute.split_sm90 import SplitSm90

__all__ = ["build_forward", "build_split", "needs_v_mean"]

DTYPES: dict[str, Any] = {
    "uint8": cutlass.Uint8,
    "bool": cutlass.Uint8,
    "int32": cutlass.Int32,
    "int64": cutlass.Int64,
    "float16": cutlass.Float16,
    "bfloat16": cutlass.BFloat16,
    "float32": cutlass.Float32,
}


def operand(dtype: Any, head_dim: int) -> Any:
    """Fake (B, H, S, D) tensor: dynamic sizes and strides, innermost stride 1, 16-byte aligned."""
    width = 128 // dtype.width
    shape = (cute.sym_int32(), cute.sym_int32(), cute.sym_int32(), head_dim)
    strides = tuple(cute.sym_int64(divisibility=width) for _ in range(3))
    return make_fake_tensor(dtype, shape, (*strides, 1), assumed_align=16)


def dynamic_tensor(dtype: Any, rank: int) -> Any:
    """Fake tensor of dynamic sizes and strides, naturally aligned."""
    shape = tuple(cute.sym_int32() for _ in range(rank))
    return make_fake_tensor(dtype, shape, tuple(cute.sym_int64() for _ in range(rank)))


def _aux(dtype: Any, rank: int, unit: bool, dense: bool) -> Any:
    """Fake aux tensor of dynamic sizes; unit: innermost stride 1; dense: such that TMA can read it."""
    if not (unit or dense):
        return dynamic_tensor(dtype, rank)
    shape = tuple(cute.sym_int32() for _ in range(rank))
    if not dense:
        return make_fake_tensor(dtype, shape, (*(cute.sym_int64() for _ in range(rank - 1)), 1))
    strides = tuple(cute.sym_int64(divisibility=128 // dtype.width) for _ in range(rank - 1))
    return make_fake_tensor(dtype, shape, (*strides, 1), assumed_align=16)


def aux_operands(
    aux: tuple[tuple[str, int], ...], unit_stride: tuple[int, ...], dense: tuple[int, ...] = ()
) -> tuple | None:
    """Fake aux tensors of these (dtype name, rank). unit_stride, dense: slots, as in `program.Program`."""
    kinds = [(DTYPES[name], rank) for name, rank in aux]
    return tuple(_aux(t, rank, i in unit_stride, i in dense) for i, (t, rank) in enumerate(kinds)) or None


def build_forward(
    program: ModuleType,
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    group: int,
    *,
    aux: tuple[tuple[str, int], ...] = (),
    num_sizes: int = 0,
    need_lse: bool = False,
    config: Any,
    num_sms: int = 132,
    options: str = "",
) -> Any:
    """Compile the kernel for sm_90a; needs no GPU when CUTE_DSL_ARCH=sm_90a is set.

    Args:
        program: module with the kernel program (docs/architecture.md), importable from a real file.
        dtype: "bfloat16" or "float16", of q, k, v and out.
        head_dim, head_dim_v: of q/k and of v/out. group: query heads per key/value head.
        aux: (dtype name, rank) of each aux tensor; "bool" is received as uint8.
        num_sizes: number of run-time integers. need_lse: write the LSE.
        config: lowering.config.KernelConfig. num_sms: SMs of the device, for the persistent grid.
        options: further cute.compile options.

    Returns:
        The compiled function; its call signature is in this module's docstring.

    Raises:
        ValueError: if the configuration does not fit. Whatever cute.compile raises.
    """
    aux_types = tuple(DTYPES[name] for name, _ in aux)
    fwd = FwdSm90(program, DTYPES[dtype], head_dim, head_dim_v, group, config, num_sms, aux_types)
    return _compile(fwd, (head_dim, head_dim_v), aux, num_sizes, need_lse, (), options)


def build_split(
    program: ModuleType,
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    group: int,
    *,
    aux: tuple[tuple[str, int], ...] = (),
    num_sizes: int = 0,
    need_lse: bool = False,
    config: Any,
    options: str = "",
) -> Any:
    """Compile the split-KV kernel: as `build_forward`, for a program without DENSE.

    Args:
        config: lowering.split_config.SplitConfig.

    Returns:
        The compiled function. It takes two more arguments after those in this module's docstring:
            workspace   float32, 1-D, contiguous, of split_config.workspace_size elements of any content; None iff
                        config.split is False
            num_splits  int in [1, split_combine.MAX_SPLITS]; 1 without config.split

    Raises:
        ValueError: if the configuration does not fit. Whatever cute.compile raises.
    """
    fwd = SplitSm90(program, DTYPES[dtype], head_dim, head_dim_v, group, config)
    workspace = make_fake_tensor(Float32, (cute.sym_int32(),), (1,), assumed_align=16) if config.split else None
    return _compile(fwd, (head_dim, head_dim_v), aux, num_sizes, need_lse, (workspace, Int32(1)), options)


def _compile(
    fwd: Any,
    head_dims: tuple[int, int],
    aux: tuple[tuple[str, int], ...],
    num_sizes: int,
    need_lse: bool,
    more: tuple[Any, ...],
    options: str,
) -> Any:
    """cute.compile with fake arguments in the order of this module's docstring, then `more`."""
    d, dv = head_dims
    q, k, v, out = (operand(fwd.dtype, size) for size in (d, d, dv, dv))
    return cute.compile(
        fwd,
        q,
        k,
        v,
        out,
        dynamic_tensor(Float32, 3) if need_lse else None,
        dynamic_tensor(Float32, 3) if fwd.program.needs_v_mean else None,
        Float32(1.0),
        aux_operands(aux, fwd.program.unit_stride, fwd.program.dense),
        tuple(Int32(1) for _ in range(num_sizes)) or None,
        *more,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi {options}".strip(),
    )
