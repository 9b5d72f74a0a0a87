"""What checking this project means: `make test`, `make lint`, `make unit` and `.ci/run` all call it.

    python scripts/check.py lint|unit|all [-- pytest arguments]

Runs every step even after a failure, prints a summary, exits 1 when any step failed.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINT_PATHS = ("fa4_inductor", "tests", "scripts", "examples", "benchmarks")


def lint_steps() -> list[tuple[str, list[str]]]:
    python = sys.executable
    paths = [p for p in LINT_PATHS if (ROOT / p).exists()]
    return [
        ("ruff", [python, "-m", "ruff", "check", "--quiet", "--output-format", "concise", *paths]),
        ("layers", [python, "scripts/check_layers.py"]),
        ("sizes", [python, "scripts/check_sizes.py"]),
        ("examples", [python, "scripts/check_examples.py"]),
        ("mypy", [python, "-m", "mypy", "--no-error-summary"]),
    ]


def unit_steps(extra: list[str]) -> list[tuple[str, list[str]]]:
    """The test run; two workers unless the caller chose, each with one thread, since the work is mostly Python."""
    command = [sys.executable, "-m", "pytest", "-q"]
    if importlib.util.find_spec("xdist") and not any(a.startswith("-n") for a in extra):
        command += ["-n", str(min(os.cpu_count() or 1, 8)), "--dist", "worksteal"]
    return [("tests", [*command, *extra])]


def main(argv: list[str]) -> int:
    what, extra = (argv[0] if argv else "all"), argv[2:] if argv[1:2] == ["--"] else argv[1:]
    if what not in ("lint", "unit", "all"):
        print(__doc__)
        return 2
    steps = (lint_steps() if what != "unit" else []) + (unit_steps(extra) if what != "lint" else [])
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    rows = []
    for name, command in steps:
        start = time.monotonic()
        code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        rows.append((name, code, time.monotonic() - start))
    lines = [f"{'FAILED' if code else 'ok':6}  {name:9} {seconds:6.1f} s" for name, code, seconds in rows]
    print("\n" + "\n".join(lines), flush=True)
    return int(any(code for _, code, _ in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
