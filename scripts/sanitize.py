"""A reduced sweep of the kernels under compute-sanitizer, on a machine with a Hopper GPU.

    python scripts/sanitize.py [--tools memcheck,racecheck] [--at-once 4] [--log-dir DIR]

memcheck finds accesses outside of allocations, racecheck unordered accesses to shared memory. Each kernel has a run of
its own, since an internal error of the tool ends a run. Results are compared with fp32 as everywhere. Exit code 1: an
error was reported, a result is wrong or a run did not finish; 3: no compute-sanitizer here.
"""

from __future__ import annotations

import argparse
import glob
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("memcheck", "racecheck")
# part of the mangled name of each of our kernels: torch's are not checked
KERNELS = "kernel_substring=fa4_inductor"
FOUND = 9


def jobs() -> list[tuple[Any, ...]]:
    """(program, dtype, head_dim, head_dim_v, group, need_lse, overrides): each code path of the kernels once.

    racecheck fails inside itself on kernels with three consumer warpgroups and on some others, sometimes not where
    tiles are narrower (engineering log, entries 66 and 74). It does not see reads against writes of TMA.
    """
    narrow = (("tile_n", 64),)
    return [
        ("plain", "bfloat16", 64, 64, 1, True, ()),
        ("causal", "bfloat16", 128, 128, 2, True, narrow),
        ("causal", "float16", 64, 64, 1, False, ()),
        ("window", "bfloat16", 64, 64, 1, True, ()),
        ("padding", "bfloat16", 64, 64, 1, True, ()),
        ("document_causal", "bfloat16", 64, 64, 1, True, ()),
        ("distance_table", "bfloat16", 64, 64, 1, True, narrow),
        ("tma_bias", "bfloat16", 64, 64, 1, True, ()),
        ("sink_window", "bfloat16", 128, 128, 4, True, narrow),
        ("plain", "bfloat16", 128, 128, 4, True, (("split", True),)),
        ("cache_positions", "bfloat16", 64, 64, 2, True, (("split", True),)),
        ("padding_causal", "float16", 64, 64, 3, True, (("split", False),)),
    ]


def sanitizer() -> str | None:
    """Path of the tool: on PATH, or in a CUDA toolkit at the usual places."""
    places = glob.glob("/usr/local/cuda*/bin/compute-sanitizer")
    places += glob.glob("/usr/local/cuda*/compute-sanitizer/compute-sanitizer")
    return shutil.which("compute-sanitizer") or next(iter(sorted(places, reverse=True)), None)


def check(index: int, per_job: int, seed: int) -> int:
    """Launch one job on `per_job` random small problems; returns how many results were wrong."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "gpu")]
    import fwd_sweep

    job = jobs()[index]
    _, checked, failures, _ = fwd_sweep.run_job(job, per_job, seed)
    for failure in failures:
        print(f"WRONG {job}: {failure}", flush=True)
    print(f"{checked} problems, {len(failures)} wrong results", flush=True)
    return len(failures)


def run_tool(tool: str, executable: str, index: int, args: argparse.Namespace) -> bool:
    """One kernel under one tool. Returns whether it finished and nothing was found."""
    log = args.log_dir / f"{tool}-{index}.log"
    command = [executable, "--tool", tool, "--kernel-name", KERNELS, "--error-exitcode", str(FOUND)]
    command += ["--log-file", str(log), sys.executable, __file__]
    command += ["--inside", str(index), "--per-job", str(args.per_job)]
    begin, environment = time.monotonic(), {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    said = [line.strip("= ") for line in log.read_text().splitlines() if line.strip("= ")] if log.exists() else []
    said = [line for line in said if "Error" in line or "SUMMARY" in line] or said[-1:] or ["no log"]
    seconds, words = time.monotonic() - begin, (done.stdout.strip().splitlines() or ["no output"])[-1]
    print(f"{tool} {jobs()[index]}: exit code {done.returncode}, {seconds:.0f} s; {said[0]}; {words}", flush=True)
    return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--per-job", type=int, default=2, help="random problems per kernel")
    parser.add_argument("--at-once", type=int, default=4, help="runs side by side")
    parser.add_argument("--log-dir", type=Path, default=ROOT / "build" / "sanitizer")
    parser.add_argument("--inside", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside is not None:
        return int(check(args.inside, args.per_job, 0) > 0)
    executable = sanitizer()
    if executable is None:
        print("compute-sanitizer is neither on PATH nor under /usr/local/cuda*: nothing was checked")
        return 3
    args.log_dir.mkdir(parents=True, exist_ok=True)
    runs = [(tool, executable, index, args) for tool in args.tools.split(",") for index in range(len(jobs()))]
    with ThreadPoolExecutor(args.at_once) as pool:
        clean = list(pool.map(lambda run: run_tool(*run), runs))
    print(f"{sum(clean)} of {len(clean)} runs clean", flush=True)
    return int(not all(clean))


if __name__ == "__main__":
    sys.exit(main())
