"""Coverage, error and speed of backend="fa4" on unmodified Hugging Face models with random weights.

    python benchmarks/models.py --device cpu                        coverage and error, static and dynamic shapes
    python benchmarks/models.py --device cpu --models llama --time  with times against eager and Inductor
    python benchmarks/models.py --implementation cute               only through our kernel
    python benchmarks/models.py --suite e2e                         GPU: ms, peak GiB, first call beside Inductor
    python benchmarks/models.py --suite train                       the same of a train step
    python benchmarks/models.py --suite generate                    GPU: tokens per second of generate(), by cache

On a CPU each model runs twice: with the automatic choice, and with every site through the reference, which shows that
what was understood is right also where no fast implementation exists. Exit code 1 when a site was not understood or not
fused by the implementation asked for, or when an error is beyond its limit. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import results_io
import torch

from fa4_inductor import measure, model_zoo

DEFAULT_MODELS = "llama,mistral,gemma2,gpt2,bert,bloom,t5_encoder,t5,gpt_oss,vit,qwen3"
COLUMNS = ["model", "attn", "through", "shapes", "sites", "found", "matched", "fused", "declined"]
COLUMNS += ["error", "eager_error", "ok"]
TIME_COLUMNS = ["eager_ms", "inductor_ms", "fa4_ms", "first_call_s"]


def compiled(case: model_zoo.Case, backend: str, dynamic: bool | None, options: dict[str, Any]) -> Any:
    """The compiled model, from a clean Dynamo state with zeroed counters."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return torch.compile(case.model, backend=backend, dynamic=dynamic, options=options or None)


def declined_text(counters: dict[str, int]) -> str:
    """`2 (not_faster 2)` from the counters declined and declined.<reason>."""
    reasons = {k.removeprefix("declined."): n for k, n in counters.items() if k.startswith("declined.")}
    text = ", ".join(f"{reason} {n}" for reason, n in sorted(reasons.items()))
    return f"{counters.get('declined', 0)}" + (f" ({text})" if text else "")


def cases_of(case: model_zoo.Case, dynamic: bool) -> list[model_zoo.Case]:
    """The inputs to run: one size, or three through one dynamic compile (images vary in batch only)."""
    if not dynamic:
        return [case]
    first = next(iter(case.inputs.values()))
    batch, seqlen = first.shape[0], first.shape[1]
    return [case, case.resized(batch + 1, seqlen + 31), case.resized(batch + 2, max(seqlen - 17, 8))]


def coverage_row(name: str, attn: str, through: str, dynamic: bool, args: argparse.Namespace) -> dict[str, Any]:
    """Compiles, runs and compares one model; the counters are those of all its graphs."""
    dtype = getattr(torch, args.dtype)
    row: dict[str, Any] = dict(model=name, attn=attn, through=through, shapes="dynamic" if dynamic else "static")
    case = model_zoo.build(name, attn, size=args.size, dtype=dtype, device=args.device, seqlen=args.seqlen)
    options = {"fa4.implementation": through} if through != "auto" else {}
    model = compiled(case, "fa4", True if dynamic else None, options)
    row["first_call_s"] = round(measure.first_call_seconds(lambda: case.run(model), args.device), 1)
    runs = cases_of(case, dynamic)
    errors = [measure.compare(run.run(model), run.run(), run.in_double().run()) for run in runs]
    worst = max(errors, key=lambda e: (not e.ok, e.candidate / e.bound if e.bound else 0.0))
    counters = dict(torch._dynamo.utils.counters["fa4"])
    row |= dict(sites=case.sites, counters=counters, declined=declined_text(counters))
    row |= {key: counters.get(key, 0) for key in ("found", "matched", "fused")}
    row |= dict(error=f"{worst.candidate:.1e}", eager_error=f"{worst.eager:.1e}", bound=worst.bound)
    row["graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    fused = row["matched"] if through == "auto" else row["fused"]
    understood = row["found"] == fused == case.sites
    row["ok"] = "yes" if worst.ok and understood else "error" if understood else "sites"
    if args.time and not dynamic and through != "reference":
        row |= times(case, model)
    return row


def times(case: model_zoo.Case, fa4_model: Any) -> dict[str, Any]:
    """Interleaved medians of eager, Inductor and fa4 for the same model and attention implementation."""
    inductor = torch.compile(case.model, backend="inductor")
    device = next(case.model.parameters()).device
    runs = {
        "eager_ms": lambda: case.run(),
        "inductor_ms": lambda: case.run(inductor),
        "fa4_ms": lambda: case.run(fa4_model),
    }
    return {name: round(ms, 2) for name, ms in measure.medians_ms(runs, device).items()}


def coverage(args: argparse.Namespace) -> int:
    """All models and attention implementations asked for; writes the table; 1 when any row is not ok."""
    torch._dynamo.config.recompile_limit = 64
    rows = []
    for name in args.models.split(","):
        offered = model_zoo.implementations(name)
        attns = [attn for attn in args.impl.split(",") if attn in offered]
        runs = itertools.product(attns, args.implementation.split(","), args.shapes.split(","))
        for attn, through, shapes in runs:
            try:
                row = coverage_row(name, attn, through, shapes == "dynamic", args)
            except Exception as error:
                traceback.print_exc()
                row = dict(model=name, attn=attn, through=through, shapes=shapes)
                row |= dict(ok=type(error).__name__, message=str(error)[:500])
            rows.append(row)
            print("  ".join(f"{c}={row.get(c, '')}" for c in COLUMNS), flush=True)
    columns = COLUMNS + (TIME_COLUMNS if args.time else ["first_call_s"])
    title = f"models_{args.device}_{args.dtype}"
    results_io.print_table(title, rows, columns)
    if args.write:
        facts = results_io.provenance(args.device)
        path = results_io.write(title, facts, rows, [results_io.markdown_table(rows, columns)], args.out)
        print(f"written to {path}")
    good = sum(row["ok"] == "yes" for row in rows)
    print(f"{good} of {len(rows)} rows ok; matched {total(rows, 'matched')} of {total(rows, 'found')} sites found")
    return int(good != len(rows))


def total(rows: list[dict[str, Any]], key: str) -> int:
    return sum(row.get(key, 0) for row in rows)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--suite", choices=("coverage", "e2e", "train", "generate"), default="coverage")
    top.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    top.add_argument("--models", default="", help="comma-separated; default: all of the suite")
    top.add_argument("--impl", default="eager,sdpa", help="attention implementations; those a model lacks are left out")
    top.add_argument("--shapes", default="static,dynamic")
    top.add_argument("--size", choices=model_zoo.SIZES, default="tiny")
    top.add_argument("--seqlen", type=int, help="instead of the size's own")
    top.add_argument("--dtype", default="", help="default: float32 on a CPU, bfloat16 on a GPU")
    top.add_argument("--implementation", default="", help="auto,reference,sdpa,cute; default: see above")
    top.add_argument("--time", action="store_true", help="also time eager, Inductor and fa4 (static shapes)")
    top.add_argument("--jobs", type=int, default=8, help="e2e, train, generate: processes that compile at once")
    top.add_argument("--batch", type=int, default=14, help="e2e, train, generate: processes alive at once")
    top.add_argument("--rounds", type=int, default=3, help="e2e, train, generate: interleaved rounds of timing")
    top.add_argument("--wait-for", default="", help="e2e, train, generate: do not time before this file is there")
    top.add_argument("--attn", default="", help="e2e, train: only these of Inductor's attention implementations")
    top.add_argument("--caches", default="dynamic,static", help="generate: ways to cache")
    top.add_argument("--batches", default="1", help="generate: sequences at once")
    top.add_argument("--prompts", default="512", help="generate: tokens of the prompt")
    top.add_argument("--new-tokens", type=int, default=256, help="generate: tokens to add")
    top.add_argument("--out", type=Path, default=results_io.RESULTS)
    top.add_argument("--no-write", dest="write", action="store_false", help="print only")
    return top


def main() -> int:
    args = parser().parse_args()
    args.dtype = args.dtype or ("float32" if args.device == "cpu" else "bfloat16")
    if args.suite != "coverage":
        return (import_module("generate") if args.suite == "generate" else import_module("e2e")).run(args)
    args.models = args.models or DEFAULT_MODELS
    args.implementation = args.implementation or ("auto,reference" if args.device == "cpu" else "auto,cute")
    return coverage(args)


if __name__ == "__main__":
    sys.exit(main())
