"""One thread per element runs a kernel program and stores what it computes: score, keep, key ranges, sink.

    compiled = build_harness(module, aux=(("float32", 1),), num_sizes=0)
    compiled(score_in, score_out, keep_out, ranges_out, sink_out, aux, sizes)

score_in, score_out (B, H, Sq, Sk) float32, keep_out the same in uint8, ranges_out (B, H, Sq, 4) int32 (kv_range and
kv_full of the rows 0..q_idx), sink_out (B, H, Sq) float32. Lengths are read off score_in.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint8
from cutlass.cute.runtime import make_fake_tensor
from cutlass.runtime import make_fake_stream

from fa4_inductor.kernels.cute import ops
from fa4_inductor.kernels.cute.program import Program, ProgramContext

_THREADS = 128
DTYPES: dict[str, Any] = {
    "bool": cutlass.Uint8, "uint8": cutlass.Uint8, "int32": cutlass.Int32, "int64": cutlass.Int64,
    "float16": cutlass.Float16, "bfloat16": cutlass.BFloat16, "float32": cutlass.Float32,
}  # fmt: skip


def _context(aux, sizes, seqlen_q, seqlen_k):
    return ProgramContext(() if aux is None else aux, () if sizes is None else sizes, seqlen_q, seqlen_k, Float32(1.0))


class Harness:
    def __init__(self, module):
        self.program = Program(module)

    @cute.jit
    def __call__(self, score_in, score_out, keep_out, ranges_out, sink_out, aux, sizes, stream):
        total = cute.size(score_in)
        self.kernel(score_in, score_out, keep_out, ranges_out, sink_out, aux, sizes).launch(
            grid=[(total + _THREADS - 1) // _THREADS, 1, 1], block=[_THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, score_in, score_out, keep_out, ranges_out, sink_out, aux, sizes):
        seqlen_q, seqlen_k = score_in.shape[2], score_in.shape[3]
        index = cute.arch.block_idx()[0] * _THREADS + cute.arch.thread_idx()[0]
        if index < cute.size(score_in):
            kv_idx = index % seqlen_k
            q_idx = index // seqlen_k % seqlen_q
            h = index // (seqlen_k * seqlen_q) % score_in.shape[1]
            b = index // (seqlen_k * seqlen_q * score_in.shape[1])
            ctx = _context(aux, sizes, seqlen_q, seqlen_k)
            self.element(ctx, score_in, score_out, keep_out, ranges_out, sink_out, b, h, q_idx, kv_idx)

    def element(self, ctx, score_in, score_out, keep_out, ranges_out, sink_out, b, h, q_idx, kv_idx):
        program = self.program
        u = program.uniform(ctx, b, h)
        r = program.row(ctx, b, h, q_idx, u)
        c = program.column(ctx, b, h, kv_idx, u)
        s = score_in[b, h, q_idx, kv_idx]
        value = s * ops.LOG2_E if program.plain else program.score(ctx, s, b, h, q_idx, kv_idx, u, r, c)
        score_out[b, h, q_idx, kv_idx] = Float32(value)
        if program.masked:
            keep_out[b, h, q_idx, kv_idx] = Uint8(ops.select(program.keep(ctx, b, h, q_idx, kv_idx, u, r, c), 1, 0))
            ranges = (*program.module.kv_range(ctx, b, h, 0, q_idx), *program.module.kv_full(ctx, b, h, 0, q_idx))
            for i, bound in enumerate(ranges):
                ranges_out[b, h, q_idx, i] = Int32(bound)
        if program.has_sink:
            sink_out[b, h, q_idx] = program.sink(ctx, b, h, q_idx)


def _tensor(dtype: Any, rank: int) -> Any:
    shape = tuple(cute.sym_int32() for _ in range(rank))
    return make_fake_tensor(dtype, shape, tuple(cute.sym_int64() for _ in range(rank)))


def build_harness(module: Any, aux: tuple[tuple[str, int], ...] = (), num_sizes: int = 0) -> Any:
    """Compile the harness around a program module; needs no GPU when CUTE_DSL_ARCH is set."""
    return cute.compile(
        Harness(module),
        _tensor(Float32, 4),
        _tensor(Float32, 4),
        _tensor(Uint8, 4),
        _tensor(Int32, 4),
        _tensor(Float32, 3),
        tuple(_tensor(DTYPES[name], rank) for name, rank in aux) or None,
        tuple(Int32(1) for _ in range(num_sizes)) or None,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi",
    )
