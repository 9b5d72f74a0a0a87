"""Sizes a reader can hold: files of at most 400 lines, functions of at most 60 (device code: 150). No file is exempt.

    python scripts/check_sizes.py [ROOT]

A function counts from `def` to its last line without its docstring. Device code: fa4_inductor/kernels/cute.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

FOLDERS = ("fa4_inductor", "tests", "scripts", "examples", "benchmarks")
FILE_LINES = 400
FUNCTION_LINES = 60
DEVICE_FUNCTION_LINES = 150
DEVICE_FOLDER = "fa4_inductor/kernels/cute/"


def function_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end without the docstring."""
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    if ast.get_docstring(node, clean=False) is not None:
        first = node.body[0]
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines


def check_file(path: Path, name: str) -> list[str]:
    text = path.read_text()
    limit = DEVICE_FUNCTION_LINES if name.startswith(DEVICE_FOLDER) else FUNCTION_LINES
    count = len(text.splitlines())
    problems = [f"{name}: {count} lines, at most {FILE_LINES}"] if count > FILE_LINES else []
    for node in ast.walk(ast.parse(text, name)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (lines := function_lines(node)) > limit:
            problems.append(f"{name}:{node.lineno}: {node.name} has {lines} lines, at most {limit}")
    return problems


def check(root: Path) -> list[str]:
    """Violations under `root`, as `path[:line]: message`."""
    paths = [p for folder in FOLDERS for p in sorted((root / folder).rglob("*.py"))]
    return [problem for path in paths for problem in check_file(path, path.relative_to(root).as_posix())]


def main(argv: list[str]) -> int:
    root = Path(argv[0]) if argv else Path(__file__).resolve().parent.parent
    problems = check(root)
    print("\n".join(problems) if problems else "sizes: every file and function within its limit")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
