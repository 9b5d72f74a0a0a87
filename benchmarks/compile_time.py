"""What finding attention adds to the time of the first call: CPU, deep and narrow models, stage by stage.

    python benchmarks/compile_time.py [--models llama,bert] [--rounds 2] [--analysis-only] [--write]

Each run is a process of its own without caches; backends take turns. Times are CPU seconds, of the process and of the
C++ compilers it starts (one at a time), so that other work on the machine does not count; `wall_s` tells how long it
took all the same. `--analysis-only` compiles nothing: it analyses copies of the captured graph and takes the fastest.

    analysis_ms  everything fa4 does to a graph before Inductor gets it
    distinct_ms  the first site of a structure: trace and match it, and what every site costs
    site_ms      each further site of the same structure
    added        analysis_ms as a part of Inductor's own first call
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
LAYERS = {"llama": 32, "mistral": 32, "gemma2": 32, "bert": 24, "flex": 32}
IMPLEMENTATIONS = ("reference", "auto")
REPEATS = 5
STAGES = ("trace", "match", "slice and bind", "decide", "rewrite", "other")
COLUMNS = [
    "model", "layers", "through", "sites", "distinct", *(f"{s}_ms" for s in STAGES), "analysis_ms", "distinct_ms",
    "site_ms", "inductor_s", "fa4_s", "wall_s", "added",
]  # fmt: skip


# ------------------------------------------------------------------------------------------- inside one process
class Stages:
    """CPU time by stage; a stage does not count what it spends in another."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._inner: list[float] = []

    def watch(self, owner: Any, name: str, stage: str) -> None:
        """Count calls of `owner.name` as `stage` from now on."""
        function = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            begin = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent = time.thread_time() - begin
                self.seconds[stage] += spent - self._inner.pop()
                if self._inner:
                    self._inner[-1] += spent

        setattr(owner, name, timed)


def _watched() -> tuple[Stages, list[Any]]:
    """The stages of the backend, and the searches through graphs that it will make."""
    from fa4_inductor import backend
    from fa4_inductor.patterns import flex, sites

    stages, searches = Stages(), []
    start = sites._Search.__init__

    def recorded(self: Any, *args: Any, **kwargs: Any) -> None:
        searches.append(self)
        start(self, *args, **kwargs)

    sites._Search.__init__ = recorded  # type: ignore[method-assign]
    for module in (sites, flex):
        stages.watch(module, "trace", "trace")
        stages.watch(module, "normalize", "trace")
    stages.watch(sites._Search, "once", "match")
    stages.watch(backend, "find_sites", "slice and bind")
    stages.watch(backend, "decide", "decide")
    stages.watch(backend, "build_kernels", "decide")
    stages.watch(backend, "_splice", "rewrite")
    stages.watch(backend, "fuse", "other")
    return stages, searches


def _facts(stages: Stages, searches: list[Any]) -> dict[str, Any]:
    """Milliseconds by stage of the graphs seen since the last call."""
    import torch

    counters = torch._dynamo.utils.counters["fa4"]
    distinct = sum(found is not None for search in searches for found in search.results.values())
    facts = {"sites": counters["found"], "fused": counters["fused"], "distinct": distinct}
    facts["stages"] = {name: 1e3 * stages.seconds[name] for name in STAGES}
    stages.seconds.clear()
    counters.clear()
    searches.clear()
    return facts


def _model(name: str, layers: int) -> Callable[[Callable[..., Any]], Any]:
    """A function that runs the model through `compile(module) -> callable`."""
    if name == "flex":
        return _flex_stack(layers)
    from fa4_inductor import model_zoo

    case = model_zoo.build(name, layers=layers)
    return lambda compiled: case.run(compiled(case.model))


def _flex_stack(layers: int) -> Callable[[Callable[..., Any]], Any]:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    slopes = torch.tensor([0.5, 0.25])
    mask = create_block_mask(lambda b, h, q, k: (q >= k) & (q - k < 64), None, None, 128, 128, device="cpu")
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(384, 128, generator=generator) * 128**-0.5 for _ in range(layers)]

    def stack(x: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            q, k, v = torch.nn.functional.linear(x, weight).view(1, 128, 3, 2, 64).permute(2, 0, 3, 1, 4).unbind(0)
            out = flex_attention(q, k, v, lambda s, b, h, i, j: s + slopes[h] * (j - i), mask)
            x = x + out.transpose(1, 2).reshape(1, 128, 128)
        return x

    def run(compiled: Callable[..., Any]) -> Any:
        with torch.no_grad():
            return compiled(stack)(torch.randn(1, 128, 128))

    return run


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def first_call(name: str, layers: int, how: str) -> dict[str, Any]:
    """One first call under "inductor" or "fa4:<implementation>"."""
    import torch

    run, (backend, _, implementation) = _model(name, layers), how.partition(":")
    options = {"fa4.implementation": implementation} if implementation else None
    if backend == "fa4":
        watched = _watched()
    begin, cpu = time.perf_counter(), _cpu_seconds()
    run(lambda module: torch.compile(module, backend=backend, options=options))
    facts: dict[str, Any] = {"wall_s": time.perf_counter() - begin, "cpu_s": _cpu_seconds() - cpu}
    return facts | (_facts(*watched) if backend == "fa4" else {})


def analysis(name: str, layers: int, implementation: str) -> dict[str, Any]:
    """The fastest of several analyses of the captured graph, the first of which warms up."""
    import torch

    from fa4_inductor import backend
    from fa4_inductor.settings import Settings

    run, watched, results = _model(name, layers), _watched(), []
    settings = Settings.from_env().with_options({"fa4.implementation": implementation})

    def analyse(gm: Any, _: Any) -> Any:
        for _ in range(REPEATS + 1):
            graph = copy.deepcopy(gm)
            gc.collect()
            gc.disable()
            backend.fuse(graph, settings)
            gc.enable()
            results.append(_facts(*watched))
        return gm.forward

    run(lambda module: torch.compile(module, backend=analyse))
    assert len(results) == REPEATS + 1, "the model is more than one graph"
    return min(results[1:], key=lambda facts: sum(facts["stages"].values()))


# ------------------------------------------------------------------------------------------- over all processes
def _run(name: str, how: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {
            "TORCHINDUCTOR_CACHE_DIR": cache,
            "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, str(HERE / "compile_time.py"), "--worker", name, how]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} under {how} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure_model(name: str, rounds: int, analysis_only: bool) -> list[dict[str, Any]]:
    """One row for each implementation."""
    if analysis_only:
        return [_row(name, i, [_run(name, f"analysis:{i}")]) for i in IMPLEMENTATIONS]
    hows = ["inductor", *(f"fa4:{i}" for i in IMPLEMENTATIONS)]
    runs: dict[str, list[dict[str, Any]]] = {how: [] for how in hows}
    for _ in range(rounds):
        for how in hows:
            runs[how].append(_run(name, how))
            print(f"{name} {how}: {runs[how][-1]['cpu_s']:.1f} s CPU, {runs[how][-1]['wall_s']:.1f} s", flush=True)
    return [_row(name, i, runs[f"fa4:{i}"], runs["inductor"]) for i in IMPLEMENTATIONS]


def _row(
    name: str, implementation: str, runs: list[dict[str, Any]], default: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """The fastest analysis of the runs; medians of whole first calls."""
    best = min(runs, key=lambda run: sum(run["stages"].values()))
    stages, sites, distinct = best["stages"], best["sites"], best["distinct"]
    total, once = sum(stages.values()), stages["trace"] + stages["match"]
    every = (total - once) / sites
    row: dict[str, Any] = dict(model=name, layers=LAYERS[name], through=implementation, sites=sites, distinct=distinct)
    row |= {f"{stage}_ms": round(ms, 1) for stage, ms in stages.items()}
    row |= dict(analysis_ms=round(total), distinct_ms=round(once / distinct + every, 1), site_ms=round(every, 2))
    if default is not None:
        row["inductor_s"], row["fa4_s"] = (round(statistics.median(r["cpu_s"] for r in x), 1) for x in (default, runs))
        row["wall_s"] = round(statistics.median(r["wall_s"] for r in runs), 1)
        row["added"] = f"{total / 10 / row['inductor_s']:.1f} %"
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(LAYERS), help="comma-separated; known: %(default)s")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--analysis-only", action="store_true", help="no compilation, no comparison with Inductor")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/compile_time_cpu.*")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        name, how = args.worker
        kind, _, implementation = how.partition(":")
        layers = LAYERS[name]
        facts = analysis(name, layers, implementation) if kind == "analysis" else first_call(name, layers, how)
        print(json.dumps(facts))
        return 0
    import results_io

    rows = [row for name in args.models.split(",") for row in measure_model(name, args.rounds, args.analysis_only)]
    columns = [c for c in COLUMNS if any(c in row for row in rows)]
    results_io.print_table("compile time", rows, columns)
    if args.write:
        table = results_io.markdown_table(rows, columns)
        facts = results_io.provenance("cpu")
        print(f"written to {results_io.write('compile_time_cpu', facts, rows, [table], results_io.RESULTS)}")
    return int(any(row["sites"] != row["layers"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
