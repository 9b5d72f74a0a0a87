"""Benchmarks whose runs have a process each: started and compiled side by side, then timed one at a time in rounds.

Compiler state and allocator peaks leak between runs of one process. GPU time is what is scarce, so the processes of a
batch start and compile together, then wait; only when all have compiled are they timed, in rounds over the variants of
a model. First-call seconds are therefore those of a loaded machine: comparable with each other, not with a quiet one.

A worker prints `READY {json}` once it has compiled, and `ROUND {json of numbers}` for each line it reads from stdin.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
READY_SECONDS, ROUND_SECONDS = 480, 120


def serve(facts: dict[str, Any], one_round: Callable[[], dict[str, float]]) -> None:
    """The worker's side: reports that it is ready, then runs a round for each line, until stdin is closed."""
    print("READY " + json.dumps(facts), flush=True)
    for _ in sys.stdin:
        print("ROUND " + json.dumps(one_round()), flush=True)


class Child:
    """One worker process; its tagged lines arrive through a queue so that a hung one can be given up.

    Args:
        script: of this folder. arguments: of the script. labels: the row's first columns; `model` groups the rounds.
    """

    def __init__(self, script: str, arguments: list[str], **labels: Any) -> None:
        self.row: dict[str, Any] = labels | dict(note="")
        self.rounds: list[dict[str, float]] = []
        self._command = [sys.executable, str(HERE / script), *arguments]
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._tail: list[str] = []
        self._process: subprocess.Popen[str] | None = None

    def start(self, threads: int) -> None:
        """Starts the process and waits until it has compiled or failed."""
        environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            self._command, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()
        facts = self._next("READY", READY_SECONDS)
        self.row |= facts or {}

    def time_once(self) -> None:
        """One round of timing, if the process is alive."""
        if self.alive and self._process is not None and self._process.stdin is not None:
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
            if (facts := self._next("ROUND", ROUND_SECONDS)) is not None:
                self.rounds.append(facts)

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None and not self.row["note"].startswith("failed")

    def finish(self) -> dict[str, Any]:
        """Ends the process and returns the row."""
        if self._process is not None and self._process.poll() is None:
            try:
                self._process.communicate(timeout=10)  # closes stdin, which ends the worker's loop
            except (subprocess.TimeoutExpired, ValueError):
                self._process.kill()
                self._process.wait()
        for key in self.rounds[0] if self.rounds else ():
            values = [r[key] for r in self.rounds]
            peak = key.startswith("peak")
            self.row[key] = round(max(values), 3) if peak else round(statistics.median(values), 2)
        return self.row

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _next(self, tag: str, seconds: float) -> dict[str, Any] | None:
        deadline = time.monotonic() + seconds
        while True:
            try:
                line = self._lines.get(timeout=max(deadline - time.monotonic(), 0.01))
            except queue.Empty:
                self.row["note"] = f"failed: no answer within {seconds} s"
                return None
            if line is None:
                self.row["note"] = "failed: " + " / ".join(x.strip()[:160] for x in self._tail[-3:])
                return None
            if line.startswith(tag + " "):
                return json.loads(line[len(tag) + 1 :])
            self._tail.append(line)


def run_batch(children: list[Child], jobs: int, rounds: int, wait_for: str = "") -> list[dict[str, Any]]:
    """Compiles all side by side, then times them in rounds: a figure is the median, a peak the largest of them.

    Args:
        wait_for: a file without which timing does not begin, for machines where something else runs meanwhile.
    """
    threads = max((os.cpu_count() or 1) // max(min(jobs, len(children)), 1), 1)
    begin = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda child: child.start(threads), children))
    print(f"{len(children)} compiled in {time.monotonic() - begin:.0f} s", flush=True)
    while wait_for and not os.path.exists(wait_for):
        time.sleep(0.1)
    for name in dict.fromkeys(child.row["model"] for child in children):
        same = [child for child in children if child.row["model"] == name]
        for _ in range(rounds):
            for child in same:
                child.time_once()
        for child in same:
            print("  ".join(f"{k}={v}" for k, v in child.finish().items()), flush=True)
    return [child.finish() for child in children]
