"""Our attention kernels beside the peers' on one GPU, interleaved in one process.

    python benchmarks/kernels.py --suite forward --peers all
    python benchmarks/kernels.py --suite forward --peers fa4 --sizes 128:4096 --variants "persistent=False;tile_n=96"

Prints TFLOP/s over kept scores and the ratio to the best peer; writes benchmarks/results/<suite>.json and .md.
FA4_PREBUILT may name a folder of kernels built ahead (tests/gpu/prebuilt.py).
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "gpu")]

PEERS = ("fa4", "cudnn", "flex")


@dataclass(frozen=True)
class Case:
    """One row of the table: bf16, 32k tokens in total unless batch is given."""

    head_dim: int
    seqlen: int
    program: str = "plain"
    heads: int = 16
    kv_heads: int = 16
    batch: int = 0

    @property
    def b(self) -> int:
        return self.batch or max(1, 32768 // self.seqlen)

    @property
    def long_q(self) -> bool:
        from fa4_inductor.lowering.config_table import LONG_SEQLEN_Q

        return self.seqlen >= LONG_SEQLEN_Q

    @property
    def flops(self) -> float:
        """4 * B * H * D * kept scores."""
        s = self.seqlen
        kept: float = s * s
        if "causal" in self.program:
            kept = s * s / 2
        if "window" in self.program:
            kept = sum(min(i + 1, WINDOW) for i in range(s))
        return 4.0 * self.b * self.heads * kept * self.head_dim


WINDOW = 1024


def forward_cases() -> list[Case]:
    """The sizes of the peers' table."""
    cases = [
        Case(d, s, program, heads=h, kv_heads=h)
        for d, h in ((128, 16), (64, 32))
        for s in (1024, 4096, 16384)
        for program in ("plain", "causal")
    ]
    cases.append(Case(256, 4096, "causal", 8, 8, 4))
    cases.append(Case(128, 4096, "causal", 32, 8, 4))
    return cases


def program_cases() -> list[Case]:
    """Masks and score mods, B2 H16 S8192."""
    names = (
        "causal",
        "softcap_causal",
        "alibi_causal",
        "distance_table",
        "dense_bias",
        "tma_bias",
        "window",
        "padding",
        "padding_causal",
    )
    return [Case(d, 8192, name, 16, 16, 2) for d in (128, 64) for name in names]


def dims_cases() -> list[Case]:
    """The other head dims, 16k tokens."""
    return [Case(d, 4096, program, 16, 16, 4) for d in (80, 96, 192, 256) for program in ("plain", "causal")]


def kernel_job(case: Case) -> tuple[str, str, int, int, int, bool]:
    return case.program, "bfloat16", case.head_dim, case.head_dim, case.heads // case.kv_heads, False


def make_inputs(case: Case) -> tuple[Any, Any, Any, tuple[Any, ...], tuple[int, ...]]:
    import random

    import fwd_cases
    import torch

    def operand(heads: int) -> Any:
        shape = (case.b, case.seqlen, heads, case.head_dim)
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2)

    aux = fwd_cases.make_aux(case.program, random.Random(0), case.b, case.heads, case.seqlen, case.seqlen)
    if "padding" in case.program:
        aux = (torch.ones_like(aux[0]),)
    sizes = (WINDOW,) if "window" in case.program else ()
    return operand(case.heads), operand(case.kv_heads), operand(case.kv_heads), aux, sizes


def ours(case: Case, inputs: Any, overrides: dict[str, Any]) -> Callable[[], Any]:
    import fwd_cases
    import prebuilt
    import torch

    q, k, v, aux, sizes = inputs
    name, dtype, d, dv, group, need_lse = kernel_job(case)
    config = prebuilt.resolve_config(name, d, dv, overrides, case.long_q)
    compiled = prebuilt.forward(name, dtype, d, dv, group, need_lse, config)
    program = fwd_cases.load_program(name)
    mean = v.float().mean(2) if program.EMPTY_ROW == "mean" and program.MAY_BE_EMPTY else None
    raw = tuple(t.view(torch.uint8) if t.dtype == torch.bool else t for t in aux) or None
    out = torch.empty_like(q.transpose(1, 2)).transpose(1, 2)

    def run() -> Any:
        compiled(q, k, v, out, None, mean, case.head_dim**-0.5, raw, sizes or None)
        return out

    return run


def peer(name: str, case: Case, inputs: Any) -> Callable[[], Any]:
    """Call of one peer; raises where the peer has no such feature."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v, aux, _ = inputs
    causal, grouped = case.program == "causal", case.heads != case.kv_heads
    offered = {"window": ("fa4",), "tma_bias": ("flex",)}.get(case.program, PEERS)
    if case.program not in ("plain", "causal", "window", "tma_bias") or name not in offered:
        raise NotImplementedError(f"{name} has no {case.program}")
    if name == "fa4":
        from flash_attn.cute import flash_attn_func

        qs, ks, vs = (x.transpose(1, 2) for x in (q, k, v))
        if case.program == "window":
            return lambda: flash_attn_func(qs, ks, vs, causal=True, window_size=(WINDOW - 1, 0))
        return lambda: flash_attn_func(qs, ks, vs, causal=causal)
    if name == "cudnn":

        def run() -> Any:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

        return run
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = None
    if causal:
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, case.seqlen, case.seqlen, device="cuda")
    # One recompilation per shape; past the default limit flex_attention would silently run uncompiled.
    torch._dynamo.config.recompile_limit = 128
    flex = torch.compile(flex_attention, dynamic=False)
    score_mod = None
    if case.program == "tma_bias":
        score_mod = lambda s, b, h, i, j: s + aux[0][h, i, j]  # noqa: E731
    return lambda: flex(q, k, v, score_mod=score_mod, block_mask=mask, enable_gqa=grouped)


def time_interleaved(runs: dict[str, Callable[[], Any]], rounds: int, budget_ms: float) -> dict[str, float]:
    """Median milliseconds of each call over `rounds` interleaved rounds of about `budget_ms`."""
    import torch

    def once(fn: Callable[[], Any], repeat: int) -> float:
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(repeat):
            fn()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / repeat

    repeats = {}
    for name, fn in runs.items():
        fn()
        repeats[name] = max(2, int(budget_ms / max(once(fn, 3), 1e-3)))
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, fn in runs.items():
            samples[name].append(once(fn, repeats[name]))
    return {name: statistics.median(times) for name, times in samples.items()}


def relative_error(case: Case, inputs: Any, out: Any) -> float:
    """Largest error against fp32 over the last rows of the last head, relative to the largest value."""
    import torch

    q, k, v, aux, sizes = inputs
    if case.program not in ("plain", "causal"):
        return float("nan")
    rows = min(256, case.seqlen)
    s = q[-1, -1, -rows:].float() @ k[-1, -1].float().T * case.head_dim**-0.5
    if case.program == "causal":
        index = torch.arange(case.seqlen, device="cuda")
        s = s.masked_fill(index[None] > index[-rows:, None], float("-inf"))
    exact = torch.softmax(s, -1) @ v[-1, -1].float()
    return float((out[-1, -1, -rows:].float() - exact).abs().max() / exact.abs().max())


def run_case(
    case: Case, peers: list[str], variants: list[dict[str, Any]], rounds: int, budget_ms: float
) -> dict[str, Any]:
    inputs = make_inputs(case)
    runs: dict[str, Callable[[], Any]] = {}
    notes: dict[str, str] = {}
    for overrides in variants:
        label = "ours" + "".join(f" {k}={v}" for k, v in overrides.items())
        try:
            runs[label] = ours(case, inputs, overrides)
            runs[label]()
        except Exception as error:
            runs.pop(label, None)
            notes[label] = f"{type(error).__name__}: {str(error)[:120]}"
    for name in peers:
        try:
            run = peer(name, case, inputs)
            run()
            runs[name] = run
        except Exception as error:
            notes[name] = f"{type(error).__name__}: {str(error)[:120]}"
    error = relative_error(case, inputs, runs["ours"]()) if "ours" in runs else float("nan")
    times = time_interleaved(runs, rounds, budget_ms)
    tflops = {name: case.flops / ms * 1e-9 for name, ms in times.items()}
    return {"case": asdict(case), "ms": times, "tflops": tflops, "error": error, "notes": notes}


def show(result: dict[str, Any]) -> str:
    case = Case(**result["case"])
    tflops = result["tflops"]
    best = max((v for k, v in tflops.items() if not k.startswith("ours")), default=float("nan"))
    cells = "  ".join(f"{k} {v:.0f}" for k, v in tflops.items())
    ratio = tflops.get("ours", float("nan")) / best
    head = f"D{case.head_dim} S{case.seqlen} B{case.b} H{case.heads}/{case.kv_heads} {case.program}"
    return f"{head:42s} {cells}  ratio {ratio:.2f}  err {result['error']:.1e} {result['notes'] or ''}"


def versions() -> dict[str, str]:
    import torch

    found = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    for name in ("nvidia-cutlass-dsl", "flash-attn-4", "triton"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


def write(results: list[dict[str, Any]], suite: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    meta = {
        "date": datetime.date.today().isoformat(),
        "command": "python benchmarks/kernels.py " + " ".join(sys.argv[1:]),
        **versions(),
    }
    (folder / f"{suite}.json").write_text(json.dumps({"meta": meta, "results": results}, indent=1))
    names = list(dict.fromkeys(name for r in results for name in r["tflops"]))
    lines = [f"TFLOP/s over kept scores. {', '.join(f'{k} {v}' for k, v in meta.items())}", ""]
    lines += ["| case | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for r in results:
        case = Case(**r["case"])
        cells = [f"{r['tflops'][n]:.0f}" if n in r["tflops"] else "-" for n in names]
        head = f"D{case.head_dim} S{case.seqlen} B{case.b} H{case.heads}/{case.kv_heads} {case.program}"
        lines.append(f"| {head} | " + " | ".join(cells) + " |")
    (folder / f"{suite}.md").write_text("\n".join(lines) + "\n")


def parse_variants(text: str) -> list[dict[str, Any]]:
    """ "a=1,b=2;c=3" -> [{}, {a: 1, b: 2}, {c: 3}]; the table's own configuration is always first."""
    import ast

    table: list[dict[str, Any]] = [{}]
    for part in filter(None, text.split(";")):
        table.append({k: ast.literal_eval(v) for k, v in (item.split("=") for item in part.split(","))})
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=("forward", "programs", "dims"), default="forward")
    parser.add_argument("--peers", default="fa4,cudnn", help="comma separated, or all, or none")
    parser.add_argument("--sizes", default="", help="only these head_dim:seqlen pairs, comma separated")
    parser.add_argument("--variants", default="", help="further configurations of ours")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--budget-ms", type=float, default=15.0)
    parser.add_argument("--export", default="", help="only build the kernels into this folder (no GPU needed)")
    parser.add_argument("--workers", type=int, default=2, help="processes that build, with --export")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    cases = {"forward": forward_cases, "programs": program_cases, "dims": dims_cases}[args.suite]()
    if args.sizes:
        wanted = {tuple(map(int, pair.split(":"))) for pair in args.sizes.split(",")}
        cases = [c for c in cases if (c.head_dim, c.seqlen) in wanted]
    variants = parse_variants(args.variants)
    if args.export:
        import prebuilt

        jobs = {(*kernel_job(c), tuple(v.items()), c.long_q) for c in cases for v in variants}
        print(len(prebuilt.export_all(args.export, sorted(jobs, key=repr), args.workers)), "kernels in", args.export)
        return
    import torch

    torch.manual_seed(0)
    peers = {"all": list(PEERS), "none": []}.get(args.peers, args.peers.split(","))
    results = []
    for case in cases:
        results.append(run_case(case, peers, variants, args.rounds, args.budget_ms))
        print(show(results[-1]), flush=True)
    write(results, args.suite, args.results)


if __name__ == "__main__":
    main()
