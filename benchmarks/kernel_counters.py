"""Hardware counters of our kernels on the cases of benchmarks/kernels.py: what limits them.

    python benchmarks/kernel_counters.py --suite programs --only softcap_causal:128,dense_bias:64

Needs Nsight Compute (`ncu`, on PATH or under /usr/local/cuda*) and permission to read counters. Clocks are left alone.
Prints, per case, the time under the profiler, how busy the issue slots and the pipes were (per cent of what an SM can
do in the cycles it was active), the largest reasons for which warps waited (per issued instruction), and the throughput
of memory; writes every counter to counters.json in --results. FA4_PREBUILT as in kernels.py.
"""

from __future__ import annotations

import argparse
import csv
import glob
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import results_io
import torch
from kernel_cases import NATIVE, PROGRAMS, SUITES, Case, make_operands
from kernel_ours import ours
from kernels import select

SECTIONS = (
    "SpeedOfLight", "ComputeWorkloadAnalysis", "SchedulerStats", "WarpStateStats", "InstructionStats",
    "MemoryWorkloadAnalysis",
)  # fmt: skip
SHOWN = {
    "us": r"^gpu__time_duration\.sum$",
    "issue": r"^sm(sp)?__issue_active\.avg\.pct|^sm__inst_issued\.avg\.pct",
    "tensor": r"^sm__inst_executed_pipe_tensor\w*\.avg\.pct|^sm__pipe_tensor\w*cycles_active\.avg\.pct",
    "xu": r"^sm__inst_executed_pipe_xu\.avg\.pct",
    "fma": r"^sm__(inst_executed_)?pipe_fma(_cycles_active|heavy|)\.avg\.pct",
    "alu": r"^sm__(inst_executed_)?pipe_alu(_cycles_active|)\.avg\.pct",
    "lsu": r"^sm__inst_executed_pipe_lsu\.avg\.pct",
    "uniform": r"^sm__inst_executed_pipe_uniform\.avg\.pct",
    "dram": r"^(gpu|dram)__\w*dram_throughput\.avg\.pct|^dram__throughput\.avg\.pct",
    "L2": r"^lts__t_sectors?\.avg\.pct|^lts__throughput\.avg\.pct",
}
_STALL = re.compile(r"^smsp__average_warps_issue_stalled_(\w+?)_(?:per_issue_active|not_issued)\w*\.ratio$")


def ncu() -> str | None:
    """Path of the profiler: on PATH, or in a CUDA toolkit at the usual places."""
    return shutil.which("ncu") or next(iter(sorted(glob.glob("/usr/local/cuda*/bin/ncu"), reverse=True)), None)


def launch_all(cases: list[Case]) -> None:
    """One launch of each case's kernels, in order; what is launched while they are made is not ours."""
    for case in cases:
        operands, aux = make_operands(case, "cuda"), PROGRAMS[case.program].make_aux(case, "cuda")
        run = ours(case, operands, aux, {})
        torch.cuda.synchronize()
        torch.cuda.nvtx.range_push("measured")
        run()
        torch.cuda.synchronize()
        torch.cuda.nvtx.range_pop()
        print(case.title, flush=True)


def profile(executable: str, arguments: list[str]) -> list[dict[str, str]]:
    """One row of raw counters per profiled launch. Raises RuntimeError with ncu's words."""
    command = [executable, "--clock-control", "none", "--nvtx", "--nvtx-include", "measured/", "--csv", "--page", "raw"]
    command += ["--print-units", "base"]  # nanoseconds
    command += ["--kernel-name", "regex:fa4_inductor", *(word for s in SECTIONS for word in ("--section", s))]
    command += [sys.executable, __file__, "--inside", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if first is None:
        raise RuntimeError(f"ncu found no launches:\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}")
    table = "\n".join(line for line in lines[first:] if line.startswith('"'))
    return [row for row in csv.DictReader(io.StringIO(table)) if row["ID"]]  # the first row is of units


def number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def shown(row: dict[str, str]) -> dict[str, str]:
    """The columns of the printed table."""
    result = {}
    for name, pattern in SHOWN.items():
        values = [v for counter, text in row.items() if re.search(pattern, counter) and (v := number(text)) is not None]
        if values:
            result[name] = f"{max(values) / (1e3 if name == 'us' else 1):.1f}"
    stalls = {m[1]: v for counter, text in row.items() if (m := _STALL.match(counter)) and (v := number(text))}
    largest = sorted(stalls, key=lambda name: -stalls[name])[:3]
    return result | {"waits": ", ".join(f"{name} {stalls[name]:.2f}" for name in largest)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=list(SUITES), default="programs")
    parser.add_argument("--only", default="", help="as in kernels.py")
    parser.add_argument("--results", type=Path, default=results_io.RESULTS)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    cases = [case for case in select(SUITES[args.suite](), args.only) if case.program not in NATIVE]
    if args.inside:
        launch_all(cases)
        return 0
    executable = ncu()
    if executable is None:
        print("ncu is neither on PATH nor under /usr/local/cuda*")
        return 3
    rows = profile(executable, ["--suite", args.suite, "--only", args.only])
    if len(rows) != len(cases):
        print(f"{len(rows)} launches for {len(cases)} cases: a case has several kernels, or one failed")
    table: list[dict[str, Any]] = [
        {"case": cases[i].title if len(rows) == len(cases) else row["Kernel Name"][:40], **shown(row)}
        for i, row in enumerate(rows)
    ]
    results_io.print_table("counters", table, ["case", *SHOWN, "waits"])
    args.results.mkdir(parents=True, exist_ok=True)
    content = {"facts": results_io.provenance("cuda"), "rows": table, "counters": rows}
    (args.results / "counters.json").write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
