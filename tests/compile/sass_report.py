"""Machine code of the benchmark's programs, as a table and against stored bounds.

    python tests/compile/sass_report.py [--only alibi_causal:128,window] [--workers 2] [--write]

Per program of benchmarks/kernel_cases.py, as emitted, at head dims 64 and 128: instructions per score in the loop over
full key tiles and in that over masked ones (every branch counted, taken or not); per tile of the first, wgmma, moves of
descriptors back to uniform registers, maxima (a fixed shift needs none); spills. Exit code 1 where a figure is beyond
its bound in sass_bounds.json; --write stores the present figures as bounds. Needs no GPU.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1]), str(HERE.parents[1] / "benchmarks")]
os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")

BOUNDS = HERE / "sass_bounds.json"
CHECKED = ("full", "masked", "r2ur", "fmnmx", "spills")
COLUMNS = ("full", "masked", "hgmma", "r2ur", "fmnmx", "spills")
PLAIN_GOAL = 4.8
"""Instructions per score that a loop of plain full tiles should have."""


def names() -> list[str]:
    """ "program D64" of everything the report covers."""
    from kernel_cases import PROGRAMS

    return [f"{name} D{d}" for name in PROGRAMS for d in (128, 64)]


def figures(name: str) -> dict[str, float | None]:
    """Compile the program and read its machine code. None: the program has no such loop."""
    import kernel_ours
    import sass
    from kernel_cases import Case

    from fa4_inductor.kernels.cute import build
    from fa4_inductor.lowering.config import KernelConfig
    from fa4_inductor.runtime import compile as compiler

    program, d = name.split(" D")
    batch = 256 if program == "evoformer" else 2
    (key,) = kernel_ours.keys_of(Case(program, int(d), 8192, 16, 16, batch), {})
    with tempfile.TemporaryDirectory() as folder:
        keeping = functools.partial(build.build_forward, options=f"--keep-cubin --dump-dir={folder}")
        with mock.patch.object(build, "build_forward", keeping):
            kernel: Any = compiler.build(key)
        code = sass.disassemble(kernel.artifacts.CUBIN, Path(folder))
    scores = KernelConfig.parse(key.config).tile_n // 2  # that one thread has of a tile
    loops = sass.mma_loops(code)
    inner = [loop for loop in loops if loop["HGMMA"] == loops[0]["HGMMA"]][:2]
    per_score = [round(loop.total() / scores, 2) for loop in inner]
    return {
        "full": per_score[0], "masked": per_score[1] if len(per_score) > 1 else None,
        "hgmma": inner[0]["HGMMA"], "r2ur": inner[0]["R2UR"], "fmnmx": inner[0]["FMNMX"], "spills": sass.spills(code),
    }  # fmt: skip


def beyond(name: str, found: dict[str, float | None], bounds: dict[str, dict[str, float | None]]) -> list[str]:
    """What is worse than its bound, in words; an unknown program has to be stored first."""
    if name not in bounds:
        return [f"{name} has no bounds: run {Path(__file__).name} --only ... --write"]
    problems = [] if found["hgmma"] else [f"{name}: no wgmma"]
    for what in CHECKED:
        value, bound = found[what], bounds[name][what]
        if value is not None and bound is not None and value > bound:
            problems.append(f"{name}: {what} {value} > {bound}")
    return problems


def load_bounds() -> dict[str, dict[str, float | None]]:
    return json.loads(BOUNDS.read_text()) if BOUNDS.exists() else {}


def main() -> int:
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="program or program:head_dim, comma separated")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="store what is found as the bounds")
    args = parser.parse_args()
    wanted = [w.replace(":", " D") for w in args.only.split(",") if w]
    chosen = [n for n in names() if not wanted or n in wanted or n.split(" ")[0] in wanted]
    bounds, problems = load_bounds(), []
    print(f"{'instructions per score':28s}" + "".join(f"{c:>8s}" for c in COLUMNS))
    with ProcessPoolExecutor(args.workers, mp_context=get_context("spawn")) as pool:
        for name, found in zip(chosen, pool.map(figures, chosen)):
            cells = "".join(f"{'-' if found[c] is None else found[c]:>8}" for c in COLUMNS)
            print(f"{name:28s}{cells}" + (f"  goal {PLAIN_GOAL}" if name.startswith("plain ") else ""), flush=True)
            if args.write:
                bounds[name] = {what: found[what] for what in CHECKED}
            problems += beyond(name, found, bounds)
    if args.write:
        lines = ",\n".join(f" {json.dumps(n)}: {json.dumps(bounds[n])}" for n in names() if n in bounds)
        BOUNDS.write_text("{\n" + lines + "\n}\n")
    print("\n".join(problems))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
