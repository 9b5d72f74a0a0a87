"""Autotuning with made-up times: which configurations take part, one contest per key and GPU, what is remembered."""

import dataclasses
import json
import logging

import pytest
import torch

from fa4_inductor import log
from fa4_inductor.errors import KernelUnavailable
from fa4_inductor.lowering.candidates import candidates
from fa4_inductor.lowering.config_table import HEAD_DIMS, select_config
from fa4_inductor.lowering.split_config import Variant
from fa4_inductor.runtime import compile as C
from fa4_inductor.runtime import launch, tuning
from fa4_inductor.runtime.target import target_for
from fa4_inductor.settings import Settings
from fa4_inductor.spec import AttentionSpec

HOPPER = target_for("cuda", "sm_90a")
KEY = C.forward_key(
    AttentionSpec(0.125).text, torch.bfloat16, 128, 128, 1, False, HOPPER, variant=Variant.FORWARD, regular=True
)


@pytest.fixture(autouse=True)
def fresh():
    for forget in (tuning.forget, log.reset_warnings, launch.clear_plans, C.clear_failures):
        forget()
    yield
    tuning.forget()
    launch.clear_plans()


@pytest.fixture
def settings(tmp_path):
    return Settings(cache_dir=tmp_path, autotune=True)


@pytest.fixture
def built(monkeypatch):
    """Kernels are the texts of their configurations; those listed fail."""
    failing: list[str] = []

    def get_kernel(key, settings):
        if key.config in failing:
            raise KernelUnavailable("refused")
        return key.config

    monkeypatch.setattr(C, "get_kernel", get_kernel)
    return failing


def contest_for(settings, gpu="H200", key=KEY):
    kernel, contest = tuning.kernel_of(key, settings, gpu)
    return kernel, contest


def settle(monkeypatch, contest, fastest):
    monkeypatch.setattr(tuning, "time_ms", lambda calls: {t: 1.0 if t == fastest else 2.0 for t in calls})
    return contest.settle({text: lambda: None for text in contest.kernels})


@pytest.mark.parametrize("d", HEAD_DIMS)
@pytest.mark.parametrize("dense_bytes", [0, 2])
def test_candidates_are_few_distinct_and_fit(d, dense_bytes):
    table = select_config(d, d, dense_bytes // 2, dense_bytes=dense_bytes)
    found = candidates(table, d, d, dense_bytes)
    assert found[0] == table and 2 <= len(found) <= 8 and len(set(found)) == len(found)
    padded = 96 if d == 80 else d
    assert all(c.smem(padded, padded, dense_bytes).fits for c in found)


def test_a_tile_map_fixes_the_tiles():
    table = select_config(64, 64)
    tiles = {(c.tile_m, c.tile_n) for c in candidates(table, 64, 64, fixed_tiles=True)}
    assert tiles == {(table.tile_m, table.tile_n)}


def test_without_autotuning_there_is_one_kernel_and_no_contest(settings, built):
    off = dataclasses.replace(settings, autotune=False)
    assert tuning.keys_to_build(KEY, off, "H200") == [KEY]
    assert contest_for(off) == (KEY.config, None)


def test_the_fastest_is_taken_and_remembered_on_disk(settings, built, monkeypatch):
    kernel, contest = contest_for(settings)
    assert kernel == KEY.config and len(contest.kernels) > 1
    other = list(contest.kernels)[1]
    assert settle(monkeypatch, contest, other) == other
    assert contest_for(settings) == (other, None)
    tuning.forget()  # as in another process
    assert contest_for(settings) == (other, None)
    assert tuning.keys_to_build(KEY, settings, "H200") == [dataclasses.replace(KEY, config=other)]


@pytest.mark.parametrize("gpu, key", [("H100", KEY), ("H200", dataclasses.replace(KEY, sources="other"))])
def test_another_gpu_or_version_has_its_own_contest(settings, built, monkeypatch, gpu, key):
    settle(monkeypatch, contest_for(settings)[1], KEY.config)
    assert contest_for(settings, gpu, key)[1] is not None


def test_a_gain_within_noise_changes_nothing(settings, built, monkeypatch):
    _, contest = contest_for(settings)
    monkeypatch.setattr(tuning, "time_ms", lambda calls: {t: 1.0 if t == KEY.config else 0.995 for t in calls})
    assert contest.settle({t: lambda: None for t in contest.kernels}) == KEY.config


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"format": 0, "config": "x"}', '{"format": 1, "config": "x"}'])
def test_a_damaged_record_is_ignored_with_one_message(settings, built, monkeypatch, caplog, damage):
    settle(monkeypatch, contest_for(settings)[1], KEY.config)
    (record,) = (settings.cache_dir / "tuned").iterdir()
    assert json.loads(record.read_text())["gpu"] == "H200"
    record.write_text(damage)
    tuning.forget()
    with caplog.at_level(logging.WARNING, logger="fa4_inductor"):
        for _ in range(2):
            assert contest_for(settings)[1] is not None
    assert len(caplog.records) == 1 and "ignored" in caplog.text
    settle(monkeypatch, contest_for(settings)[1], KEY.config)
    tuning.forget()
    assert contest_for(settings)[1] is None


def test_candidates_that_cannot_be_built_take_no_part(settings, built):
    keys = tuning.candidate_keys(KEY)
    built += [key.config for key in keys[1:]]
    assert contest_for(settings) == (KEY.config, None)
    built.append(KEY.config)
    with pytest.raises(KernelUnavailable):
        contest_for(settings)


def test_the_first_launch_outside_a_capture_holds_the_contest(settings, monkeypatch):
    """Each kernel is launched on the operands at hand, then only the fastest."""
    calls = []
    names = [key.config for key in tuning.candidate_keys(KEY)]
    kernels = {name: lambda *args, n=name: calls.append(n) for name in names}
    contest = tuning.Contest(KEY, kernels, settings, "H200")
    device = torch.device("cpu")
    capturing = [True]
    monkeypatch.setattr(launch, "current_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())

    def time_ms(timed):
        for call in timed.values():
            call()
        return {text: 1.0 if text == names[-1] else 2.0 for text in timed}

    monkeypatch.setattr(tuning, "time_ms", time_ms)
    plan_key = launch.PlanKey(KEY.program, torch.bfloat16, 128, 128, 1, device, False, Variant.FORWARD, True)
    launch.prepare(kernels[names[0]], plan_key, contest=contest)
    q = torch.zeros(1, 2, 8, 128, dtype=torch.bfloat16)
    run = lambda: launch.forward(q, q, q, [], KEY.program, [], "cute", False)
    run()
    assert calls == names[:1]
    capturing[0] = False
    run()
    assert calls[1:-1] == names and calls[-1] == names[-1]
    run()
    assert calls[-2:] == names[-1:] * 2 and log.counters()["kernels_tuned"] == 1
