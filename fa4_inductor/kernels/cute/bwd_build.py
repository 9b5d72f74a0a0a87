"""Build the sm_90a backward attention kernel: the entry that the runtime calls.

    compiled = build_backward(program, dtype, head_dim, head_dim_v, group, aux=..., num_sizes=..., grad_lse=False)
    compiled(q, k, v, out, do, lse, grad_lse, dq, dk, dv, stats, accumulator, turns, learned, softmax_scale, aux, sizes)

One compiled function serves every batch size, every number of heads with that group, every length and every stride.

Call signature of `compiled`, as that of the forward (build.py), whose rules for q hold for out, do, dq, dk and dv:
    out     (B, Hq, Sq, Dv), what the forward gave; do (B, Hq, Sq, Dv), its gradient
    lse     (B, Hq, Sq) float32, natural log, any strides; grad_lse the same, None iff not built with it
    dq      (B, Hq, Sq, D): written
    dk, dv  (B, Hkv * splits, Sk, D or Dv): written; each of `splits` heads in a row, a divisor of the group, has the
            gradient through its share of the query heads of one key head
    stats        (B * Hq * num_m * 4, tile_m) float32, contiguous, and
    accumulator  (B * Hq * num_m, tile_m * padded D) float32, contiguous: scratch, where num_m = ceil(Sq / tile_m)
    turns        (B * Hq * num_m, 2) int32, contiguous: scratch of a deterministic kernel, None for others
    learned      tuple of float32 tensors, innermost stride 1: the gradients of the aux tensors in the program's LEARNED
            slots are added to them; of the shapes of these, (1,) for a scalar; None without such slots
Not launched for B * Hq * Sq == 0 or Sk == 0.
"""

from types import ModuleType
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_tensor
from cutlass.runtime import make_fake_stream

from fa4_inductor.kernels.cute.build import DTYPES, aux_operands, dynamic_tensor, operand
from fa4_inductor.kernels.cute.bwd_sm90 import BwdSm90


def _rows(length: int) -> Any:
    """Fake contiguous float32 (any, length)."""
    return make_fake_tensor(Float32, (cute.sym_int32(), length), (length, 1), assumed_align=16)


def _learned_operands(aux: tuple[tuple[str, int], ...], learned: tuple[tuple[int, str], ...]) -> tuple | None:
    """Fake float32 tensors of the ranks of the learned aux tensors."""
    ranks = [max(aux[slot][1], 1) for slot in dict.fromkeys(slot for slot, _ in learned)]
    return tuple(
        make_fake_tensor(
            Float32, tuple(cute.sym_int32() for _ in range(n)), (*(cute.sym_int64() for _ in range(n - 1)), 1)
        )
        for n in ranks
    ) or None


def build_backward(
    program: ModuleType,
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    group: int,
    *,
    aux: tuple[tuple[str, int], ...] = (),
    num_sizes: int = 0,
    grad_lse: bool = False,
    deterministic: bool = False,
    tile_m: int,
    options: str = "",
) -> Any:
    """Compile the kernel for sm_90a; needs no GPU when CUTE_DSL_ARCH=sm_90a is set.

    Args:
        program: module emitted with `gradient`, importable from a real file.
        dtype, head_dim, head_dim_v, group, aux, num_sizes, options: as in `build.build_forward`.
        grad_lse: whether the LSE has a gradient. tile_m: query rows per tile.
        deterministic: add up dQ in the order of the key tiles, so that all gradients are the same bits every time.

    Returns:
        The compiled function; its call signature is in this module's docstring.
    """
    element = DTYPES[dtype]
    bwd = BwdSm90(program, element, head_dim, head_dim_v, group, tile_m)
    return cute.compile(
        bwd,
        *(operand(element, n) for n in (head_dim, head_dim, head_dim_v, head_dim_v, head_dim_v)),
        dynamic_tensor(Float32, 3),
        dynamic_tensor(Float32, 3) if grad_lse else None,
        *(operand(element, n) for n in (head_dim, head_dim, head_dim_v)),
        _rows(tile_m),
        _rows(tile_m * bwd.tile_d),
        make_fake_tensor(Int32, (cute.sym_int32(), 2), (2, 1)) if deterministic else None,
        _learned_operands(aux, bwd.program.learned),
        Float32(1.0),
        aux_operands(aux, bwd.program.unit_stride),
        tuple(Int32(1) for _ in range(num_sizes)) or None,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi {options}".strip(),
    )
