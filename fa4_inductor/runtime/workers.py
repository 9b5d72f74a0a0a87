"""Several kernels of one graph at once. CuTe-DSL compiles one kernel per process at a time: the others get processes.

Workers build kernels into the disk cache, one after the other as they are handed out; the parent builds too, and loads
from the cache what the workers built. A worker that fails costs time only: the parent compiles what it does not find.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from fa4_inductor import log
from fa4_inductor.errors import KernelUnavailable
from fa4_inductor.runtime import compile as compiler
from fa4_inductor.runtime.key import CompileKey
from fa4_inductor.settings import Settings

# A worker imports for about as long as a kernel takes to compile: fewer kernels are faster in here.
_WORTH_WORKERS = 3
_TIMEOUT_S = 300.0
_log = log.get_logger(__name__)


def build_all(keys: Sequence[CompileKey], settings: Settings) -> dict[CompileKey, KernelUnavailable | None]:
    """Make every kernel ready for its first launch. The value of a key is None, or why it cannot be built."""
    unique = list(dict.fromkeys(keys))
    cache = compiler.kernel_cache(settings)
    missing = deque(key for key in unique if not compiler.has_failed(key) and cache.peek(key.digest()) is None)
    workers: list[_Worker] = []
    if settings.disk_cache and len(missing) >= _WORTH_WORKERS:
        workers = [_Worker(missing, settings) for _ in range(min(settings.compile_threads, len(missing)) - 1)]
    results: dict[CompileKey, KernelUnavailable | None] = {}
    try:
        for key in _taken_from(missing):
            results[key] = _build(key, settings)
        for worker in workers:
            worker.wait()
    finally:
        for worker in workers:
            worker.kill()
    return {key: results[key] if key in results else _build(key, settings) for key in unique}


def _taken_from(queue: deque[CompileKey]) -> Iterator[CompileKey]:
    """Keys until the queue, which several threads empty, is empty."""
    while True:
        try:
            key = queue.popleft()
        except IndexError:
            return
        yield key


def _build(key: CompileKey, settings: Settings) -> KernelUnavailable | None:
    try:
        compiler.get_kernel(key, settings)
        return None
    except KernelUnavailable as error:
        return error


class _Worker:
    """A process that builds the kernels that a thread of this process takes from a queue for it."""

    def __init__(self, queue: deque[CompileKey], settings: Settings) -> None:
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        self._environment = {**os.environ, "PYTHONPATH": path, "_FA4_INDUCTOR_WORKER": "1"}
        self._environment["FA4_INDUCTOR_CACHE_DIR"] = str(settings.cache_dir)
        self._queue = queue
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._feed, daemon=True)
        self._thread.start()

    def _feed(self) -> None:
        try:
            for key in _taken_from(self._queue):
                if self._process is None:
                    self._process = self._start(key.arch)
                assert self._process.stdin is not None and self._process.stdout is not None
                self._process.stdin.write(json.dumps(key.describe()) + "\n")
                self._process.stdin.flush()
                if not self._process.stdout.readline():
                    return  # it died; this key is built where all are collected
        except OSError as error:
            _log.info("a kernel worker ended: %s", error)

    def _start(self, arch: str) -> subprocess.Popen[str]:
        command, pipe = [sys.executable, "-m", __name__], subprocess.PIPE
        environment = {**self._environment, "CUTE_DSL_ARCH": arch}
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env=environment)

    def wait(self) -> None:
        """Until the worker has built what it was handed."""
        self._thread.join(_TIMEOUT_S)
        if self._thread.is_alive():
            _log.info("a kernel worker took more than %s s", _TIMEOUT_S)

    def kill(self) -> None:
        """End the process, whatever it is doing."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def key_from_json(text: str) -> CompileKey:
    """The key that `CompileKey.describe` wrote. Raises TypeError for fields of another version of this package."""
    fields = json.loads(text)
    fields["toolchain"] = tuple(tuple(pair) for pair in fields["toolchain"])
    return CompileKey(**fields)


def main() -> int:
    """Build the kernels whose keys come line by line into the disk cache; answer each with a line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the toolchain prints is no answer
    settings = Settings.from_env()
    for line in sys.stdin:
        failure = _build(key_from_json(line), settings)
        print("built" if failure is None else "failed", file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
