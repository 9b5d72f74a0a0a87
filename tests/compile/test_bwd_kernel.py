"""The backward kernel compiles for sm_90a without a GPU: no spills, and wgmma that ptxas did not serialise."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path

import pytest
import sass
import torch

from fa4_inductor.analysis import facts
from fa4_inductor.kernels.cute.bwd_build import build_backward
from fa4_inductor.lowering.backward_config import backward_tile_m
from fa4_inductor.lowering.emit_program import emit_program, write_program
from fa4_inductor.spec import AttentionSpec, AuxSpec, parse_expr

_AUX = (AuxSpec("bool", 2), AuxSpec("float32", 1))
_LEARNED_AUX = (AuxSpec("bfloat16", 3), AuxSpec("float32", 4), AuxSpec("float32", 0), AuxSpec("float32", 2))
SPECS = {
    "plain": AttentionSpec(0.125),
    "causal": AttentionSpec(0.125, keep=parse_expr("kv_idx <= q_idx")),
    "softcap": AttentionSpec(0.125, score=parse_expr("20.0 * tanh(score * 0.05)")),
    "alibi_padded": AttentionSpec(
        0.125,
        score=parse_expr("score + aux1[h] * float(kv_idx)", _AUX),
        keep=parse_expr("(kv_idx <= q_idx) & aux0[b, kv_idx]", _AUX),
        aux=_AUX,
    ),
}
LEARNED = {
    "bias": ("score + aux0[h, q_idx, kv_idx]", 0, 4 + 32, 56),
    "table": ("score + aux1[0, h, kv_idx - q_idx + seqlen_q + 255, 0]", 1, 4 + 18, 81),
    "temperature": ("score * aux2[()]", 2, 4 + 1, 0),
    "keys": ("score + aux3[b, kv_idx]", 3, 4 + 2, 6),
}
SPECS |= {
    name: AttentionSpec(0.125, score=parse_expr(score, _LEARNED_AUX), aux=_LEARNED_AUX)
    for name, (score, *_) in LEARNED.items()
}
pytestmark = pytest.mark.skipif(sass.cuobjdump() is None, reason="needs the cuobjdump of the Triton wheel")


@pytest.fixture(autouse=True)
def _hopper(monkeypatch):
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")


def kernels(
    name: str,
    head_dim: int,
    folder: Path,
    learned: tuple[int, ...] = (),
    head_dim_v: int | None = None,
    **options,
) -> list[list[tuple[int, str]]]:
    """The code of the three kernels: before, main, after (in any order)."""
    dims = head_dim, head_dim_v or head_dim
    spec = SPECS[name]
    path = write_program(
        emit_program(spec, facts(spec), need_lse=True, gradient=True, learned=learned), f"bwd_{name}", folder
    )
    module_spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    compiled = build_backward(
        module, "bfloat16", *dims, 1, aux=tuple((a.dtype, a.ndim) for a in spec.aux),
        tile_m=backward_tile_m(*dims, spec, torch.bfloat16, bool(learned)),
        options=f"--keep-cubin --dump-dir={folder}", **options,
    )  # fmt: skip
    result: list[list[tuple[int, str]]] = []
    for address, text in sass.disassemble(compiled.artifacts.CUBIN, folder):
        if address == 0:
            result.append([])
        result[-1].append((address, text))
    return result


@pytest.mark.parametrize(
    ("name", "head_dim", "spills"),
    [("causal", 128, 0), ("plain", 64, 0), ("softcap", 64, 0), ("softcap", 128, 24), ("alibi_padded", 128, 24)],
)
def test_machine_code(name, head_dim, spills, tmp_path):
    code = kernels(name, head_dim, tmp_path)
    assert len(code) == 3
    assert sum(map(sass.spills, code)) <= spills
    main = max(code, key=len)
    # S, dP and their like for 64 keys; dQ is over 128 keys for half of the tile
    products = {("plain", 64): 4 + 4 + 8 + 8 + 8, ("softcap", 64): 4 + 4 + 4 + 4 + 8}.get(
        (name, head_dim), 8 + 8 + 4 + 4 + 8
    )
    opcodes = Counter(sass.opcode(text) for _, text in main)
    assert opcodes["HGMMA"] == products
    assert opcodes["WARPGROUP"] <= 10, "ptxas has serialised the wgmma"
    rows = 128 if (name, head_dim) == ("plain", 64) else 64
    assert opcodes["REDG"] == rows * head_dim // 256 // 4


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", LEARNED)
def test_gradients_of_captured_tensors_compile(name, head_dim, tmp_path):
    _, slot, additions, spills = LEARNED[name]
    code = kernels(name, head_dim, tmp_path, (slot,))
    main = max(code, key=len)
    opcodes = Counter(sass.opcode(text) for _, text in main)
    assert opcodes["WARPGROUP"] <= 10, "ptxas has serialised the wgmma"
    assert opcodes["REDG"] == additions + (4 if head_dim == 128 else 0)
    assert sass.spills(main) <= (spills if head_dim == 128 else 0)


def test_rows_of_fills_compile(tmp_path):
    code = kernels("bias", 128, tmp_path)
    assert sum(map(sass.spills, code)) <= 8
    assert sorted(Counter(sass.opcode(text) for _, text in part)["MUFU"] > 1 for part in code) == [False, True, True]


@pytest.mark.parametrize("dims", [(80, 80), (96, 64), (64, 128)])
def test_other_head_dims_compile(dims, tmp_path):
    code = kernels("causal", dims[0], tmp_path, head_dim_v=dims[1])
    main = max(code, key=len)
    assert Counter(sass.opcode(text) for _, text in main)["WARPGROUP"] <= 10
    assert sum(map(sass.spills, code)) == 0


@pytest.mark.parametrize("head_dim", [64, 128])
def test_deterministic_kernels_compile(head_dim, tmp_path):
    code = kernels("causal", head_dim, tmp_path, deterministic=True)
    main = max(code, key=len)
    assert Counter(sass.opcode(text) for _, text in main)["WARPGROUP"] <= 10
    assert sum(map(sass.spills, code)) == 0


def test_a_gradient_of_the_lse_compiles(tmp_path):
    assert len(kernels("plain", 64, tmp_path, grad_lse=True)) == 3


def test_programs_of_backward_kernels(tmp_path):
    text = {n: emit_program(s, facts(s), need_lse=True, gradient=True) for n, s in SPECS.items()}
    assert [n for n in SPECS if "def score_grad" in text[n]] == ["softcap", "temperature"]
    assert not any("LEARNED" in t for t in text.values())
    assert "keep_column" not in text["alibi_padded"]
    assert Counter(text["softcap"].split())["tanh_approx"] == 0  # the names are qualified
    assert text["softcap"].count("ops.tanh_approx") >= 2
