"""Examples and the demo run as a user would run them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    result = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=280
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    return result.stdout


def test_hf_llama() -> None:
    out = run("examples/hf_llama.py", "--seqlen", "64")
    assert "2 found, 2 understood" in out
    assert float(out.rsplit(":", 1)[1]) < 1e-3


def test_custom_score_mod() -> None:
    out = run("examples/custom_score_mod.py")
    assert out.count("tanh") == 2
    errors = [float(line.rsplit(":", 1)[1]) for line in out.splitlines() if line.startswith("largest error")]
    assert len(errors) == 2
    assert max(errors) < 1e-4


def test_explain_model() -> None:
    out = run("examples/explain_model.py", "--model", "gpt_oss")
    assert out.count("sink=") >= 2
    assert "modeling_gpt_oss.py:" in out


@pytest.mark.slow
def test_demo() -> None:
    out = run("-m", "fa4_inductor.demo", "--rounds", "3", "--seqlen", "256")
    assert "matched 4" in out
    assert "EXCEEDED" not in out
    assert "fa4 is faster by" in out
