"""Emitted programs compile with CuTe-DSL for sm_90a, every op of the table among them."""

import os

import pytest
from emit_cases import OPS_PROGRAMS, compile_spec, spec_of

from fa4_inductor.spec.expr import walk
from fa4_inductor.spec.ops import OPS


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


def test_special_constants_compile():
    assert callable(compile_spec(spec_of("where(kv_idx > 2, score, -inf) + where(h > 0, 1e38, 0.0) + sqrt(-1.0)")))
