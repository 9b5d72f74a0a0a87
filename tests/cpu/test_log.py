"""Warnings once per cause, counters in Dynamo's place, TORCH_LOGS."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch._dynamo.utils as dynamo_utils

from fa4_inductor import log

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def fresh():
    log.reset_warnings()
    log.counters().clear()
    yield
    log.reset_warnings()


def test_one_warning_per_cause(caplog):
    with caplog.at_level(logging.WARNING, logger="fa4_inductor"):
        assert log.warn_once("no compiler.", "Install one.")
        assert not log.warn_once("no compiler.", "Install one.")
        assert log.warn_once("another cause", "Do that.")
    assert [r.message for r in caplog.records] == ["no compiler. Install one.", "another cause. Do that."]


def test_counters_are_dynamos():
    log.count("found")
    log.count("declined.dropout", 2)
    assert dynamo_utils.counters["fa4"] == {"found": 1, "declined.dropout": 2}


def test_torch_logs_turns_on_debug_output():
    code = (
        "import torch._logging, logging; from fa4_inductor import log;"
        "log.get_logger('fa4_inductor.runtime.cache').debug('seen by the user')"
    )
    env = {**os.environ, "TORCH_LOGS": "+fa4_inductor", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "seen by the user" in done.stderr


def test_artifact_is_handed_over_unevaluated(monkeypatch):
    seen = {}
    monkeypatch.setattr("torch._logging.trace_structured", lambda kind, **fns: seen.update(kind=kind, **fns))
    log.artifact("fa4_test", lambda: "payload")
    assert (
        seen["kind"] == "artifact" and seen["metadata_fn"]()["name"] == "fa4_test" and seen["payload_fn"]() == "payload"
    )
