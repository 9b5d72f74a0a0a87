"""The device form of dropout compiles for sm_90a and needs no more instructions than was counted on."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
import pytest
import sass
import torch
from cutlass import Float32, Int32, Uint32

from fa4_inductor.kernels import philox
from fa4_inductor.kernels.cute import dropout, ops

_TILE = 64  # keys per row of the fragment that the test kernel drops


@cute.kernel
def _drop(values: cute.Tensor, words: cute.Tensor, p: cutlass.Constexpr, drops: cutlass.Constexpr):
    """Each thread: rows t and t + 8 of a fragment, 4 elements at a time, as a thread of wgmma has them."""
    t, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    key = tuple(Uint32(words[i]) for i in range(3))
    for j in cutlass.range_constexpr(_TILE // 4):
        q, kv = (t // 4 // 8) * 16 + (t // 4) % 8, (j // 2) * 16 + 2 * (t % 4) + j % 2
        kept = (True,) * 4
        if cutlass.const_expr(drops):
            kept = dropout.kept(key, p, Int32(row), Int32(q), Int32(kv))
        for i in cutlass.range_constexpr(4):
            at = (t, 4 * j + i)
            value = values[at] * Float32(2.0)
            values[at] = ops.select(kept[i], value, Float32(0.0)) if cutlass.const_expr(drops) else value


@cute.jit
def _launch(values: cute.Tensor, words: cute.Tensor, p: cutlass.Constexpr, drops: cutlass.Constexpr):
    _drop(values, words, p, drops).launch(grid=(1, 1, 1), block=(128, 1, 1))


def code(folder: Path, drops: bool) -> list[tuple[int, str]]:
    values = cute.runtime.make_fake_compact_tensor(Float32, (128, _TILE), stride_order=(1, 0))
    words = cute.runtime.make_fake_compact_tensor(cutlass.Int64, (3,))
    kernel: Any = cute.compile(_launch, values, words, 0.1, drops, options=f"--keep-cubin --dump-dir={folder}")
    return sass.disassemble(kernel.artifacts.CUBIN, folder)


@pytest.mark.skipif(sass.cuobjdump() is None, reason="needs the cuobjdump of the Triton wheel")
def test_instructions_per_score(tmp_path, monkeypatch):
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    dropped, plain = (code(tmp_path, drops) for drops in (True, False))
    assert sass.spills(dropped) == 0
    counts = Counter(sass.opcode(text) for _, text in dropped)
    counts.subtract(Counter(sass.opcode(text) for _, text in plain))
    more = {name: round(n / _TILE, 2) for name, n in counts.most_common() if n / _TILE >= 0.1}
    assert (len(dropped) - len(plain)) / _TILE < 9.5, more


@pytest.mark.filterwarnings("ignore:(?s).*does not fit in Uint32")  # the wrap-around is meant
@pytest.mark.parametrize("p", [0.1, 0.5, 1.0])
def test_the_device_function_gives_the_bits_of_the_reference(p):
    """Its operations are those of unsigned integers, which the DSL carries out itself where all are known."""
    words = torch.tensor([0xFEDCBA98, 0x12345678, 0x80000001])
    key, heads, b, h = tuple(Uint32(int(w)) for w in words), 3, 5, 2
    for q, kv in ((0, 0), (3, 6), (16, 0), (49, 1030), (4096, 23), (131072 + 7, 16 * 77777 + 5)):
        got = dropout.kept(key, p, Int32(b * heads + h), Int32(q), Int32(kv))
        indices = [torch.tensor(n) for n in (b, h)]
        want = [
            bool(philox.kept(words, p, heads, *indices, torch.tensor(q + i), torch.tensor(kv + j))) and p < 1.0
            for i in (0, 8) for j in (0, 8)
        ]  # fmt: skip
        assert [bool(x.value) for x in got] == want
