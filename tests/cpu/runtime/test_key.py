"""CompileKey: stable across processes, different for every difference, closed to what has no exact text."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from fa4_inductor.runtime import key as K

ROOT = Path(__file__).resolve().parents[3]
BASE = {
    "program": "fa4/1; aux=; sizes=0; scale=0.125; score=score; keep=True; empty_row=zero",
    "dtype": "bfloat16",
    "head_dim": 64,
    "head_dim_v": 64,
    "qhead_per_kvhead": 1,
    "need_lse": False,
    "arch": "sm_90a",
    "num_sms": 132,
    "config": "KernelConfig(tile_m=128)",
}
FIXED = {**BASE, "toolchain": (("cutlass", "1"),), "sources": "abc"}


def test_digest_is_the_same_in_another_process():
    code = f"from fa4_inductor.runtime.key import CompileKey; print(CompileKey(**{BASE!r}).digest())"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == K.CompileKey(**BASE).digest()


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(K.CompileKey)])
def test_every_field_is_part_of_the_digest(name):
    base = K.CompileKey(**FIXED)
    value = getattr(base, name)
    other = (not value) if isinstance(value, bool) else value + 1 if isinstance(value, int) else value + value
    assert dataclasses.replace(base, **{name: other}).digest() != base.digest()


@pytest.mark.parametrize("value", [1.5, b"x", ["a"], object(), (1, 2.0)])
def test_a_value_without_exact_text_fails_closed(value):
    with pytest.raises(TypeError, match="CompileKey.config"):
        dataclasses.replace(K.CompileKey(**FIXED), config=value).digest()


def test_bool_and_int_do_not_meet():
    base = K.CompileKey(**FIXED)
    assert dataclasses.replace(base, need_lse=True).digest() != dataclasses.replace(base, need_lse=1).digest()


def test_fingerprint_sees_content_names_and_new_files(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.py").write_text("1")
    seen = {K.fingerprint_tree(tmp_path, ("a",))}
    for change in (lambda: (tmp_path / "a" / "x.py").write_text("2"), lambda: (tmp_path / "a" / "y.py").write_text("2"),
                   lambda: (tmp_path / "a" / "y.py").rename(tmp_path / "a" / "z.py")):  # fmt: skip
        change()
        seen.add(K.fingerprint_tree(tmp_path, ("a",)))
    assert len(seen) == 4


def test_toolchain_names_python():
    assert dict(K.toolchain_versions())["python"] == f"{sys.version_info.major}.{sys.version_info.minor}"
