"""Our backward kernel beside the peers' on one GPU, interleaved in one process.

    python benchmarks/kernels_backward.py --peers fa4,cudnn
    python benchmarks/kernels_backward.py --peers flex --programs softcap_causal,alibi_causal,window,dense_bias
    python benchmarks/kernels_backward.py --peers none --deterministic
    python benchmarks/kernels_backward.py --peers flex --programs dense_bias,relative_table,alibi_causal --learned

Prints TFLOP/s over kept scores (five products: 2.5 x the forward's), the ratio to the best peer, and the largest error
of dq, dk and dv against fp32 relative to the largest value; writes benchmarks/results/<date>-<gpu>-backward.json and
.md. Only the backward is timed: each side's own forward runs once before.
"""

from __future__ import annotations

import argparse
import datetime
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import results_io
import torch
from kernel_cases import PROGRAMS, Case, forward_cases, make_operands
from kernel_peers import PEERS, peer
from kernels import geometric_mean, select, time_interleaved
from torch import Tensor

from fa4_inductor.kernels.graph_aux import eager_aux
from fa4_inductor.kernels.reference import attention_reference
from fa4_inductor.kernels.reference_backward import backward_reference
from fa4_inductor.lowering.backward_config import ENABLED_BY, HEAD_DIMS
from fa4_inductor.lowering.prepare import prepare
from fa4_inductor.runtime.ops import ATTENTION

OURS, DETERMINISTIC = "ours", "ours, deterministic"
_MAX_CHECKED = 4096  # keys up to which all gradients are compared with fp32
Run = Callable[[], Any]


def cases_of(programs: Sequence[str]) -> list[Case]:
    """Plain attention as in the forward suite, or these programs at B2 H16 S8192."""
    if programs:
        return [Case(name, d, 8192, 16, 16, 2) for d in (128, 64) for name in programs]
    return [case for case in forward_cases() if (case.head_dim, case.dv) in HEAD_DIMS]


def forward_of(name: str, case: Case, operands: tuple[Tensor, ...], aux: tuple[Tensor, ...]) -> Tensor:
    """The output of one side's forward, with its graph."""
    if name in (OURS, DETERMINISTIC):
        prepared = prepare(case.spec)
        tables = eager_aux(prepared, operands[0], operands[1], aux)
        return ATTENTION(*operands, tables, prepared.spec.text, list(PROGRAMS[case.program].sizes), "cute")
    out = peer(name, case, operands, aux)()
    out = out[0] if isinstance(out, tuple) else out
    return out.transpose(1, 2) if name == "fa4" else out


def calls_of(
    case: Case, operands: tuple[Tensor, ...], aux: tuple[Tensor, ...], grad_out: Tensor, names: Sequence[str]
) -> tuple[dict[str, Run], dict[str, str]]:
    """The backward calls to time, each made once, and why others cannot be made."""
    runs: dict[str, Run] = {}
    notes: dict[str, str] = {}
    wanted = (*operands, *(t for t in aux if t.requires_grad))
    for name in names:
        try:
            out = forward_of(name, case, operands, aux)

            def run(out: Tensor = out, name: str = name) -> tuple[Tensor, ...]:
                torch.use_deterministic_algorithms(name == DETERMINISTIC)
                return torch.autograd.grad(out, wanted, grad_out, retain_graph=True)

            run()
            torch.cuda.synchronize()
            runs[name] = run
        except Exception as failure:
            notes[name] = f"{type(failure).__name__}: {(str(failure).strip().splitlines() or [''])[0][:160]}"
    return runs, notes


def error_of(
    case: Case, operands: tuple[Tensor, ...], aux: tuple[Tensor, ...], grad_out: Tensor, grads: Sequence[Tensor]
) -> float:
    """Largest error of the gradients against fp32, relative to the largest value; nan for long sequences."""
    if case.seqlen > _MAX_CHECKED:
        return math.nan
    sizes, wide = PROGRAMS[case.program].sizes, [t.detach().float() for t in operands]
    learned = [slot for slot, t in enumerate(aux) if t.requires_grad]
    fixed = [t.detach() for t in aux]
    out, lse = attention_reference(*wide, fixed, case.spec, sizes, need_lse=True)
    exact = backward_reference(grad_out.float(), None, *wide, out, lse, fixed, case.spec, sizes, learned=learned)
    return max(float((g.float() - e).abs().max() / e.abs().max()) for g, e in zip(grads, exact, strict=True))


def run_case(case: Case, names: Sequence[str], rounds: int, budget_ms: float, learned: bool) -> dict[str, Any]:
    """Measure one case. Whoever fails is left out, with a note. learned: with gradients of what the score captures."""
    aux = PROGRAMS[case.program].make_aux(case, "cuda")
    for slot in case.spec.score_slots if learned else ():
        if aux[slot].is_floating_point():
            aux[slot].requires_grad_()
    operands = tuple(t.requires_grad_() for t in make_operands(case, "cuda"))
    grad_out = torch.randn(case.b, case.sq, case.heads, case.dv, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    runs, notes = calls_of(case, operands, aux, grad_out, names)
    error = error_of(case, operands, aux, grad_out, runs[OURS]()) if OURS in runs else math.nan
    times = time_interleaved(runs, rounds, budget_ms)
    torch.use_deterministic_algorithms(False)
    flops = 2.5 * case.flops(aux)
    tflops = {name: flops / ms * 1e-9 for name, ms in times.items()}
    return {"case": asdict(case), "ms": times, "tflops": tflops, "error": error, "notes": notes}


def row_of(result: dict[str, Any]) -> dict[str, Any]:
    """The printed row of a result."""
    row: dict[str, Any] = {"case": Case(**result["case"]).title}
    row |= {name: f"{rate:.0f}" for name, rate in result["tflops"].items()}
    ratio = ratio_of(result)
    return row | {"/ best peer": "" if ratio is None else f"{ratio:.2f}", "error": f"{result['error']:.1e}"}


def ratio_of(result: dict[str, Any]) -> float | None:
    """Speed of ours over that of the best peer."""
    peers = [ms for name, ms in result["ms"].items() if name in PEERS]
    return min(peers) / result["ms"][OURS] if peers and OURS in result["ms"] else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default="fa4,cudnn", help=f"comma separated out of {', '.join(PEERS)}; all; none")
    parser.add_argument("--programs", default="", help=f"comma separated out of {', '.join(PROGRAMS)}")
    parser.add_argument("--only", default="", help="program:head_dim:seqlen, comma separated; parts may be left out")
    parser.add_argument("--deterministic", action="store_true", help="time the deterministic kernel, too")
    parser.add_argument("--learned", action="store_true", help="with gradients of captured tensors")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget-ms", type=float, default=20.0)
    parser.add_argument("--results", type=Path, default=results_io.RESULTS)
    args = parser.parse_args()
    os.environ[ENABLED_BY] = "1"  # kernels that sites do not take yet are measured, too
    torch.manual_seed(0)
    peers = {"all": list(PEERS), "none": []}.get(args.peers, args.peers.split(","))
    names = [OURS, *([DETERMINISTIC] if args.deterministic else []), *peers]
    results: list[dict[str, Any]] = []
    for case in select(cases_of([p for p in args.programs.split(",") if p]), args.only):
        results.append(run_case(case, names, args.rounds, args.budget_ms, args.learned))
        notes = {n: t for n, t in results[-1]["notes"].items() if not t.startswith("NotImplementedError")}
        print("  ".join(f"{k} {v}" for k, v in row_of(results[-1]).items() if v), notes or "", flush=True)
    ratios = [ratio for ratio in map(ratio_of, results) if ratio is not None]
    print(f"geometric mean over the best peer: {geometric_mean(ratios):.3f} ({len(ratios)} cases)")
    facts = results_io.provenance("cuda")
    gpu = str(facts.get("gpu", "cpu")).split()[-1].lower()
    columns = ["case", *names, "/ best peer", "error"]
    tables = ["TFLOP/s over kept scores", results_io.markdown_table([row_of(r) for r in results], columns)]
    name = f"{datetime.date.today().isoformat()}-{gpu}-backward{'-learned' if args.learned else ''}"
    print("written to", results_io.write(name, facts, results, tables, args.results))


if __name__ == "__main__":
    main()
