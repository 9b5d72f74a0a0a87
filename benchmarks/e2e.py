"""Whole models on one GPU: ms per forward, peak memory and first call, under Inductor and under fa4.

    python benchmarks/models.py --suite e2e [--models llama,mistral] [--jobs 8] [--rounds 3]

Every (model, attention, backend) runs in a process of its own, since compiler state and allocator peaks leak between
runs. GPU time is what is scarce, so the processes of a batch start and compile side by side, then wait; only when all
have compiled are they timed, one at a time, in rounds over a model's variants. The first-call seconds are therefore
those of a loaded machine: comparable with each other, not with a quiet one.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
READY_SECONDS, ROUND_SECONDS = 480, 120
# model -> attention implementations that Inductor is measured with; fa4 always gets the eager one.
VARIANTS: dict[str, tuple[str, ...]] = {
    "llama": ("eager", "sdpa", "flex_attention"),
    "mistral": ("eager", "sdpa", "flex_attention"),
    "gemma2": ("eager", "flex_attention"),
    "gpt_oss": ("eager", "flex_attention"),
    "gpt2": ("eager", "sdpa"),
    "bert": ("eager", "sdpa"),
    "bloom": ("eager",),
    "t5_encoder": ("eager",),
    "mpt": ("eager",),
}
COLUMNS = ["model", "batch x seqlen", "backend", "attn", "ms", "peak_gib", "first_call_s", "fused", "mean_abs", "note"]


# ------------------------------------------------------------------------------------------- inside one process
def worker(name: str, attn: str, backend: str) -> None:
    """Builds, compiles, reports READY; then one timing round for each line read from stdin, until it is closed."""
    sys.path.insert(0, str(HERE.parent))
    import torch

    from fa4_inductor import measure, model_zoo

    torch._dynamo.config.recompile_limit = 64
    device = os.environ.get("FA4_BENCH_DEVICE", "cuda")
    size = os.environ.get("FA4_BENCH_SIZE", "bench")
    case = model_zoo.build(name, attn, size=size, dtype=torch.bfloat16, device=device)
    model = torch.compile(case.model, backend=backend)
    first = measure.first_call_seconds(lambda: case.run(model), device)
    out = case.run(model)
    facts = dict(first_call_s=round(first, 1), mean_abs=round(out.double().abs().mean().item(), 4))
    facts["batch x seqlen"] = " x ".join(str(n) for n in next(iter(case.inputs.values())).shape[:2])
    facts["finite"] = bool(out.isfinite().all())
    counters = torch._dynamo.utils.counters["fa4"]
    facts["fused"] = f"{counters['fused']}/{case.sites}" if backend == "fa4" else ""
    facts["declined"] = {k: n for k, n in counters.items() if k.startswith("declined")}
    del out
    if device == "cuda":
        torch.cuda.empty_cache()
    print("READY " + json.dumps(facts), flush=True)
    for _ in sys.stdin:
        print("ROUND " + json.dumps(one_round(case, model, device)), flush=True)


def one_round(case: Any, model: Any, device: str) -> dict[str, float]:
    """Median ms of eight forwards after two, and the peak of allocated memory meanwhile."""
    import torch

    from fa4_inductor import measure

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    ms = measure.medians_ms({"ms": lambda: case.run(model)}, device, rounds=8)["ms"]
    peak = 0.0
    if device == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**30
        torch.cuda.empty_cache()
    return dict(ms=ms, peak_gib=peak)


# --------------------------------------------------------------------------------------------------- the parent
class Child:
    """One worker process; its tagged lines arrive through a queue so that a hung one can be given up."""

    def __init__(self, name: str, attn: str, backend: str) -> None:
        self.row: dict[str, Any] = dict(model=name, backend=backend, attn=attn, note="")
        self.rounds: list[dict[str, float]] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._tail: list[str] = []
        self._process: subprocess.Popen[str] | None = None

    def start(self, threads: int) -> None:
        """Starts the process and waits until it has compiled or failed."""
        command = [sys.executable, str(HERE / "e2e.py"), self.row["model"], self.row["attn"], self.row["backend"]]
        environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        threading.Thread(target=self._read, daemon=True).start()
        facts = self._next("READY", READY_SECONDS)
        if facts is not None:
            self.row |= {k: v for k, v in facts.items() if k not in ("declined", "finite")}
            notes = [] if facts["finite"] else ["output not finite"]
            self.row["note"] = "; ".join(notes + [f"{k} {n}" for k, n in facts["declined"].items()])

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
        if self.rounds:
            self.row["ms"] = round(statistics.median(r["ms"] for r in self.rounds), 2)
            self.row["peak_gib"] = round(max(r["peak_gib"] for r in self.rounds), 3)
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


def run_batch(children: list[Child], jobs: int, rounds: int) -> list[dict[str, Any]]:
    """Compiles all side by side, then times them in rounds."""
    threads = max((os.cpu_count() or 1) // max(min(jobs, len(children)), 1), 1)
    begin = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda child: child.start(threads), children))
    print(f"{len(children)} compiled in {time.monotonic() - begin:.0f} s", flush=True)
    for name in dict.fromkeys(child.row["model"] for child in children):
        same = [child for child in children if child.row["model"] == name]
        for _ in range(rounds):
            for child in same:
                child.time_once()
        for child in same:
            print("  ".join(f"{k}={v}" for k, v in child.finish().items()), flush=True)
    return [child.finish() for child in children]


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per model: fa4 beside the fastest of Inductor's attention implementations and the one with the lowest peak."""
    lines = []
    for name in dict.fromkeys(row["model"] for row in rows):
        timed = [row for row in rows if row["model"] == name and "ms" in row]
        ours = next((row for row in timed if row["backend"] == "fa4"), None)
        peers = [row for row in timed if row["backend"] != "fa4"]
        if ours is None or not peers:
            continue
        best = min(peers, key=lambda row: row["ms"])
        lean = min(peers, key=lambda row: row["peak_gib"])
        line = dict(model=name, fa4_ms=ours["ms"], best_inductor_ms=best["ms"], best_attn=best["attn"])
        line |= dict(speedup=round(best["ms"] / ours["ms"], 2), fa4_gib=ours["peak_gib"])
        lines.append(line | dict(lowest_inductor_gib=lean["peak_gib"], lean_attn=lean["attn"]))
    return lines


def run(args: argparse.Namespace) -> int:
    """The suite; 1 when a run failed or fa4 is slower than the best of Inductor's."""
    import results_io

    names = args.models.split(",") if args.models else list(VARIANTS)
    children = []
    for name in names:
        runs = [("eager", "fa4")] + [(attn, "inductor") for attn in VARIANTS.get(name, ("eager",))]
        children += [Child(name, attn, backend) for attn, backend in runs]
    rows = []
    for start in range(0, len(children), args.batch):
        rows += run_batch(children[start : start + args.batch], args.jobs, args.rounds)
    lines = summary(rows)
    results_io.print_table("e2e", rows, COLUMNS)
    if lines:
        results_io.print_table("fa4 (eager attention) beside the best of Inductor", lines, list(lines[0]))
    if args.write:
        tables = [results_io.markdown_table(lines, list(lines[0]))] if lines else []
        tables.append(results_io.markdown_table(rows, COLUMNS))
        print(f"written to {results_io.write('models_e2e', results_io.provenance('cuda'), rows, tables, args.out)}")
    return int(any("ms" not in row for row in rows) or any(line["speedup"] < 1 for line in lines))


if __name__ == "__main__":
    worker(*sys.argv[1:4])
