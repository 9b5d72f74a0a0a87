"""Several kernels of one graph at once. CuTe-DSL compiles one kernel per process at a time: the others get processes.

A worker builds one kernel into the disk cache and exits; the parent then loads it from there. A worker that fails costs
time only: the parent compiles what it does not find.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fa4_inductor import log
from fa4_inductor.errors import KernelUnavailable
from fa4_inductor.runtime import compile as compiler
from fa4_inductor.runtime.key import CompileKey
from fa4_inductor.settings import Settings

# A worker imports for about 4 s before it compiles for 2-4 s (2 cores, 2026-11-30): fewer kernels are faster in here.
_WORTH_WORKERS = 3
_TIMEOUT_S = 300.0
_log = log.get_logger(__name__)


def build_all(keys: Sequence[CompileKey], settings: Settings) -> dict[CompileKey, KernelUnavailable | None]:
    """Make every kernel ready for its first launch. The value of a key is None, or why it cannot be built."""
    unique = list(dict.fromkeys(keys))
    cache = compiler.kernel_cache(settings)
    missing = [key for key in unique if not compiler.has_failed(key) and cache.peek(key.digest()) is None]
    spread = missing[1:] if settings.disk_cache and len(missing) >= _WORTH_WORKERS else []
    workers = _start(spread[: settings.compile_threads - 1], settings)
    results: dict[CompileKey, KernelUnavailable | None] = {}
    try:
        for key in sorted(unique, key=lambda key: key in workers):
            if key in workers:
                _wait(workers[key])
            try:
                compiler.get_kernel(key, settings)
                results[key] = None
            except KernelUnavailable as error:
                results[key] = error
    finally:
        for worker in workers.values():
            if worker.poll() is None:
                worker.kill()
    return results


def _start(keys: Sequence[CompileKey], settings: Settings) -> dict[CompileKey, subprocess.Popen[bytes]]:
    root = str(Path(__file__).resolve().parents[2])
    workers: dict[CompileKey, subprocess.Popen[bytes]] = {}
    for key in keys:
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path, "CUTE_DSL_ARCH": key.arch}
        environment["FA4_INDUCTOR_CACHE_DIR"] = str(settings.cache_dir)
        with tempfile.TemporaryFile() as request:
            request.write(json.dumps(key.describe()).encode())
            request.seek(0)
            command = [sys.executable, "-m", __name__]
            try:
                quiet = subprocess.DEVNULL
                workers[key] = subprocess.Popen(command, stdin=request, stdout=quiet, stderr=quiet, env=environment)
            except OSError as error:
                _log.info("no worker process: %s", error)
                break
    return workers


def _wait(worker: subprocess.Popen[bytes]) -> None:
    try:
        worker.wait(_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        _log.info("a kernel worker took more than %s s", _TIMEOUT_S)
        worker.kill()
        worker.wait()


def key_from_json(text: str) -> CompileKey:
    """The key that `CompileKey.describe` wrote. Raises TypeError for fields of another version of this package."""
    fields = json.loads(text)
    fields["toolchain"] = tuple(tuple(pair) for pair in fields["toolchain"])
    return CompileKey(**fields)


def main() -> int:
    """Build the kernel whose key is on standard input into the disk cache."""
    compiler.get_kernel(key_from_json(sys.stdin.read()), Settings.from_env())
    return 0


if __name__ == "__main__":
    sys.exit(main())
