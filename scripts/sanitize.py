"""A reduced sweep of the kernels under compute-sanitizer, on a machine with a Hopper GPU.

    python scripts/sanitize.py [--tools memcheck,racecheck] [--log-dir DIR]

memcheck finds accesses outside of allocations, racecheck unordered accesses to shared memory. The sweep's results are
compared with fp32 as everywhere. Exit code 1: an error was reported or a result is wrong; 3: no compute-sanitizer here.
"""

from __future__ import annotations

import argparse
import glob
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("memcheck", "racecheck")
# part of the mangled name of each of our kernels: torch's are not checked
KERNELS = "kernel_substring=fa4_inductor"
FOUND = 9


def jobs() -> list[tuple[Any, ...]]:
    """(program, dtype, head_dim, head_dim_v, group, need_lse, overrides): each code path of the kernels once.

    None with three consumer warpgroups: racecheck's own code finds no registers beside 512 threads.
    """
    return [
        ("plain", "bfloat16", 64, 64, 1, True, ()),
        ("causal", "bfloat16", 128, 128, 2, True, ()),
        ("causal", "float16", 64, 64, 1, False, ()),
        ("window", "bfloat16", 64, 64, 1, True, ()),
        ("padding", "bfloat16", 64, 64, 1, True, ()),
        ("document_causal", "bfloat16", 64, 64, 1, True, ()),
        ("distance_table", "bfloat16", 64, 64, 1, True, ()),
        ("tma_bias", "bfloat16", 64, 64, 1, True, ()),
        ("sink_window", "bfloat16", 128, 128, 4, True, ()),
        ("plain", "bfloat16", 128, 128, 4, True, (("split", True),)),
        ("cache_positions", "bfloat16", 64, 64, 2, True, (("split", True),)),
        ("padding_causal", "float16", 64, 64, 3, True, (("split", False),)),
    ]


def sanitizer() -> str | None:
    """Path of the tool: on PATH, or in a CUDA toolkit at the usual places."""
    places = glob.glob("/usr/local/cuda*/bin/compute-sanitizer")
    places += glob.glob("/usr/local/cuda*/compute-sanitizer/compute-sanitizer")
    return shutil.which("compute-sanitizer") or next(iter(sorted(places, reverse=True)), None)


def sweep(per_job: int, seed: int) -> int:
    """Launch every job on `per_job` random small problems; returns how many results were wrong."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "gpu")]
    import fwd_sweep

    wrong = checked = 0
    for job in jobs():
        _, count, failures, _ = fwd_sweep.run_job(job, per_job, seed)
        checked += count
        wrong += len(failures)
        for failure in failures:
            print(f"WRONG {job}: {failure}", flush=True)
    print(f"{checked} problems, {wrong} wrong results", flush=True)
    return wrong


def run_tool(tool: str, executable: str, per_job: int, log_dir: Path) -> bool:
    """Run the sweep under one tool. Returns whether nothing was found."""
    log_dir.mkdir(parents=True, exist_ok=True)
    log = log_dir / f"{tool}.log"
    command = [executable, "--tool", tool, "--kernel-name", KERNELS, "--error-exitcode", str(FOUND)]
    command += ["--log-file", str(log), sys.executable, __file__, "--inside", "--per-job", str(per_job)]
    begin = time.monotonic()
    code = subprocess.run(command, env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, check=False).returncode
    summary = (log.read_text().strip().splitlines() or ["no log"])[-1] if log.exists() else "no log"
    print(f"{tool}: exit code {code}, {time.monotonic() - begin:.0f} s, {summary}", flush=True)
    return code == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--per-job", type=int, default=2, help="random problems per kernel")
    parser.add_argument("--log-dir", type=Path, default=ROOT / "build" / "sanitizer")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        return int(sweep(args.per_job, 0) > 0)
    executable = sanitizer()
    if executable is None:
        print("compute-sanitizer is neither on PATH nor under /usr/local/cuda*: nothing was checked")
        return 3
    clean = [run_tool(tool, executable, args.per_job, args.log_dir) for tool in args.tools.split(",")]
    return int(not all(clean))


if __name__ == "__main__":
    sys.exit(main())
