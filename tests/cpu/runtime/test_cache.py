"""KernelCache with plain text as kernels: one compile per key, and a disk that may fail in every way."""

import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fa4_inductor import log
from fa4_inductor.runtime import cache as C

ROOT = Path(__file__).resolve().parents[3]
DIGEST = "d" * 64


def load(path: Path) -> str:
    return path.read_text()


def save(kernel: str, path: Path) -> None:
    path.write_text(kernel)


def make(root) -> C.KernelCache[str]:
    return C.KernelCache(root, load, save)


class Compiler:
    """Counts how often it is asked."""

    def __init__(self, result="kernel"):
        self.calls = 0
        self.result = result

    def __call__(self):
        self.calls += 1
        return self.result


def never():
    pytest.fail("compiled although cached")


@pytest.fixture(autouse=True)
def fresh():
    log.reset_warnings()
    log.counters().clear()


def entry(root: Path) -> Path:
    return root / "kernels" / DIGEST


def test_memory_then_disk(tmp_path):
    first, compiler = make(tmp_path), Compiler()
    assert first.get(DIGEST, {"program": "p"}, compiler) == "kernel"
    assert first.get(DIGEST, {}, never) == "kernel"
    assert make(tmp_path).get(DIGEST, {}, never) == "kernel"
    assert compiler.calls == 1
    assert log.counters()["kernel_compiles"] == 1 and log.counters()["kernel_cache_hits"] == 1
    assert json.loads((entry(tmp_path) / C.META).read_text())["key"] == {"program": "p"}
    assert (tmp_path / "kernels").stat().st_mode & 0o077 == 0


def test_memory_only():
    cache = make(None)
    assert cache.get(DIGEST, {}, Compiler()) == "kernel" == cache.get(DIGEST, {}, never)
    assert cache.peek("e" * 64) is None


def test_peek_reads_the_disk_and_never_compiles(tmp_path):
    assert make(tmp_path).peek(DIGEST) is None
    make(tmp_path).get(DIGEST, {}, Compiler())
    assert make(tmp_path).peek(DIGEST) == "kernel"


def truncate(folder):
    (folder / C.ARTEFACT).write_text("ker")


def garble_meta(folder):
    (folder / C.META).write_text("{")


def empty_meta(folder):
    (folder / C.META).write_text("[]")


def drop_artefact(folder):
    (folder / C.ARTEFACT).unlink()


def rename_entry(folder):
    meta = json.loads((folder / C.META).read_text())
    (folder / C.META).write_text(json.dumps({**meta, "digest": "e" * 64}))


def old_format(folder):
    meta = json.loads((folder / C.META).read_text())
    (folder / C.META).write_text(json.dumps({**meta, "format": 0}))


@pytest.mark.parametrize("damage", [truncate, garble_meta, empty_meta, drop_artefact, rename_entry, old_format])
def test_a_damaged_or_foreign_entry_is_compiled_anew_and_replaced(tmp_path, damage):
    make(tmp_path).get(DIGEST, {}, Compiler())
    damage(entry(tmp_path))
    compiler = Compiler()
    assert make(tmp_path).get(DIGEST, {}, compiler) == "kernel" and compiler.calls == 1
    assert make(tmp_path).get(DIGEST, {}, never) == "kernel"


def test_an_entry_that_does_not_load_is_compiled_anew(tmp_path):
    make(tmp_path).get(DIGEST, {}, Compiler())

    def broken(path):
        raise RuntimeError("bad object file")

    compiler = Compiler("fresh")
    assert C.KernelCache(tmp_path, broken, save).get(DIGEST, {}, compiler) == "fresh"
    assert make(tmp_path).get(DIGEST, {}, never) == "fresh"


def test_a_kernel_that_cannot_be_saved_still_works_with_one_warning(tmp_path, caplog):
    def broken(kernel, path):
        path.write_text("half")
        raise OSError("disk full")

    cache = C.KernelCache(tmp_path, load, broken)
    with caplog.at_level(logging.WARNING, logger="fa4_inductor"):
        assert cache.get(DIGEST, {}, Compiler()) == "kernel"
        assert cache.get("e" * 64, {}, Compiler()) == "kernel"
    assert len(caplog.records) == 1 and "disk full" in caplog.text
    assert [p.name for p in (tmp_path / "kernels").iterdir() if not p.name.endswith(".lock")] == []


def test_a_directory_that_cannot_be_made_still_works_with_one_warning(tmp_path, caplog):
    blocker = tmp_path / "file"
    blocker.write_text("")
    cache = make(blocker / "cache")
    with caplog.at_level(logging.WARNING, logger="fa4_inductor"):
        assert cache.get(DIGEST, {}, Compiler()) == "kernel"
        assert cache.get("e" * 64, {}, Compiler()) == "kernel"
    assert len(caplog.records) == 1 and "FA4_INDUCTOR_CACHE_DIR" in caplog.text


def test_a_read_only_cache_is_still_read(tmp_path, monkeypatch):
    make(tmp_path).get(DIGEST, {}, Compiler())
    real_open, real_mkdtemp = os.open, C.tempfile.mkdtemp

    def no_open(path, flags, *args, **kwargs):
        if flags & os.O_CREAT:
            raise PermissionError(13, "read-only", str(path))
        return real_open(path, flags, *args, **kwargs)

    def no_mkdtemp(*args, **kwargs):
        raise PermissionError(13, "read-only")

    monkeypatch.setattr(C.os, "open", no_open)
    monkeypatch.setattr(C.tempfile, "mkdtemp", no_mkdtemp)
    assert make(tmp_path).get(DIGEST, {}, never) == "kernel"
    assert make(tmp_path).get("e" * 64, {}, Compiler("other")) == "other"
    monkeypatch.setattr(C.tempfile, "mkdtemp", real_mkdtemp)
    assert not (tmp_path / "kernels" / ("e" * 64)).exists()


def test_a_cache_others_can_write_is_not_trusted(tmp_path, caplog):
    make(tmp_path).get(DIGEST, {}, Compiler())
    (tmp_path / "kernels").chmod(0o777)
    compiler = Compiler()
    with caplog.at_level(logging.WARNING, logger="fa4_inductor"):
        assert make(tmp_path).get(DIGEST, {}, compiler) == "kernel"
    assert compiler.calls == 1 and "other users" in caplog.text


def test_a_failed_compile_passes_through_and_is_tried_again(tmp_path):
    def broken():
        raise ValueError("no such instruction")

    cache = make(tmp_path)
    with pytest.raises(ValueError, match="no such instruction"):
        cache.get(DIGEST, {}, broken)
    assert cache.get(DIGEST, {}, Compiler()) == "kernel"
    assert log.counters()["kernel_compiles"] == 1


def test_threads_compile_once(tmp_path):
    cache, barrier, calls = make(tmp_path), threading.Barrier(8), []

    def slow():
        calls.append(1)
        threading.Event().wait(0.05)
        return "kernel"

    def work():
        barrier.wait()
        assert cache.get(DIGEST, {}, slow) == "kernel"

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1


_RACER = """
import sys, time
from pathlib import Path
from fa4_inductor.runtime import cache as C
root, log = Path(sys.argv[1]), Path(sys.argv[2])
def slow():
    with log.open("a") as f: f.write("compiled\\n")
    time.sleep(0.5)
    return "kernel"
cache = C.KernelCache(root, lambda p: p.read_text(), lambda k, p: p.write_text(k))
(root / f"ready{sys.argv[3]}").touch()
while not all((root / f"ready{i}").exists() for i in "01"): time.sleep(0.01)
assert cache.get("d" * 64, {}, slow) == "kernel"
"""


def test_two_processes_one_key_compile_once(tmp_path):
    compiled = tmp_path / "compiled.log"
    racers = [
        subprocess.Popen([sys.executable, "-c", _RACER, str(tmp_path), str(compiled), str(i)], cwd=ROOT)
        for i in range(2)
    ]
    assert [racer.wait(timeout=120) for racer in racers] == [0, 0]
    assert compiled.read_text() == "compiled\n"


def test_a_lock_held_too_long_does_not_block_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(C, "_LOCK_TIMEOUT_S", 0.1)
    (tmp_path / "kernels").mkdir(mode=0o700)
    with C._file_lock(tmp_path / "kernels" / f"{DIGEST}.lock") as locked:
        assert locked
        assert make(tmp_path).get(DIGEST, {}, Compiler()) == "kernel"
