"""The kernel that makes tile maps and the forward kernel that walks them compile for sm_90a, without spills."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import sass
from emit_cases import load_module

from fa4_inductor.analysis import facts
from fa4_inductor.kernels.cute.build import build_forward
from fa4_inductor.kernels.cute.tile_map import build_tile_map
from fa4_inductor.lowering.aux_layout import dense_loads, streamed_slots
from fa4_inductor.lowering.emit_program import emit_program, emit_tile_test
from fa4_inductor.lowering.tile_map import with_tile_map
from fa4_inductor.runtime.compile import forward_config
from fa4_inductor.spec import AttentionSpec, parse_spec

CAUSAL = "(kv_idx <= q_idx)"
MASKS = {
    "documents": (f"{CAUSAL} & (aux0[b, kv_idx] == aux0[b, q_idx])", "int32[2]"),
    "padding": (f"{CAUSAL} & aux0[b, kv_idx]", "bool[2]"),
    "dense": ("aux0[b, 0, q_idx, kv_idx]", "bool[4]"),
}
pytestmark = pytest.mark.skipif(sass.cuobjdump() is None, reason="needs the cuobjdump of the Triton wheel")


@pytest.fixture(autouse=True)
def _hopper(monkeypatch):
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")


def spec_of(name: str) -> AttentionSpec:
    keep, aux = MASKS[name]
    return parse_spec(f"fa4/1; aux={aux}; sizes=0; scale=0.125; score=score; keep={keep}; empty_row=zero")


def kinds(spec: AttentionSpec) -> tuple[tuple[str, int], ...]:
    return tuple((a.dtype, a.ndim) for a in spec.aux)


@pytest.mark.parametrize("tile", [(128, 128), (192, 96)])
@pytest.mark.parametrize("name", MASKS)
def test_the_map_kernel(name, tile, tmp_path: Path):
    spec = spec_of(name)
    module: ModuleType = load_module(
        emit_tile_test(spec, facts(spec), dense=dense_loads(spec), unit_stride=streamed_slots(spec))
    )
    compiled = build_tile_map(module, *tile, aux=kinds(spec), options=f"--keep-cubin --dump-dir={tmp_path}")
    code = sass.disassemble(compiled.artifacts.CUBIN, tmp_path)
    assert code and sass.spills(code) == 0


@pytest.mark.parametrize(("name", "d"), [("documents", 128), ("dense", 64)])
def test_full_tiles_of_a_map_evaluate_no_mask(name, d, tmp_path: Path):
    config, loads = forward_config(with_tile_map(spec_of(name), 0, 0), d, d, long_q=True, regular=True)
    assert config is not None and loads == dense_loads(spec_of(name))
    spec = with_tile_map(spec_of(name), config.tile_m, config.tile_n)
    text = emit_program(spec, facts(spec), dense=loads, unit_stride=streamed_slots(spec), use_tile_map=True)
    compiled = build_forward(
        load_module(text), "bfloat16", d, d, 1, aux=(*kinds(spec), ("int32", 1)), config=config,
        options=f"--keep-cubin --dump-dir={tmp_path}",
    )  # fmt: skip
    code = sass.disassemble(compiled.artifacts.CUBIN, tmp_path)
    assert sass.spills(code) == 0
    full = sass.mma_loops(code)[0]
    # counts a branch that is almost never taken: the shift of rows that have seen no key
    assert full.total() / (config.tile_n // 2) <= 6.8, full.most_common()
    assert full["R2UR"] <= 4 and full["LDG"] == full["LDSM"] == 0
