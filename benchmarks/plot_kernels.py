"""Draws a result of benchmarks/kernels.py: one group of bars per case, one bar per implementation.

    python benchmarks/plot_kernels.py benchmarks/results/2026-11-30-h200-forward.json

Writes the picture beside the result, as PNG. Needs matplotlib (the `plots` extra).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kernel_cases import Case


def draw(result: Path) -> Path:
    """The picture of a result file. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    content = json.loads(result.read_text())
    facts, rows = content["facts"], content["rows"]
    unit, label = ("kv_gb_per_s", "GB/s of K and V") if "decode" in result.stem else ("tflops", "TFLOP/s")
    names = list(dict.fromkeys(name for row in rows for name in row[unit]))
    figure, axes = pyplot.subplots(figsize=(max(8.0, 0.7 * len(rows)), 5.0), layout="constrained")
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        present = [(x, row[unit][name]) for x, row in enumerate(rows) if name in row[unit]]
        left = (i - len(names) / 2 + 0.5) * width
        axes.bar([x + left for x, _ in present], [y for _, y in present], width, label=name)
    axes.set_xticks(range(len(rows)), [Case(**row["case"]).title for row in rows], rotation=60, ha="right", fontsize=7)
    axes.set_ylabel(label)
    axes.set_title(f"{facts.get('gpu', facts['cpu'])}, {facts['date'][:10]}, commit {facts['commit']}", fontsize=9)
    axes.legend(ncols=len(names), fontsize=8)
    path = result.with_suffix(".png")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(draw(Path(argument)))
