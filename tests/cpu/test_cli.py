"""The command line: doctor's findings and exit codes, explain's output and wrong usage."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from fa4_inductor import cli, collect_env
from fa4_inductor.collect_env import MISSING, NOTE, OK, Check

HOPPER = {"cuda_build": "13.0", "available": True, "devices": [["NVIDIA H200", 9, 0, 150 << 30]]}
NO_GPU = {"cuda_build": None, "available": False, "devices": []}


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_doctor_exits_0_and_prints_json(capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True
    names = {check["name"] for check in found["checks"]}
    assert {"Python", "torch", "fa4 backend", "NVIDIA driver", "kernel cache", "nvidia-cutlass-dsl"} <= names
    assert "registered" in next(c["value"] for c in found["checks"] if c["name"] == "fa4 backend")


def test_doctor_exits_1_and_names_the_remedy(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    findings = [Check("torch", "2.13"), Check("CuTe-DSL", "not installed", MISSING, "pip install nvidia-cutlass-dsl")]
    monkeypatch.setattr(collect_env, "collect", lambda: findings)
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "MISSING" in out
    assert "-> pip install nvidia-cutlass-dsl" in out


@pytest.mark.parametrize(("facts", "status"), [(HOPPER, MISSING), (NO_GPU, NOTE)], ids=["hopper", "cpu"])
def test_missing_cutlass_matters_on_a_hopper_gpu_only(
    monkeypatch: pytest.MonkeyPatch, facts: dict, status: str
) -> None:
    monkeypatch.setattr(collect_env, "version_of", lambda name: None)
    checks = by_name(collect_env._kernel_checks(facts))
    assert checks["nvidia-cutlass-dsl"].status == status
    assert "pip install" in checks["nvidia-cutlass-dsl"].remedy


def test_broken_cutlass_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect_env, "version_of", lambda name: "4.8.1")
    monkeypatch.setattr(collect_env, "_CUTLASS_PROBE", "raise TypeError('DSL and library do not match')")
    check = by_name(collect_env._kernel_checks(HOPPER))["CuTe-DSL"]
    assert check.status == MISSING
    assert "DSL and library do not match" in check.value


def test_a_driver_without_a_cuda_torch_is_missing_something(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect_env, "driver_version", lambda: "580.1")
    assert by_name(collect_env._device_checks(NO_GPU))["GPU"].status == MISSING
    assert by_name(collect_env._device_checks(HOPPER))["GPU"].status == OK
    monkeypatch.setattr(collect_env, "driver_version", lambda: None)
    assert by_name(collect_env._device_checks(NO_GPU))["GPU"].status == NOTE


def test_old_or_unloadable_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect_env, "version_of", lambda name: "2.9.1+cu128")
    assert collect_env._torch_checks(None, "")[0].status == MISSING
    monkeypatch.setattr(collect_env, "version_of", lambda name: "2.13.0")
    unloadable = by_name(collect_env._torch_checks(None, "ImportError: no sympy"))["fa4 backend"]
    assert unloadable.status == MISSING
    assert "no sympy" in unloadable.value


def test_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (check,) = collect_env.cache_checks(tmp_path / "file" / "cache", enabled=True)
    assert check.status == MISSING
    assert "FA4_INDUCTOR_CACHE_DIR" in check.remedy


def test_cache_counts_its_kernels(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "meta.json").write_text("{}")
    (check,) = collect_env.cache_checks(tmp_path, enabled=True)
    assert (check.status, "2 kernels" in check.value) == (OK, True)
    (off,) = collect_env.cache_checks(tmp_path, enabled=False)
    assert off.status == NOTE


def test_probe_survives_what_it_looks_at(monkeypatch: pytest.MonkeyPatch) -> None:
    assert collect_env._probe("import os; os.abort()")[0] is None
    assert collect_env._probe("raise ValueError('told you')") == (None, "ValueError: told you")
    monkeypatch.setattr(collect_env, "_PROBE_SECONDS", 0.2)
    assert "no answer" in collect_env._probe("import time; time.sleep(60)")[1]


def test_explain_prints_every_site(capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["explain", "--model", "llama", "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["sites"]) == found["sites_expected"] == 2
    for site in found["sites"]:
        assert site["status"] in ("fused", "matched")
        assert "kv_idx <= q_idx" in site["program"]
        assert "modeling_llama.py:" in site["location"] or "sdpa_attention.py:" in site["location"]


def test_explain_with_an_unknown_model(capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["explain", "--model", "no_such_model"]) == 2
    assert "known are llama" in capsys.readouterr().err


def test_wrong_usage_exits_2() -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["explode"])
    assert exit_.value.code == 2


def test_sys_path_reaches_the_probe() -> None:
    found, _ = collect_env._probe("import json, sys; print(json.dumps(sys.path))")
    here = {os.path.realpath(p) for p in sys.path if p and os.path.isdir(p)}
    assert here <= {os.path.realpath(p) for p in found or []}
