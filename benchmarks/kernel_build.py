"""Seconds to build kernels: one, by stage; all of a model, with and without workers; several processes and one key.

    python benchmarks/kernel_build.py [--programs plain:128,causal:64] [--workers 4] [--parts one,all]

Every part starts without caches. Needs no GPU.

    trace   Python: the program's source, the DSL's trace
    passes  MLIR, NVVM and ptxas
    load    from the disk cache, as a later process does
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
PROGRAMS = "plain:128,causal:128,softcap_causal:64,alibi_causal:128,dense_bias:128,window:64"


def seconds(function: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def key_of(item: str) -> Any:
    import kernel_ours
    from kernel_cases import Case

    program, _, head_dim = item.partition(":")
    (key,) = kernel_ours.keys_of(Case(program, int(head_dim), 8192, 16, 16, 2), {})
    return key


def one_by_one(items: list[str]) -> None:
    """A line per program, in a process that has imported everything."""
    import cutlass.cute  # noqa: F401
    from cutlass.base_dsl.compiler import Compiler

    from fa4_inductor.runtime import compile as compiler

    passes, run = [0.0], Compiler.compile

    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return run(self, *args, **kwargs)
        finally:
            passes[0] = time.perf_counter() - begin

    with mock.patch.object(Compiler, "compile", timed), tempfile.TemporaryDirectory() as folder:
        for item in items:
            key, built = key_of(item), []
            total = seconds(lambda k=key, b=built: b.append(compiler.build(k)))
            path = Path(folder) / "kernel.o"
            compiler.save_artefact(built[0], path)
            load = seconds(lambda p=path: compiler.load_artefact(p))
            text = f"trace {total - passes[0]:.2f} s, passes {passes[0]:.2f} s, load {load:.3f} s"
            print(f"{item:24s} {total:.2f} s: {text}", flush=True)


def all_of_a_model(items: list[str], threads: int) -> None:
    """The same kernels by `build_all`, first in this process alone, then with workers."""
    from fa4_inductor import log
    from fa4_inductor.runtime import compile as compiler
    from fa4_inductor.runtime import workers
    from fa4_inductor.settings import Settings

    keys = [key_of(item) for item in items]
    for count in (1, threads):
        with tempfile.TemporaryDirectory() as folder:
            settings = Settings(cache_dir=Path(folder), compile_threads=count)
            log.counters().clear()
            took = seconds(lambda s=settings: workers.build_all(keys, s))
            here = log.counters()["kernel_compiles"]
            print(f"{len(keys)} kernels, {count} processes: {took:.1f} s, {here} built in this one", flush=True)
            compiler._kernel_cache.cache_clear()


_RACER = """
import json, sys, time
from pathlib import Path
import cutlass.cute
from fa4_inductor import log
from fa4_inductor.runtime import compile as compiler, workers
from fa4_inductor.settings import Settings
key = workers.key_from_json(sys.argv[1])
sys.stdin.readline()
begin = time.perf_counter()
compiler.get_kernel(key, Settings.from_env())
print(log.counters()["kernel_compiles"], time.perf_counter() - begin)
"""


def race(item: str, processes: int) -> None:
    """Processes that want one key at the same moment."""
    import json

    key = dataclasses.replace(key_of(item))
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "FA4_INDUCTOR_CACHE_DIR": folder, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", _RACER, json.dumps(key.describe())]
        pipe = subprocess.PIPE
        racers = [
            subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) for _ in range(processes)
        ]
        time.sleep(6)  # all have imported
        for racer in racers:
            assert racer.stdin is not None
            racer.stdin.write("go\n")
            racer.stdin.flush()
        answers = [racer.communicate()[0].split() for racer in racers]
    compiles, slowest = sum(int(a[0]) for a in answers), max(float(a[1]) for a in answers)
    print(f"{processes} processes, one key: {compiles} compiled it, all had it in {slowest:.2f} s", flush=True)


def imports() -> None:
    """What a worker imports before it can build."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "_FA4_INDUCTOR_WORKER": "1"}
    code = "import fa4_inductor.runtime.workers, fa4_inductor.kernels.cute.build"
    took = seconds(lambda: subprocess.run([sys.executable, "-c", code], env=environment, check=True))
    print(f"a worker's start: {took:.2f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", default=PROGRAMS)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--parts", default="start,one,all,race", help="comma separated out of %(default)s")
    args = parser.parse_args()
    items = args.programs.split(",")
    parts = {
        "start": imports,
        "one": lambda: one_by_one(items),
        "all": lambda: all_of_a_model(items, args.workers),
        "race": lambda: race(items[0], args.workers),
    }
    for part in args.parts.split(","):
        parts[part]()


if __name__ == "__main__":
    main()
