"""The forward kernel compiles for sm_90a without a GPU: no spills, wgmma, and few instructions per score."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import sass
import sass_report
from programs import dense_bytes

from fa4_inductor.kernels.cute.build import build_forward
from fa4_inductor.lowering.config import KernelConfig
from fa4_inductor.lowering.config_table import HEAD_DIMS, select_config


@pytest.fixture(autouse=True)
def _hopper(monkeypatch):
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")


def fixture_program(name: str) -> ModuleType:
    return importlib.import_module(f"programs.{name}")


def build(name: str, d: int, dv: int, options: str = "", **overrides):
    program = fixture_program(name)
    aux = getattr(program, "AUX", ())
    config = overrides.pop("config", None) or select_config(d, dv, len(aux), dense_bytes=dense_bytes(program))
    assert config is not None
    return build_forward(
        program, "bfloat16", d, dv, 1, aux=aux, num_sizes=getattr(program, "NUM_SIZES", 0), need_lse=True,
        config=config, options=options, **overrides,
    )  # fmt: skip


# the others are in `python tests/compile/sass_report.py`
@pytest.mark.skipif(sass.cuobjdump() is None, reason="needs the cuobjdump of the Triton wheel")
@pytest.mark.parametrize(
    "name",
    [
        "plain D128", "plain D64", "causal D128", "softcap_causal D128", "alibi_causal D64", "window D128",
        "relative_table D128", "dense_bias D128", "padding_causal D64",
    ],
)  # fmt: skip
def test_machine_code_is_within_its_bounds(name):
    assert sass_report.beyond(name, sass_report.figures(name), sass_report.load_bounds()) == []


def test_worse_machine_code_is_found():
    bounds = {"p D64": {"full": 5.0, "masked": None, "r2ur": 0, "fmnmx": 0, "spills": 0}}
    found = {"full": 5.0, "masked": 11.0, "hgmma": 12, "r2ur": 0, "fmnmx": 0, "spills": 0}
    assert sass_report.beyond("p D64", found, bounds) == []
    for worse in ({"full": 5.1}, {"spills": 2}, {"r2ur": 32}, {"hgmma": 0}):
        assert len(sass_report.beyond("p D64", found | worse, bounds)) == 1
    assert "has no bounds" in sass_report.beyond("q D64", found, bounds)[0]


@pytest.mark.skipif(sass.cuobjdump() is None, reason="needs the cuobjdump of the Triton wheel")
def test_a_dense_bias_is_read_by_ldmatrix(tmp_path: Path):
    compiled = build("tma_bias", 64, 64, f"--keep-cubin --dump-dir={tmp_path}")
    loop = sass.mma_loops(sass.disassemble(compiled.artifacts.CUBIN, tmp_path))[0]
    assert loop["LDSM"] == 8 and loop["LDG"] == 0 and loop["LDS"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(("d", "dv"), [(80, 80), (192, 128), (256, 256), (64, 128), (128, 256)])
def test_head_dims(d, dv):
    assert callable(build("causal", d, dv))


def test_every_pair_of_head_dims_has_a_configuration():
    import cutlass

    from fa4_inductor.kernels.cute.fwd_sm90 import FwdSm90

    for d in HEAD_DIMS:
        for dv in HEAD_DIMS:
            for long_q in (False, True):
                config = select_config(d, dv, long_q=long_q)
                assert config is not None
                FwdSm90(fixture_program("plain"), cutlass.BFloat16, d, dv, 1, config, 132)
            assert select_config(d, dv, 1, dense_bytes=2) is not None


@pytest.mark.parametrize("dims", [(72, 72), (64, 72), (512, 512)])
def test_other_head_dims_have_none(dims):
    assert select_config(*dims) is None


def test_a_configuration_beyond_shared_memory_is_refused():
    with pytest.raises(ValueError, match="shared memory"):
        build("plain", 256, 256, config=KernelConfig(num_consumers=2, tile_n=128, num_stages=2))


@pytest.mark.parametrize("wrong", [{"num_consumers": 4}, {"tile_n": 100}, {"tile_n": 512}, {"num_stages": 0}])
def test_impossible_configurations_are_refused(wrong):
    with pytest.raises(ValueError):
        KernelConfig(**wrong)
