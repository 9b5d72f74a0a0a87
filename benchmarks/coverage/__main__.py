"""Command line of the coverage measurement; run it in the root of the project.

    python -m benchmarks.coverage --models common --out r.jsonl                   fast: rewritten, then run eagerly
    python -m benchmarks.coverage --impl eager,sdpa --jobs 2 --out r.jsonl        every architecture (about an hour)
    python -m benchmarks.coverage --compile inductor --models llama,t5            code generation too
    python -m benchmarks.coverage --backend inductor-passes --out i.jsonl         Inductor's own passes, to compare
    python -m benchmarks.coverage --summary r.jsonl i.jsonl                       only print the totals
    python -m benchmarks.coverage --write-docs r.jsonl i.jsonl                    docs/supported.md from these results

Exit code 1 when a model that was measured is wrong, crashes or takes too long.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import math
import os
import sys
import warnings
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
warnings.filterwarnings("ignore")

import transformers  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: E402
from torch._dynamo.exc import InvalidBackend  # noqa: E402

from benchmarks import results_io  # noqa: E402

from . import document, summary  # noqa: E402
from .backends import EAGER, resolve  # noqa: E402
from .configs import COMMON, model_types  # noqa: E402
from .measure import Job, Record, isolated, key_of, prepare  # noqa: E402

_COUNTS = {"sites": "sites", "fused": "fused", "left": "left", "breaks": "graph_breaks"}
_STYLES = {"ok": "green", "skip": "dim", "stochastic": "yellow"}


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m benchmarks.coverage",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    arg = top.add_argument
    arg("--backend", default="fa4", help="fa4, inductor, inductor-passes, one that Dynamo knows, or module:attribute")
    arg("--compile", choices=("eager", "inductor"), help="what runs the graphs (default: eager where it can)")
    arg("--options", help="key=value,... for the backend (default for fa4: fa4.implementation=reference)")
    arg("--models", default="all", help="comma-separated model types, common, or all (default)")
    arg("--impl", default="eager", help="comma-separated attention implementations: eager,sdpa")
    arg("--dtype", default="float32", help="a half type is compared with the float32 run of the same weights")
    arg("--padding", default="auto", choices=("auto", "left", "right", "none"), help="side of the padded row")
    arg("--cache", action="store_true", help="use_cache=True")
    arg("--jobs", type=int, default=1, help="models measured at once")
    arg("--timeout", type=float, default=120, help="seconds a model may take")
    arg("--out", type=Path, help="JSON lines; what is there already is not measured again")
    arg("--summary", type=Path, nargs="+", metavar="FILE", help="print the totals of these result files and exit")
    arg("--write-docs", type=Path, nargs="+", metavar="FILE", help="write docs/supported.md from these and exit")
    return top


def jobs(args: argparse.Namespace) -> list[Job]:
    """Every measurement asked for. Raises `ValueError` for a model type that is none, and what `resolve` raises."""
    known = model_types()
    names = {"all": known, "common": COMMON}.get(args.models) or args.models.split(",")
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"transformers {transformers.__version__} has no model type {', '.join(unknown)}")
    is_fa4 = args.backend == "fa4"
    options = args.options if args.options is not None else "fa4.implementation=reference" if is_fa4 else ""
    common = dict(
        backend=args.backend,
        compile=args.compile or ("eager" if args.backend in EAGER else "inductor"),
        options=dict(pair.split("=", 1) for pair in options.split(",") if pair),
        dtype=args.dtype,
        padding=args.padding,
        cache=args.cache,
        timeout=args.timeout,
    )
    resolve(common["backend"], common["compile"])
    return [Job(name, impl, **common) for name, impl in itertools.product(names, args.impl.split(","))]


def line(record: Record) -> str:
    """One measurement as one line."""
    error = record.get("rel_err", math.nan)
    counts = " ".join(f"{name} {record.get(field, '-')}" for name, field in _COUNTS.items())
    head = f"{record['status']:10} {record['model']:28} {record['impl']:5} {counts} rel {error:.1e} {record['wall_s']}s"
    return f"{head} {' '.join(record.get('reason', '').split())[:110]}".rstrip()


def measure_all(todo: list[Job], workers: int, out: Path | None, command: list[str]) -> list[Record]:
    """Measures, tells each result at once, and appends it to `out`."""
    console, records = Console(stderr=not sys.stdout.isatty()), []
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    facts = results_io.provenance("cpu", command)
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=len(todo))
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            for done in concurrent.futures.as_completed([pool.submit(isolated, job) for job in todo]):
                record = done.result() | {"run": facts}
                records.append(record)
                style = _STYLES.get(record["status"], "red")
                console.print(line(record), style=style, markup=False, highlight=False, soft_wrap=True)
                progress.advance(task)
                if out:
                    with out.open("a") as file:
                        file.write(json.dumps(record) + "\n")
    return records


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    if args.summary:
        print(summary.text(summary.read(args.summary)))
        return 0
    if args.write_docs:
        document.PATH.write_text(document.render(summary.read(args.write_docs)))
        print(f"written to {document.PATH}")
        return 0
    transformers.logging.set_verbosity_error()
    known = summary.read([args.out]) if args.out and args.out.exists() else []
    try:
        wanted = jobs(args)
    except (ValueError, ImportError, AttributeError, InvalidBackend) as error:
        parser().error(str(error))
    measured = {key_of(record) for record in known}
    prepare()
    todo = [job for job in wanted if job.key not in measured]
    known += measure_all(todo, args.jobs, args.out, ["-m", "benchmarks.coverage", *argv])
    keys = {job.key for job in wanted}
    records = [record for record in known if key_of(record) in keys]
    print(summary.text(records))
    return int(any(record["status"] in summary.FAILURES for record in records))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
