"""The split-KV kernel compiles for sm_90a without a GPU: no spills, wgmma, few instructions per score."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import sass

from fa4_inductor.kernels.cute import packed, split_combine
from fa4_inductor.kernels.cute.build import build_split
from fa4_inductor.lowering import split_config
from fa4_inductor.lowering.split_config import SplitConfig, select_split_config


@pytest.fixture(autouse=True)
def _hopper(monkeypatch):
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")


def build(name: str, d: int, dv: int, group: int, split: bool, options: str = "", config: SplitConfig | None = None):
    program = importlib.import_module(f"programs.{name}")
    return build_split(
        program, "bfloat16", d, dv, group, aux=getattr(program, "AUX", ()),
        num_sizes=getattr(program, "NUM_SIZES", 0), need_lse=True,
        config=config or select_split_config(d, dv, split), options=options,
    )  # fmt: skip


@pytest.mark.skipif(sass.cuobjdump() is None, reason="needs the cuobjdump of the Triton wheel")
@pytest.mark.parametrize(
    ("name", "d", "group", "split", "per_score"),
    [
        ("plain", 128, 4, True, 10.6),
        ("offset_causal", 64, 1, False, 9.2),
        ("cache_positions", 128, 4, True, 10.8),
        ("softcap_causal", 64, 8, True, 12.0),
    ],
)
def test_machine_code(name, d, group, split, per_score, tmp_path: Path):
    compiled = build(name, d, d, group, split, f"--keep-cubin --dump-dir={tmp_path}")
    code = sass.disassemble(compiled.artifacts.CUBIN, tmp_path)
    assert sass.spills(code) == 0
    loops = sass.mma_loops(code)
    assert loops, "no loop issues wgmma"
    # each thread of the warpgroup holds 32 scores of a tile
    assert loops[0].total() / 32 <= per_score, loops[0].most_common()
    assert loops[0]["R2UR"] == 0, "the wgmma descriptors left the uniform registers"


@pytest.mark.slow
@pytest.mark.parametrize(("d", "dv"), [(80, 80), (192, 128), (256, 256)])
def test_head_dims(d, dv):
    assert callable(build("causal", d, dv, 2, True))


def test_the_kernel_and_its_plan_agree():
    assert split_combine.MAX_SPLITS == split_config.MAX_SPLITS and packed.TILE_M == split_config.TILE_M


def test_a_configuration_beyond_shared_memory_is_refused():
    with pytest.raises(ValueError, match="shared memory"):
        build("plain", 256, 256, 1, False, config=SplitConfig(False, num_stages=4, ctas_per_sm=1))
