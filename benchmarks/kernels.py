"""Our attention kernels beside the peers' on one GPU, interleaved in one process.

    python benchmarks/kernels.py --suite forward --peers all --plot
    python benchmarks/kernels.py --suite programs --peers flex,flex_flash --only alibi_causal:128,window
    python benchmarks/kernels.py --suite forward --peers fa4 --only :128:4096 --variants "tile_n=96;num_stages=3"
    python benchmarks/kernels.py --suite forward --export kernels --workers 2    # builds, without a GPU
    FA4_PREBUILT=kernels python benchmarks/kernels.py --suite forward

Prints TFLOP/s over kept scores (GB/s of K and V for `decode`), the ratio to the best peer, for programs the ratio to
our plain kernel of the same shape, measured in turn with it, and geometric means; writes
benchmarks/results/<date>-<gpu>-<suite>.json and .md. Suites and programs are data: benchmarks/kernel_cases.py.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import functools
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import results_io
import torch
from kernel_cases import COLD, IN_GRAPHS, NATIVE, PROGRAMS, SUITES, Case, make_operands, names_of
from kernel_ours import Overrides, compiled_by_us, export, ours
from kernel_peers import PEERS, peer
from torch import Tensor

from fa4_inductor.spec.interpret import Env, evaluate

Run = Callable[[], Any]
CALLS_PER_GRAPH = 20
_COLD_BYTES = 200e6  # of K and V, several times the L2
PLAIN = "our plain"


def in_graph(runs: Sequence[Run]) -> Run:
    """Replays of a CUDA graph of several calls, of these in turn; it keeps them, and so the tensors they work on."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for run in runs:
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(CALLS_PER_GRAPH):
            runs[i % len(runs)]()
    return functools.partial(_replay, graph, tuple(runs))


def _replay(graph: torch.cuda.CUDAGraph, keep: tuple[Run, ...]) -> None:
    graph.replay()


def time_interleaved(runs: dict[str, Run], rounds: int, budget_ms: float) -> dict[str, float]:
    """Median milliseconds of each call over `rounds` interleaved rounds of about `budget_ms`."""

    def once(run: Run, repeat: int) -> float:
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(repeat):
            run()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / repeat

    repeats = {}
    for name, run in runs.items():
        run()
        repeats[name] = max(2, int(budget_ms / max(once(run, 3), 1e-3)))
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            samples[name].append(once(run, repeats[name]))
    return {name: statistics.median(times) for name, times in samples.items()}


def relative_error(case: Case, operands: Sequence[Tensor], aux: tuple[Tensor, ...], out: Tensor) -> float:
    """Largest error against fp32 over the last rows of the last head, relative to the largest value."""
    q, k, v = operands
    device = q.device
    rows = torch.arange(max(0, case.sq - 256), case.sq, device=device)
    scores = q[-1, -1, rows].float() @ k[-1, -1].float().T * case.head_dim**-0.5
    names = names_of(case, rows, str(device))
    names |= {n: torch.full((), i - 1, device=device) for n, i in (("b", case.b), ("h", case.heads))}
    wide = [t.float() if t.is_floating_point() else t for t in aux]
    keep = torch.as_tensor(evaluate(case.spec.keep, Env(names, wide)), device=device)
    logits = evaluate(case.spec.score, Env({**names, "score": scores}, wide))
    exact = torch.softmax(logits.masked_fill(~keep, -torch.inf), -1) @ v[-1, -1].float()
    return float((out[-1, -1, rows].float() - exact).abs().max() / exact.abs().max())


def native_error(case: Case, inputs: tuple[Tensor, ...], out: Tensor) -> float:
    """The same for the last batch entry of a native program, against its eager function in fp32."""
    exact = NATIVE[case.program].function(*(t[-1:].float() if t.dim() else t.float() for t in inputs))
    return float((out[-1:].float() - exact).abs().max() / exact.abs().max())


def calls_of(
    case: Case, operands: tuple[Tensor, ...], aux: tuple[Tensor, ...], peers: Sequence[str], variants: list[Overrides]
) -> tuple[dict[str, Run], dict[str, str]]:
    """The calls to time, each made once, and why others cannot be made."""
    makers: dict[str, Callable[[], Run]] = {}
    if case.program in NATIVE:
        makers["ours"] = lambda: compiled_by_us(case, operands)
    else:
        for overrides in variants:
            name = "ours" + "".join(f" {k}={v}" for k, v in overrides.items())
            makers[name] = lambda o=overrides: ours(case, operands, aux, o)  # type: ignore[misc]
    baseline = case.baseline()
    if baseline is not None:
        makers[PLAIN] = lambda: ours(baseline, make_operands(baseline, "cuda"), _aux_of(baseline), {})
    for peer_name in peers:
        makers[peer_name] = lambda n=peer_name: peer(n, case, operands, aux)  # type: ignore[misc]
    runs: dict[str, Run] = {}
    notes: dict[str, str] = {}
    for name, make in makers.items():
        try:
            run = make()
            run()
            torch.cuda.synchronize()
            runs[name] = run
        except Exception as failure:
            notes[name] = f"{type(failure).__name__}: {(str(failure).strip().splitlines() or [''])[0][:160]}"
    return runs, notes


@torch.no_grad()
def run_case(
    case: Case, peers: Sequence[str], variants: list[Overrides], rounds: int, budget_ms: float, graphs: bool, cold: bool
) -> dict[str, Any]:
    """Measure one case. Whoever fails is left out, with a note.

    graphs: as replays of CUDA graphs. cold: with so many copies of the operands that none is still in L2.
    """
    native, aux = NATIVE.get(case.program), _aux_of(case)
    operands = native.make(case, "cuda") if native else make_operands(case, "cuda")
    runs, notes = calls_of(case, operands, aux, peers, variants)
    error = math.nan
    if "ours" in runs:
        out = runs["ours"]()
        error = native_error(case, operands, out) if native else relative_error(case, operands, aux, out)
    if graphs:
        copies = min(CALLS_PER_GRAPH, math.ceil(_COLD_BYTES / case.kv_bytes)) if cold else 1
        able = [name for name in peers if name in runs]
        sets = [calls_of(case, make_operands(case, "cuda"), aux, able, variants)[0] for _ in range(copies - 1)]
        runs = {name: in_graph([run, *(calls[name] for calls in sets)]) for name, run in runs.items()}
    times = time_interleaved(runs, rounds, budget_ms)
    if graphs:
        times = {name: ms / CALLS_PER_GRAPH for name, ms in times.items()}
    flops = dict.fromkeys(times, case.flops(aux))
    baseline = case.baseline()
    if baseline is not None:
        flops[PLAIN] = baseline.flops(_aux_of(baseline))
    tflops = {name: flops[name] / ms * 1e-9 for name, ms in times.items()}
    gbytes = {name: case.kv_bytes / ms * 1e-6 for name, ms in times.items()}
    return {"case": asdict(case), "ms": times, "tflops": tflops, "kv_gb_per_s": gbytes, "error": error, "notes": notes}


def _aux_of(case: Case) -> tuple[Tensor, ...]:
    return () if case.program in NATIVE else PROGRAMS[case.program].make_aux(case, "cuda")


def ratios(result: dict[str, Any]) -> dict[str, float]:
    """Speed of ours over the best peer's and, as a rate over kept scores, over our plain kernel's."""
    times, rates, found = result["ms"], result["tflops"], {}
    peers = [ms for name, ms in times.items() if name in PEERS]
    if "ours" in times and peers:
        found["best peer"] = min(peers) / times["ours"]
    if "ours" in times and PLAIN in times:
        found["plain"] = rates["ours"] / rates[PLAIN]
    return found


def rows_of(results: Sequence[dict[str, Any]], suite: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows of the printed table, and its columns."""
    names = [n for n in (*_ours(results), PLAIN, *PEERS) if any(n in r["ms"] for r in results)]
    rows = []
    for result in results:
        rate = result["kv_gb_per_s"] if suite == "decode" else result["tflops"]
        row: dict[str, Any] = {"case": Case(**result["case"]).title}
        row |= {name: f"{rate[name]:.0f}" for name in names if name in rate}
        row |= {"us": f"{1e3 * result['ms']['ours']:.1f}" if "ours" in result["ms"] else ""}
        row |= {f"/ {name}": f"{value:.2f}" for name, value in ratios(result).items()}
        rows.append(row | {"error": f"{result['error']:.1e}"})
    return rows, ["case", *names, "us", *(f"/ {n}" for n in ("best peer", "plain")), "error"]


def _ours(results: Sequence[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for r in results for name in r["ms"] if name.startswith("ours")))


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def means(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Geometric means and worst cases of the ratios over groups of cases."""
    groups: dict[str, list[dict[str, Any]]] = {"all": list(results)}
    for result in results:
        case = Case(**result["case"])
        if case.sq == case.seqlen and case.sq >= 4096:
            groups.setdefault("S >= 4096", []).append(result)
        groups.setdefault(f"D{case.head_dim}", []).append(result)
    lines = []
    for group, members in groups.items():
        for name in ("best peer", "plain"):
            found = [(r[name], Case(**m["case"]).title) for m in members if name in (r := ratios(m))]
            if found:
                worst = min(found)
                mean = geometric_mean(value for value, _ in found)
                lines.append({
                    "group": group, "ours over": name, "cases": len(found), "geometric mean": f"{mean:.3f}",
                    "lowest": f"{worst[0]:.2f}", "at": worst[1],
                })  # fmt: skip
    return lines


def parse_variants(text: str) -> list[Overrides]:
    """ "a=1,b=2;c=3" -> [{}, {a: 1, b: 2}, {c: 3}]; the table's own configuration is always first."""
    table: list[Overrides] = [{}]
    for part in filter(None, text.split(";")):
        table.append({k: ast.literal_eval(v) for k, v in (item.split("=") for item in part.split(","))})
    return table


def select(cases: list[Case], text: str) -> list[Case]:
    """The cases that match one of the comma-separated `program:head_dim:seqlen`, any part of which may be left out."""
    wanted = [(*item.split(":"), "", "")[:3] for item in filter(None, text.split(","))]
    return [
        c for c in cases
        if not wanted or any(
            name in ("", c.program) and d in ("", str(c.head_dim)) and s in ("", str(c.seqlen)) for name, d, s in wanted
        )
    ]  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=list(SUITES), default="forward")
    parser.add_argument("--peers", default="fa4,cudnn", help=f"comma separated out of {', '.join(PEERS)}; all; none")
    parser.add_argument("--only", default="", help="program:head_dim:seqlen, comma separated; parts may be left out")
    parser.add_argument("--variants", default="", help="further configurations of ours")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--budget-ms", type=float, default=15.0)
    parser.add_argument("--export", default="", help="only build the kernels into this folder (no GPU needed)")
    parser.add_argument("--workers", type=int, default=2, help="processes that build, with --export")
    parser.add_argument("--plot", action="store_true", help="draw the result too (needs the `plots` extra)")
    parser.add_argument("--commit", default="", help="of a tree without its git repository, for the record")
    parser.add_argument("--results", type=Path, default=results_io.RESULTS)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    cases = select(SUITES[args.suite](), args.only)
    variants = parse_variants(args.variants)
    if args.export:
        print(export(args.export, cases, variants, args.workers), "kernels in", args.export)
        return
    torch.manual_seed(0)
    peers = {"all": list(PEERS), "none": []}.get(args.peers, args.peers.split(","))
    results: list[dict[str, Any]] = []
    for case in cases:
        results.append(
            run_case(case, peers, variants, args.rounds, args.budget_ms, args.suite in IN_GRAPHS, args.suite in COLD)
        )
        (row,), columns = rows_of(results[-1:], args.suite)
        notes = {n: text for n, text in results[-1]["notes"].items() if not text.startswith("NotImplementedError")}
        print("  ".join(f"{c} {row[c]}" for c in columns if row.get(c)), notes or "", flush=True)
        path = write(results, args)  # what an interrupted run has is kept
    for line in means(results):
        print("  ".join(f"{k} {v}" for k, v in line.items()))
    print("written to", path)
    if args.plot:
        from plot_kernels import draw

        print("drawn in", draw(path.with_suffix(".json")))


def write(results: list[dict[str, Any]], args: argparse.Namespace) -> Path:
    """The result files of a suite; returns the Markdown one."""
    rows, columns = rows_of(results, args.suite)
    summary = means(results)
    facts = results_io.provenance("cuda") | ({"commit": args.commit} if args.commit else {})
    unit = "GB/s of K and V read" if args.suite == "decode" else "TFLOP/s over kept scores"
    tables = [f"{unit}; `us` is the time of one call of ours.", results_io.markdown_table(rows, columns)]
    if summary:
        tables.append(results_io.markdown_table(summary, list(summary[0])))
    gpu = str(facts.get("gpu", "cpu")).split()[-1].lower()
    name = f"{datetime.date.today().isoformat()}-{gpu}-{args.suite}"
    return results_io.write(name, facts, results, tables, args.results)


if __name__ == "__main__":
    main()
