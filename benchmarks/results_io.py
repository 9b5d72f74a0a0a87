"""Result files: what was run, on what, with which versions, beside the figures."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("torch", "transformers", "nvidia-cutlass-dsl", "apache-tvm-ffi", "triton", "flash-attn-4")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    run = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False)
    return run.stdout.strip() if run.returncode == 0 else None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _command(argv: list[str]) -> str:
    """The command line without where its results went."""
    kept, rest = [], iter(argv)
    for word in rest:
        if word == "--out":
            next(rest, None)
        elif not word.startswith("--out="):
            kept.append(word)
    return shlex.join(["python", *kept])


def provenance(device: str, command: list[str] | None = None) -> dict[str, Any]:
    """Everything a reader needs to run it again and to know what the figures hold for.

    Args:
        command: what `python` was called with; default: this process's arguments.
    """
    import torch

    facts: dict[str, Any] = {
        "command": _command(sys.argv if command is None else command),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _git_commit(),
        "python": platform.python_version(),
        "versions": {p: v for p in PACKAGES if (v := _version(p))},
        "cpu": f"{_processor()}, {torch.get_num_threads()} threads",
    }
    if device == "cuda" and torch.cuda.is_available():
        from fa4_inductor.collect_env import driver_version

        facts |= {"gpu": torch.cuda.get_device_name(), "driver": driver_version()}
    return facts


def markdown_table(rows: list[dict[str, Any]], columns: list[str]) -> str:
    """A Markdown table; missing values stay empty."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(str(row.get(c, "")) for c in columns) + " |" for row in rows]
    return "\n".join(lines)


def write(name: str, facts: dict[str, Any], rows: list[dict[str, Any]], tables: list[str], folder: Path) -> Path:
    """Writes `name`.json (facts, rows) and `name`.md (facts, tables) into `folder`; returns the Markdown path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps({"facts": facts, "rows": rows}, indent=1) + "\n")
    versions = ", ".join(f"{p} {v}" for p, v in facts["versions"].items())
    machine = f"{facts['gpu']}, driver {facts['driver']}" if "gpu" in facts else facts["cpu"]
    head = f"`{facts['command']}`\n\n{facts['date']}, commit {facts['commit']}, {machine}; {versions}\n"
    path = folder / f"{name}.md"
    path.write_text("\n\n".join([f"# {name}", head, *tables]) + "\n")
    return path


def print_table(title: str, rows: list[dict[str, Any]], columns: list[str]) -> None:
    """Shows the rows on the terminal."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(str(row.get(c, "")) for c in columns))
    Console(width=None if sys.stdout.isatty() else 160).print(table)
