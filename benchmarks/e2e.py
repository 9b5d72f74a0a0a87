"""Whole models on one GPU: ms per forward or train step, peak memory and first call, under Inductor and under fa4.

    python benchmarks/models.py --suite e2e [--models llama,mistral] [--jobs 8] [--rounds 3]
    python benchmarks/models.py --suite train

Each (model, attention, backend) has a process of its own (child.py). A train step is a forward, the mean square of the
output as the loss, and a backward; dropout is what the model's config says.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from child import Child, run_batch, serve

HERE = Path(__file__).resolve().parent
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
def worker(name: str, attn: str, backend: str, suite: str) -> None:
    """Builds, compiles, reports, then times as often as it is asked to."""
    sys.path.insert(0, str(HERE.parent))
    import torch

    from fa4_inductor import measure, model_zoo

    torch._dynamo.config.recompile_limit = 64
    device = os.environ.get("FA4_BENCH_DEVICE", "cuda")
    size = os.environ.get("FA4_BENCH_SIZE", "bench")
    case = model_zoo.build(name, attn, size=size, dtype=torch.bfloat16, device=device)
    model = torch.compile(case.model, backend=backend)
    step = train_step(case, model) if suite == "train" else lambda: case.run(model)
    first = measure.first_call_seconds(step, device)
    out = step()
    facts = dict(first_call_s=round(first, 1), mean_abs=round(out.double().abs().mean().item(), 4))
    facts["batch x seqlen"] = " x ".join(str(n) for n in next(iter(case.inputs.values())).shape[:2])
    counters = torch._dynamo.utils.counters["fa4"]
    facts["fused"] = f"{counters['fused']}/{case.sites}" if backend == "fa4" else ""
    notes = [] if bool(out.isfinite().all()) else ["output not finite"]
    facts["note"] = "; ".join(notes + [f"{k} {n}" for k, n in counters.items() if k.startswith("declined")])
    del out
    if device == "cuda":
        torch.cuda.empty_cache()
    serve(facts, lambda: one_round(step, device))


def train_step(case: Any, model: Any) -> Callable[[], Any]:
    """A step that leaves no gradients behind and returns those of one weight, a sample of them all."""
    case.model.requires_grad_(True).train()
    sample = next(p for p in reversed(list(case.model.parameters())) if p.dim() == 2)

    def step() -> Any:
        output = model(**case.inputs)
        first = output.logits if "logits" in output else output.last_hidden_state
        first.float().square().mean().backward()
        gradient = sample.grad
        case.model.zero_grad(set_to_none=True)
        return gradient

    return step


def one_round(step: Callable[[], Any], device: str) -> dict[str, float]:
    """Median ms of eight steps after two, and the peak of allocated memory meanwhile."""
    import torch

    from fa4_inductor import measure

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    ms = measure.medians_ms({"ms": step}, device, rounds=8)["ms"]
    peak = 0.0
    if device == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**30
        torch.cuda.empty_cache()
    return dict(ms=ms, peak_gib=peak)


# --------------------------------------------------------------------------------------------------- the parent
def child(name: str, attn: str, backend: str, suite: str = "e2e") -> Child:
    """The process of one variant."""
    return Child("e2e.py", [name, attn, backend, suite], model=name, backend=backend, attn=attn)


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
    """The suite `args.suite`; 1 when a run failed or fa4 is slower than the best of Inductor's."""
    import results_io

    names = args.models.split(",") if args.models else list(VARIANTS)
    children = []
    for name in names:
        peers = [attn for attn in VARIANTS.get(name, ("eager",)) if not args.attn or attn in args.attn.split(",")]
        runs = [("eager", "fa4"), *((attn, "inductor") for attn in peers)]
        children += [child(name, attn, backend, args.suite) for attn, backend in runs]
    rows = []
    for start in range(0, len(children), args.batch):
        rows += run_batch(children[start : start + args.batch], args.jobs, args.rounds, args.wait_for)
    lines = summary(rows)
    results_io.print_table(args.suite, rows, COLUMNS)
    if lines:
        results_io.print_table("fa4 (eager attention) beside the best of Inductor", lines, list(lines[0]))
    if args.write:
        tables = [results_io.markdown_table(lines, list(lines[0]))] if lines else []
        tables.append(results_io.markdown_table(rows, COLUMNS))
        title = f"models_{args.suite}"
        print(f"written to {results_io.write(title, results_io.provenance('cuda'), rows, tables, args.out)}")
    return int(any("ms" not in row for row in rows) or any(line["speedup"] < 1 for line in lines))


if __name__ == "__main__":
    worker(*sys.argv[1:5])
