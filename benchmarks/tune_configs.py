"""Measures the rows of lowering/config_rows.py anew on this GPU.

    python benchmarks/tune_configs.py [--only no loads:128] [--export kernels --workers 4] [--write]

Each row is measured on the cases below with the table's configuration and every candidate of autotuning in turns; the
fastest in geometric mean becomes the row if it gains 1 % or more. Without --write the table is only printed.
FA4_PREBUILT as in kernels.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from kernel_cases import PROGRAMS, Case, make_operands
from kernel_ours import export, ours
from kernels import geometric_mean, time_interleaved

from fa4_inductor.lowering import config_rows
from fa4_inductor.lowering.candidates import candidates
from fa4_inductor.lowering.config import KernelConfig

RowKey = tuple[str, int, int]
WORTH = 1.01
PATH = Path(config_rows.__file__)
PROGRAMS_OF = {
    "loads": (("alibi_causal", 2048), ("relative_table", 2048)),
    "no loads": (("plain", 2048), ("window", 4096), ("causal", 2048)),
    "lean": (("plain", 4096), ("plain", 16384), ("causal", 8192), ("alibi_causal", 8192)),
    "bounded": (("softcap_causal", 4096), ("softcap_causal", 16384)),
    "dense": (("dense_bias", 2048), ("dense_bias", 8192)),
    "short dense": (("evoformer", 256), ("dense_bias", 512)),
}
DENSE_BYTES = 2  # of the programs of dense kinds


def cases(row: RowKey) -> list[Case]:
    """What a row is measured on: 32k tokens, or 16k of the larger head dims."""
    kind, d, dv = row
    heads, tokens = (32 if d == 64 else 16), (32768 if d <= 128 else 16384)
    programs = list(PROGRAMS_OF[kind])
    if kind == "loads" and ("no loads", d, dv) not in config_rows.ROWS:
        programs += [("plain", 4096), ("causal", 4096)]  # the row is everything's
    return [
        Case(p, d, s, heads, heads, max(tokens // s, 256 if p == "evoformer" else 1), 0, dv if dv != d else 0)
        for p, s in programs
    ]


def variants(row: RowKey) -> list[dict[str, Any]]:
    """Fields to replace in the table's configuration, {} first."""
    table = KernelConfig(**config_rows.ROWS[row])  # type: ignore[arg-type]
    return [
        {f: v for f, v in dataclasses.asdict(config).items() if v != getattr(table, f)}
        for config in candidates(table, row[1], row[2], DENSE_BYTES if "dense" in row[0] else 0)
    ]


def measure(row: RowKey, rounds: int, budget_ms: float) -> dict[str, float]:
    """Speed of each variant over the table's configuration, by its text; those that fail on a case are left out."""
    speeds: dict[str, list[float]] = {}
    for case in cases(row):
        operands, aux = make_operands(case, "cuda"), PROGRAMS[case.program].make_aux(case, "cuda")
        runs = {}
        for overrides in variants(row):
            try:
                runs[json.dumps(overrides)] = ours(case, operands, aux, overrides)
            except Exception as error:
                print(f"  {case.title} {overrides}: {type(error).__name__}: {error}", flush=True)
        times = time_interleaved(runs, rounds, budget_ms)
        for text, ms in times.items():
            speeds.setdefault(text, []).append(times["{}"] / ms)
        print(f"  {case.title:40s} " + "  ".join(f"{t} {times['{}'] / ms:.3f}" for t, ms in times.items()), flush=True)
    count = len(cases(row))
    return {text: geometric_mean(values) for text, values in speeds.items() if len(values) == count}


def write(rows: dict[RowKey, dict[str, int | bool]], gpu: str) -> None:
    """The module of rows, with where and when they were measured."""
    head = PATH.read_text().partition("GPU = ")[0]
    lines = []
    for (kind, d, dv), fields in rows.items():
        values = ", ".join(f'"{name}": {value!r}' for name, value in fields.items())
        line = f'    ("{kind}", {d}, {dv}): {{{values}}},'
        lines.append(line if len(line) <= 120 else line.replace("{", "{\n        ").replace("}", ",\n    }"))
    date = datetime.date.today().isoformat()
    text = f'{head}GPU = "{gpu}"\nDATE = "{date}"\nROWS: dict[tuple[str, int, int], dict[str, int | bool]] = {{\n'
    PATH.write_text(text + "\n".join(lines) + "\n}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows, as kind:head_dim, comma separated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget-ms", type=float, default=10.0)
    parser.add_argument("--export", default="", help="only build the kernels into this folder (no GPU needed)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    wanted = [item for item in args.only.split(",") if item]
    chosen = [row for row in config_rows.ROWS if not wanted or f"{row[0]}:{row[1]}" in wanted]
    if args.export:
        print(sum(export(args.export, cases(row), variants(row), args.workers) for row in chosen), "kernels")
        return
    torch.manual_seed(0)
    rows = {row: dict(fields) for row, fields in config_rows.ROWS.items()}
    for row in chosen:
        print(row, config_rows.ROWS[row], flush=True)
        speeds = measure(row, args.rounds, args.budget_ms)
        best = max(speeds, key=lambda text: speeds[text])
        if speeds[best] >= WORTH:
            rows[row] |= json.loads(best)
        print(f"  -> {best if speeds[best] >= WORTH else 'stays'} ({speeds[best]:.3f})", flush=True)
    if args.write:
        write(rows, torch.cuda.get_device_name())
        print("written to", PATH)


if __name__ == "__main__":
    main()
