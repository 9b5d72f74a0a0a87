"""The compile path without a GPU: program text to kernel, disk cache across processes, broken toolchains."""

import collections
import dataclasses
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fa4_inductor import backend, decide, log
from fa4_inductor.errors import KernelUnavailable
from fa4_inductor.lowering.split_config import Variant
from fa4_inductor.runtime import compile as C
from fa4_inductor.runtime import launch, workers
from fa4_inductor.runtime.target import target_for
from fa4_inductor.settings import Settings
from fa4_inductor.spec import AttentionSpec, AuxSpec, EmptyRow, parse_expr

ROOT = Path(__file__).resolve().parents[2]
HOPPER = target_for("cuda", "sm_90a")
PLAIN = AttentionSpec(0.125).text
_AUX = (AuxSpec("bool", 2),)
PADDED = AttentionSpec(0.125, keep=parse_expr("aux0[b, kv_idx]", _AUX), aux=_AUX, empty_row=EmptyRow.MEAN)


def key_of(
    program=PLAIN, dtype=torch.bfloat16, d=64, dv=64, group=1, need_lse=False, target=HOPPER, variant=Variant.FORWARD,
    regular=True,
):  # fmt: skip
    return C.forward_key(program, dtype, d, dv, group, need_lse, target, variant=variant, regular=regular)


@pytest.fixture(autouse=True)
def fresh():
    log.reset_warnings()
    C.clear_failures()
    launch.clear_plans()
    yield
    C.clear_failures()


_PROCESS = """
import dataclasses, json, sys
import torch
from fa4_inductor import backend, decide, log
from fa4_inductor.lowering.split_config import Variant
from fa4_inductor.runtime import compile as C
from fa4_inductor.runtime.target import target_for
from fa4_inductor.settings import Settings
hopper = target_for("cuda", "sm_90a")
key = C.forward_key(sys.argv[1], torch.bfloat16, 64, 64, 1, False, hopper, variant=Variant.FORWARD, regular=True)
key = dataclasses.replace(key, sources="as of this test")
kernel = C.get_kernel(key, Settings.from_env())
q = torch.zeros(1, 1, 8, 64, dtype=torch.bfloat16)
try:
    kernel(q, q, q, q, None, None, 1.0, None, None)
except Exception as error:
    refusal = str(error)
print(json.dumps({"refusal": refusal, **log.counters()}))
"""


def test_a_second_process_compiles_nothing(tmp_path):
    def run():
        env = {**os.environ, "FA4_INDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", _PROCESS, PLAIN]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    first, second = run(), run()
    assert first["kernel_compiles"] == 1 and "kernel_cache_hits" not in first
    assert second["kernel_cache_hits"] == 1 and "kernel_compiles" not in second
    assert "expected device_type=cuda" in second["refusal"]  # loaded and callable: it checks its arguments


def test_emitted_program_compiles_with_and_without_lse(tmp_path):
    settings = Settings(cache_dir=tmp_path)
    kernels = [C.get_kernel(key_of(PADDED.text, need_lse=lse), settings) for lse in (False, True)]
    assert kernels[0] is not kernels[1] and log.counters()["kernel_compiles"] == 2
    assert C.needs_v_mean(PADDED) and not C.needs_v_mean(AttentionSpec(1.0, empty_row=EmptyRow.MEAN))


@pytest.mark.parametrize(
    "change, cause",
    [
        ({"dtype": torch.float32}, "bfloat16 and float16"),
        ({"d": 72}, "head dims 72"),
        ({"target": target_for("cuda", "sm_89")}, "sm_89"),
        ({"target": target_for("cpu")}, "sm_90a"),
    ],
    ids=["dtype", "head_dim", "ada", "cpu"],
)
def test_what_the_kernel_does_not_cover_is_named(change, cause):
    with pytest.raises(KernelUnavailable, match=cause):
        key_of(**change)


BREAKAGES = [ImportError("no module"), AttributeError("cute has no attribute"), TypeError("unexpected argument")]


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda e: type(e).__name__)
def test_a_broken_toolchain_is_one_error_with_versions_and_is_not_tried_twice(monkeypatch, breakage):
    calls = []

    def broken(key):
        calls.append(key)
        raise breakage

    monkeypatch.setattr(C, "_build", broken)
    settings = Settings(disk_cache=False)
    for _ in range(2):
        with pytest.raises(KernelUnavailable, match=f"{type(breakage).__name__}.*found nvidia-cutlass-dsl .*needed"):
            C.get_kernel(key_of(group=7), settings)
    assert len(calls) == 1


def test_a_missing_package_is_such_an_error(monkeypatch):
    for name in [m for m in sys.modules if m.startswith(("fa4_inductor.kernels.cute.", "cutlass"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cutlass", None)
    with pytest.raises(KernelUnavailable, match="ModuleNotFoundError"):
        C.get_kernel(key_of(group=5), Settings(disk_cache=False))


def test_at_launch_it_warns_once_and_runs_in_eager_torch_or_raises_in_strict_mode(monkeypatch, caplog):
    def broken(key):
        raise TypeError("unexpected argument")

    monkeypatch.setattr(C, "_build", broken)
    monkeypatch.setattr("fa4_inductor.runtime.target.target_for", lambda device: HOPPER)
    monkeypatch.setattr(launch, "_DEVICES", ("cpu",))
    q = torch.randn(1, 2, 4, 64, dtype=torch.bfloat16)
    with caplog.at_level(logging.WARNING, logger="fa4_inductor"):
        for head_dim_v in (64, 128):
            v = torch.randn(1, 2, 4, head_dim_v, dtype=torch.bfloat16)
            out, _ = launch.forward(q, q, v, [], PLAIN, [], "cute", False)
            torch.testing.assert_close(out, launch.forward(q, q, v, [], PLAIN, [], "reference", False)[0])
    assert len(caplog.records) == 1 and "TypeError" in caplog.text
    launch.clear_plans()
    monkeypatch.setenv("FA4_INDUCTOR_STRICT", "1")
    with pytest.raises(KernelUnavailable, match="TypeError"):
        launch.forward(q, q, q, [], PLAIN, [], "cute", False)


def test_many_kernels_are_built_by_workers_and_loaded_from_disk(tmp_path):
    settings = Settings(cache_dir=tmp_path)
    keys = [dataclasses.replace(key_of(group=g), sources="as of this test") for g in (1, 2, 4, 4)]
    assert list(workers.build_all(keys, settings).values()) == [None] * 3
    built, loaded = log.counters()["kernel_compiles"], log.counters()["kernel_cache_hits"]
    assert built + loaded == 3 and built < 3  # how many the workers get depends on the machine
    assert workers.build_all(keys, settings).keys() == set(keys) and log.counters()["kernel_compiles"] == built


def test_a_worker_builds_one_kernel_after_the_other(tmp_path, monkeypatch):
    """Everything is left to two workers."""
    settings = Settings(cache_dir=tmp_path)
    keys = [dataclasses.replace(key_of(group=g), sources="as of this test") for g in (1, 2, 4)]
    queue = collections.deque(keys)
    handed_out = [workers._Worker(queue, settings) for _ in range(2)]
    for worker in handed_out:
        worker.wait()
        worker.kill()
    assert not queue and all(C.kernel_cache(settings).peek(key.digest()) is not None for key in keys)
    assert "kernel_compiles" not in log.counters()


def test_a_worker_that_dies_costs_only_time(tmp_path, monkeypatch):
    monkeypatch.setattr(workers.sys, "executable", "/bin/false")
    settings = Settings(cache_dir=tmp_path)
    keys = [key_of(group=g) for g in (1, 2, 4)]
    monkeypatch.setattr(C, "_build", lambda key: key.describe())
    monkeypatch.setattr(C, "save_artefact", lambda kernel, path: path.write_text("x"))
    assert list(workers.build_all(keys, settings).values()) == [None] * 3
    assert log.counters()["kernel_compiles"] == 3


def test_failures_are_reported_by_key(monkeypatch):
    def broken(key):
        if key.qhead_per_kvhead == 2:
            raise TypeError("unexpected argument")
        return print

    monkeypatch.setattr(C, "_build", broken)
    keys = [key_of(group=g, program=AttentionSpec(0.5).text) for g in (1, 2)]
    results = workers.build_all(keys, Settings(disk_cache=False))
    assert results[keys[0]] is None and "TypeError" in str(results[keys[1]])


def test_a_key_survives_the_way_to_a_worker():
    key = key_of()
    assert workers.key_from_json(json.dumps(key.describe())) == key


def test_the_backend_builds_kernels_while_dynamo_compiles(tmp_path, monkeypatch):
    def attention(q, k, v):
        return torch.softmax(q @ k.transpose(2, 3) * 0.125, dim=-1) @ v

    monkeypatch.setenv("FA4_INDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(decide, "target_for", lambda device, arch=None: HOPPER)
    graphs = []

    def fuse(gm, example_inputs):
        graphs.append(backend.fuse(gm, Settings.from_env().with_options({"fa4.strict": True})))
        return lambda *args: [args[0]]  # there is no GPU to run the kernel

    with torch.no_grad():
        torch.compile(attention, backend=fuse)(*(torch.zeros(1, 2, 8, 64, dtype=torch.bfloat16) for _ in range(3)))
    assert graphs[0] and log.counters()["kernel_compiles"] == 1 and len(launch._plans) == 1
