"""Scalar device operations that the kernels and the emitted programs share, each one or two machine instructions.

Every function takes and returns DSL scalars (Float32, Int32, Boolean) and runs at trace time, so it can be called from
undecorated Python.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32
from cutlass._mlir.dialects import arith, llvm
from cutlass.cutlass_dsl import T, dsl_user_op

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453


def _f32_asm(text: str, *args: Float32, loc=None, ip=None) -> Float32:
    constraints = "=f" + ",f" * len(args)
    values = [Float32(x).ir_value(loc=loc, ip=ip) for x in args]
    result = llvm.inline_asm(
        T.f32(),
        values,
        text,
        constraints,
        has_side_effects=False,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    return Float32(result)


@dsl_user_op
def exp2(x: Float32, *, loc=None, ip=None) -> Float32:
    """2**x by the special function unit; 0 for -inf, subnormal results flushed (relative error 2^-22)."""
    return _f32_asm("ex2.approx.ftz.f32 $0, $1;", x, loc=loc, ip=ip)


_ROUND = 12582912.0  # 1.5 * 2**23: a sum with it has the nearest integer in its low bits
_EXP2 = (0.999928074, 0.693260985, 0.242611122, 0.0551716691)
"""Of the polynomials of degree 3, the nearest to 2**x on [-1/2, 1/2] in relative terms."""


def exp2_polynomial(x: Float32) -> Float32:
    """2**x for |x| <= 125 by multiply-adds, for where the special function unit is the bottleneck (relative error
    7.5e-5, a 26th of the rounding of bf16; Cody-Waite range reduction as in FlashAttention-4, arXiv 2603.05451)."""
    shifted = x + _ROUND
    fraction = x - (shifted - _ROUND)
    p = Float32(_EXP2[3])
    for c in reversed(_EXP2[:3]):
        p = fma(p, fraction, c)
    return bits_to_float((float_to_bits(shifted) << 23) + float_to_bits(p))


@dsl_user_op
def log2(x: Float32, *, loc=None, ip=None) -> Float32:
    """log2(x) by the special function unit; -inf for 0."""
    return _f32_asm("lg2.approx.ftz.f32 $0, $1;", x, loc=loc, ip=ip)


@dsl_user_op
def rcp(x: Float32, *, loc=None, ip=None) -> Float32:
    """1/x by the special function unit (relative error 2^-23)."""
    return _f32_asm("rcp.approx.ftz.f32 $0, $1;", x, loc=loc, ip=ip)


@dsl_user_op
def tanh_approx(x: Float32, *, loc=None, ip=None) -> Float32:
    """tanh(x) in one instruction; absolute error up to 2^-11, below the rounding of bf16 scores."""
    return _f32_asm("tanh.approx.f32 $0, $1;", x, loc=loc, ip=ip)


@dsl_user_op
def fmax(a: Float32, b: Float32, *, loc=None, ip=None) -> Float32:
    """max(a, b) as one FMNMX; a NaN loses against a number."""
    return _f32_asm("max.f32 $0, $1, $2;", a, b, loc=loc, ip=ip)


@dsl_user_op
def fmin(a: Float32, b: Float32, *, loc=None, ip=None) -> Float32:
    """min(a, b) as one FMNMX; a NaN loses against a number."""
    return _f32_asm("min.f32 $0, $1, $2;", a, b, loc=loc, ip=ip)


@dsl_user_op
def fabs(x: Float32, *, loc=None, ip=None) -> Float32:
    """|x|, usually folded into the instruction that uses it."""
    return _f32_asm("abs.f32 $0, $1;", x, loc=loc, ip=ip)


@dsl_user_op
def fma(a: Float32, b: Float32, c: Float32, *, loc=None, ip=None) -> Float32:
    """a*b + c with one rounding."""
    return _f32_asm("fma.rn.f32 $0, $1, $2, $3;", a, b, c, loc=loc, ip=ip)


@dsl_user_op
def select(cond: Boolean, a, b, *, loc=None, ip=None):
    """a where cond else b, without a branch; both are evaluated and have one type (Python numbers are converted)."""
    kind = type(a) if isinstance(a, cutlass.Numeric) else type(b)
    if not issubclass(kind, cutlass.Numeric):
        kind = Int32 if isinstance(a, int) and isinstance(b, int) else Float32
    picked = arith.select(
        Boolean(cond).ir_value(loc=loc, ip=ip),
        kind(a).ir_value(loc=loc, ip=ip),
        kind(b).ir_value(loc=loc, ip=ip),
        loc=loc,
        ip=ip,
    )
    return kind(picked)


@dsl_user_op
def imin(a: Int32, b: Int32, *, loc=None, ip=None) -> Int32:
    """Signed min."""
    return Int32(arith.minsi(Int32(a).ir_value(loc=loc, ip=ip), Int32(b).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


@dsl_user_op
def imax(a: Int32, b: Int32, *, loc=None, ip=None) -> Int32:
    """Signed max."""
    return Int32(arith.maxsi(Int32(a).ir_value(loc=loc, ip=ip), Int32(b).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


def clamp(x: Int32, low: Int32, high: Int32) -> Int32:
    """x forced into [low, high]; for load indices at ragged edges."""
    return imax(imin(x, high), low)


@dsl_user_op
def clamp_index(x: Int32, last: Int32, *, loc=None, ip=None) -> Int32:
    """x if it is in [0, last], else `last`: for elements that are dropped, where any valid index does."""
    low = arith.minui(Int32(x).ir_value(loc=loc, ip=ip), Int32(last).ir_value(loc=loc, ip=ip), loc=loc, ip=ip)
    return Int32(low)


def entry(vector: cute.Tensor, i: Int32):
    """vector[i] for a stride of 1 and i >= 0, whose address is one unsigned multiply-add."""
    dtype = vector.element_type
    address = vector.iterator.toint() + Int64(Uint32(i)) * (dtype.width // 8)
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=dtype.width // 8)
    return cute.make_tensor(pointer, cute.make_layout(1))[0]


@dsl_user_op
def pack_half2(low: Float32, high: Float32, dtype: type, *, loc=None, ip=None) -> Int32:
    """Two fp32 rounded to bf16 or fp16 (nearest even) and packed into 32 bits by one instruction."""
    name = "bf16x2" if dtype is cutlass.BFloat16 else "f16x2"
    packed = llvm.inline_asm(
        T.i32(),
        [Float32(low).ir_value(loc=loc, ip=ip), Float32(high).ir_value(loc=loc, ip=ip)],
        f"cvt.rn.{name}.f32 $0, $2, $1;",
        "=r,f,f",
        has_side_effects=False,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    return Int32(packed)


@dsl_user_op
def mul_bf16x2(a: Int32, b: Int32, *, loc=None, ip=None) -> Int32:
    """The products of two pairs of bf16, each rounded to bf16."""
    product = llvm.inline_asm(
        T.i32(),
        [Int32(a).ir_value(loc=loc, ip=ip), Int32(b).ir_value(loc=loc, ip=ip)],
        "mul.rn.bf16x2 $0, $1, $2;",
        "=r,r,r",
        has_side_effects=False,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    return Int32(product)


@dsl_user_op
def bit_range(first: Int32, count: Int32, *, loc=None, ip=None) -> Int32:
    """`count` ones from bit `first` on, one instruction; neither may be negative, bits beyond 31 are dropped."""
    bits = llvm.inline_asm(
        T.i32(),
        [Int32(first).ir_value(loc=loc, ip=ip), Int32(count).ir_value(loc=loc, ip=ip)],
        "bmsk.clamp.b32 $0, $1, $2;",
        "=r,r,r",
        has_side_effects=False,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    return Int32(bits)


@dsl_user_op
def bits_to_float(x: Int32, *, loc=None, ip=None) -> Float32:
    """The fp32 number with these bits."""
    return Float32(arith.bitcast(T.f32(), Int32(x).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


@dsl_user_op
def float_to_bits(x: Float32, *, loc=None, ip=None) -> Int32:
    """The bits of an fp32 number."""
    return Int32(arith.bitcast(T.i32(), Float32(x).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


def vector_at(address: Int64, dtype: type, size: int) -> cute.Tensor:
    """`size` elements of global memory as a tensor, at an address that is a multiple of their size in all."""
    align = size * dtype.width // 8
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=align)
    return cute.make_tensor(pointer, cute.make_layout(size))


def unpack_floats(pair: Int64) -> tuple[Float32, Float32]:
    """The two fp32 numbers of a 64-bit word, the lower first."""
    return bits_to_float(Int32(pair)), bits_to_float(Int32(pair >> 32))


@dsl_user_op
def add_to_memory(address: Int64, values: tuple, *, loc=None, ip=None) -> None:
    """Add four fp32 numbers to global memory at a 16-byte aligned address, each atomically, by one instruction."""
    llvm.inline_asm(
        None,
        [Int64(address).ir_value(loc=loc, ip=ip), *(Float32(x).ir_value(loc=loc, ip=ip) for x in values)],
        "red.global.add.v4.f32 [$0], {$1, $2, $3, $4};",
        "l,f,f,f,f",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


@dsl_user_op
def add_float(address: Int64, value: Float32, *, loc=None, ip=None) -> None:
    """Add one fp32 number to global memory, atomically, without reading it."""
    llvm.inline_asm(
        None,
        [Int64(address).ir_value(loc=loc, ip=ip), Float32(value).ir_value(loc=loc, ip=ip)],
        "red.global.add.f32 [$0], $1;",
        "l,f",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


@dsl_user_op
def unpack_f16(word: Int32, *, loc=None, ip=None) -> tuple[Float32, Float32]:
    """The two fp16 numbers of a word, the lower first."""
    pair = llvm.inline_asm(
        llvm.StructType.get_literal([T.f32(), T.f32()]),
        [Int32(word).ir_value(loc=loc, ip=ip)],
        "{ .reg .f16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }",
        "=f,=f,r",
        has_side_effects=False,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    return tuple(Float32(llvm.extractvalue(T.f32(), pair, [i], loc=loc, ip=ip)) for i in range(2))


def unpack_half(word: Int32, dtype: type) -> tuple[Float32, Float32]:
    """The two numbers of a word of this half type, the lower first."""
    return unpack_bf16(word) if dtype is cutlass.BFloat16 else unpack_f16(word)


def unpack_bf16(word: Int32) -> tuple[Float32, Float32]:
    """The two bf16 numbers of a word, one instruction each: a bf16 is the upper half of an fp32."""
    return bits_to_float(word << 16), bits_to_float(word & Int32(-65536))


def quad_max(x: Float32) -> Float32:
    """Maximum over the four lanes that share an accumulator row."""
    x = fmax(x, cute.arch.shuffle_sync_bfly(x, offset=1))
    return fmax(x, cute.arch.shuffle_sync_bfly(x, offset=2))


def quad_sum(x: Float32) -> Float32:
    """Sum over the four lanes that share an accumulator row."""
    x = x + cute.arch.shuffle_sync_bfly(x, offset=1)
    return x + cute.arch.shuffle_sync_bfly(x, offset=2)
