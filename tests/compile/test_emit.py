"""Emitted programs compile with CuTe-DSL for sm_90a, every op of the table among them."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
pytest.importorskip("cutlass")

from emitted import OPS_PROGRAMS, compile_spec, spec_of  # noqa: E402

from fa4_inductor.spec.expr import walk  # noqa: E402
from fa4_inductor.spec.ops import OPS  # noqa: E402


@pytest.fixture(autouse=True)
def _hopper(monkeypatch):
    monkeypatch.setenv("CUTE_DSL_ARCH", os.environ.get("CUTE_DSL_ARCH", "sm_90a"))


def test_the_programs_use_every_op():
    roots = [r for s in OPS_PROGRAMS.values() for r in (s.score, s.keep, s.sink) if r is not None]
    assert set(OPS) - {node.op for root in roots for node in walk(root)} == set()


@pytest.mark.parametrize("name", OPS_PROGRAMS)
def test_compiles(name):
    assert callable(compile_spec(OPS_PROGRAMS[name]))


def test_exact_math_compiles():
    assert callable(compile_spec(OPS_PROGRAMS["fast"], fast_math=False))


def test_constants_outside_fp32_compile():
    assert callable(compile_spec(spec_of("where(kv_idx > 2, score, -inf) + where(h > 0, 1e39, 0.0) + sqrt(-1.0)")))
