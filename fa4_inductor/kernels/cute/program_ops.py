"""What emitted score programs need beyond `ops`: integer division, conversions, and functions with torch's corner
cases.

Like `ops`, everything runs at trace time on DSL scalars. "fast" forms use the special function unit and are meant for
logits; the exact forms are for comparisons, truncations and indices, where the last bit decides.
"""

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass._mlir.dialects import arith, llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from fa4_inductor.kernels.cute import ops


@dsl_user_op
def _asm(result, constraint: str, text: str, *args, constraints: str, loc=None, ip=None):
    return llvm.inline_asm(
        result,
        [a.ir_value(loc=loc, ip=ip) for a in args],
        text,
        f"{constraint},{constraints}",
        has_side_effects=False,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


def minimum(a: Float32, b: Float32) -> Float32:
    """min(a, b), NaN if either is NaN."""
    return Float32(_asm(T.f32(), "=f", "min.NaN.f32 $0, $1, $2;", Float32(a), Float32(b), constraints="f,f"))


def maximum(a: Float32, b: Float32) -> Float32:
    """max(a, b), NaN if either is NaN."""
    return Float32(_asm(T.f32(), "=f", "max.NaN.f32 $0, $1, $2;", Float32(a), Float32(b), constraints="f,f"))


def mul_rz(a: Float32, b: Float32) -> Float32:
    """a * b rounded toward zero: overflow gives the largest finite number, and only inf gives inf."""
    return Float32(_asm(T.f32(), "=f", "mul.rz.f32 $0, $1, $2;", Float32(a), Float32(b), constraints="f,f"))


def fma_rz(a: Float32, b: Float32, c: Float32) -> Float32:
    """a * b + c rounded toward zero once, with the overflow rule of `mul_rz`."""
    args = (Float32(a), Float32(b), Float32(c))
    return Float32(_asm(T.f32(), "=f", "fma.rz.f32 $0, $1, $2, $3;", *args, constraints="f,f,f"))


def truncate(x: Float32) -> Int32:
    """x toward zero; saturates, NaN gives 0."""
    return Int32(_asm(T.i32(), "=r", "cvt.rzi.s32.f32 $0, $1;", Float32(x), constraints="f"))


def saturate(x: Int64) -> Int32:
    """x forced into int32, so that order is kept for values beyond it."""
    return Int32(_asm(T.i32(), "=r", "cvt.sat.s32.s64 $0, $1;", Int64(x), constraints="l"))


def _rounded(x: Float32, mode: str) -> Float32:
    return Float32(_asm(T.f32(), "=f", f"cvt.{mode}.f32.f32 $0, $1;", Float32(x), constraints="f"))


def floor(x: Float32) -> Float32:
    """Largest integer <= x."""
    return _rounded(x, "rmi")


def ceil(x: Float32) -> Float32:
    """Smallest integer >= x."""
    return _rounded(x, "rpi")


def trunc(x: Float32) -> Float32:
    """x toward zero."""
    return _rounded(x, "rzi")


def round_even(x: Float32) -> Float32:
    """Nearest integer, halves to even (as torch.round)."""
    return _rounded(x, "rni")


def sqrt(x: Float32) -> Float32:
    """Correctly rounded square root."""
    return Float32(_asm(T.f32(), "=f", "sqrt.rn.f32 $0, $1;", Float32(x), constraints="f"))


def rsqrt(x: Float32) -> Float32:
    """1/sqrt(x), relative error 2^-22."""
    return Float32(_asm(T.f32(), "=f", "rsqrt.approx.f32 $0, $1;", Float32(x), constraints="f"))


def divide(a: Float32, b: Float32) -> Float32:
    """Correctly rounded a / b."""
    return Float32(_asm(T.f32(), "=f", "div.rn.f32 $0, $1, $2;", Float32(a), Float32(b), constraints="f,f"))


@dsl_user_op
def floordiv(a: Int32, b: Int32, *, loc=None, ip=None) -> Int32:
    """floor(a / b); a shift where b is a power of two known at trace time."""
    if isinstance(b, int) and b > 0 and b & (b - 1) == 0:
        shift = Int32(b.bit_length() - 1).ir_value(loc=loc, ip=ip)
        return Int32(arith.shrsi(Int32(a).ir_value(loc=loc, ip=ip), shift, loc=loc, ip=ip))
    a, b = Int32(a), Int32(b)
    remainder = _truncated_remainder(a, b)
    quotient = Int32(arith.divsi(a.ir_value(loc=loc, ip=ip), b.ir_value(loc=loc, ip=ip), loc=loc, ip=ip))
    return quotient - ops.select((remainder != 0) & ((remainder < 0) != (b < 0)), 1, 0)


def mod(a: Int32, b: Int32) -> Int32:
    """a - b * floor(a / b), with the sign of b (as torch.remainder)."""
    if isinstance(b, int) and b > 0 and b & (b - 1) == 0:
        return Int32(a) & (b - 1)
    return Int32(a) - floordiv(a, b) * b


@dsl_user_op
def _truncated_remainder(a: Int32, b: Int32, *, loc=None, ip=None) -> Int32:
    return Int32(arith.remsi(a.ir_value(loc=loc, ip=ip), b.ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


def float_mod(a: Float32, b: Float32) -> Float32:
    """a - b * floor(a / b) (as torch.remainder)."""
    return ops.fma(floor(divide(a, b)), -Float32(b), a)


def iabs(x: Int32) -> Int32:
    """|x|."""
    return ops.imax(x, -Int32(x))


def logical_not(x: Boolean) -> Boolean:
    """True where x is False."""
    return Boolean(x) == Boolean(False)


def exp(x: Float32) -> Float32:
    """e**x, fast."""
    return ops.exp2(Float32(x) * ops.LOG2_E)


def log(x: Float32) -> Float32:
    """Natural logarithm, fast."""
    return ops.log2(x) * ops.LN_2


def sigmoid(x: Float32) -> Float32:
    """1 / (1 + e**-x), fast."""
    return ops.rcp(ops.exp2(Float32(x) * -ops.LOG2_E) + 1.0)


def exact_sigmoid(x: Float32) -> Float32:
    """1 / (1 + e**-x) with a correctly rounded division."""
    return divide(Float32(1.0), cute.math.exp(-Float32(x)) + 1.0)


def fast_divide(a: Float32, b: Float32) -> Float32:
    """a / b through the reciprocal unit (relative error 2^-22)."""
    return Float32(a) * ops.rcp(b)
